"""Branches and segments of a schedule in words, and as JSON values."""

from __future__ import annotations

import itertools
import math
from typing import Any

from sparsegen.errors import InputError
from sparsegen.schedule.forms import var
from sparsegen.schedule.formula import cube_text
from sparsegen.schedule.tree import AnyOf, HeadClass, NoneOf, Schedule, Segment, Span, Tiling

_KIND = {
    "head": "leading tiles",
    "full": "full tiles",
    "tail": "trailing tiles",
    "whole": "tiles without a full part",
}


def class_of(schedule: Schedule, head: int) -> HeadClass:
    """The class that a query head belongs to; ``InputError`` where no rule names it."""
    rest = None
    for one in schedule.classes:
        if one.heads is None:
            rest = one
        elif any(lo <= head <= hi for lo, hi in one.heads):
            return one
    if rest is None:
        known = ", ".join(heads_text(c.heads) for c in schedule.classes)
        raise InputError(f"no rule of the pattern names head {head}; rules name heads {known}")
    return rest


def heads_text(heads: tuple[tuple[int, int], ...] | None) -> str:
    """``0, 2-3``, or ``rest``."""
    if heads is None:
        return "rest"
    return ", ".join(str(lo) if lo == hi else f"{lo}-{hi}" for lo, hi in heads)


def branches(head_class: HeadClass, block_m: int) -> list[dict[str, Any]]:
    """One object a branch: name, tiling, keys of a row, keys of a tile, and its segments (the loops over key tiles)."""
    return [
        {
            "name": segment.name,
            "tiling": tiling_text(segment, block_m),
            "sweep": number,
            "rows": None if sweep.rows is None else list(sweep.rows),
            "split": sweep.split,
            "row_keys": [str(segment.row_lo), str(segment.row_hi)],
            "tile_keys": [str(segment.tile_lo), str(segment.tile_hi)],
            "segments": [
                {"kind": span.kind, "tests": span_tests(segment, span)} for span in segment.spans
            ],
        }
        for number, sweep in enumerate(head_class.sweeps, 1)
        for segment in sweep.segments
    ]


def tiling_text(segment: Segment, block_m: int) -> str:
    """How query tiles of ``block_m`` rows and the keys of a segment lie: ``runs`` of neighbours, or in words."""
    keys = keys_text(segment)
    return query_text(segment.tiling, block_m) + (f"; keys: {keys}" if keys else "")


