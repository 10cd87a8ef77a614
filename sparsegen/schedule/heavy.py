"""Few rows with many keys: which a branch has, and which of them lie near enough together for one sweep."""

from __future__ import annotations

from collections.abc import Sequence

from sparsegen.schedule.branches import Branch
from sparsegen.schedule.forms import BIG, Floor, Q
from sparsegen.schedule.formula import Cube, Range, conj
from sparsegen.schedule.tree import Segment

NEAR = 64  # heavy rows with a gap of so many at most are swept together


def few_rows(
    branch: Branch, from_zero: bool = False
) -> tuple[tuple[int, int], Branch, Branch | None] | None:
    """Rows first..last that a branch is bounded to, the branch there, and what it shows before position 0.

    ``q < 64`` has no first row where a call has rows before position 0: those are left to a branch of their own, unless rows
    are known to start ``from_zero``.
    """
    limits = [_row_limits(c) for c in branch.alts]
    first, last = (min(lo for lo, _ in limits), max(hi for _, hi in limits)) if limits else (0, BIG)
    if last >= BIG:
        return None
    if first > -BIG:
        return (first, last), branch, None
    if from_zero:
        return (0, last), branch, None
    within, before = (_meeting(branch, r) for r in (Range(Q, 0, BIG), Range(Q, -BIG, -1)))
    return None if within is None else ((0, last), within, before)


def _row_limits(cube: Cube) -> tuple[int, int]:
    """What ranges of q, and of q // m, bound the rows of a cube to."""
    low, high = -BIG, BIG
    for r in cube:
        (g, c), *more = r.lin.terms
        m = 1 if r.lin == Q else g.m if isinstance(g, Floor) and g.arg == Q else 0
        if m and c == 1 and not more:
            low = max(low, r.lo * m) if r.lo > -BIG else low
            high = min(high, r.hi * m + m - 1) if r.hi < BIG else high
    return low, high


def _meeting(branch: Branch, r: Range) -> Branch | None:
    cubes = (conj([*c, r]) for c in branch.alts)
    alts = tuple(c for c in cubes if c is not None)
    return Branch(alts, branch.minus) if alts else None


def hulls(
    heavy: Sequence[tuple[tuple[int, int], Segment]],
) -> list[tuple[tuple[int, int], list[Segment]]]:
    """Segments of rows that lie near together, with the rows of all of them."""
    out: list[tuple[tuple[int, int], list[Segment]]] = []
    for (first, last), segment in sorted(heavy, key=lambda x: x[0]):
        if out and first <= out[-1][0][1] + NEAR:
            (start, end), some = out[-1]
            out[-1] = (start, max(end, last)), [*some, segment]
        else:
            out.append(((first, last), [segment]))
    return out
