"""What a cube says of one row: the range of keys in closed form, conditions on the row, and what is left to test."""

from __future__ import annotations

from dataclasses import dataclass

from sparsegen.schedule.forms import (
    BIG,
    K_FIRST,
    K_LAST,
    Q_FIRST,
    Q_LAST,
    Floor,
    Lin,
    Var,
    inside,
    size,
    var,
    variables,
)
from sparsegen.schedule.formula import Cube, Range
from sparsegen.schedule.intervals import bounds, cdiv, fdiv, pick

LONGEST_FORM = 60  # operations; a conjunct whose forms are longer is tested instead

_SAME = {n: (var(n), var(n)) for n in ("k_first", "k_last", "q_len", "kv_len")}
ON_TILE = {**_SAME, "q": (Q_FIRST, Q_LAST)}


@dataclass(frozen=True)
class Limits:
    """The conjuncts of a cube by kind: k >= each of ``lower``, k <= each of ``upper``, rows, tests."""

    lower: tuple[Lin, ...]
    upper: tuple[Lin, ...]
    rows: tuple[Range, ...]
    tests: tuple[Range, ...]

    @property
    def row_lo(self) -> Lin:
        """First key that the row limits allow."""
        return pick("max", [K_FIRST, *self.lower])

    @property
    def row_hi(self) -> Lin:
        """Last key that the row limits allow."""
        return pick("min", [K_LAST, *self.upper])


def invert(lin: Lin, lo: Lin | None, hi: Lin | None) -> tuple[Lin | None, Lin | None] | None:
    """Solve lo <= lin <= hi for k, exactly: (least k, greatest k) as forms of the row; None where k is not alone."""
    with_k = [(g, c) for g, c in lin.terms if "k" in inside(g)]
    if len(with_k) != 1:
        return None
    g, c = with_k[0]
    if not isinstance(g, (Var, Floor)):
        return None
    rest = lin - Lin({g: c})
    a = None if lo is None else lo - rest
    b = None if hi is None else hi - rest
    if c < 0:
        a, b = (None if b is None else -b), (None if a is None else -a)
    a, b = (None if a is None else cdiv(a, abs(c))), (None if b is None else fdiv(b, abs(c)))
    if isinstance(g, Var):
        return a, b
    return invert(g.arg, None if a is None else a * g.m, None if b is None else b * g.m + (g.m - 1))


def limits(cube: Cube) -> Limits:
    """Sort the conjuncts of a cube; those whose forms grow too long become tests."""
    lower: list[Lin] = []
    upper: list[Lin] = []
    rows: list[Range] = []
    tests: list[Range] = []
    for r in cube:
        if "k" not in variables(r.lin):
            (rows if all(size(f) <= LONGEST_FORM for f in ends(r.lin)) else tests).append(r)
            continue
        lo = None if r.lo <= -BIG else Lin((), r.lo)
        hi = None if r.hi >= BIG else Lin((), r.hi)
        solved = invert(r.lin, lo, hi)
        if solved is None or any(x is not None and _too_long(x) for x in solved):
            tests.append(r)
            continue
        lower += [solved[0]] if solved[0] is not None else []
        upper += [solved[1]] if solved[1] is not None else []
    return Limits(tuple(lower), tuple(upper), tuple(rows), tuple(tests))


def _too_long(row_form: Lin) -> bool:
    return any(size(f) > LONGEST_FORM for f in (row_form, *ends(row_form)))


def ends(lin: Lin) -> tuple[Lin, Lin]:
    """Least and greatest value over the rows of a tile, as forms."""
    lo, hi = bounds(lin, ON_TILE)
    return as_form(lo), as_form(hi)


def as_form(x: object) -> Lin:
    """An int as a form."""
    return x if isinstance(x, Lin) else Lin((), int(x))  # type: ignore[call-overload]
