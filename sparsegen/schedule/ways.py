"""Ways to compute one head class: which query tiling, which key cuts, how many sweeps.

Every way to write the mask as disjoint branches is tried on every query tiling that the formula's moduli suggest, each
branch with its best key cuts.  Branches on one query tiling share a sweep; few rows with many keys may get a split sweep
of their own.  Closed forms know no length, so trying a tiling is evaluating a few forms on arrays of query tiles.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sparsegen.schedule import cost
from sparsegen.schedule.branches import Branch, walked_term
from sparsegen.schedule.formula import Cube
from sparsegen.schedule.heavy import few_rows, hulls
from sparsegen.schedule.loads import Call, Load
from sparsegen.schedule.machine import Machine, Sizes
from sparsegen.schedule.shapes import (
    MOST_BOX,
    by,
    cut_chains,
    moduli,
    placed,
    query_tilings,
)
from sparsegen.schedule.tiling import close
from sparsegen.schedule.tree import IDENTITY, Segment, Sweep, Tiling

MOST_TILINGS = 3  # query tilings of one schedule
MOST_SPLIT = 3  # split sweeps of one schedule
MOST_WAYS = 4  # made into sweeps; the search keeps fewer still
KEY_CUTS_KEPT = 2  # of a branch on one chain of query cuts
HEAVY = 4.0  # rows with so many times the mean of key tiles may be swept apart
KEYS_PLACE, SPLIT_PLACE = 3, 4  # in a label, after the three kinds of query tilings
LOOP = 0.01  # by so much of its time must one loop more make a way faster than another of the same name
MOST_CLOSED = 150  # closed forms tried for a class, by the square of their alternatives; then the best so far is taken


@dataclass(frozen=True)
class Group:
    """A sweep to be: segments on one query tiling, and what they cost."""

    shape: Tiling  # query cuts and extent
    segments: tuple[Segment, ...]
    loads: tuple[Load, ...]
    rows: tuple[int, int] | None = None
    split: bool = False

    @property
    def busy(self) -> int:
        """Query tiles that see keys."""
        return int(np.count_nonzero(np.sum([x.tiles for x in self.loads], axis=0)))


@dataclass(frozen=True)
class Way:
    """Sweeps of one head class, a short name for how they lie, and predicted seconds of the searched call."""

    sweeps: tuple[Sweep, ...]
    label: str
    seconds: float


class Ways:
    """The search for one call and tile; everything tried is kept, since decompositions share branches."""

    def __init__(
        self,
        call: Call,
        tile: tuple[int, int],
        sizes: Sizes,
        machine: Machine,
        from_zero: bool = False,
    ):
        """``from_zero``: no call has rows before position 0."""
        self.call, self.tile, self.sizes, self.machine = call, tile, sizes, machine
        self.from_zero = from_zero
        self.exhausted = False
        self._left = MOST_CLOSED
        self._closed: dict[tuple[Branch, Tiling], Segment | None] = {}
        self._options: dict[tuple[Branch, Tiling], tuple[Segment, Load] | None] = {}
        self._ranks: dict[tuple[Branch, tuple[int, ...]], list[tuple[int, ...]]] = {}

    def plain(self, branches: Sequence[Branch]) -> Way:
        """All branches on runs, in one sweep."""
        segments = tuple(s for b in branches if (s := close(b)) is not None)
        loads = (cost.load(s, self.call, self.tile, machine=self.machine) for s in segments)
        return self._way([Group(IDENTITY, segments, tuple(loads))])

    def best(self, found: Iterable[tuple[Branch, ...]]) -> dict[str, Way]:
        """The cheapest way of every name, over all decompositions; plain ones are left out."""
        best: dict[str, tuple[float, list[Group]]] = {}
        for branches in found:
            for groups in self._divided(branches):
                label = name(groups)
                if label == "runs":
                    continue
                loops = sum(len(g.segments) for g in groups)
                seconds = self._seconds(groups) * (1 + LOOP * loops)
                if label not in best or seconds < best[label][0] - 1e-12:
                    best[label] = seconds, groups
        kept = sorted(best.values(), key=lambda x: x[0])[:MOST_WAYS]
        ways = [self._way(groups) for _, groups in kept]
        return {way.label: way for way in ways}

    # ---- one branch ----

    def _close(self, branch: Branch, tiling: Tiling) -> Segment | None:
        key = branch, tiling
        if key not in self._closed:
            if tiling != IDENTITY:
                self._left -= len(branch.alts) ** 2
            if self._left < 0:
                self.exhausted = True
                return None
            self._closed[key] = close(branch, tiling)
        return self._closed[key]

    def _option(self, branch: Branch, shape: Tiling) -> tuple[Segment, Load] | None:
        """The branch on a query tiling with its best key cuts; None where it cannot be closed there."""
        key = branch, shape
        if key not in self._options:
            tried = [self._loaded(branch, shape, cuts) for cuts in self._key_cuts(branch, shape)]
            found = [x for x in tried if x is not None]
            self._options[key] = min(found, key=lambda x: _total(x[1]), default=None)
        return self._options[key]

    def _loaded(
        self, branch: Branch, shape: Tiling, k_cuts: tuple[int, ...]
    ) -> tuple[Segment, Load] | None:
        # Forms for the largest extent hold for the smaller ones: close enough to compare by, and made once.
        wide = tuple(1 if e == 1 else MOST_BOX for e in shape.extent)
        segment = self._close(branch, Tiling(shape.q_cuts, wide, k_cuts))
        if segment is None:
            return None
        return segment, cost.load(segment, self.call, self.tile, shape, machine=self.machine)

    def _key_cuts(self, branch: Branch, shape: Tiling) -> list[tuple[int, ...]]:
        """Key cuts worth trying, ranked once for each chain of query cuts."""
        key = branch, shape.q_cuts
        if key not in self._ranks:
            ranked = []
            for cuts in self._key_cuts_of(branch, shape):
                got = self._loaded(branch, shape, cuts)
                if got is not None:
                    ranked.append((_total(got[1]), len(cuts), cuts))
            self._ranks[key] = [cuts for _, _, cuts in sorted(ranked)[:KEY_CUTS_KEPT]]
        return self._ranks[key]

    def _key_cuts_of(self, branch: Branch, shape: Tiling) -> list[tuple[int, ...]]:
        if any(map(walked_term, branch.alts)):
            return [()]
        every = cut_chains(_cubes(branch), "k")
        _, alone = moduli(_cubes(branch), "k")
        if len(shape.q_cuts) < 2:
            # Rows of all residues see keys of all residues; rows of one modulo m see one modulo its divisors.
            own, grids = moduli(_cubes(branch), "q")
            m = math.prod(shape.q_cuts)
            if shape.q_cuts and own and not grids and all(m % d for d in own):
                return []
            every = [c for c in every if set(c) <= alone or (m > 1 and m % math.prod(c) == 0)]
        if len(branch.alts) == 1:
            return every
        # One box over several alternatives: digits are of use only where all of them have the remainder.
        common = [set(cut_chains([c], "k")) for c in branch.alts]
        every = [cuts for cuts in every if all(cuts in x for x in common)]
        if shape.q_cuts and not any(cuts == shape.q_cuts for cuts in every):
            return []
        return every

    # ---- one decomposition ----

    def _divided(self, branches: Sequence[Branch]) -> Iterator[list[Group]]:
        """The sweeps of a decomposition: for every few query tilings, each branch on its cheapest of them."""
        cubes = [c for b in branches for c in _cubes(b)]
        shapes = query_tilings(cubes, self.call, self.tile[0])
        table = [[self._option(b, s) for s in shapes] for b in branches]
        loads = np.array(
            [[math.inf if x is None else _total(x[1]) for x in row] for row in table]
        ).reshape(len(branches), len(shapes))
        for pick in _few(loads):
            home = loads[:, pick].argmin(1) if len(branches) else np.zeros(0, int)
            if len(branches) and not np.isfinite(loads[:, pick].min(1)).all():
                continue
            groups = []
            for u, shape in enumerate(pick):
                mine = [table[b][shape] for b in range(len(branches)) if home[b] == u]
                if mine:
                    segments, own = zip(*(x for x in mine if x is not None), strict=True)
                    groups.append(Group(shapes[shape], segments, own))
            yield in_order(groups)
            yield from self._heavy_apart(groups)

    def _heavy_apart(self, groups: Sequence[Group]) -> Iterator[list[Group]]:
        """The same with few rows of many keys in split sweeps of their own, where there are any."""
        runs = next((g for g in groups if not g.shape.q_cuts), None)
        if runs is None:
            return
        every = sum(float(np.sum(x.tiles)) for g in groups for x in g.loads)
        mean = every / max(len(runs.loads[0].tiles), 1)
        heavy: list[tuple[tuple[int, int], Segment]] = []
        left: list[tuple[Segment, Load]] = []
        for segment, load in zip(runs.segments, runs.loads, strict=True):
            apart = None if segment.table is not None else few_rows(segment.branch, self.from_zero)
            if apart is None or load.tiles.max(initial=0) <= HEAVY * mean:
                left.append((segment, load))
                continue
            within, before = (
                None if b is None else self._loaded(b, IDENTITY, ()) for b in apart[1:]
            )
            if within is None:
                return
            heavy.append((apart[0], within[0]))
            left += [before] if before is not None else []
        splits = [self._split(rows, some) for rows, some in hulls(heavy)]
        if not splits or len(splits) > MOST_SPLIT:
            return
        plain = [g for g in groups if g is not runs]
        if left or not plain:
            plain.append(Group(IDENTITY, tuple(s for s, _ in left), tuple(x for _, x in left)))
        yield [*in_order(plain), *splits]

    def _split(self, rows: tuple[int, int], segments: Sequence[Segment]) -> Group:
        loads = tuple(
            cost.load(s, self.call, self.tile, rows=rows, machine=self.machine) for s in segments
        )
        return Group(IDENTITY, tuple(segments), loads, rows, split=True)

    # ---- what it costs, and the sweeps themselves ----

    def _seconds(self, groups: Sequence[Group]) -> float:
        parts = (
            cost.sweep_cost(
                g.loads,
                len(g.segments),
                self.tile,
                self.sizes,
                first=i == 0,
                split=cost.split_of(g.rows, self.call) if g.split else None,
                machine=self.machine,
            )
            for i, g in enumerate(groups)
        )
        return sum(p.seconds(self.machine) for p in parts)

    def _way(self, groups: Sequence[Group]) -> Way:
        sweeps = tuple(
            Sweep(g.shape, tuple(_with_extent(s, g.shape) for s in g.segments), g.rows, g.split)
            for g in groups
        )
        return Way(sweeps, name(groups), self._seconds(groups))


def _with_extent(segment: Segment, shape: Tiling) -> Segment:
    """The segment closed for the very extent that its sweep has."""
    tiling = replace(segment.tiling, extent=shape.extent)
    if tiling == segment.tiling:
        return segment
    closed = close(segment.branch, tiling)
    assert closed is not None, f"{segment.branch} closes on {segment.tiling} but not on {tiling}"
    return closed


def _total(load: Load) -> float:
    return float(load.weighted.sum())


def _cubes(branch: Branch) -> list[Cube]:
    return [*branch.alts, *branch.minus]


def _few(loads: np.ndarray) -> Iterator[tuple[int, ...]]:
    """Query tilings to combine: of each branch the best two, the best for all, and runs; up to three at a time."""
    branches, shapes = loads.shape
    short = {0}
    for row in loads:
        short |= {int(i) for i in np.argsort(row, kind="stable")[:2] if np.isfinite(row[i])}
    if branches:
        short.add(int(np.argmin(loads.sum(0))))
    for n in range(1, min(MOST_TILINGS, max(branches, 1)) + 1):
        yield from itertools.combinations(sorted(short), n)


def in_order(groups: Sequence[Group]) -> list[Group]:
    """The sweep with the most rows first: its rows pay for no state, and it covers them all; runs before others."""
    return sorted(groups, key=lambda g: (-g.busy, g.shape.q_cuts, g.shape.extent))


def name(groups: Sequence[Group]) -> str:
    """How the sweeps lie, in a few words: ``runs + mod 128``, ``box 16 of 256``.

    Stored with measurements, so its parts have an order of their own and not that of the sweeps.
    """
    parts: set[tuple[tuple[int, ...], str]] = set()  # (by what it is sorted, text)
    for g in groups:
        parts.add(((SPLIT_PLACE,), "split rows") if g.split else placed(g.shape))
        cuts = {s.tiling.k_cuts for s in g.segments} - {(), g.shape.q_cuts}
        parts |= {((KEYS_PLACE, *c), f"keys mod {by(c)}") for c in cuts}
    return " + ".join(text for _, text in sorted(parts)) or "runs"
