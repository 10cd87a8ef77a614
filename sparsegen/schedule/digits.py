"""Positions as digits of a tiling: names, ranges, and conjuncts of q and k written in them.

Lowering puts the digits in place of q and k, in any position of any call: the top axes have no bounds, a floor is a
floor.  A floor whose argument stays in one period goes away, and a remainder that meets one multiple is an equality,
so ``(q - k) % 128 == 0`` on cuts of 128 reads ``x0 - y0 == 0``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from sparsegen.schedule.facts import axes as digit_axes
from sparsegen.schedule.facts import subst
from sparsegen.schedule.forms import (
    BIG,
    Env,
    Lin,
    Var,
    floor_,
    substitute,
    var,
    variables,
)
from sparsegen.schedule.formula import Cube, Range, as_mod, kept_whole
from sparsegen.schedule.intervals import SYMBOLS, bounds, ordered
from sparsegen.schedule.limits import ON_TILE, alone, ends
from sparsegen.schedule.tidy import effort, least, tidy
from sparsegen.schedule.tree import Tiling


@dataclass(frozen=True)
class Conjunct:
    """lo <= lin <= hi in digits.  ``plain``: the form as the formula has it; it is ``lin`` + ``shift`` on every cell."""

    lin: Lin
    lo: int
    hi: int
    plain: Lin | None = None
    shift: int = 0

    def test(self, lower: bool = True, upper: bool = True) -> Range:
        """The conjunct (or one side of it) in the spelling that is cheaper to compute."""
        lo, hi = (self.lo if lower else -BIG), (self.hi if upper else BIG)
        if self.plain is None or effort(self.lin) < effort(self.plain):
            return Range(self.lin, lo, hi)
        return Range(
            self.plain,
            lo + self.shift if lo > -BIG else lo,
            hi + self.shift if hi < BIG else hi,
        )

    @property
    def ever(self) -> bool:
        """Has it a side left to fail?"""
        return self.lo > -BIG or self.hi < BIG


class Axes:
    """The digits of a tiling.

    ``rows``, ``keys``: names of the axes, the top one last.  ``static``: what they can be on any call.
    ``row_names``: what a form of one row may have.  ``key_names``: what tells keys apart.
    ``on_tile``: first and last value over a query tile, as forms.  ``symbols``: what these forms can be.
    """

    def __init__(self, tiling: Tiling):
        self.tiling = tiling
        self.plain = not tiling.q_cuts and not tiling.k_cuts
        self.rows, q, q_static = _axis("q", "x", tiling.q_cuts, -BIG)
        self.keys, k, k_static = _axis("k", "y", tiling.k_cuts, 0)
        self.top = self.keys[-1]
        self.row_names = frozenset((*self.rows, "k_first", "k_last", "q_len", "kv_len"))
        self.key_names = frozenset((*self.keys, "k"))  # an opaque form depends on k itself
        self.positions = {"q": q, "k": k}
        lengths = {"q_len": (1, BIG), "kv_len": (1, BIG), "k_first": (0, BIG), "k_last": (0, BIG)}
        self.static = {**lengths, **q_static, **k_static}
        self.on_tile: dict[str, tuple[Lin, Lin]] = dict(ON_TILE)
        self.symbols: Env = SYMBOLS
        if tiling.q_cuts:
            self._name_tile(q_static)

    def _name_tile(self, static: Mapping[str, tuple[int, int]]) -> None:
        del self.on_tile["q"]
        self.symbols = type(SYMBOLS)()
        for t, name in enumerate(self.rows):
            first, last = f"{name}_first", f"{name}_last"
            size = self.tiling.extent[t] if t < len(self.tiling.extent) else 0
            if size == 1:
                self.on_tile[name] = var(name), var(name)
                self.symbols[name] = static[name]
                continue
            self.on_tile[name] = var(first), var(last)
            for n in (first, last):
                self.on_tile[n] = var(n), var(n)  # inner digits are in symbols of the tile already
                self.symbols[n] = static[name]
            self.symbols[f"{name}_rows"] = 0, (size - 1 if size else BIG)

    def radix(self, name: str) -> int:
        """Number of values of a lower axis."""
        return self.static[name][1] + 1

    def lower(self, lin: Lin) -> Lin:
        """A form of q and k in digits."""
        if self.plain:
            return lin
        return tidy(subst(lin, self.positions, self.static), self.static)

    def conjunct(self, r: Range) -> Conjunct:
        """A Range of q and k in digits."""
        return _in_digits(self.tiling, r)

    def lowered(self, r: Range) -> Conjunct:
        """The same, worked out."""
        return self._normal(Conjunct(self.lower(r.lin), r.lo, r.hi, r.lin))

    def _normal(self, c: Conjunct) -> Conjunct:
        """A remainder that meets one multiple as an equality; the constant of the form in the bounds."""
        mod = as_mod(c.lin)
        if mod and c.lo == c.hi and not self.plain:
            u, m, off = mod
            lo, hi = bounds(u, self.static)
            first = c.lo - off + m * -((c.lo - off - lo) // m)  # least value that passes
            if first <= hi < first + m:
                return Conjunct(Lin(u.terms), first - u.const, first - u.const)
        return _moved(c)

    def replaced(self, c: Conjunct, digits: Mapping[str, Lin]) -> Conjunct:
        """The conjunct with key digits replaced by forms of the row."""
        if not variables(c.lin) & digits.keys():
            return c
        return self._normal(replace(c, lin=tidy(substitute(c.lin, digits), self.static)))

    def unproven(self, c: Conjunct, env: Env | None = None) -> Conjunct:
        """The conjunct with the sides that can fail (on ``env``); a remainder keeps both as long as one can."""
        lo, hi = bounds(c.lin, self.static if env is None else env)
        low, high = self.least(lo - c.lo) < 0, self.least(c.hi - hi) < 0
        if kept_whole(c.lin) and (low or high):
            return c
        return replace(c, lo=c.lo if low else -BIG, hi=c.hi if high else BIG)

    def determined(self, c: Conjunct) -> tuple[str, Lin] | None:
        """The lower key digit that a conjunct fixes for a row, and its value there: y == form, or a remainder of it."""
        if c.lo != c.hi:
            return None
        mod = as_mod(c.lin)
        inner, m, off = mod if mod else (c.lin, 0, 0)
        names = variables(inner) & self.key_names
        if len(names) != 1 or (name := next(iter(names))) == self.top or name == "k":
            return None
        found = alone(inner, name)
        if found is None or not isinstance(found[0], Var) or abs(found[1]) != 1:
            return None
        if m and self.radix(name) > m:
            return None  # several values
        g, sign = found
        form = (inner - Lin({g: sign}) - (c.lo - off)) * -sign
        return name, tidy(form - floor_(form, m) * m if m else form, self.static)

    def ends(self, lin: Lin, env: Env | None = None) -> tuple[Lin, Lin]:
        """Least and greatest value of a form over a query tile (over ``env``), as forms."""
        lo, hi = ends(lin, self.on_tile if env is None else env)
        return (lo, hi) if self.plain else (self.tidy(lo), self.tidy(hi))

    def tidy(self, form: Lin) -> Lin:
        """The same form in the tile's symbols, shorter by what is known of them."""
        return form if self.plain else _tidied(self.tiling, form)

    def least(self, form: Lin | int) -> int:
        """A bound below all values of a form in the tile's symbols."""
        if self.plain and isinstance(form, Lin):
            return int(bounds(ordered(form), self.symbols)[0])
        return _least(self.tiling, form) if isinstance(form, Lin) else form

    def most(self, form: Lin | int) -> int:
        """A bound above all values of a form in the tile's symbols."""
        return -self.least(-form)

    def cheaper(self, cube: Cube) -> Cube | None:
        """A cube of tests with each conjunct in its cheaper spelling, without those that always hold; None: never holds."""
        out = []
        for r in cube:
            c = self.conjunct(r)
            lo, hi = bounds(c.lin, self.static)
            if lo > c.hi or hi < c.lo:
                return None
            out += [c.test()] if self.unproven(c).ever else []
        return tuple(out)


