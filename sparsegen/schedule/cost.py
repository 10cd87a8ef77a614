"""What a schedule costs, predicted: key tiles, bytes and seconds, for one call and one tile size.

The model has to rank schedules, not to time kernels: the tuner measures.  All constants are in ``machine``.
A sweep takes as long as its matrix products at the machine's rate, or as its longest program on one processor; a later
sweep pays for the state that it takes up and hands on.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from sparsegen.schedule.chunks import chunks_of
from sparsegen.schedule.loads import Call, Load, environment, load
from sparsegen.schedule.machine import H200, Machine, Sizes
from sparsegen.schedule.row_blocks import row_blocks
from sparsegen.schedule.tree import HeadClass, Schedule, Sweep

__all__ = [
    "Call",
    "Cost",
    "Load",
    "SweepCost",
    "cost_of",
    "cost_of_sweep",
    "environment",
    "head_shares",
    "load",
    "split_of",
    "sweep_cost",
    "tile_seconds",
]


@dataclass(frozen=True)
class SweepCost:
    """One sweep of all heads: seconds of its parts."""

    key_tiles: int  # of one head
    rows: int  # of query tiles that see keys, one head
    matmul: float  # all programs, evenly over the processors
    longest: float  # the longest program alone
    state: int  # bytes that move the softmax state, if it is not the first
    workspace: int  # bytes of partial states, written and read once, if it is split
    launches: int

    def seconds(self, machine: Machine = H200) -> float:
        """Work or longest program, then state and launches."""
        moved = (self.state + 2 * self.workspace) / machine.bandwidth
        return max(self.matmul, self.longest) + moved + self.launches * machine.launch


def sweep_cost(
    loads: Iterable[Load],
    segments: int,
    tile: tuple[int, int],
    sizes: Sizes,
    *,
    first: bool,
    split: tuple[int, int] | None = None,
    machine: Machine = H200,
) -> SweepCost:
    """Cost of the segments with these loads in one sweep.

    ``split``: its query rows and the keys of the call, where the keys are split over programs.
    """
    work = _work(list(loads), tile[1], split, machine)
    return _priced(work, segments, tile, sizes, first=first, split=split, machine=machine)


@dataclass(frozen=True)
class _Work:
    """Of some query tiles: key tiles, query tiles that see keys, weighted key tiles of all, of the heaviest program
    and of the heaviest chunk."""

    key_tiles: int
    busy: int
    weighted: float
    heaviest: float
    chunk: float

    def __add__(self, other: _Work) -> _Work:
        return _Work(
            self.key_tiles + other.key_tiles,
            self.busy + other.busy,
            self.weighted + other.weighted,
            max(self.heaviest, other.heaviest),
            max(self.chunk, other.chunk),
        )


def _work(
    loads: list[Load], block_n: int, split: tuple[int, int] | None, machine: Machine
) -> _Work:
    none = np.zeros(1)
    weighted = np.sum([x.weighted for x in loads], axis=0) if loads else none
    tiles = np.sum([x.tiles for x in loads], axis=0) if loads else none.astype(np.int64)
    entries = 0 if split is None else chunks_of(split[1])[1]
    # A program takes one chunk of every segment.
    parts = [-(-x.tiles * block_n // entries) if entries else x.tiles > 0 for x in loads]
    weighted = weighted + machine.program * np.max(parts, axis=0, initial=0)
    chunk = 0.0
    if split is not None:
        shares = (np.minimum(1, entries / np.maximum(x.tiles * block_n, 1)) for x in loads)
        first_chunk = sum((x.weighted * s for x, s in zip(loads, shares)), start=none)
        chunk = float(first_chunk.max(initial=0.0))
    return _Work(
        key_tiles=int(tiles.sum()),
        busy=int(np.count_nonzero(tiles)),
        weighted=float(weighted.sum()),
        heaviest=float(weighted.max(initial=0.0)),
        chunk=chunk,
    )


def _priced(
    work: _Work,
    segments: int,
    tile: tuple[int, int],
    sizes: Sizes,
    *,
    first: bool,
    split: tuple[int, int] | None,
    machine: Machine,
) -> SweepCost:
    rows = tile[0] * work.busy
    one = tile_seconds(tile, sizes, machine)
    # One program has a processor to itself: it runs at a share of the machine's rate.
    alone = one * machine.sms * sizes.group / sizes.heads
    longest = work.heaviest * alone
    workspace, launches = 0, 1
    if split is not None:
        longest = min(longest, (work.chunk + machine.program) * alone)
        chunks, _ = chunks_of(split[1])
        workspace, launches = sizes.partial(chunks * split[0]), 2
    return SweepCost(
        key_tiles=work.key_tiles,
        rows=rows,
        matmul=(work.weighted + machine.segment * segments) * one,
        longest=longest,
        state=0 if first else sizes.state(rows),
        workspace=workspace,
        launches=launches,
    )


def tile_seconds(tile: tuple[int, int], sizes: Sizes, machine: Machine = H200) -> float:
    """One key tile without a test, of all heads."""
    block_m, block_n = tile
    return sizes.operations(block_m * block_n) / machine.rate(block_m, block_n)


@dataclass(frozen=True)
class Cost:
    """Prediction for one call: of all heads, but ``tile_cells`` is of one head of every class."""

    q_len: int
    kv_len: int
    sizes: Sizes
    tile: tuple[int, int]
    tile_cells: int  # cells in the key tiles that are computed, whole tiles counted
    bytes: (
        int  # q, k, v and outputs once, the state of later sweeps, partial states written and read
    )
    state_bytes: int  # of these, the state of later sweeps
    workspace_bytes: int  # memory for the partial states of split sweeps
    sweeps: int
    launches: int
    matmul_seconds: float
    waiting_seconds: float  # by which longest programs exceed the work of their sweep
    state_seconds: float
    memory_seconds: float  # q, k, v and outputs once, at the speed of a copy
    launch_seconds: float

    @property
    def seconds(self) -> float:
        """Predicted time."""
        first = max(self.matmul_seconds + self.waiting_seconds, self.memory_seconds)
        return first + self.state_seconds + self.launch_seconds

    def parts(self) -> dict[str, float]:
        """Milliseconds by part, for people and JSON."""
        named = {
            "matmul": self.matmul_seconds,
            "longest_program": self.waiting_seconds,
            "copies": max(self.memory_seconds - self.matmul_seconds - self.waiting_seconds, 0.0),
            "later_sweeps": self.state_seconds,
            "launches": self.launch_seconds,
        }
        return {name: 1e3 * seconds for name, seconds in named.items()}


def cost_of(
    schedule: Schedule,
    q_len: int,
    kv_len: int,
    tile: tuple[int, int],
    sizes: Sizes | None = None,
    machine: Machine = H200,
    k_start: int = 0,
) -> Cost:
    """What a schedule costs for one call; classes weigh by the heads that their rules name."""
    sizes = sizes or Sizes()
    call = (kv_len - q_len if schedule.align == "bottom_right" else 0, q_len, k_start, kv_len)
    found = []
    for one, heads in zip(
        schedule.classes, head_shares(schedule.classes, sizes.heads), strict=True
    ):
        own = replace(sizes, heads=heads)
        found += [
            cost_of_sweep(sweep, call, tile, own, first=i == 0, machine=machine)
            for i, sweep in enumerate(one.sweeps)
        ]
    once = sizes.once(q_len, kv_len)
    state, workspace = sum(x.state for x in found), sum(x.workspace for x in found)
    launches = sum(x.launches for x in found)
    return Cost(
        q_len=q_len,
        kv_len=kv_len,
        sizes=sizes,
        tile=tile,
        tile_cells=sum(x.key_tiles for x in found) * tile[0] * tile[1],
        bytes=once + state + 2 * workspace,
        state_bytes=state,
        workspace_bytes=workspace,
        sweeps=max((len(c.sweeps) for c in schedule.classes), default=0),
        launches=launches,
        matmul_seconds=sum(x.matmul for x in found),
        waiting_seconds=sum(max(x.longest - x.matmul, 0.0) for x in found),
        state_seconds=(state + 2 * workspace) / machine.bandwidth,
        memory_seconds=once / machine.bandwidth,
        launch_seconds=launches * machine.launch,
    )


def cost_of_sweep(
    sweep: Sweep,
    call: Call,
    tile: tuple[int, int],
    sizes: Sizes,
    *,
    first: bool,
    machine: Machine = H200,
) -> SweepCost:
    """What one sweep costs for one call."""
    split = split_of(sweep.rows, call) if sweep.split else None
    blocks = row_blocks(call[0], call[1], tile[0], sweep.tiling, sweep.rows)
    parts = (
        _work(
            [load(s, call, tile, rows=rows, machine=machine) for s in sweep.segments],
            tile[1],
            split,
            machine,
        )
        for rows in blocks
    )
    work, segments = functools.reduce(operator.add, parts), len(sweep.segments)
    return _priced(work, segments, tile, sizes, first=first, split=split, machine=machine)


def split_of(rows: tuple[int, int] | None, call: Call) -> tuple[int, int]:
    """(query rows, keys) of a split sweep: ``sweep_cost`` takes them."""
    _, q_len, _, kv_len = call
    return (q_len if rows is None else min(rows[1] - rows[0] + 1, q_len)), kv_len


def head_shares(classes: Iterable[HeadClass], heads: int) -> list[int]:
    """Heads of every class: those that its rules name, and what is left for the rest (at least one each)."""
    named = [sum(hi - lo + 1 for lo, hi in c.heads or ()) for c in classes]
    rest = max(heads - sum(named), 1)
    return [n or rest for n in named]
