"""What a cube says of one row: the range of keys in closed form, conditions on the row, and what is left to test.

Also how one conjunct is solved for one variable: exactly, or between bounds where others occur beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from sparsegen.schedule.forms import (
    BIG,
    FAR,
    K_FIRST,
    K_LAST,
    Q_FIRST,
    Q_LAST,
    Env,
    Floor,
    Generator,
    Lin,
    Var,
    as_form,
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


def alone(lin: Lin, name: str) -> tuple[Generator, int] | None:
    """The one generator that depends on ``name``, and its coefficient; None where others do too, or it is opaque."""
    found = [(g, c) for g, c in lin.terms if name in inside(g)]
    if len(found) != 1 or not isinstance(found[0][0], (Var, Floor)):
        return None
    return found[0]


def direction(lin: Lin, name: str) -> int:
    """1 where the form never falls as ``name`` grows, -1 where it never rises, 0 where nobody knows."""
    found = alone(lin, name)
    if found is None:
        return 0
    g, c = found
    sign = 1 if c > 0 else -1
    return sign * direction(g.arg, name) if isinstance(g, Floor) else sign


def invert(
    lin: Lin, lo: Lin | None, hi: Lin | None, name: str = "k"
) -> tuple[Lin | None, Lin | None] | None:
    """Solve lo <= lin <= hi for a variable, exactly: (least, greatest) as forms; None where it is not alone."""
    found = alone(lin, name)
    if found is None:
        return None
    g, c = found
    rest = lin.without(g)
    a = None if lo is None else lo - rest
    b = None if hi is None else hi - rest
    a, b = _scaled(a, b, c)
    if isinstance(g, Floor):
        return invert(g.arg, *_unfloored(a, b, g.m), name)
    return a, b


def enclose(
    lin: Lin, lo: Any, hi: Any, name: str, env: Env, *, strict: bool
) -> tuple[Any, Any] | None:
    """Solve lo <= lin <= hi for a variable while the others lie in ``env``: (least, greatest).

    Loose: nothing outside passes for any values of the others.  Strict: all inside passes for all of them.
    """
    found = alone(lin, name)
    if found is None:
        return None
    g, c = found
    rlo, rhi = bounds(lin.without(g), env)
    if strict:
        rlo, rhi = rhi, rlo
    a, b = _scaled(None if lo is None else lo - rhi, None if hi is None else hi - rlo, c)
    if isinstance(g, Floor):
        return enclose(g.arg, *_unfloored(a, b, g.m), name, env, strict=strict)
    return a, b


def _scaled(a: Any, b: Any, c: int) -> tuple[Any, Any]:
    """Bounds of x from a <= c * x <= b."""
    if c < 0:
        a, b = (None if b is None else -b), (None if a is None else -a)
    return (None if a is None else cdiv(a, abs(c))), (None if b is None else fdiv(b, abs(c)))


def _unfloored(a: Any, b: Any, m: int) -> tuple[Any, Any]:
    """Bounds of x from a <= floor(x / m) <= b."""
    return (None if a is None else a * m), (None if b is None else b * m + (m - 1))


def limits(cube: Cube) -> Limits:
    """Sort the conjuncts of a cube; those whose forms grow too long become tests."""
    lower: list[Lin] = []
    upper: list[Lin] = []
    rows: list[Range] = []
    tests: list[Range] = []
    for r in cube:
        if "k" not in variables(r.lin):
            (tests if any(map(over, ends(r.lin))) else rows).append(r)
            continue
        solved = invert(r.lin, *edges(r.lo, r.hi))
        if solved is None or any(x is not None and too_long(x) for x in solved):
            tests.append(r)
            continue
        lower += [solved[0]] if solved[0] is not None else []
        upper += [solved[1]] if solved[1] is not None else []
    return Limits(tuple(lower), tuple(upper), tuple(rows), tuple(tests))


def edges(lo: int, hi: int) -> tuple[Lin | None, Lin | None]:
    """Both bounds of a Range as forms; None for no bound."""
    return (None if lo <= -BIG else Lin((), lo)), (None if hi >= BIG else Lin((), hi))


def too_long(row_form: Lin, on_tile: Env = ON_TILE) -> bool:
    """Is the form, or one of its ends over a tile, too long to be worth computing?"""
    return any(map(over, (row_form, *ends(row_form, on_tile))))


_WATCHED: ContextVar[list[Lin] | None] = ContextVar("watched", default=None)


def over(form: Lin) -> bool:
    """Is the form longer than a kernel should compute?  Those that are, are told to ``watch_long_forms``."""
    long = size(form) > LONGEST_FORM
    watched = _WATCHED.get()
    if long and watched is not None:
        watched.append(form)
    return long


@contextmanager
def watch_long_forms() -> Iterator[list[Lin]]:
    """The forms that are found too long meanwhile."""
    found: list[Lin] = []
    token = _WATCHED.set(found)
    try:
        yield found
    finally:
        _WATCHED.reset(token)


def unbounded(form: Lin) -> bool:
    """Does the form stand for no bound?  Then "infinity" sits somewhere in its constant."""
    return abs(form.const) >= FAR


def ends(lin: Lin, on_tile: Env = ON_TILE) -> tuple[Lin, Lin]:
    """Least and greatest value over the rows of a tile, as forms."""
    lo, hi = bounds(lin, on_tile)
    return as_form(lo), as_form(hi)