@lru_cache(maxsize=256)
def axes_of(tiling: Tiling) -> Axes:
    """The axes of a tiling, made once."""
    return Axes(tiling)


@lru_cache(maxsize=1 << 13)
def _in_digits(tiling: Tiling, r: Range) -> Conjunct:
    """The same Ranges come back in branch after branch of a search."""
    return axes_of(tiling).lowered(r)


@lru_cache(maxsize=1 << 12)
def _tidied(tiling: Tiling, form: Lin) -> Lin:
    return tidy(form, axes_of(tiling).symbols)


@lru_cache(maxsize=1 << 13)
def _least(tiling: Tiling, form: Lin) -> int:
    return least(form, axes_of(tiling).symbols)


def radices(cuts: tuple[int, ...]) -> tuple[int, ...]:
    """Number of values of each lower axis."""
    return tuple(b // a for a, b in itertools.pairwise((1, *cuts)))


def _axis(
    plain: str, digit: str, cuts: tuple[int, ...], low: int
) -> tuple[tuple[str, ...], Lin, dict[str, tuple[int, int]]]:
    """Names of a position's axes, the position as a form in them, and their ranges."""
    if not cuts:
        return (plain,), var(plain), {plain: (low, BIG)}
    form, ranges = digit_axes(digit, cuts, low, BIG)
    top = f"{digit}{len(cuts)}"
    return tuple(ranges), form, {**ranges, top: (low, BIG)}


def _moved(c: Conjunct) -> Conjunct:
    """The constant of the form moved into the bounds."""
    n = c.lin.const
    if not n:
        return c
    lo, hi = (c.lo - n if c.lo > -BIG else c.lo), (c.hi - n if c.hi < BIG else c.hi)
    return Conjunct(Lin(c.lin.terms), lo, hi, c.plain, c.shift + n)
