"""Closed forms of one branch on the identity tiling: which keys a row, and a tile of rows, may see.

A conjunct with one generator in k, monotone in k, is an *interval*: solved for k it limits a row exactly.  Conjuncts
without k are conditions on *rows*.  All others are *tests*.  Bounds of the row limits over the rows of a tile give the
tile's range (loose side) and its full part (strict side); no length and no tile size occurs in any of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from sparsegen.schedule.branches import Branch, walked_term
from sparsegen.schedule.forms import (
    BIG,
    FAR,
    K_FIRST,
    K_LAST,
    Floor,
    Lin,
    Opaque,
    size,
    value,
)
from sparsegen.schedule.formula import Range, as_mod
from sparsegen.schedule.intervals import SYMBOLS, bounds, ordered, pick, pick_args
from sparsegen.schedule.limits import LONGEST_FORM, ON_TILE, Limits, as_form, ends, limits
from sparsegen.schedule.tree import (
    IDENTITY,
    AnyOf,
    NoneOf,
    Segment,
    Span,
    TableWalk,
    Test,
)

SMALLEST_BLOCK = 16  # rows and keys of a kernel's smallest tile; a smaller full part is no use
FAR_AWAY = 1 << 21  # positions at which full parts are looked for
SHORTEST_RUN = 16  # rows in a row; remainders of q that hold for fewer never fill a tile


def close(branch: Branch) -> Segment:
    """The segment of a branch, unnamed."""
    if len(branch.alts) == 1:
        return _close_one(branch)
    every = [limits(c) for c in branch.alts]
    joined = _joined_limits(branch, every)
    if joined is not None:
        return _segment(branch, *joined, rows=(), tests=(), clauses=())
    return _close_hull(branch, every)


def _close_one(branch: Branch) -> Segment:
    (cube,) = branch.alts
    term = walked_term(cube)
    if term is not None:
        cube = tuple(r for r in cube if Opaque(term) not in dict(r.lin.terms))
    got = limits(cube)
    clauses = tuple(NoneOf((m,)) for m in branch.minus)
    if term is not None:
        return _walk(branch, got, clauses, TableWalk(term, term["block"], term["per_row"]))
    return _segment(branch, got.row_lo, got.row_hi, got.rows, got.tests, clauses)


def _joined_limits(branch: Branch, every: list[Limits]) -> tuple[Lin, Lin] | None:
    """Alternatives that are plain intervals with one end in common are one interval."""
    if branch.minus or any(x.rows or x.tests for x in every):
        return None
    first = every[0]
    if all(set(x.lower) == set(first.lower) for x in every):
        highs = [pick("min", x.upper or [K_LAST]) for x in every]
        return first.row_lo, pick("min", [K_LAST, pick("max", highs)])
    if all(set(x.upper) == set(first.upper) for x in every):
        lows = [pick("max", x.lower or [K_FIRST]) for x in every]
        return pick("max", [K_FIRST, pick("min", lows)]), first.row_hi
    return None


def _segment(
    branch: Branch,
    row_lo: Lin,
    row_hi: Lin,
    rows: tuple[Range, ...],
    tests: tuple[Test, ...],
    clauses: tuple[NoneOf, ...],
) -> Segment:
    (tile_lo, full_lo), (full_hi, tile_hi) = ends(row_lo), ends(row_hi)
    has_lower = full_lo != tile_lo  # else every row starts at the first key of the range
    guards = None if tests else _guards(rows, clauses, full_lo, full_hi)
    if guards is not None and not _ever_full(tile_lo, tile_hi, full_lo, full_hi, guards):
        guards = None
    whole = Span("whole", has_lower, True, (*rows, *tests, *clauses))
    if guards is None:
        spans: tuple[Span, ...] = (whole,)
    else:
        head = Span("head", has_lower, False, clauses)
        tail = Span("tail", False, True, clauses)
        spans = (*((head,) if has_lower else ()), Span("full", False, False), tail)
        if (whole.lower, whole.tests) != (tail.lower, tail.tests):
            spans += (whole,)
    full = guards is not None
    return Segment(
        name="",
        branch=branch,
        tiling=IDENTITY,
        row_lo=row_lo,
        row_hi=row_hi,
        tile_lo=tile_lo,
        tile_hi=tile_hi,
        live=_live(rows),
        full_lo=full_lo if full else None,
        full_hi=full_hi if full else None,
        guards=guards or (),
        spans=spans,
        width=constant_width(tile_lo, tile_hi),
    )


def _close_hull(branch: Branch, every: list[Limits]) -> Segment:
    """Several alternatives in one range: from the least first key to the greatest last one, all of them tested."""
    lows, highs = [ends(x.row_lo)[0] for x in every], [ends(x.row_hi)[1] for x in every]
    tile_lo, tile_hi = pick("min", lows), pick("min", [K_LAST, pick("max", highs)])
    if size(tile_lo) > LONGEST_FORM:
        tile_lo = K_FIRST
    if size(tile_hi) > LONGEST_FORM:
        tile_hi = K_LAST
    tests: tuple[Test, ...] = (AnyOf(branch.alts), *(NoneOf((m,)) for m in branch.minus))
    full_lo = full_hi = None
    guards: tuple[tuple[Lin, ...], ...] = ()
    spans = (Span("whole", False, True, tests),)
    for x in sorted((x for x in every if not x.tests), key=lambda x: len(x.rows)):
        lo, hi = ends(x.row_lo)[1], ends(x.row_hi)[0]
        found = _guards(x.rows, tests[1:], lo, hi)  # type: ignore[arg-type]
        if found is not None and _ever_full(tile_lo, tile_hi, lo, hi, found):
            full_lo, full_hi, guards = lo, hi, found
            head, tail = Span("head", False, False, tests), Span("tail", False, True, tests)
            spans = (head, Span("full", False, False), tail)  # type: ignore[assignment]
            break
    return Segment(
        name="",
        branch=branch,
        tiling=IDENTITY,
        row_lo=K_FIRST,
        row_hi=K_LAST,
        tile_lo=tile_lo,
        tile_hi=tile_hi,
        live=_live(_row_hull(every)),
        full_lo=full_lo,
        full_hi=full_hi,
        guards=guards,
        spans=spans,
        width=constant_width(tile_lo, tile_hi),
    )


def _walk(branch: Branch, got: Limits, clauses: tuple[NoneOf, ...], walk: TableWalk) -> Segment:
    """Blocks of a table: the row limits and all other conjuncts are tested on each of them."""
    tile_lo, tile_hi = ends(got.row_lo)[0], ends(got.row_hi)[1]
    # Blocks lie where the table says: both ends of the keys are tested, the first key too.
    whole = Span("whole", True, True, (*got.rows, *got.tests, *clauses))
    return Segment(
        name="",
        branch=branch,
        tiling=IDENTITY,
        row_lo=got.row_lo,
        row_hi=got.row_hi,
        tile_lo=tile_lo,
        tile_hi=tile_hi,
        live=_live(got.rows),
        full_lo=None,
        full_hi=None,
        guards=(),
        spans=(whole,),
        table=walk,
    )


def _row_hull(every: list[Limits]) -> Iterator[Range]:
    """Conditions that the rows of any alternative meet: the least bound and the greatest one of each form in all."""
    for lin in dict.fromkeys(r.lin for r in every[0].rows):
        found = [r for x in every for r in x.rows if r.lin == lin]
        if len(found) == len(every):
            yield Range(lin, min(r.lo for r in found), max(r.hi for r in found))


def _live(rows: Iterable[Range]) -> tuple[Lin, ...]:
    """Forms that are >= 0 wherever some row of the tile may pass."""
    out = []
    for r in rows:
        lo, hi = ends(r.lin)
        out += [hi - r.lo] if r.lo > -BIG else []
        out += [-lo + r.hi] if r.hi < BIG else []
    return tuple(f for f in dict.fromkeys(out) if _least(f) < 0)


def _guards(
    rows: Iterable[Range], clauses: Iterable[NoneOf], full_lo: Lin, full_hi: Lin
) -> tuple[tuple[Lin, ...], ...] | None:
    """Forms that prove the row conditions and the exclusions on a full part; None: they are never proven."""
    out: list[tuple[Lin, ...]] = []
    for r in rows:
        if _short_run(r):
            return None
        lo, hi = ends(r.lin)
        out += [(lo - r.lo,)] if r.lo > -BIG else []
        out += [(-hi + r.hi,)] if r.hi < BIG else []
    here = {**ON_TILE, "k": (full_lo, full_hi)}
    for clause in clauses:
        proofs: list[Lin] = []
        for r in clause.cubes[0]:  # one literal that is false on the whole part is enough
            lo, hi = map(as_form, bounds(r.lin, here))
            proofs += [lo - r.hi - 1] if r.hi < BIG else []
            proofs += [-hi + (r.lo - 1)] if r.lo > -BIG else []
        out.append(tuple(f for f in proofs if size(f) <= LONGEST_FORM and _most(f) >= 0))
    out = [g for g in dict.fromkeys(out) if not any(_least(f) >= 0 for f in g)]
    possible = all(any(_most(f) >= 0 for f in g) for g in out)
    return tuple(out) if possible and _most(full_hi - full_lo) >= 0 else None


def _ever_full(
    tile_lo: Lin, tile_hi: Lin, full_lo: Lin, full_hi: Lin, guards: tuple[tuple[Lin, ...], ...]
) -> bool:
    """Has any tile of the smallest size a full key tile?  Looked for at many places; a miss costs speed, not cells."""
    m = SMALLEST_BLOCK
    near, far = np.arange(0, 1 << 13, m), np.arange(0, FAR_AWAY, 37 * m)
    first = np.concatenate([near, far, near])
    last_key = np.concatenate([near * 0 + FAR_AWAY, far * 0 + FAR_AWAY, near + 2 * m])
    env = {"q_first": first, "q_last": first + m - 1, "k_first": 0, "k_last": last_key}
    env |= {"q_len": FAR_AWAY, "kv_len": last_key + 1}
    start = value(tile_lo, env)
    body = start - (start - value(full_lo, env)) // m * m
    held = value(full_hi, env) + 1 - body >= m
    held &= value(tile_hi, env) >= start
    for group in guards:
        held = held & np.logical_or.reduce(
            [np.broadcast_to(value(f, env) >= 0, first.shape) for f in group]
        )
    return bool(np.any(held))


def _short_run(r: Range) -> bool:
    """Does a remainder of q hold for a few neighbouring rows only?"""
    mod = as_mod(r.lin)
    if mod is None or len(mod[0].terms) != 1:
        return False
    g, c = mod[0].terms[0]
    period = g.m if isinstance(g, Floor) else 1
    return (r.hi - r.lo + 1) * period < SHORTEST_RUN * abs(c)


def _least(form: Lin) -> int:
    return int(bounds(ordered(form), SYMBOLS)[0])


def _most(form: Lin) -> int:
    return int(bounds(ordered(form), SYMBOLS)[1])


def constant_width(tile_lo: Lin, tile_hi: Lin) -> int | None:
    """Most keys from tile_lo to tile_hi on any tile, where no row and no length decides it."""
    pairs = [hi - lo for hi in pick_args(tile_hi, "min") for lo in pick_args(tile_lo, "max")]
    most = min(map(_most, pairs))
    return max(most + 1, 0) if most < FAR else None
