"""A fleet's problems: a file of changes, and ``warm`` and ``check`` over patterns x problems x GPU types."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsegen.artifact import fleet
from sparsegen.artifact.problems import changed, read_problems
from sparsegen.artifact.store import Store
from sparsegen.errors import InputError
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from tests.artifact.standin import StandinBuilder


def pattern(name: str, **problem: object) -> Pattern:
    return Pattern.from_dict({"name": name, "mask": "causal", "problem": problem})


def test_changes_stand_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "problems.yaml"
    file.write_text("- {}\n- {dtype: float16}\n- {lengths: [[1, 65536]]}\n")
    assert read_problems(file) == [{}, {"dtype": "float16"}, {"lengths": [[1, 65536]]}]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must be a list of problems"),
        ("# none yet\n", "must be a list of problems"),
        ("[]", "must be a list of problems"),
        ("- 3\n", "must be a list of problems"),
        ("- {a: [\n", r"problems.yaml:\d+:\d+: "),
        ("- {dtype: float16, dtype: float32}\n", r"problems.yaml:1:20: .*dtype"),
        ("- {heads: 0x10}\n- !x {}\n- !y {}\n", r"problems.yaml:2:3: .* \(and 1 more\)"),
        ("- {heads: 8}\n- {}\n- {heads: 8}\n", "problem 3 is problem 1 again"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "problems.yaml"
    file.write_text(text)
    with pytest.raises(InputError, match=said) as raised:
        read_problems(file)
    assert str(file) in str(raised.value) and "\n" not in str(raised.value)
    with pytest.raises(InputError, match="cannot be read"):
        read_problems(tmp_path / "none.yaml")


def test_what_follows_from_other_fields_follows_anew() -> None:
    plain = pattern("a", head_dim=64, heads=16)
    assert changed(plain, {}) == plain.problem
    assert changed(plain, {"head_dim": 128, "heads": 32}) == Problem(head_dim=128, heads=32)
    grouped = pattern("b", head_dim=64, value_dim=32, heads=16, kv_heads=4)
    made = changed(grouped, {"heads": 32})
    assert (made.heads, made.kv_heads, made.value_dim) == (32, 4, 32)
    with pytest.raises(InputError, match="problem heads 6 for b: .*multiple of kv_heads"):
        changed(grouped, {"heads": 6})
    with pytest.raises(InputError, match="problem hats 6 for b"):
        changed(grouped, {"hats": 6})


def test_warm_and_check_go_over_all_of_them(tmp_path: Path) -> None:
    store, builder = Store(tmp_path), RealKeys()
    patterns = [pattern("a", heads=8), pattern("b", heads=16, kv_heads=3 + 5)]
    asked = [{}, {"dtype": "float16"}, {"heads": 12}]
    seen: list[str] = []
    options = {"problems": asked, "store": store, "builder": builder}
    first = fleet.warm(
        ["h200", "a100"], patterns, **options, progress=lambda *s: seen.append(s[2]), jobs=2
    )
    assert first.counts() == {"built": 10, "failed": 2}, str(first)  # 12 heads share no 8 key heads
    assert "nvidia-h200 b [heads 12]: failed (problem heads 12 for b: " in str(first)
    assert "nvidia-a100 a [dtype float16]: built" in seen and len(seen) == 12
    assert fleet.warm(["h200", "a100"], patterns, **options).counts() == {"hit": 10, "failed": 2}
    checked = fleet.check(["h200"], patterns[:1], **options)
    assert checked.counts() == {"ok": 3} and [r.problem for r in checked.results] == [
        "as stated",
        "dtype float16",
        "heads 12",
    ]
    more = fleet.check(["h200"], patterns[:1], **{**options, "problems": [{"head_dim": 64}]})
    assert more.counts() == {"missing": 1} and "head_dim: asked 64" in more.results[0].detail


class RealKeys(StandinBuilder):
    """The stand-in, with keys that know the problem."""

    def key(self, request):
        from dataclasses import replace

        p = request.problem
        return replace(
            super().key(request),
            head_dim=p.head_dim,
            value_dim=p.value_dim,
            heads=p.heads,
            kv_heads=p.kv_heads,
            dtype=p.dtype,
        )
