"""``tests/cases_index.md`` names tests that exist, and a case only where a test stands for it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
INDEX = (ROOT / "tests" / "cases_index.md").read_text(encoding="utf-8")


def test_every_named_test_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", INDEX)
    assert len(named) > 90
    defined = {
        path: {n.name for n in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
               if isinstance(n, ast.FunctionDef)}
        for path in {path for path, _ in named}
    }  # fmt: skip
    gone = [f"{path}::{name}" for path, name in named if name not in defined[path]]
    assert not gone, f"cases_index.md names what is not there: {gone}"


def test_every_row_is_a_case_with_tests() -> None:
    rows = re.findall(r"^\| (B\d\d) \|.*\|$", INDEX, re.M)
    assert len(rows) == len(set(rows)) == 27
    bare = [line for line in INDEX.splitlines() if re.match(r"\| B\d\d", line) and "::" not in line]
    assert not bare
