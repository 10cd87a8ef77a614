"""Analysing, rendering and tabulating long calls: nothing is O(S^2) (CASES B20)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.one_triton  # no kernel runs

ROOT = Path(__file__).parents[2]
MEASURE = """
import resource, sys
import jinja2, networkx, numpy, torch
import sparsegen
from sparsegen.codegen import render
from sparsegen.launch.tables import random_table
from sparsegen.schedule.build import build
from sparsegen.schedule.count import block_entries, computed_cells
from sparsegen.spec import Pattern, Problem
from tests.work import at_most

def work(mask, n):
    pattern = Pattern.from_dict({"name": "p", "mask": mask})
    schedule = build(pattern)
    source = render(pattern, schedule, Problem())
    computed_cells(schedule, n, n, 128, 128)
    rows = [len(block_entries(schedule, n, n, 128, 128))] if not source.tables else []
    return rows + [len(random_table(t, 0, n, n, "cpu")[0]) for t in source.tables]

mask, n = eval(sys.argv[1]), int(sys.argv[2])
work(mask, 512)  # imports what is imported late
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with at_most(80_000):
    rows = work(mask, n)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory >> 10, rows)
"""
SINKS = {"all_of": ["causal", {"any_of": [{"window": {"size": 4096}}, {"sink": {"tokens": 4}}]}]}
PREFIX = {"any_of": ["causal", {"prefix": {"tokens": 4096}}]}
DRAWN = {"all_of": ["causal", {"random_blocks": {"block": 64, "per_row": 3, "seed": 1}}]}


@pytest.mark.parametrize(
    ("mask", "length", "rows"),
    [(SINKS, 1 << 20, 8192), (PREFIX, 96_000, 750), (DRAWN, 96_000, 1502)],
    ids=["a million", "prefix", "random blocks"],
)
def test_long_calls_take_little(mask: dict, length: int, rows: int) -> None:
    """Few calls and under 64 MiB; a random_blocks table has rows * per_row entries and those of one tile more."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, repr(mask), str(length)],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    mebibytes, counted = done.stdout.split(maxsplit=1)
    assert int(mebibytes) < 64, done.stdout
    assert counted.strip() == f"[{rows}]"
