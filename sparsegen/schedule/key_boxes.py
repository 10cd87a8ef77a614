"""Twins of schedules whose keys are boxes of a grid: key tiles that are boxes themselves, which a tensor descriptor loads.

Entries of a box in a row are no box where its width differs between query tiles, as at the edges of a grid.  A twin pads
the box to whole key tiles of a fixed width and computes as many cells, or more: the tuner measures both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from sparsegen.schedule import reach
from sparsegen.schedule.cost import Call, environment
from sparsegen.schedule.tiles import visit
from sparsegen.schedule.tree import IDENTITY, Schedule, Segment, Sweep, Tiling

WIDTHS = (4, 8, 16)  # of a key tile on axis 0; every BLOCK_N holds them
BLOCKS = ((128, 64), (128, 128))  # tiles that widths are compared in


def twin(schedule: Schedule, call: Call) -> Schedule | None:
    """The schedule with boxes for key tiles wherever they differ in size; None where none do.

    ``call``: the one at which the fewest cells decide how wide these boxes are.
    """
    classes = tuple(
        replace(c, sweeps=tuple(_boxed(sweep, call) for sweep in c.sweeps))
        for c in schedule.classes
    )
    segments = [s for c in classes for sweep in c.sweeps for s in sweep.segments]
    widths = sorted({s.tiling.k_extent for s in segments} - {0})
    if not widths:
        return None
    return replace(
        schedule,
        classes=classes,
        position_limit=reach.position_limit(segments),
        label=f"{schedule.label} + key boxes {' and '.join(map(str, widths))} wide",
    )


def _boxed(sweep: Sweep, call: Call) -> Sweep:
    if sweep.tiling == IDENTITY:
        return sweep
    segments = (min(_ways(s), key=lambda w: _cells(w, call)) for s in sweep.segments)
    return replace(sweep, segments=tuple(segments))


def _ways(s: Segment) -> Iterator[Segment]:
    """A segment in key tiles of every width, or as it is where its key tiles are boxes already, or no boxes at all."""
    varies = len(s.inner) > 1 or any((hi - lo).terms for lo, hi in s.inner)
    if not varies or s.full_lo is not None or s.width is not None:
        yield s
        return
    for width in WIDTHS:
        yield replace(s, tiling=replace(s.tiling, k_extent=width))


def _cells(s: Segment, call: Call) -> int:
    shape = Tiling(s.tiling.q_cuts, s.tiling.extent)
    return sum(int(visit(s, environment(call, m, shape, None), n).entries.sum()) for m, n in BLOCKS)
