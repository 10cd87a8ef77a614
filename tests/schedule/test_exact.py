"""Schedules executed tile by tile equal their masks: the recorded ones, and random ones at ragged lengths."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparsegen.errors import UnsupportedError
from sparsegen.schedule.build import build, build_from_exprs, candidates
from sparsegen.schedule.text import expr_text
from sparsegen.schedule.tree import Schedule, Segment
from sparsegen.schedule.verify import ScheduleError, class_of, execute, verify, verify_exprs
from sparsegen.spec.pattern import Pattern
from tests.evaluator import evaluate
from tests.schedule.formulas import mask, random_mask, runs
from tests.spec.random_patterns import random_pattern

FOLDER = Path(__file__).parents[1] / "data" / "acceptance"
CASES = json.loads((FOLDER / "expected.json").read_text())
PATTERNS = {p.name: Pattern.from_yaml(p) for p in sorted((FOLDER / "patterns").glob("*.yaml"))}
STATIC = [name for name, p in PATTERNS.items() if p.position_only]
BLOCKS = [(16, 16), (4, 5), (8, 16), (15, 7)]


@pytest.mark.parametrize("name", STATIC)
def test_acceptance_masks(name: str) -> None:
    """The union of all tiles has the recorded sha256, each cell once."""
    pattern = PATTERNS[name]
    schedule = build(pattern)
    cases = [c for c in CASES if c["pattern"] == name]
    assert cases
    for i, case in enumerate(cases):
        q_len, kv_len = case["q_len"], case["kv_len"]
        start = kv_len - q_len if pattern.align == "bottom_right" else 0
        block_m, block_n = BLOCKS[i % len(BLOCKS)]
        for head, want in enumerate(case["heads"]):
            heads = pattern.exprs[pattern.head_rule_of(len(case["heads"]))[head]][0]
            one = class_of(schedule, heads)
            got = execute(one, (start, q_len, 0, kv_len), block_m, block_n)
            assert got.max(initial=0) <= 1
            digest = hashlib.sha256(np.packbits(got > 0).tobytes()).hexdigest()
            assert digest == want["sha256"], (q_len, kv_len, head)


@pytest.mark.parametrize("name", STATIC)
def test_acceptance_patterns_at_ragged_lengths(name: str) -> None:
    """More rows than keys, one row, odd tiles, calls that begin elsewhere than their alignment says."""
    pattern = PATTERNS[name]
    lengths = [(37, 37), (1, 41), (29, 11), (8, 53), (1, 1)]
    schedule = build(pattern)
    verify(schedule, pattern, lengths)
    verify_exprs(schedule, pattern.exprs, [(23, 40)], [(8, 5)], starts=[(5, 0), (0, 9), (-30, 0)])


@pytest.mark.parametrize("name", sorted(set(PATTERNS) - set(STATIC)))
def test_run_time_patterns_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedError, match="documents|block_mask"):
        build(PATTERNS[name])


@pytest.mark.parametrize("seed", range(120))
def test_random_masks(seed: int) -> None:
    rng = random.Random(f"schedule {seed}")
    e = random_mask(rng, rng.randint(1, 4))
    length = rng.randint(1, 40), rng.randint(1, 40)
    align = rng.choice(["bottom_right", "top_left"])
    lengths = [length] if rng.random() < 0.3 else []
    schedule = build_from_exprs([(None, e)], align, lengths)
    # What is proven for some lengths only may be asked at these alone.
    starts = [(0, 0)] if lengths else [(0, 0), (rng.randint(-30, 30), rng.randint(0, 30))]
    blocks = [rng.choice([(4, 4), (8, 4), (16, 16), (8, 16), (5, 7)])]
    try:
        verify_exprs(schedule, [(None, e)], [length], blocks, starts)
    except ScheduleError as error:
        raise AssertionError(f"{expr_text(e)}: {error}") from error


@pytest.mark.parametrize("seed", range(60))
def test_random_patterns_of_the_language(seed: int) -> None:
    """Every node that positions decide, four levels deep, per head or not: all candidates show what the evaluator of
    the fuzz tests sees, which shares no code with the language."""
    rng = random.Random(f"patterns {seed}")
    data: dict[str, Any] = {}
    while not data or not Pattern.from_dict(data).position_only:
        data = random_pattern(rng, 4)
        data.pop("problem", None)
    pattern = Pattern.from_dict(data)
    calls = [(rng.randint(1, 30), rng.randint(1, 30)) for _ in range(2)]  # grids have 30 cells
    heads = 6 if "heads" in data else 1
    wanted = [evaluate(data, *call, heads)[0] for call in calls]
    for c in candidates(pattern):
        for (q_len, kv_len), want in zip(calls, wanted):
            start = kv_len - q_len if pattern.align == "bottom_right" else 0
            for head in range(heads):
                rule = pattern.exprs[pattern.head_rule_of(heads)[head]][0]
                one, tile = class_of(c.schedule, rule), rng.choice([(4, 4), (8, 16), (5, 7)])
                got = execute(one, (start, q_len, 0, kv_len), *tile)
                assert (got == want[head]).all(), (data, c.schedule.label, (q_len, kv_len), head)


def broken(schedule: Schedule, change: object) -> Schedule:
    """The schedule with every segment changed."""
    classes = []
    for c in schedule.classes:
        sweeps = tuple(replace(s, segments=tuple(map(change, s.segments))) for s in c.sweeps)  # type: ignore[arg-type]
        classes.append(replace(c, sweeps=sweeps))
    return replace(schedule, classes=tuple(classes))


def _without_upper(s: Segment) -> Segment:
    return replace(s, spans=tuple(replace(x, upper=False) for x in s.spans))


def _without_lower(s: Segment) -> Segment:
    return replace(s, spans=tuple(replace(x, lower=False) for x in s.spans))


def _without_tests(s: Segment) -> Segment:
    return replace(s, spans=tuple(replace(x, tests=()) for x in s.spans))


def _later(s: Segment) -> Segment:
    return replace(s, tile_lo=s.tile_lo + 1, row_lo=s.row_lo)


def _too_full(s: Segment) -> Segment:
    return replace(s, full_hi=None if s.full_hi is None else s.full_hi + 4)


def _unguarded(s: Segment) -> Segment:
    return replace(s, guards=())


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("k <= q and q - k < 30", _without_upper),
        ("k <= q and q - k < 30", _without_lower),
        ("k <= q and k % 5 == 2", _without_tests),
        ("k <= q", _later),
        ("k <= q", _too_full),
        ("q % 40 >= 20", _unguarded),
    ],
)
def test_verify_finds_a_fault(text: str, change: object) -> None:
    schedule = runs(text)
    rules = [(None, mask(text))]
    verify_exprs(schedule, rules, [(64, 64)], [(8, 4)])
    with pytest.raises(ScheduleError):
        verify_exprs(broken(schedule, change), rules, [(64, 64)], [(8, 4)])


@pytest.mark.parametrize("seed", range(8))
def test_scattered_global_positions(seed: int) -> None:
    """Many single keys and rows: neighbours share a segment, the rest stays apart or becomes one masked branch."""
    rng = random.Random(f"global {seed}")
    cols = rng.sample(range(90), rng.randint(1, 12))
    rows = rng.sample(range(90), rng.randint(1, 12))
    text = " or ".join(
        ["abs(q - k) <= 3"] + [f"k == {p}" for p in cols] + [f"q == {p}" for p in rows]
    )
    text = f"({text}) and k <= q + {rng.choice([0, 99])}"
    schedule = build_from_exprs([(None, mask(text))])
    verify_exprs(schedule, [(None, mask(text))], [(70, 95), (95, 40)], [(16, 16), (8, 5)])
