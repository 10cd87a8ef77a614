"""The work of a segment on every query tile of a call: key tiles, and the same weighted by what they test.

``cost`` makes times of it.  All constants are in ``machine``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from sparsegen.schedule.forms import Floor, Lin, Opaque, Prod, value
from sparsegen.schedule.formula import Range
from sparsegen.schedule.machine import H200, Machine
from sparsegen.schedule.tiles import query_tiles, visit
from sparsegen.schedule.tree import AnyOf, NoneOf, Segment, Test, Tiling

Call = tuple[int, int, int, int]  # q_start, q_len, k_start, kv_len


@dataclass(frozen=True)
class Load:
    """Work of one segment on every query tile of one head: key tiles, and the same weighted by what is tested."""

    tiles: np.ndarray  # int64 [query tiles]
    weighted: np.ndarray  # float64 [query tiles]


@lru_cache(maxsize=64)
def environment(
    call: Call, block_m: int, tiling: Tiling, rows: tuple[int, int] | None
) -> dict[str, Any]:
    """``tiles.query_tiles`` of a call, kept: the search asks for few of them many times."""
    q_start, q_len, k_start, kv_len = call
    return query_tiles(q_start, q_len, block_m, k_start, kv_len, tiling, rows)


def load(
    segment: Segment,
    call: Call,
    tile: tuple[int, int],
    tiling: Tiling | None = None,
    rows: tuple[int, int] | None = None,
    machine: Machine = H200,
) -> Load:
    """The load of a segment in a sweep of these rows; ``tiling``: with this extent instead of the segment's own."""
    block_m, block_n = tile
    shape = segment.tiling if tiling is None else tiling
    env = environment(call, block_m, Tiling(shape.q_cuts, shape.extent), rows)
    if segment.table is not None:
        walked = _walked(segment, env, block_n)
        return Load(walked, walked * 1.0)
    counts = visit(segment, env, block_n).tiles(block_n)
    tiles = np.sum(list(counts.values()), axis=0)
    weights = span_weights(segment, machine)
    weighted = np.sum([n * weights[kind] for kind, n in counts.items()], axis=0)
    if segment.tiling.k_cuts:
        weighted = weighted * machine.gather
        if any((hi - lo).terms for lo, hi in segment.inner):
            weighted = weighted * machine.divided
    return Load(tiles, weighted + machine.start * (tiles > 0))


def _walked(segment: Segment, env: dict[str, Any], block_n: int) -> np.ndarray:
    """Key tiles of the blocks that a table lists for the block rows of each query tile."""
    assert segment.table is not None
    block = segment.table.block
    rows = env["q_last"] // block - np.maximum(env["q_first"] // block, 0) + 1
    drawn = min(segment.table.per_row, -(-env["kv_len"] // block))
    live = rows > 0
    for form in segment.live:
        live = live & (value(form, env) >= 0)
    return np.where(live, rows * drawn * max(1, -(-block // block_n)), 0)


@lru_cache(maxsize=1 << 12)
def span_weights(segment: Segment, machine: Machine = H200) -> dict[str, float]:
    """Key tiles without a test that one tile of each span costs as much as."""
    weight = {"full": 1.0}
    for span in segment.spans:
        if span.kind != "full":
            base = machine.remainder if any(map(_slow, span.tests)) else machine.partial
            weight[span.kind] = base + machine.conjunct * sum(map(_conjuncts, span.tests))
    tail = weight.setdefault("tail", machine.partial)
    weight.setdefault("whole", tail)
    weight.setdefault("head", machine.partial)
    return weight


def _conjuncts(test: Test) -> int:
    return sum(map(len, test.cubes)) if isinstance(test, (AnyOf, NoneOf)) else 1


def _slow(test: Test) -> bool:
    if isinstance(test, (AnyOf, NoneOf)):
        return any(_slow(r) for c in test.cubes for r in c)
    return isinstance(test, Range) and _divides(test.lin)


def _divides(lin: Lin) -> bool:
    return any(
        isinstance(g, (Prod, Opaque)) or (isinstance(g, Floor) and g.m & (g.m - 1) != 0)
        for g, _ in lin.terms
    )