def query_text(tiling: Tiling, block_m: int) -> str:
    """How a query tile lies on the positions."""
    cuts, extent = tiling.q_cuts, tiling.extent
    if not cuts:
        return "runs"
    if len(cuts) == 1 and extent == (1,):
        return f"tiles of one residue class q % {cuts[0]}"
    if len(cuts) == 1 and extent[0] < cuts[0] and extent[0] <= _FEW_CLASSES:
        return f"tiles of {extent[0]} neighbouring residue classes q % {cuts[0]}"
    sides = [block_m // math.prod(extent), *extent[::-1]]
    grid = " x ".join(map(str, _radixes(cuts)[::-1]))
    return f"tiles of {' x '.join(map(str, sides))} positions of a grid with lines of {grid}"


_FEW_CLASSES = 4


def _radixes(cuts: tuple[int, ...]) -> list[int]:
    return [b // a for a, b in itertools.pairwise((1, *cuts))]


def keys_text(segment: Segment) -> str:
    """Which keys are gathered, or nothing where they are runs of neighbours."""
    cuts = segment.tiling.k_cuts
    if not cuts:
        return ""
    if len(cuts) == 1 and segment.inner[0][0] == segment.inner[0][1]:
        digit, m = segment.inner[0][0], cuts[0]
        if digit.terms and segment.tiling.q_cuts == cuts and digit == var("x0"):
            return f"the same residue, k % {m} == q % {m}"
        return f"one residue class k % {m} for each tile" if digit.terms else f"k % {m} == {digit}"
    radixes = _radixes(cuts)
    lines = " x ".join(map(str, radixes[::-1]))
    if any(first.terms or last.terms for first, last in segment.inner):
        size = f", in key tiles {segment.tiling.k_extent} wide" if segment.tiling.k_extent else ""
        return f"boxes of a grid with lines of {lines}{size}"
    wide = [
        _digits_text(first.const, last.const, r)
        for (first, last), r in zip(segment.inner, radixes, strict=True)
    ]
    if len(cuts) == 1:
        return f"{wide[0]} of every {cuts[0]}"
    return f"on a grid with lines of {lines}, {' by '.join(wide[::-1])}"


def _digits_text(first: int, last: int, radix: int) -> str:
    if first == 0:
        return "all" if last == radix - 1 else f"first {last + 1}"
    return f"last {radix - first}" if last == radix - 1 else f"{first} to {last}"


def span_tests(segment: Segment, span: Span) -> list[str]:
    """The conditions that a loop still tests, in words; empty = none."""
    tests = []
    key = top_key(segment.tiling)
    if span.lower:
        tests.append(f"{key} >= {segment.row_lo}")
    if span.upper:
        tests.append(f"{key} <= {segment.row_hi}")
    for test in span.tests:
        match test:
            case AnyOf(cubes):
                tests.append(" or ".join(f"({cube_text(c)})" for c in cubes))
            case NoneOf(cubes):
                tests.append("not " + " and not ".join(f"({cube_text(c)})" for c in cubes))
            case _:
                tests.append(str(test))
    return tests


def top_key(tiling: Tiling) -> str:
    """Name of the key axis that the ranges are of."""
    return f"y{len(tiling.k_cuts)}" if tiling.k_cuts else "k"


def describe(head_class: HeadClass, block_m: int, *, explain: bool = False) -> str:
    """Every branch with its keys and, for each loop, what is still tested; ``explain`` adds the tile forms."""
    segments = [(i, s) for i, sweep in enumerate(head_class.sweeps, 1) for s in sweep.segments]
    lines = ["1 branch" if len(segments) == 1 else f"{len(segments)} branches, disjoint"]
    if len(head_class.sweeps) > 1:
        lines[0] += f", in {len(head_class.sweeps)} sweeps"
    for number, segment in segments:
        sweep = head_class.sweeps[number - 1]
        where = [tiling_text(segment, block_m)]
        where += [f"sweep {number}"] if len(head_class.sweeps) > 1 else []
        where += [f"rows {sweep.rows[0]} to {sweep.rows[1]}"] if sweep.rows else []
        where += ["keys split over programs"] if sweep.split else []
        lines.append(f"  {segment.name} ({', '.join(where)})")
        lines += [f"    {line}" for line in _segment_lines(segment, explain)]
    if not segments:
        lines = ["no branch: nothing is visible"]
    if explain:
        lines.append(f"canonical mask: {head_class.mask_text}")
    return "\n".join(lines)


def _segment_lines(segment: Segment, explain: bool) -> list[str]:
    tiling, key = segment.tiling, top_key(segment.tiling)
    lines = []
    if tiling.q_cuts or tiling.k_cuts:
        sides = (("q", "x", tiling.q_cuts), ("k", "y", tiling.k_cuts))
        lines.append(", ".join(_digits(*side) for side in sides if side[2]))
    seen = "keys" if key == "k" else key
    row = "row q" if not tiling.q_cuts else "a row"
    lines.append(f"{row} sees {seen} from {segment.row_lo} to {segment.row_hi}")
    for axis, (first, last) in enumerate(segment.inner):
        read = f"= {first}" if first == last else f"from {first} to {last}"
        lines.append(f"a tile reads y{axis} {read}")
    if segment.live:
        lines.append("only where " + " and ".join(f"{form} >= 0" for form in segment.live))
    if segment.table is not None:
        t = segment.table
        lines.append(f"keys come from a table: {t.per_row} blocks of {t.block} for every block row")
    for span in segment.spans:
        tests = span_tests(segment, span)
        said = "test " + " and ".join(tests) if tests else "no test, no mask code"
        lines.append(f"{_KIND[span.kind]}: {said}")
    if explain:
        lines.append(f"tile: {seen} from {segment.tile_lo} to {segment.tile_hi}")
        if segment.full_lo is not None:
            lines.append(f"full: {seen} from {segment.full_lo} to {segment.full_hi}")
        for guard in segment.guards:
            lines.append("full only where " + " or ".join(f"{form} >= 0" for form in guard))
        if segment.width is not None:
            lines.append(f"never more than {segment.width} {seen} for a tile")
    return lines


def _digits(name: str, axis: str, cuts: tuple[int, ...]) -> str:
    """``q = x0 + 128*x1``."""
    return f"{name} = " + " + ".join(
        (f"{c}*" if c > 1 else "") + f"{axis}{t}" for t, c in enumerate((1, *cuts))
    )
