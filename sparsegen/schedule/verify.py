"""Run a schedule in numpy, tile by tile as a kernel does, and compare every cell with the mask itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from sparsegen.errors import SparsegenError
from sparsegen.schedule.forms import value
from sparsegen.schedule.formula import Cube, Range
from sparsegen.schedule.tiles import (
    entry_keys,
    one_tile,
    query_tiles,
    tile_count,
    tile_rows,
    visit,
    within,
)
from sparsegen.schedule.transpose import TRANSPOSED
from sparsegen.schedule.tree import (
    AnyOf,
    HeadClass,
    NoneOf,
    Schedule,
    Segment,
    Span,
    Sweep,
    TableWalk,
)
from sparsegen.spec import expr as ex

Env = dict[str, Any]
Call = tuple[int, int, int, int]  # q_start, q_len, k_start, kv_len

# (q_len, kv_len) with ragged ends, one row, more rows than keys; and odd tiles.
LENGTHS = ((37, 37), (1, 41), (29, 11), (8, 53), (64, 64))
BLOCKS = ((16, 16), (4, 8), (8, 5))


class ScheduleError(SparsegenError):
    """A schedule does not compute its mask: a fault of the analysis, never of the pattern."""


def verify(
    schedule: Schedule,
    pattern: Any,
    lengths: Iterable[tuple[int, int]] = LENGTHS,
    blocks: Iterable[tuple[int, int]] = BLOCKS,
) -> None:
    """Check the schedule of a pattern at small lengths.  Raises ScheduleError at the first difference."""
    verify_exprs(schedule, pattern.exprs, lengths, blocks)


def verify_exprs(
    schedule: Schedule,
    rules: Iterable[tuple[Any, ex.Bool]],
    lengths: Iterable[tuple[int, int]] = LENGTHS,
    blocks: Iterable[tuple[int, int]] = BLOCKS,
    starts: Iterable[tuple[int, int]] = ((0, 0),),
) -> None:
    """``starts``: (rows, keys) that the call begins later than the alignment says: chunks and shards."""
    blocks, starts = list(blocks), list(starts)
    for heads, mask in rules:
        one = class_of(schedule, heads)
        for q_len, kv_len in lengths:
            aligned = kv_len - q_len if schedule.align == "bottom_right" else 0
            for more_q, more_k in starts:
                call = (aligned + more_q, q_len, more_k, kv_len)
                if not _proven(schedule, call):
                    continue
                want = mask_of(mask, call)
                for block_m, block_n in blocks:
                    got = execute(one, call, block_m, block_n)
                    _compare(one, call, (block_m, block_n), got, want)


def _proven(schedule: Schedule, call: Call) -> bool:
    """Does the schedule promise anything for the call?  See ``tree.Schedule.max_position`` and ``min_position``."""
    most, least = schedule.max_position, schedule.min_position
    if most is None:
        return True
    q_start, q_len, k_start, kv_len = call
    furthest = max(q_len, kv_len, q_start + q_len, k_start + kv_len)
    return furthest <= most and q_start >= (-most if least is None else least)


def class_of(schedule: Schedule, heads: Any) -> HeadClass:
    """The class that serves a rule's heads."""
    for c in schedule.classes:
        if heads is not None and c.heads is not None and set(heads) <= set(c.heads):
            return c
    for c in schedule.classes:
        if c.heads is None:
            return c
    raise ScheduleError(f"no class for heads {heads}")


def _compare(
    one: HeadClass, call: Call, blocks: tuple[int, int], got: np.ndarray, want: np.ndarray
) -> None:
    wrong = np.argwhere(got != want)
    if len(wrong):
        i, j = (int(x) for x in wrong[0])
        raise ScheduleError(
            f"{one.mask_text}: call (q_start, q_len, k_start, kv_len) = {call}, tiles {blocks}: "
            f"q {call[0] + i}, k {call[2] + j} is computed {got[i, j]} times, wanted {int(want[i, j])}"
        )


def environment(call: Call, q: np.ndarray, k: np.ndarray) -> Env:
    """Names for ``forms.value`` and ``expr.evaluate`` at positions q and k (broadcast together)."""
    _, q_len, k_start, kv_len = call
    env: Env = {"q": q, "k": k, "q_len": q_len, "kv_len": kv_len}
    env |= {"k_first": k_start, "k_last": k_start + kv_len - 1}
    env["@terms"] = lambda term: random_blocks(term, env)
    return env


