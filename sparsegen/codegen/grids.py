"""The launches of a schedule: which sweeps run as one grid of programs, and how many programs that is.

Sweeps at one place of their classes of heads that tile the queries alike are one launch; a split sweep is followed by
the launch that joins its partial results.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sparsegen.codegen.entries import descriptor_of
from sparsegen.schedule.tree import IDENTITY, HeadClass, Schedule, Sweep

Heads = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Grid:
    """The programs of one launch.

    A program is a query tile of a head of a batch entry; in a ``split`` launch also a chunk of the keys; in a
    ``combine`` launch one query row.
    """

    q_cuts: tuple[int, ...] = ()
    extent: tuple[int, ...] = ()
    rows: tuple[int, int] | None = None  # only these query positions, first and last
    split: bool = False
    combine: bool = False
    heads: Heads | None = None  # inclusive ranges of the query heads that take part; None: all do
    all_but: bool = False  # ``heads`` are those that do not
    described: tuple[
        tuple[int, int], ...
    ] = ()  # keys that tensor descriptors load: see ``entries.descriptor_of``

    @property
    def queries(self) -> tuple[int, int] | None:
        """(period, group) of a tensor descriptor of a tile's queries, as for keys; None: their rows are gathered."""
        if not self.q_cuts:
            return 1, 1
        if len(self.q_cuts) > 1 or 16 % self.extent[0]:
            return None
        return self.q_cuts[0], self.extent[0]

    def heads_of(self, heads: int) -> int:
        """How many of the query heads take part."""
        if self.heads is None:
            return heads
        named = sum(last - first + 1 for first, last in self.heads)
        return heads - named if self.all_but else named

    def rows_of(self, q_rows: int) -> int:
        """Most query rows that a call of so many can have in here."""
        return q_rows if self.rows is None else min(self.rows[1] - self.rows[0] + 1, q_rows)

    def tiles(self, q_rows: int, q_first: int | None, block_m: int, chunks: int) -> int:
        """Programs for one head of one batch entry.

        ``q_first``: position of query row 0; None where batch entries differ, then there is room for any.
        """
        if not q_rows:
            return 0
        if self.combine:
            return self.rows_of(q_rows)
        if self.split:
            return -(-self.rows_of(q_rows) // block_m) * chunks
        if not self.q_cuts:
            return -(-self.rows_of(q_rows) // block_m)
        top = self.q_cuts[-1]
        if q_first is None:
            digits = -(-(q_rows - 1) // top) + 1
        else:
            digits = (q_first + q_rows - 1) // top - q_first // top + 1
        for size in self.extent:
            block_m //= size
        count = -(-digits // block_m)
        for lower in self.lower_tiles:
            count *= lower
        return count

    @property
    def lower_tiles(self) -> tuple[int, ...]:
        """Query tiles along every axis below the top one."""
        return tuple(-(-radix // size) for radix, size in zip(self.radices, self.extent))

    @property
    def radices(self) -> tuple[int, ...]:
        """Digits on every axis below the top one."""
        steps = (1, *self.q_cuts)
        return tuple(above // step for step, above in zip(steps, self.q_cuts))


@dataclass(frozen=True)
class Launch:
    """One launch: its grid, and the sweep of every class of heads that takes part.

    ``chained``: the sweeps take the softmax state up from OUT and LSE.
    """

    grid: Grid
    chained: bool
    parts: tuple[tuple[HeadClass, Sweep], ...]


def launches_of(schedule: Schedule) -> tuple[Launch, ...]:
    """The launches in order; together they run every sweep of every class, those of one class in their order."""
    classes = sorted(schedule.classes, key=lambda c: c.heads is None)  # the rest becomes the "else"
    out: list[Launch] = []
    for place in range(max(1, *(len(c.sweeps) for c in classes))):
        groups: dict[Grid, list[tuple[HeadClass, Sweep]]] = {}
        for cls in classes:
            if place < len(cls.sweeps):
                groups.setdefault(_grid(cls.sweeps[place]), []).append((cls, cls.sweeps[place]))
            elif not place:  # heads that see nothing: their outputs are written too
                groups.setdefault(Grid(), []).append((cls, Sweep(IDENTITY, ())))
        for grid, parts in groups.items():
            took = [cls for cls, _ in parts]
            grid = replace(_of_heads(grid, classes, took), described=_described(parts))
            out.append(Launch(grid, place > 0, tuple(parts)))
            if grid.split:
                joins = replace(grid, split=False, combine=True, described=())
                out.append(Launch(joins, True, tuple(parts)))
    return tuple(out)


def _grid(sweep: Sweep) -> Grid:
    return Grid(sweep.tiling.q_cuts, sweep.tiling.extent, sweep.rows, sweep.split)


def _described(parts: list[tuple[HeadClass, Sweep]]) -> tuple[tuple[int, int], ...]:
    found = {descriptor_of(seg) for _, sweep in parts for seg in sweep.segments}
    return tuple(sorted(x for x in found if x is not None))


def _of_heads(grid: Grid, classes: list[HeadClass], took: list[HeadClass]) -> Grid:
    if len(took) == len(classes):
        return grid
    all_but = any(cls.heads is None for cls in took)
    named = [cls for cls in classes if (cls not in took if all_but else cls in took)]
    ranges = sorted(r for cls in named for r in cls.heads or ())
    return replace(grid, heads=tuple(ranges), all_but=all_but)
