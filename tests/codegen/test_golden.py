"""Rendered kernels and template decisions as files under review: a diff says what kind of thing changed.

pytest tests/codegen/test_golden.py --update-golden      # writes them anew
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from sparsegen.artifact.build import ask
from sparsegen.artifact.compiler import Compiler
from sparsegen.codegen import KernelSource, load_template, render
from sparsegen.codegen.hopper import ENTRY, OWN_KNOBS
from sparsegen.codegen.template import CHOICES, LAUNCH_OPTIONS
from sparsegen.schedule.build import build
from sparsegen.spec.gpu import all_gpus, find_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from tests.kernels.schedules import made

pytestmark = pytest.mark.one_triton  # texts alone

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
SHIPPED = [
    p.stem for p in sorted((ROOT / "patterns").glob("*.yaml")) if Pattern.from_yaml(p).position_only
]

# Small patterns that show one thing each; dims small enough for one column chunk, or two where that is the point.
PATTERNS: dict[str, tuple[dict[str, Any], Problem]] = {
    # one segment with a full part and a tail
    "causal": ({"mask": "causal"}, Problem(head_dim=64)),
    # two disjoint segments, one of them narrow; split columns; sink logits
    "streaming": (
        {
            "mask": {"all_of": ["causal", {"any_of": [{"window": {"size": 100}}, {"sink": {"tokens": 4}}]}]},
            "sink_logits": True,
        },
        Problem(head_dim=96, value_dim=64),
    ),
    # a table, heads of their own, softcap
    "bigbird": (
        {
            "heads": [
                {"heads": 0, "mask": {"random_blocks": {"block": 16, "per_row": 2, "seed": 1}}},
                {"heads": "rest", "mask": {"predicate": "abs(q // 16 - k // 16) <= 1"}},
            ],
            "softcap": 30,
        },
        Problem(head_dim=32, dtype="float16"),
    ),
}  # fmt: skip


# and a schedule written by hand: a window, then a chained sweep over residue classes
KERNELS = [*PATTERNS, "strided"]
# those that have a warp-specialised text too: one segment, a narrow one beside it, descriptors of digits
HOPPER = ["causal", "streaming", "strided"]


def rendered(name: str) -> KernelSource:
    if name == "strided":
        return render(*made("strided"), Problem(head_dim=64))
    data, problem = PATTERNS[name]
    pattern = Pattern.from_dict({"name": name, **data})
    return render(pattern, build(pattern, problem), problem)


@cache
def shipped(name: str) -> KernelSource:
    """The kernel of a shipped pattern for the problem that its file states."""
    pattern = Pattern.from_yaml(name)
    return render(pattern, build(pattern), pattern.problem or Problem())


def same_as_golden(path: Path, text: str, update: bool) -> None:
    if update:
        path.write_text(text, encoding="utf-8")
    assert path.exists(), f"{path} is not there yet: run with --update-golden and review it"
    wanted = path.read_text(encoding="utf-8")
    assert text == wanted, f"{path.name} changed; if that is meant: --update-golden, and review it"


@pytest.fixture
def update(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))


# ---------------------------------------------------------------------- kernels
@pytest.mark.parametrize("name", KERNELS)
def test_kernel(name: str, update: bool) -> None:
    same_as_golden(GOLDEN / f"{name}.forward.py", rendered(name).text, update)


@pytest.mark.parametrize("name", HOPPER)
def test_warp_specialised_kernel(name: str, update: bool) -> None:
    source = rendered(name).hopper
    assert source is not None
    same_as_golden(GOLDEN / f"{name}.hopper.py", source.text, update)


def test_no_golden_is_left_behind() -> None:
    for kind, names in ((".forward.py", KERNELS), (".hopper.py", HOPPER)):
        kept = {p.name.removesuffix(kind) for p in GOLDEN.glob(f"*{kind}")}
        assert kept == set(names)


@pytest.mark.skipif(find_spec("ruff") is None, reason="needs ruff (the test extra has it)")
def test_goldens_are_clean_code(tmp_path: Path) -> None:
    """Every shipped kernel too: no unused name, no undefined one, nothing imported for nothing.

    The warp-specialised text sets the planner's names of a tile in every partition, used there or not.
    """
    for name in SHIPPED:
        source = shipped(name)
        (tmp_path / f"{name}.py").write_text(source.text, encoding="utf-8")
        if source.hopper is not None:
            (tmp_path / f"{name}.hopper.py").write_text(source.hopper.text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F,E9,W291,W293,W391", "--per-file-ignores", "*.hopper.py:F841", tmp_path, *GOLDEN.glob("*.py")],
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", KERNELS)
def test_golden_mentions_every_declared_knob(name: str) -> None:
    """A knob that no kernel reads would be searched for nothing."""
    known, used = _names(f"{name}.forward.py", "attend_forward")
    for knob in load_template().knobs:
        if knob.name not in LAUNCH_OPTIONS + CHOICES + OWN_KNOBS:
            assert knob.name in known, f"{knob.name} is no parameter"
            assert knob.name in used, f"{knob.name} is declared and read nowhere"


def test_golden_mentions_the_knobs_of_the_warp_specialised_kernel() -> None:
    known, used = _names("causal.hopper.py", ENTRY)
    assert set(OWN_KNOBS) <= known & used


def _names(file: str, entry: str) -> tuple[set[str], set[str]]:
    """Parameters of a golden file's kernel, and the names that the file reads."""
    tree = ast.parse((GOLDEN / file).read_text(encoding="utf-8"))
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    (kernel,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == entry]
    return {a.arg for a in kernel.args.args}, used


