"""A schedule as readable text: stable line by line, so that a diff of two dumps shows what was decided otherwise."""

from __future__ import annotations

from collections.abc import Iterator

from sparsegen.schedule.formula import Range, cube_text
from sparsegen.schedule.tree import AnyOf, HeadClass, NoneOf, Schedule, Segment, Span, Sweep, Test


def dump(schedule: Schedule) -> str:
    """The whole schedule, one fact a line, two spaces a level."""
    return "\n".join(_schedule(schedule)) + "\n"


def _schedule(s: Schedule) -> Iterator[str]:
    if s.label != "runs":
        yield f"schedule {s.label}"
    yield f"align {s.align}"
    yield f"positions up to {s.position_limit} in 32-bit arithmetic"
    if s.max_position is not None:
        low = -s.max_position if s.min_position is None else s.min_position
        yield f"proven for positions from {low} to {s.max_position - 1} only"
    for note in s.notes:
        yield f"note {note}"
    for c in s.classes:
        yield from _class(c)


def _class(c: HeadClass) -> Iterator[str]:
    yield f"{heads_text(c.heads)}: {c.mask_text}"
    for sweep in c.sweeps:
        yield f"  sweep {tiling_text(sweep)}"
        for segment in sweep.segments:
            for line in _segment(segment):
                yield "    " + line


def heads_text(heads: tuple[tuple[int, int], ...] | None) -> str:
    """The heads of a class in words."""
    if heads is None:
        return "other heads"
    return "heads " + ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in heads)


def tiling_text(sweep: Sweep) -> str:
    """The query tiling of a sweep in words."""
    t = sweep.tiling
    text = "runs of queries"
    if t.q_cuts:
        tile = " x ".join(map(str, t.extent))
        text = f"queries cut at {', '.join(map(str, t.q_cuts))}, tile {tile}"
    if sweep.rows is not None:
        text += f" from {sweep.rows[0]} to {sweep.rows[1]}"
    return text + (", keys split" if sweep.split else "")


def _segment(s: Segment) -> Iterator[str]:
    wide = f", key tiles {s.tiling.k_extent} wide" if s.tiling.k_extent else ""
    cuts = f" (keys cut at {', '.join(map(str, s.tiling.k_cuts))}{wide})" if s.tiling.k_cuts else ""
    yield f"segment {s.name}{cuts}: {s.branch}"
    yield f"  row   {s.row_lo} .. {s.row_hi}"
    yield f"  tile  {s.tile_lo} .. {s.tile_hi}" + (f"  ({s.width} keys)" if s.width else "")
    for t, (lo, hi) in enumerate(s.inner):
        yield f"  y{t}    {lo} .. {hi}"
    if s.full_lo is not None:
        yield f"  full  {s.full_lo} .. {s.full_hi}"
    for form in s.live:
        yield f"  live  {form} >= 0"
    for group in s.guards:
        yield "  guard " + " or ".join(f"{f} >= 0" for f in group)
    if s.table is not None:
        yield f"  walk  {s.table.per_row} key blocks of {s.table.block} per block row"
    top = f"y{len(s.tiling.k_cuts)}" if s.tiling.k_cuts else "k"
    for span in s.spans:
        yield f"  {span.kind:5} " + ("; ".join(_tests(span, top)) or "no test")


def _tests(span: Span, top: str) -> Iterator[str]:
    if span.lower:
        yield f"{top} >= row_lo"
    if span.upper:
        yield f"{top} <= row_hi"
    for test in span.tests:
        yield test_text(test)


def test_text(test: Test) -> str:
    """What a span still tests, in words."""
    if isinstance(test, Range):
        return str(test)
    word = "any of" if isinstance(test, AnyOf) else "none of"
    assert isinstance(test, (AnyOf, NoneOf))
    return f"{word} ({'), ('.join(map(cube_text, test.cubes))})"
