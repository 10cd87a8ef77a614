"""Branches and segments of a schedule in words, and as JSON values."""

from __future__ import annotations

from typing import Any

from sparsegen.errors import InputError
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


def branches(head_class: HeadClass) -> list[dict[str, Any]]:
    """One object a branch: name, tiling, keys of a row, keys of a tile, and its segments (the loops over key tiles)."""
    return [
        {
            "name": segment.name,
            "tiling": tiling_text(segment.tiling),
            "row_keys": [str(segment.row_lo), str(segment.row_hi)],
            "tile_keys": [str(segment.tile_lo), str(segment.tile_hi)],
            "segments": [
                {"kind": span.kind, "tests": span_tests(segment, span)} for span in segment.spans
            ],
        }
        for sweep in head_class.sweeps
        for segment in sweep.segments
    ]


def tiling_text(tiling: Tiling) -> str:
    """``runs`` of neighbours, or the cuts of queries and keys."""
    if not tiling.q_cuts and not tiling.k_cuts:
        return "runs"
    return f"queries cut by {list(tiling.q_cuts)}, keys cut by {list(tiling.k_cuts)}"


def span_tests(segment: Segment, span: Span) -> list[str]:
    """The conditions that a loop still tests, in words; empty = none."""
    tests = []
    if span.lower:
        tests.append(f"k >= {segment.row_lo}")
    if span.upper:
        tests.append(f"k <= {segment.row_hi}")
    for test in span.tests:
        match test:
            case AnyOf(cubes):
                tests.append(" or ".join(f"({cube_text(c)})" for c in cubes))
            case NoneOf(cubes):
                tests.append("not " + " and not ".join(f"({cube_text(c)})" for c in cubes))
            case _:
                tests.append(str(test))
    return tests


def describe(head_class: HeadClass, *, explain: bool = False) -> str:
    """Every branch with its keys and, for each loop, what is still tested; ``explain`` adds the tile forms."""
    segments = [(i, s) for i, sweep in enumerate(head_class.sweeps) for s in sweep.segments]
    lines = [f"{len(segments)} branch{'es' if len(segments) != 1 else ''}, disjoint"]
    for sweep, segment in segments:
        after = f", sweep {sweep + 1}" if len(head_class.sweeps) > 1 else ""
        lines.append(f"  {segment.name} ({tiling_text(segment.tiling)}{after})")
        lines += [f"    {line}" for line in _segment_lines(segment, explain)]
    if not segments:
        lines = ["no branch: nothing is visible"]
    if explain:
        lines.append(f"canonical mask: {head_class.mask_text}")
    return "\n".join(lines)


def _segment_lines(segment: Segment, explain: bool) -> list[str]:
    lines = [f"row q sees keys from {segment.row_lo} to {segment.row_hi}"]
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
        lines.append(f"tile: keys from {segment.tile_lo} to {segment.tile_hi}")
        if segment.full_lo is not None:
            lines.append(f"full: keys from {segment.full_lo} to {segment.full_hi}")
        for guard in segment.guards:
            lines.append("full only where " + " or ".join(f"{form} >= 0" for form in guard))
        if segment.width is not None:
            lines.append(f"never more than {segment.width} keys for a tile")
    return lines