@pytest.mark.parametrize("name", SHIPPED)
def test_every_warp_specialised_kernel_renders(name: str) -> None:
    """Its partitions are given what they take, by name and in order, with one consumer and with two."""
    source = shipped(name).hopper
    if source is None:
        assert name in ("bigbird", "sparse_transformer_fixed", "video_3d", "video_frames")
        return
    tree = ast.parse(source.text)
    functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    names = [name for name, _ in source.parameters]
    taken = {f: [a.arg for a in node.args.args] for f, node in functions.items()}
    assert taken[source.entry] == [*names, *source.constexprs]
    inner = taken["producer"]
    assert taken["consumer"] == ["FIRST_ROW", *inner]
    assert inner[-len(taken[source.entry]) :] == taken[source.entry]
    given: dict[str, list[list[str]]] = {"producer": [], "consumer": []}
    for node in ast.walk(functions[source.entry]):
        match node:
            case ast.Tuple([ast.Name(function), ast.Tuple(arguments)]):
                given[function].append([ast.unparse(a) for a in arguments])
    assert given["producer"] == [inner, inner]
    first = [["gl.constexpr(0)", *inner], ["gl.constexpr(64)", *inner], ["gl.constexpr(0)", *inner]]
    assert sorted(given["consumer"]) == sorted(first)
    assert not re.search(r"\{\{|\{%|%\}|\btl\.", source.text)
    assert "\n\n\n\n" not in source.text and source.text.endswith("\n")


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_pattern_renders(name: str) -> None:
    """Parses, keeps to one indentation, has no doubled blank line; every parameter is passed on by name and in order."""
    source = shipped(name)
    tree = ast.parse(source.text)
    functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    entry = [a.arg for a in functions[source.entry].args.args]
    names = [name for name, _ in source.parameters]
    assert entry == [*names, *source.constexprs]
    inner = [a.arg for a in functions["attend_tile"].args.args]
    assert inner == ["program", *names, *(c for c in source.constexprs if c != "PERSISTENT")]
    calls = [
        n
        for n in ast.walk(functions[source.entry])
        if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "attend_tile"
    ]
    assert len(calls) == 2
    for call in calls:
        assert [a.id for a in call.args[1:]] == inner[1:]
    for call in ast.walk(functions["attend_tile"]):
        name = getattr(getattr(call, "func", None), "id", "")
        if name.startswith(("sweep", "combine")):
            taken = [a.arg for a in functions[name].args.args]
            assert [a.id for a in call.args] == taken == [n for n in inner if n != "SWEEP"]
    lines = source.text.splitlines()
    assert not [i for i, line in enumerate(lines) if "\t" in line or line != line.rstrip()]
    assert "\n\n\n\n" not in source.text and source.text.endswith("\n")
    assert not re.search(r"\{\{|\{%|%\}", source.text)


def test_rendering_twice_gives_the_same_bytes() -> None:
    code = (
        "from sparsegen.codegen import render; from sparsegen.schedule.build import build\n"
        "from sparsegen.spec import Pattern, Problem\n"
        "p = Pattern.from_yaml('bigbird'); print(render(p, build(p), Problem()).digest)"
    )
    environments = [{**os.environ, "PYTHONHASHSEED": s, "PYTHONPATH": str(ROOT)} for s in "12"]
    digests = {
        subprocess.run([sys.executable, "-c", code], env=e, capture_output=True, text=True, check=True).stdout
        for e in environments
    }  # fmt: skip
    assert len(digests) == 1


# ---------------------------------------------------------------------- decisions
PROBLEMS = {
    "bf16 d64": Problem(head_dim=64),
    "bf16 d128": Problem(),
    "bf16 d192/128": Problem(head_dim=192, value_dim=128),
    "bf16 d256": Problem(head_dim=256),
    "fp16 d96": Problem(head_dim=96, dtype="float16"),
    "fp32 d128": Problem(dtype="float32"),
}


def test_decisions(update: bool) -> None:
    """What the template chooses where nothing was measured: problems x simulated GPUs."""
    template = load_template()
    table = {
        gpu.name: {name: str(template.default(problem, gpu)) for name, problem in PROBLEMS.items()}
        for gpu in all_gpus()
    }
    same_as_golden(GOLDEN / "decisions.json", json.dumps(table, indent=1) + "\n", update)


def test_keys(update: bool) -> None:
    """What artifacts of the shipped patterns are stored under, without the versions of code and packages."""
    compiler, h200 = Compiler(), find_gpu("h200")
    moving = ("code", "triton", "torch", "template_digest")
    table = {}
    for name in SHIPPED:
        pattern = Pattern.from_yaml(name)
        key = compiler.key(ask(pattern, None, h200))
        fields = {f: str(v) for f, v in vars(key).items() if f not in moving}
        fields["mask"] = fields["mask"][:12]
        table[name] = " ".join(f"{f}={v}" for f, v in fields.items())
    same_as_golden(GOLDEN / "keys.json", json.dumps(table, indent=1) + "\n", update)