def random_blocks(term: ex.Term, env: Env) -> np.ndarray:
    """Truth of a random_blocks term at (q, k)."""
    kv_len = env["kv_len"]
    q, k = np.broadcast_arrays(env["q"], env["k"])
    if (shift := shift_of_term(term)) is not None:
        q, k, kv_len = k - shift, q, env["q_len"]
    rows, cols = q // term["block"], k // term["block"]
    if not rows.size:
        return np.zeros(rows.shape, bool)
    table = block_table(term, int(rows.min()), int(rows.max()), kv_len)
    drawn = table[rows - int(rows.min())]  # [..., per_row]
    return np.asarray((drawn == cols[..., None]).any(-1))


def block_table(term: ex.Term, first: int, last: int, kv_len: int) -> np.ndarray:
    """Drawn key blocks of the block rows first..last, int [rows, per_row], -1 = none."""
    from sparsegen.spec.random_blocks import random_block_table

    block, blocks = term["block"], -(-kv_len // term["block"])
    table = random_block_table(
        block, term["per_row"], term["seed"], first, last - first + 1, blocks
    )
    return np.asarray(table)


def mask_of(mask: ex.Bool, call: Call) -> np.ndarray:
    """The mask by definition, int [q_len, kv_len]."""
    q_start, q_len, k_start, kv_len = call
    q = (q_start + np.arange(q_len, dtype=np.int64))[:, None]
    k = (k_start + np.arange(kv_len, dtype=np.int64))[None, :]
    env = environment(call, q, k)
    out = ex.evaluate(mask, env, env["@terms"])
    return np.broadcast_to(np.asarray(out), (q_len, kv_len)).astype(np.int32)


def execute(one: HeadClass, call: Call, block_m: int, block_n: int) -> np.ndarray:
    """How often each cell is computed as visible, int [q_len, kv_len]."""
    _check_sweeps(one)
    out = np.zeros((call[1], call[3]), np.int32)
    for sweep in one.sweeps:
        size = fitting(sweep, block_m)
        env = query_tiles(call[0], call[1], size, call[2], call[3], sweep.tiling, sweep.rows)
        for i in range(tile_count(env)):
            _execute_tile(sweep, one_tile(env, i), call, size, block_n, out)
    return out


def fitting(sweep: Sweep, block_m: int) -> int:
    """The tile size, rounded up to one that holds the sweep's lower digits."""
    lower = math.prod(sweep.tiling.extent)
    return -(-block_m // lower) * lower


def _check_sweeps(one: HeadClass) -> None:
    """What ``tree`` says of sweeps and cannot be seen in the cells."""
    if one.sweeps and (one.sweeps[0].rows is not None or one.sweeps[0].split):
        raise ScheduleError(f"{one.mask_text}: the first sweep does not start every row")
    for sweep in one.sweeps:
        cuts = sweep.tiling.q_cuts, sweep.tiling.extent
        for s in sweep.segments:
            if (s.tiling.q_cuts, s.tiling.extent) != cuts:
                raise ScheduleError(f"{s.name}: not on the query tiling of its sweep")
        if sweep.tiling.k_cuts or (sweep.tiling.q_cuts and (sweep.rows or sweep.split)):
            raise ScheduleError(f"{one.mask_text}: {sweep.tiling} with rows, split or key cuts")
        if sweep.split and any(s.table is not None for s in sweep.segments):
            raise ScheduleError(f"{one.mask_text}: a table in a split sweep")


def _execute_tile(
    sweep: Sweep, tile: Env, call: Call, block_m: int, block_n: int, out: np.ndarray
) -> None:
    q_start, q_len, k_start, kv_len = call
    rows = tile_rows(tile, q_start, q_len, block_m, sweep.tiling)
    q = rows.q[rows.live]
    digits = {name: x[rows.live][:, None] for name, x in rows.digits.items()}
    for segment in sweep.segments:
        for span, keys, passing in _key_tiles(segment, tile, call, q[:, None], block_n):
            k = keys["k"]
            here = environment(call, q[:, None], k[None, :])
            here |= digits | {n: y[None, :] for n, y in keys.items() if n != "k"}
            seen = _seen(segment, span, here) & passing
            inside = (k >= k_start) & (k < k_start + kv_len)
            if seen[:, ~inside].any():
                raise ScheduleError(f"{segment.name}: a cell outside the keys is visible")
            np.add.at(out, np.ix_(q - q_start, k[inside] - k_start), seen[:, inside])


def _key_tiles(
    segment: Segment, env: Env, call: Call, q: np.ndarray, block_n: int
) -> Iterator[tuple[Span, dict[str, np.ndarray], np.ndarray | bool]]:
    """Every key tile that this query tile visits: (span, digits of its keys, rows that the tile is for).

    The last tile goes on beyond the box, as in a kernel: nothing there may pass.
    """
    spans = {s.kind: s for s in segment.spans}
    if segment.table is not None:
        live = all(value(f, env) >= 0 for f in segment.live)
        for k, rows in _walk(segment.table, env, call, q) if live else ():
            yield spans["whole"], {"k": k}, rows
        return
    tiling = segment.tiling
    block_n = -(-block_n // (tiling.k_extent or 1)) * (tiling.k_extent or 1)  # whole boxes
    got = visit(segment, env, block_n)
    counts = {kind: int(n) for kind, n in got.tiles(block_n).items()}
    inner = tuple((int(a), int(n)) for a, n in got.inner)
    at = 0
    for kind in ("head", "full", "tail", "whole"):
        span = spans.get(kind) or (spans.get("tail") if kind == "whole" else None)
        if span is None and counts[kind]:
            raise ScheduleError(f"{segment.name}: no {kind} span, but {counts[kind]} tiles of it")
        for _ in range(counts[kind]):
            entries = np.arange(at, at + block_n)
            keys = entry_keys(int(got.first), inner, entries, tiling, block_n)
            here = within(got, keys)[None, :] if tiling.k_extent else True
            yield span, keys, here  # type: ignore[misc]
            at += block_n


def shift_of_term(term: ex.Term) -> int | None:
    """What is added to query positions where the term is asked with q and k swapped; None where it is not."""
    shift: int | None = dict(term.params).get(TRANSPOSED)
    return shift


def _walk_transposed(
    walk: TableWalk, env: Env, call: Call, q: np.ndarray, shift: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The blocks of columns that draw a block row of keys: the table read backwards."""
    _, keys, start, count = call
    lowest = max(start - shift, 0) // walk.block
    table = block_table(walk.term, lowest, (start - shift + count - 1) // walk.block, keys)  # type: ignore[arg-type]
    for r in range(env["q_first"] // walk.block, env["q_last"] // walk.block + 1):
        for drawing in np.flatnonzero((table == r).any(1)):
            first = (lowest + int(drawing)) * walk.block + shift
            columns = np.arange(first, first + walk.block)
            yield columns, q // walk.block == r


def _walk(
    walk: TableWalk, env: Env, call: Call, q: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    if (shift := shift_of_term(walk.term)) is not None:  # type: ignore[arg-type]
        yield from _walk_transposed(walk, env, call, q, shift)
        return
    first, last = env["q_first"] // walk.block, env["q_last"] // walk.block
    table = block_table(walk.term, first, last, call[3])  # type: ignore[arg-type]
    for r in range(first, last + 1):
        for drawn in table[r - first]:
            if drawn >= 0:
                keys = np.arange(drawn * walk.block, (drawn + 1) * walk.block)
                yield keys, q // walk.block == r


def _seen(segment: Segment, span: Span, env: Env) -> np.ndarray:
    """Truth of what a span tests, [rows, keys]."""
    ok = np.ones(np.broadcast_shapes(env["q"].shape, env["k"].shape), bool)
    top = env[f"y{len(segment.tiling.k_cuts)}" if segment.tiling.k_cuts else "k"]
    if span.lower:
        ok &= top >= value(segment.row_lo, env)
    if span.upper:
        ok &= top <= value(segment.row_hi, env)
    for test in span.tests:
        ok &= holds(test, env)
    return ok


def holds(test: Range | AnyOf | NoneOf, env: Env) -> Any:
    """Truth of one test."""
    if isinstance(test, Range):
        return test.test(env)
    any_of = _any(test.cubes, env)
    return any_of if isinstance(test, AnyOf) else ~any_of


def _any(cubes: tuple[Cube, ...], env: Env) -> np.ndarray:
    every: Callable[[Cube], np.ndarray] = lambda c: np.logical_and.reduce(
        np.broadcast_arrays(*(r.test(env) for r in c)) if c else [True]
    )
    return np.logical_or.reduce(np.broadcast_arrays(*map(every, cubes)))
