"""Visible and computed cells of a schedule, from its closed forms: constant memory, no mask.

Visible cells go by periods of rows (``periods``), whole tiles by blocks of query tiles (``row_blocks``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsegen.errors import UnsupportedError
from sparsegen.schedule.forms import value
from sparsegen.schedule.row_blocks import row_blocks
from sparsegen.schedule.tiles import query_tiles, tile_count, visit
from sparsegen.schedule.tiling import close
from sparsegen.schedule.tree import HeadClass, Schedule, Segment, Sweep
from sparsegen.schedule.visible import visible_cells


@dataclass(frozen=True)
class Count:
    """Visible cells of one head of every class, and whether that is exact or estimated from sampled rows."""

    cells: int
    exact: bool


@dataclass(frozen=True)
class Load:
    """Key tiles per query tile, of one head of every class: the heaviest, the mean of all, and their sum."""

    heaviest: int
    mean: float
    total: int


def cells(schedule: Schedule, q_len: int, kv_len: int) -> int:
    """Visible cells of one head of every class, summed over the classes."""
    return count(schedule, q_len, kv_len).cells


def count(schedule: Schedule, q_len: int, kv_len: int) -> Count:
    """The same, and whether it is exact."""
    call = (_start(schedule, q_len, kv_len), q_len, 0, kv_len)
    parts = [visible_cells(s.branch, call) for c in schedule.classes for s in _segments(c)]
    return Count(sum(cells for cells, _ in parts), all(exact for _, exact in parts))


def computed_cells(
    schedule: Schedule,
    q_len: int,
    kv_len: int,
    block_m: int,
    block_n: int,
    narrow_block: int | None = None,
) -> int:
    """Cells that a kernel with these tiles computes, whole tiles counted, for one head of every class.

    ``narrow_block``: a segment of constant width up to this uses a key tile of the next power of two from 16 on.
    """
    total = 0
    for c in schedule.classes:
        for sweep in c.sweeps:
            start = _start(schedule, q_len, kv_len)
            for rows in row_blocks(start, q_len, block_m, sweep.tiling, sweep.rows):
                env = query_tiles(start, q_len, block_m, 0, kv_len, sweep.tiling, rows)
                for s in sweep.segments:
                    n = _key_block(s, block_n, narrow_block)
                    total += int(_tiles(s, env, n).sum()) * block_m * n
    return total


def load(schedule: Schedule, q_len: int, kv_len: int, block_m: int, block_n: int) -> Load:
    """How evenly the key tiles lie on the query tiles of all sweeps (of the class with the heaviest tile).

    The query tiles of a split sweep are cut over their keys, so none of them is the heaviest.
    """
    loads = []
    for c in schedule.classes:
        heaviest, per_tile = 0, [np.zeros(0, np.int64)]
        for sweep in c.sweeps:
            env = _query_tiles(schedule, sweep, q_len, kv_len, block_m)
            zero = np.zeros(tile_count(env), np.int64)
            tiles = sum((_tiles(s, env, block_n) for s in sweep.segments), start=zero)
            heaviest = heaviest if sweep.split else max(heaviest, int(tiles.max(initial=0)))
            per_tile.append(tiles)
        every = np.concatenate(per_tile)
        mean = float(every.mean()) if every.size else 0.0
        loads.append(Load(heaviest, mean, int(every.sum())))
    return max(loads, key=lambda x: x.heaviest)


def _segments(c: HeadClass) -> Iterator[Segment]:
    for sweep in c.sweeps:
        yield from sweep.segments


def _start(schedule: Schedule, q_len: int, kv_len: int) -> int:
    return kv_len - q_len if schedule.align == "bottom_right" else 0


def _query_tiles(
    schedule: Schedule, sweep: Sweep, q_len: int, kv_len: int, block_m: int
) -> dict[str, Any]:
    start = _start(schedule, q_len, kv_len)
    return query_tiles(start, q_len, block_m, 0, kv_len, sweep.tiling, sweep.rows)


def _key_block(s: Segment, block_n: int, narrow_block: int | None) -> int:
    if narrow_block is None or s.width is None or s.width > narrow_block:
        return block_n
    return max(16, 1 << max(s.width - 1, 0).bit_length())


def _tiles(s: Segment, env: dict[str, Any], block_n: int) -> np.ndarray:
    """Key tiles of a segment on every query tile; int64 [query tiles]."""
    if s.table is None:
        return sum(visit(s, env, block_n).tiles(block_n).values())  # type: ignore[return-value]
    block = s.table.block
    rows = env["q_last"] // block - np.maximum(env["q_first"] // block, 0) + 1
    drawn = min(s.table.per_row, -(-env["kv_len"] // block))
    live = np.logical_and.reduce(
        [np.broadcast_to(value(f, env) >= 0, rows.shape) for f in s.live] or [rows > 0]
    )
    return np.where(live, np.maximum(rows, 0) * drawn * max(1, -(-block // block_n)), 0)


# ---- blocks ----


def block_entries(
    schedule: Schedule, q_len: int, kv_len: int, block_m: int, block_n: int
) -> np.ndarray:
    """Aligned key blocks that each query block needs, of the first class: what a block list would hold.

    int64 [query blocks].  Segments that touch one block share its entry; a block list knows runs of rows and keys only,
    so that is how every branch is closed for it.  Raises UnsupportedError for table walks.
    """
    start = _start(schedule, q_len, kv_len)
    env = query_tiles(start, q_len, block_m, 0, kv_len)
    lows, highs = [], []
    for s in _segments(schedule.classes[0]):
        if s.table is not None:
            raise UnsupportedError(
                f"segment {s.name}: blocks of a table are not counted in closed form"
            )
        runs = close(s.branch)
        assert runs is not None  # runs are for every branch
        got = visit(runs, env, block_n)
        some = got.last >= got.first
        lows.append(np.where(some, got.first // block_n, 0))
        highs.append(np.where(some, got.last // block_n, -1))
    if not lows:
        return np.zeros(len(env["q_first"]), np.int64)
    order = np.argsort(np.stack(lows), axis=0)
    low = np.take_along_axis(np.stack(lows), order, 0)
    high = np.take_along_axis(np.stack(highs), order, 0)
    total, reached = np.zeros(low.shape[1], np.int64), np.full(low.shape[1], -1)
    for a, b in zip(
        low, high, strict=True
    ):  # ranges by their start: count what lies beyond the ones before
        total += np.maximum(b - np.maximum(a, reached + 1) + 1, 0)
        reached = np.maximum(reached, b)
    return total
