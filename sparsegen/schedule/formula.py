"""Formulas in normal form: a DNF is a list of cubes, a cube a conjunction of ``Range``s, one per form.

``ranged`` is the only maker of a normal ``Range`` and ``conj`` the only maker of a cube: two Ranges of one form in a
cube would silently lose one of them later.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sparsegen.schedule.forms import (
    BIG,
    FAR,
    Env,
    Floor,
    Lin,
    Opaque,
    Var,
    floor_,
    inside,
    mod_,
    text,
    value,
)
from sparsegen.schedule.intervals import bounds, remainders

CAP = 48  # most cubes in a DNF; a larger one would be tested cube by cube, which costs more than the expression


@dataclass(frozen=True)
class Range:
    """lo <= lin <= hi; -BIG and BIG stand for no bound."""

    lin: Lin
    lo: int
    hi: int

    def __str__(self) -> str:
        if self.lo == self.hi:
            return f"{self.lin} == {self.lo}"
        if self.lo <= -BIG:
            return f"{self.lin} <= {self.hi}"
        if self.hi >= BIG:
            return f"{self.lin} >= {self.lo}"
        return f"{self.lo} <= {self.lin} <= {self.hi}"

    __repr__ = __str__

    def test(self, env: Env) -> Any:
        """Truth at points: ``env`` as for ``forms.value``."""
        v = value(self.lin, env)
        if self.lo <= -BIG:
            return v <= self.hi
        return v >= self.lo if self.hi >= BIG else (v >= self.lo) & (v <= self.hi)


Cube = tuple[Range, ...]  # sorted by text, one Range per form
Dnf = list[Cube]

# What holds for every call: keys are at positions >= 0, lengths are >= 1.
ANYWHERE = {"q": (-BIG, BIG), "k": (0, BIG), "q_len": (1, BIG), "kv_len": (1, BIG)}


class Blowup(Exception):
    """The normal form would be too large; the caller keeps the expression as one opaque generator."""


@lru_cache(maxsize=1 << 14)
def as_mod(lin: Lin) -> tuple[Lin, int, int] | None:
    """(L, m, off) where lin is exactly L % m + off, else None."""
    for g, c in lin.terms:
        if isinstance(g, Floor) and c < 0:
            for inner, m in remainders(g, lin):
                if c == -m and lin.without(g).terms == inner.terms:
                    return inner, m, lin.const - inner.const
    return None


def kept_whole(lin: Lin) -> bool:
    """Is it a remainder or an opaque truth?  Its Range keeps both bounds, even one that is proven: they say which."""
    return as_mod(lin) is not None or (len(lin.terms) == 1 and isinstance(lin.terms[0][0], Opaque))


def lead(lin: Lin) -> int:
    """Coefficient that decides the sign of a form: that of q, else of what depends on q, else the last."""
    leading = max(lin.terms, key=lambda t: (t[0] == Var("q"), "q" in inside(t[0]), text(t[0])))
    return leading[1]


def ranged(lin: Lin, lo: int, hi: int) -> Range | bool:
    """Normal form of lo <= lin <= hi: True, False or a Range."""
    lo, hi = (lo - lin.const if lo > -BIG else lo), (hi - lin.const if hi < BIG else hi)
    lin = Lin(lin.terms)
    if not lin.terms:
        return lo <= 0 <= hi
    if as_mod(-lin) or (lead(lin) < 0 and not as_mod(lin)):
        lin, lo, hi = -lin, -hi, -lo
    g = math.gcd(*[c for _, c in lin.terms])
    if g > 1:
        lin = Lin([(x, c // g) for x, c in lin.terms])
        lo, hi = (-(-lo // g) if lo > -BIG else lo), (hi // g if hi < BIG else hi)
    nlo, nhi = bounds(lin, ANYWHERE)
    if lo > hi or lo > nhi or hi < nlo:
        return False
    if kept_whole(lin):
        lo, hi = max(lo, nlo), min(hi, nhi)
        if (lo, hi) == (nlo, nhi):
            return True
    else:
        lo, hi = (-BIG if lo <= nlo or lo < -FAR else lo), (BIG if hi >= nhi or hi > FAR else hi)
        if (lo, hi) == (-BIG, BIG):
            return True
    mod = as_mod(lin)
    return _mod_normal(lin, lo, hi, mod) if mod else _floor_normal(lin, lo, hi)


def _mod_normal(lin: Lin, lo: int, hi: int, mod: tuple[Lin, int, int]) -> Range | bool:
    """(L + c) % m == a  →  L % m == (a - c) % m;  (-L) % m in [a, b], a >= 1  →  L % m in [m - b, m - a]."""
    inner, m, off = mod
    if lo == hi and inner.const:
        r = (lo - off - inner.const) % m
        return ranged(mod_(Lin(inner.terms), m), r, r)
    if lead(inner) < 0 and (lo > off or hi == off):
        return ranged(mod_(-inner, m), *((m - hi + off, m - lo + off) if lo > off else (0, 0)))
    return Range(lin, lo, hi)


def _floor_normal(lin: Lin, lo: int, hi: int) -> Range | bool:
    floors = [(x, c) for x, c in lin.terms if isinstance(x, Floor)]
    if lo == hi:  # L1 % m == L2 % m  →  (L1 - L2) % m == 0
        for (f, c), (h, d) in itertools.permutations(floors, 2):
            for (a, m), (b, n) in itertools.product(remainders(f, lin), remainders(h, lin)):
                if m == n and c == -m and d == m and lin - lo == a - Lin({f: m}) - b + Lin({h: m}):
                    return ranged(mod_(a - b, m), 0, 0)
    if floors:  # m*a <= v - m*X <= m*b + m-1  →  a <= v // m - X <= b
        m = floors[0][0].m
        plain = [(x, c) for x, c in lin.terms if c % m]
        if len(plain) == 1 and isinstance(plain[0][0], Var) and abs(plain[0][1]) == 1:
            sign = plain[0][1]
            low, high = (lo, hi) if sign > 0 else (-hi, -lo)
            if (low <= -BIG or low % m == 0) and (high >= BIG or high % m == m - 1):
                low, high = (low if low <= -BIG else low // m), (high if high >= BIG else high // m)
                return ranged(floor_(lin * sign, m), low, high)
    return Range(lin, lo, hi)


def conj(parts: Iterable[Range]) -> Cube | None:
    """One cube from many Ranges (same form: intersect), or None where it is empty."""
    out: dict[Lin, tuple[int, int]] = {}
    for r in parts:
        lo, hi = out.get(r.lin, (-BIG, BIG))
        lo, hi = max(lo, r.lo), min(hi, r.hi)
        if lo > hi:
            return None
        out[r.lin] = lo, hi
    return tuple(sorted((Range(lin, *b) for lin, b in out.items()), key=str))


def without(cube: Cube, r: Range) -> Cube:
    """The cube less one of its Ranges."""
    return tuple(x for x in cube if x != r)


def negate(r: Range) -> Dnf:
    """not r: up to two cubes."""
    low = ranged(r.lin, -BIG, r.lo - 1) if r.lo > -BIG else False
    high = ranged(r.lin, r.hi + 1, BIG) if r.hi < BIG else False
    return [c for p in (low, high) for c in lift(p)]


def lift(r: Range | bool) -> Dnf:
    """A Range as a DNF."""
    return [()] if r is True else [] if r is False else [(r,)]


def _joined(a: Cube, b: Cube) -> Cube | None:
    """One cube equal to a or b: where one holds the other, or they differ in one touching range."""
    fa, fb = {r.lin: r for r in a}, {r.lin: r for r in b}
    if all(x in fa and fa[x].lo >= r.lo and fa[x].hi <= r.hi for x, r in fb.items()):
        return b
    if all(x in fb and fb[x].lo >= r.lo and fb[x].hi <= r.hi for x, r in fa.items()):
        return a
    if fa.keys() == fb.keys() and len(diff := [x for x in fa if fa[x] != fb[x]]) == 1:
        x = diff[0]
        first, second = sorted((fa[x], fb[x]), key=lambda r: r.lo)
        if second.lo <= first.hi + 1:
            r = ranged(x, first.lo, max(first.hi, second.hi))
            if r is True:
                return without(a, fa[x])
            if isinstance(r, Range):
                return conj([*without(a, fa[x]), r])
    return None


def merge(cubes: Iterable[Cube]) -> Dnf:
    """Absorb cubes inside others; join cubes that differ in one touching range.  Raises Blowup early, to stay fast."""
    out: Dnf = []
    todo = list(dict.fromkeys(cubes))[::-1]
    while todo:
        new = todo.pop()
        for i, old in enumerate(out):
            both = _joined(old, new)
            if both is not None:
                if both != old:  # the larger cube may join others now
                    out.pop(i)
                    todo.append(both)
                break
        else:
            out.append(new)
            if len(out) > 2 * CAP:
                raise Blowup
    return out


def dnf_and(a: Dnf, b: Dnf) -> Dnf:
    """a and b.  Raises Blowup."""
    if len(a) * len(b) > 20 * CAP:
        raise Blowup
    out = merge(c for x in a for y in b if (c := conj([*x, *y])) is not None)
    if len(out) > CAP:
        raise Blowup
    return out


def dnf_or(parts: Iterable[Dnf]) -> Dnf:
    """Union.  Raises Blowup."""
    cubes = [c for p in parts for c in p]
    if len(cubes) > 20 * CAP:
        raise Blowup
    out = merge(cubes)
    if len(out) > CAP:
        raise Blowup
    return out


def dnf_not(cubes: Dnf) -> Dnf:
    """Complement.  Raises Blowup."""
    out: Dnf = [()]
    for c in cubes:
        out = dnf_and(out, merge(n for r in c for n in negate(r)))
    return out


def cube_text(cube: Cube) -> str:
    """A cube for people."""
    return " and ".join(map(str, cube)) or "all"


def dnf_text(cubes: Iterable[Cube]) -> str:
    """A DNF for people; the empty one is "none"."""
    parts = [f"({t})" if " and " in (t := cube_text(c)) else t for c in cubes]
    return " or ".join(parts) or "none"
