"""`benchmarks/edits.py` and `variants.py`: every edit fits the templates that ship, and what fits nothing is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sparsegen.codegen import load_template, render
from sparsegen.codegen.backward import KEYS, render_backward
from sparsegen.paths import data_dir
from sparsegen.schedule.build import build
from sparsegen.schedule.transpose import transpose
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CAUSAL = Pattern.from_dict({"name": "causal", "mask": "causal"})


@pytest.fixture
def variants(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import variants

    return variants


def texts(problem: Problem) -> tuple[str, str]:
    schedule = build(CAUSAL, problem)
    turned = transpose(CAUSAL, problem)
    forward = render(CAUSAL, schedule, problem)
    backward = render_backward(CAUSAL, turned.schedule, problem, KEYS, turned.shift)
    return forward.hopper.text, backward.hopper.text


@pytest.mark.parametrize("value_dim", [128, 96])
def test_every_edit_changes_a_kernel(variants, value_dim):
    """One direction of it, and it is Python still; behind it the shipped templates are there again."""
    problem = Problem(head_dim=128, value_dim=value_dim)
    shipped, digest = texts(problem), load_template().digest
    for name in variants.EDITS | variants.WITHOUT:
        with variants.templates_of(variants.edited(name)):
            changed = [a != b for a, b in zip(texts(problem), shipped)]
        assert changed == [name != "borders", name == "borders"], name
    assert texts(problem) == shipped and load_template().digest == digest


def test_edits_are_joined(variants):
    kernel = (variants.edited("turns+no_exponentials") / "forward" / "hopper.py.jinja").read_text()
    assert "TILES + 2" in kernel and "gl.exp2(s * scale - gl.convert_layout(m, gl" not in kernel


def test_an_edit_of_other_templates_is_refused(variants, tmp_path):
    import edits

    path = tmp_path / "hopper.py.jinja"
    path.write_text("one two two")
    edits.change(path, "one", "three")
    with pytest.raises(ValueError, match=r"hopper.py.jinja holds 'two' 2 times, not 1"):
        edits.change(path, "two", "three")
    assert path.read_text() == "three two two"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--cases=causal_17k", "--cases: no 'causal_17k'; there are axial_128k"),
        ("--peers=fa5", "--peers: no 'fa5'; there are cudnn, fa4, none"),
        ("--parts=values", "--parts: no 'values'; there are fused, keys, queries"),
        ("turns+bogus", "no edit 'bogus'; there are turns, borders; or NAME=DIR"),
        ("no_exponentials", "no edit 'no_exponentials'"),
        ("shipped", "each name once, and none of them shipped"),
        (f"mine={BENCHMARKS}", "is no copy of templates/"),
    ],
)
def test_what_is_no_variant(word, said):
    command = [sys.executable, BENCHMARKS / "variants.py", word, "--dry"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and said in done.stderr


def test_an_edit_that_is_never_right_is_left_out(variants, capsys):
    """The others go on; the templates that ship have to be right."""

    def none_works():
        raise AssertionError("causal: no configuration works")

    assert variants._tried(variants.Variant("turns", None, []), none_works) is None
    assert "LEFT OUT turns: causal: no configuration works" in capsys.readouterr().out
    with pytest.raises(AssertionError):
        variants._tried(variants.Variant(variants.SHIPPED, None, []), none_works)


def test_a_copy_of_the_templates_is_one(variants, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["variants.py", f"mine={data_dir('templates')}", "turns"])
    assert list(variants._options().variants) == ["shipped", "mine", "turns"]
