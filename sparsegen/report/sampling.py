"""Masks that only data decide, looked at row by row: counts and pictures for patterns that no schedule takes yet.

A row costs O(kv_len).  Short inputs are looked at whole, of long ones only some rows, spread evenly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from sparsegen.report.coverage import Grid, edges, over_rows, sample_rows
from sparsegen.spec.pattern import Pattern

WHOLE_CELLS = 1 << 24  # up to here every cell is counted; about 2 s
SOME_CELLS = 1 << 23  # beyond, this many are looked at
_AT_ONCE = 1 << 21  # cells of a mask held at once
_ROWS_A_TILE = 3  # rows looked at in a tile row of a long input: its first, middle and last


def mask_rows(
    pattern: Pattern, rows: Any, q_len: int, kv_len: int, head: int, runtime: dict[str, Any]
) -> Iterator[Any]:
    """Yields bool arrays [some rows, kv_len] of one head (batch entry 0) for query indexes ``rows``, in order."""
    import torch

    step = max(_AT_ONCE // kv_len, 1)
    named = [high for rule in pattern.rules for _, high in rule.heads or ()]
    heads = None if len(pattern.rules) == 1 else max([*named, head]) + 1
    if pattern.problem is not None:
        heads = pattern.problem.heads
    for first in range(0, len(rows), step):
        index = torch.from_numpy(np.ascontiguousarray(rows[first : first + step]))
        mask = pattern.dense_mask(q_len, kv_len, rows=index, heads=heads, **runtime)
        mask = mask[0] if mask.dim() == 4 else mask
        yield mask[head if mask.shape[0] > 1 else 0].numpy()


def grid_of_mask(
    pattern: Pattern,
    q_len: int,
    kv_len: int,
    size: tuple[int, int],
    head: int,
    runtime: dict[str, Any],
) -> Grid:
    """Visible share of at most ``size`` = (rows, columns) blocks, of fewer rows where the input is long."""
    most = max(min(size[0], SOME_CELLS // kv_len), 8)
    q_edges, k_edges = edges(q_len, most), edges(kv_len, size[1])
    rows, looked = sample_rows(q_edges, most=2 if q_len * kv_len <= WHOLE_CELLS else 1)
    seen = np.concatenate(
        [
            np.add.reduceat(mask.astype(float), k_edges[:-1], axis=1)
            for mask in mask_rows(pattern, rows, q_len, kv_len, head, runtime)
        ]
    )
    area = over_rows(np.broadcast_to(np.diff(k_edges), seen.shape), q_edges, looked)
    counts = {"mask": over_rows(seen, q_edges, looked)}
    return Grid(counts, area, q_edges, k_edges, len(rows) == q_len)


def count_mask(
    pattern: Pattern,
    q_len: int,
    kv_len: int,
    tile: tuple[int, int],
    head: int,
    runtime: dict[str, Any],
) -> tuple[int, int, bool]:
    """(visible cells, cells of non-empty tiles, exact): from all rows, else from a few rows of some tile rows."""
    exact = q_len * kv_len <= WHOLE_CELLS
    tile_rows = -(-q_len // tile[0])
    chosen = np.arange(tile_rows)
    if not exact:
        some = max(SOME_CELLS // (_ROWS_A_TILE * kv_len), 1)
        chosen = np.unique(((np.arange(some) + 0.5) * tile_rows / some).astype(np.int64))
    cells = tiles = rows_seen = 0
    for first in chosen * tile[0]:
        last = min(first + tile[0], q_len) - 1
        looked = last - first + 1 if exact else min(_ROWS_A_TILE, last - first + 1)
        rows = np.linspace(first, last, looked).round().astype(np.int64)
        hit = np.zeros(-(-kv_len // tile[1]), bool)
        for mask in mask_rows(pattern, rows, q_len, kv_len, head, runtime):
            cells += int(mask.sum())
            hit |= np.logical_or.reduceat(mask.any(0), np.arange(0, kv_len, tile[1]))
        tiles += int(hit.sum())
        rows_seen += looked
    computed = tiles * tile[0] * tile[1]
    if exact:
        return cells, computed, True
    return round(cells * q_len / rows_seen), round(computed * tile_rows / len(chosen)), False
