"""Rows that see every key beside a limit that moves with the row: one range of keys, in place of two branches."""

from __future__ import annotations

import numpy as np
import pytest

from sparsegen.schedule.build import build_from_exprs
from sparsegen.schedule.forms import value
from sparsegen.schedule.tiles import query_tiles, visit
from sparsegen.schedule.transpose import transpose
from sparsegen.schedule.tree import Schedule, Segment
from sparsegen.schedule.verify import verify_exprs
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from tests.schedule.formulas import mask

CALLS = ((64, 64), (37, 37), (8, 153), (90, 41), (1, 70))


def segments(schedule: Schedule) -> list[Segment]:
    return [s for c in schedule.classes for w in c.sweeps for s in w.segments]


def built(text: str) -> tuple[Schedule, list[Segment]]:
    schedule = build_from_exprs([(None, mask(text))])
    return schedule, segments(schedule)


@pytest.mark.parametrize(
    ("text", "full", "partial"),
    [
        # 64 tiles of 64 rows: the first 8 see 64 tiles of keys, tile p of the others its diagonal and 63 - p behind it
        ("q < 512 or k >= q", 8 * 64 + sum(range(56)), 56),
        # or p before it
        ("q < 512 or k <= q", 8 * 64 + sum(range(8, 64)), 56),
        ("q >= 3584 or k <= q", 8 * 64 + sum(range(56)), 56),
        # 130..149 lie within tile 2: it visits all 64, the last 61 of them tested, since two of three rows end at the diagonal
        ("130 <= q and q < 150 or k <= q", sum(range(64)), 63 + 62),
    ],
)
def test_one_range(text: str, full: int, partial: int) -> None:
    schedule, (s,) = built(text)
    counts = visit(s, query_tiles(0, 4096, 64, 0, 4096), 64).tiles(64)
    assert int(counts["full"].sum()) == full
    assert sum(int(counts[k].sum()) for k in ("head", "tail", "whole")) == partial
    assert not s.live and not s.guards
    for call in CALLS:
        verify_exprs(schedule, [(None, mask(text))], (call,), ((16, 16), (32, 8)))


@pytest.mark.parametrize("text", ["q < 30 or k >= q", "q < 30 or k <= q + 3", "10 <= q and q < 31 or k <= q"])  # fmt: skip
def test_small_calls_see_every_cell_once(text: str) -> None:
    """With the rows inside the call, and more queries than keys: rows before position 0 are rows like others."""
    schedule, found = built(text)
    assert len(found) == 1
    verify_exprs(schedule, [(None, mask(text))], CALLS, ((16, 16), (8, 32)))


def test_a_limit_on_both_sides_is_no_such_range() -> None:
    """Whole rows and a band have no end in common: two segments, and each cell once."""
    schedule, found = built("q < 20 or abs(q - k) <= 8")
    assert len(found) > 1
    verify_exprs(schedule, [(None, mask("q < 20 or abs(q - k) <= 8"))], CALLS, ((16, 16),))


def test_few_columns_stay_narrow() -> None:
    """A fixed limit beside whole rows is a segment of its own: it takes a key tile of its own size."""
    schedule, _ = built("k < 64 or abs(q - k) <= 256 or (0 <= q and q < 64)")
    assert 64 in [s.width for s in segments(schedule)]


def test_a_transposed_prefix_is_one_range() -> None:
    """Keys of the prefix are seen by all queries, others from their own position on."""
    pattern = Pattern.from_dict(
        {"name": "p", "mask": {"any_of": ["causal", {"prefix": {"tokens": 2048}}]}}
    )
    found = transpose(pattern, Problem(lengths=((8192, 8192),)))
    (s,) = segments(found.schedule)
    env = query_tiles(0, 8192, 128, found.shift, 8192)
    visited = sum(n.sum() for n in visit(s, env, 64).tiles(64).values())
    # 16 of 64 tiles of keys are of the prefix: 128 tiles of queries each; the others as under a causal mask
    assert visited == 16 * 128 + sum(128 - 2 * p for p in range(16, 64))


def test_forms_stay_in_32_bits_up_to_the_limit() -> None:
    """A row's limit is right at the largest positions, in 32-bit arithmetic."""
    schedule, (s,) = built("q < 2048 or k >= q")
    far = schedule.position_limit
    assert (1 << 29) < far < (1 << 30)
    with np.errstate(over="raise"):
        for q in (0, 2047, 2048, far - 1):
            env = {n: np.int32(v) for n, v in {"q": q, "k_first": 0, "k_last": far - 1}.items()}
            assert value(s.row_lo, env) == (0 if q < 2048 else q)


@pytest.mark.parametrize("first", [0, 1 << 35])
@pytest.mark.parametrize("keys", [(1 << 31) - 1, 1 << 34])
def test_calls_of_any_length(keys: int, first: int) -> None:
    """Beyond 32 bits: however many keys a call has, rows outside see what the limit of the other alternative says."""
    lower, upper = (built(t)[1][0] for t in ("q < 2048 or k >= q", "q < 2048 or k <= q"))
    last = first + keys - 1
    for q in (2047, 2048, (1 << 30) + 5, first + (1 << 30) + 5, last - 1):
        env = {"q": q, "k_first": first, "k_last": last}
        whole = q < 2048
        assert max(value(lower.row_lo, env), first) == (first if whole else max(q, first))
        assert min(value(upper.row_hi, env), last) == (last if whole else max(q, first - 1))
    tiles = {"q_first": last - 200, "q_last": last - 137, "k_first": first, "k_last": last}
    assert value(lower.tile_lo, tiles) == last - 200 and value(lower.full_lo, tiles) == last - 137
    assert value(upper.tile_hi, tiles) == last - 137 and value(upper.full_hi, tiles) == last - 200
