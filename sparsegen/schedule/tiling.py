"""Closed forms of one branch on a tiling: which keys a row, and a tile of rows, may see.

``boxes`` says what each cube of the branch means there.  Here its bounds become a segment: the loose ones the box, the
strict ones the full part, with guards for what no bound says; spans test what is left.  No length and no tile size
occurs in any form.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from sparsegen.schedule.boxes import Box, Edge, Ends, solve
from sparsegen.schedule.branches import Branch, walked_term
from sparsegen.schedule.digits import Axes, Conjunct, axes_of
from sparsegen.schedule.forms import BIG, FAR, K_FIRST, K_LAST, Lin, Opaque, product, variables
from sparsegen.schedule.formula import Range
from sparsegen.schedule.guards import ever_full, guards, live
from sparsegen.schedule.intervals import fdiv, pick, pick_args
from sparsegen.schedule.limits import over
from sparsegen.schedule.tree import (
    IDENTITY,
    AnyOf,
    NoneOf,
    Segment,
    Span,
    TableWalk,
    Test,
    Tiling,
)


@lru_cache(maxsize=1 << 12)
def close(branch: Branch, tiling: Tiling = IDENTITY) -> Segment | None:
    """The segment of a branch, unnamed; None where the tiling is not for it: tables have runs, ``k_extent`` no full part."""
    found = _closed(branch, tiling)
    return None if found and tiling.k_extent and found.full_lo is not None else found


def _closed(branch: Branch, tiling: Tiling) -> Segment | None:
    axes = axes_of(tiling)
    if len(branch.alts) == 1:
        return _close_one(branch, axes)
    every = [solve(c, axes) for c in branch.alts]
    joined = _joined(branch, every, axes)
    if joined is not None:
        return _segment(branch, axes, joined, _limits(joined, axes), clauses=())
    return _close_hull(branch, axes, every)


def _close_one(branch: Branch, axes: Axes) -> Segment | None:
    (cube,) = branch.alts
    term = walked_term(cube)
    if term is None:
        box = solve(cube, axes)
        return _segment(branch, axes, box, _limits(box, axes), _clauses(branch, axes))
    if not axes.plain:
        return None
    box = solve(tuple(r for r in cube if Opaque(term) not in dict(r.lin.terms)), axes)
    walk = TableWalk(term, term["block"], term["per_row"])
    return _walk(branch, axes, box, walk)


def _clauses(branch: Branch, axes: Axes) -> tuple[NoneOf, ...]:
    """The exclusions, in the cheaper spelling; those that meet no cell at all are none."""
    found = [(m, axes.cheaper(m)) for m in branch.minus]
    return tuple(NoneOf((cheaper or m,)) for m, cheaper in found if cheaper is not None)


def _limits(box: Box, axes: Axes) -> Ends:
    """Exact limits of the top key axis for a row; where there are none, the blocks that hold keys of the call."""
    lows = [*([box.first] if box.first is not None else []), *box.lower]
    highs = [*([box.last] if box.last is not None else []), *box.upper]
    top = (1, *axes.tiling.k_cuts)[-1]
    row_lo = pick("max", lows or [fdiv(K_FIRST, top)])
    row_hi = pick("min", highs or [fdiv(K_LAST, top)])
    return row_lo, row_hi


def _joined(branch: Branch, every: list[Box], axes: Axes) -> Box | None:
    """Alternatives that are plain intervals in one box, with one end in common, are one interval.

    One that shows some rows all keys (``q < 2048``) is either an interval up to the last key or one from the first, and for the other rows
    empty.  It joins those with a limit that moves with the row; beside a fixed one (``k < 64``) it would make a wide segment of a narrow one.
    """
    first = every[0]
    if branch.minus or first.first is None or first.last is None:
        return None
    for x in every:
        if x.tests or x.inside or x.below or x.above or x.inner != first.inner:
            return None
        if x.rows and (x.lower or x.upper):
            return None
    plain, whole = [x for x in every if not x.rows], [x.rows for x in every if x.rows]
    if not plain:
        return None
    one = plain[0]
    if all(set(x.lower) == set(one.lower) for x in plain) and not (whole and one.lower):
        highs = [pick("min", x.upper or [first.last]) for x in plain]
        if whole and not all(_of_row(x, axes) for x in highs):
            return None
        highs += [first.last - _beyond(rows) for rows in whole]
        return replace(one, upper=(pick("max", highs),))
    if all(set(x.upper) == set(one.upper) for x in plain) and not (whole and one.upper):
        lows = [pick("max", x.lower or [first.first]) for x in plain]
        if whole and not all(_of_row(x, axes) for x in lows):
            return None
        lows += [first.first + _beyond(rows) for rows in whole]
        return replace(one, lower=(pick("min", lows),))
    return None


def _of_row(form: Lin, axes: Axes) -> bool:
    return bool(variables(form) & set(axes.rows))


def _beyond(rows: Iterable[Conjunct]) -> Lin:
    """0 for a row that meets the conditions, else as many as the call has keys: what is so far beyond either end is no key."""
    excess = [Lin()]
    for c in rows:
        excess += [c.lin - c.hi] if c.hi < BIG else []
        excess += [c.lo - c.lin] if c.lo > -BIG else []
    outside = pick("min", [Lin((), 1), pick("max", excess)])
    return product(outside, K_LAST - K_FIRST + 1)


def _tile_ends(box: Box, axes: Axes, row: Ends) -> tuple[Ends, tuple[Lin, Lin] | None]:
    """(first, last) of the box on the top axis, and of the part that all rows see; None where no form says the latter."""
    (lo, full_lo), (full_hi, hi) = axes.ends(row[0]), axes.ends(row[1])
    lows = [lo, *(e.loose for e in box.below if e.loose is not None)]
    highs = [hi, *(e.loose for e in box.above if e.loose is not None)]
    tile = axes.tidy(pick("max", lows)), axes.tidy(pick("min", highs))
    if any(e.strict is None for e in (*box.below, *box.above)):
        return tile, None
    strict_lows = [full_lo, *(e.strict for e in box.below if e.strict is not None)]
    strict_highs = [full_hi, *(e.strict for e in box.above if e.strict is not None)]
    return tile, (axes.tidy(pick("max", strict_lows)), axes.tidy(pick("min", strict_highs)))


def _segment(
    branch: Branch, axes: Axes, box: Box, row: Ends, clauses: tuple[NoneOf, ...]
) -> Segment:
    tile, full = _tile_ends(box, axes, row)
    row_lower, below = _lower_tests(axes, box, row, tile, full)
    has_head = row_lower or bool(below)
    begins: tuple[tuple[Lin, ...], ...] = ()
    if full is not None and below and not row_lower and all(map(_of_call, box.below)):
        # Calls nearly always begin at key 0: a guard that theirs fills a box spares all of them the head's loop.
        has_head, begins, full = False, ((tile[0] - full[0],),), (tile[0], full[1])
    proofs = None
    if full is not None and not box.tests:
        conditions = (*box.rows, *box.inside)
        proofs = guards(axes, conditions, clauses, box.inner, full, begins)
        if proofs is not None and not ever_full(axes.tiling, tile, full, box.inner, proofs):
            proofs = None
    above = tuple(e.test for e in box.above)
    row_upper = bool(box.upper) or box.last is not None
    rest = [c.test() for c in (*box.rows, *box.inside, *box.tests)]
    whole = Span("whole", row_lower, row_upper, (*rest, *_merged((*below, *above)), *clauses))
    head = Span("head", row_lower, False, (*below, *clauses)) if has_head else None
    tail = Span("tail", False, row_upper, (*above, *clauses))
    return _made(
        branch,
        axes,
        row,
        tile,
        None if proofs is None else full,
        rows=box.rows,
        proofs=proofs or (),
        spans=(whole,) if proofs is None else _spans(head, tail, whole),
        inner=box.inner,
    )


def _made(
    branch: Branch,
    axes: Axes,
    row: Ends,
    tile: Ends,
    full: Ends | None,
    *,
    rows: Iterable[Conjunct],
    spans: tuple[Span, ...],
    proofs: tuple[tuple[Lin, ...], ...] = (),
    inner: tuple[Ends, ...] = (),
    table: TableWalk | None = None,
) -> Segment:
    """The segment between these ends, unnamed; ``rows``: what the branch says of rows alone."""
    return Segment(
        name="",
        branch=branch,
        tiling=axes.tiling,
        row_lo=row[0],
        row_hi=row[1],
        tile_lo=tile[0],
        tile_hi=tile[1],
        live=live(axes, rows),
        full_lo=None if full is None else full[0],
        full_hi=None if full is None else full[1],
        guards=proofs,
        spans=spans,
        inner=inner,
        width=constant_width(axes, *tile, inner) if table is None else None,
        table=table,
    )


def _lower_tests(
    axes: Axes, box: Box, row: Ends, tile: Ends, full: Ends | None
) -> tuple[bool, tuple[Range, ...]]:
    """Is the row's first key tested, and what else bounds the top axis from below.

    Neither where every row starts at the first key of the box.
    """
    if full is not None and full[0] == tile[0]:
        return False, ()
    exact = bool(box.lower) or box.first is not None
    if exact and box.below:  # perhaps all rows have the same limit, and only the edges differ
        exact = axes.least(tile[0] - axes.ends(row[0])[1]) < 0
    return exact, tuple(e.test for e in box.below)


def _of_call(e: Edge) -> bool:
    """Is the strict bound one for all tiles of a call?"""
    return e.strict is not None and variables(e.strict) <= {"k_first", "k_last", "q_len", "kv_len"}


def _spans(head: Span | None, tail: Span, whole: Span) -> tuple[Span, ...]:
    """The loops of a segment with a full part; a tail that tests as much as the whole serves for it."""
    spans = (*((head,) if head is not None else ()), Span("full", False, False), tail)
    same = (whole.lower, whole.tests) == (tail.lower, tail.tests)
    return spans if same else (*spans, whole)


def _merged(tests: Iterable[Range]) -> tuple[Range, ...]:
    """Both sides of one form as one test."""
    out: dict[Lin, Range] = {}
    for r in tests:
        old = out.get(r.lin)
        out[r.lin] = r if old is None else Range(r.lin, max(r.lo, old.lo), min(r.hi, old.hi))
    return tuple(out.values())


def _close_hull(branch: Branch, axes: Axes, every: list[Box]) -> Segment:
    """Several alternatives in one box: from the least first key to the greatest last one, all of them tested."""
    inner = _inner_hull(axes, every)
    if not axes.plain:  # what each alternative says of all keys of the common box
        every = [solve(c, axes, inner) for c in branch.alts]
    keys = solve((), axes, inner)
    row = _limits(keys, axes)
    (first, last), _ = _tile_ends(keys, axes, row)
    ends = [_tile_ends(x, axes, _limits(x, axes)) for x in every]
    tile_lo = _short(axes, pick("min", [lo for (lo, _), _ in ends]), first)
    most = pick("max", [hi for (_, hi), _ in ends])
    tile = tile_lo, _short(axes, pick("min", [last, most]), last)
    clauses = _clauses(branch, axes)
    full, proofs = _full_hull(axes, tile, every, [part for _, part in ends], inner, clauses)
    alts = [(c, axes.cheaper(c)) for c in branch.alts]
    possible = tuple(cheaper or c for c, cheaper in alts if cheaper is not None)
    tests: tuple[Test, ...] = (AnyOf(possible), *clauses)
    below, above = tuple(e.test for e in keys.below), tuple(e.test for e in keys.above)
    row_upper = keys.last is not None
    # No limit of rows from below: where the call's first key has one, it is the same for the whole tile.
    whole = Span("whole", False, row_upper, (*_merged((*below, *above)), *tests))
    head = Span("head", False, False, (*below, *tests))
    tail = Span("tail", False, row_upper, (*above, *tests))
    return _made(
        branch,
        axes,
        row,
        tile,
        full,
        rows=_row_hull(every),
        proofs=proofs,
        spans=(whole,) if full is None else _spans(head, tail, whole),
        inner=inner,
    )


def _inner_hull(axes: Axes, every: list[Box]) -> tuple[Ends, ...]:
    """The ranges of the lower digits that hold those of all boxes."""
    out = []
    for y, ends in zip(axes.keys, zip(*(x.inner for x in every))):
        lo, hi = pick("min", [lo for lo, _ in ends]), pick("max", [hi for _, hi in ends])
        out.append((_short(axes, lo, Lin()), _short(axes, hi, Lin((), axes.radix(y) - 1))))
    return tuple(out)


def _full_hull(
    axes: Axes,
    tile: Ends,
    every: list[Box],
    parts: list[Ends | None],
    inner: tuple[Ends, ...],
    clauses: tuple[NoneOf, ...],
) -> tuple[Ends | None, tuple[tuple[Lin, ...], ...]]:
    """The full part of one alternative, of those with few conditions on rows first, and its guards."""
    for box, full in sorted(zip(every, parts), key=lambda x: len(x[0].rows)):
        if full is None or box.tests:
            continue
        proofs = guards(axes, (*box.rows, *box.inside), clauses, inner, full)
        if proofs is not None and ever_full(axes.tiling, tile, full, inner, proofs):
            return full, proofs
    return None, ()


def _short(axes: Axes, form: Lin, else_: Lin) -> Lin:
    form = axes.tidy(form)
    return else_ if over(form) else form


def _walk(branch: Branch, axes: Axes, box: Box, walk: TableWalk) -> Segment:
    """Blocks of a table: the row limits and all other conjuncts are tested on each of them."""
    row = _limits(box, axes)
    tile, _ = _tile_ends(box, axes, row)
    tests: tuple[Test, ...] = tuple(c.test() for c in (*box.rows, *box.tests))
    # Blocks lie where the table says: both ends of the keys are tested, the first key too.
    whole = Span("whole", True, True, (*tests, *_clauses(branch, axes)))
    return _made(branch, axes, row, tile, None, rows=box.rows, spans=(whole,), table=walk)


def _row_hull(every: list[Box]) -> Iterator[Conjunct]:
    """Conditions that the rows of any alternative meet: the least bound and the greatest one of each form in all."""
    for lin in dict.fromkeys(c.lin for c in every[0].rows):
        found = [c for x in every for c in x.rows if c.lin == lin]
        if len(found) == len(every):
            yield Conjunct(lin, min(c.lo for c in found), max(c.hi for c in found))


def constant_width(
    axes: Axes, tile_lo: Lin, tile_hi: Lin, inner: Sequence[Ends] = ()
) -> int | None:
    """Most keys that a box can hold on any tile, where no row and no length decides it."""
    total = 1
    for lo, hi in ((tile_lo, tile_hi), *inner):
        pairs = [b - a for b in pick_args(hi, "min") for a in pick_args(lo, "max")]
        most = min(map(axes.most, pairs))
        if most >= FAR:
            return None
        total *= max(most + 1, 0)
    return total
