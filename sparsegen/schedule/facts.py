"""What a cube proves: the interval of any form under a conjunction, for all positions of a domain.

Positions are written in mixed-radix digits of a chain of moduli found in the formula; then bounds propagation, sums
with a known range, and exact remainders.  Every maximal chain is tried and the best answer wins.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from sparsegen.schedule.forms import (
    BIG,
    Floor,
    Generator,
    Lin,
    Prod,
    Table,
    Var,
    floor_,
    one,
    var,
    variables,
)
from sparsegen.schedule.formula import Cube, Range, as_mod
from sparsegen.schedule.intervals import bounds, fdiv, terms_more
from sparsegen.schedule.narrowing import narrowed


@dataclass(frozen=True)
class Domain:
    """Positions that a proof must hold for: q_lo <= q <= q_hi, 0 <= k <= k_hi, lengths 1..len_hi."""

    q_lo: int
    q_hi: int
    k_hi: int
    len_hi: int


_FURTHEST = 1 << 36
ANY_LENGTH = Domain(-_FURTHEST, _FURTHEST, _FURTHEST, 2 * _FURTHEST)


class Exhausted(Exception):
    """The budget of proofs is used up; the caller keeps the best plan so far."""


# One analysis at a time in a process: what another thread proves, and so remembers, must not decide how far a budget goes.
ANALYSIS = threading.RLock()


class Budget:
    """Counts proof steps, so that the result depends on the pattern and not on the machine's speed."""

    def __init__(self) -> None:
        self.left: int | None = None

    def spend(self, n: int) -> None:
        if self.left is not None:
            self.left -= n
            if self.left < 0:
                raise Exhausted


BUDGET = Budget()


def moduli(cubes: Iterable[Cube], names: Iterable[str] = ("q", "k")) -> list[int]:
    """All m for which some form takes floor(x / m) of a form in ``names`` (nested floors are already joined)."""
    out: set[int] = set()
    wanted = set(names)

    def walk(lin: Lin) -> None:
        for g, _ in lin.terms:
            if isinstance(g, Floor):
                if variables(g.arg) & wanted:
                    out.add(g.m)
                walk(g.arg)

    for c in cubes:
        for r in c:
            walk(r.lin)
    return sorted(out)


def chains(ms: list[int], longest: int = 3) -> list[tuple[int, ...]]:
    """Sets of moduli where each divides the next, () first."""
    return [
        c
        for n in range(longest + 1)
        for c in itertools.combinations(ms, n)
        if all(b % a == 0 for a, b in itertools.pairwise(c))
    ]


def maximal_chains(ms: list[int], most: int = 4) -> list[tuple[int, ...]]:
    """The chains that are not part of another one."""
    every = chains(ms[:24])
    return [c for c in every if not any(set(c) < set(d) for d in every)][:most]


def axes(name: str, cuts: tuple[int, ...], lo: int, hi: int) -> tuple[Lin, dict[str, Any]]:
    """Digits of a position: the substitution, and the interval of every digit (the top one last)."""
    steps = (1, *cuts)
    form, env = Lin(), {}
    for t, c in enumerate(steps):
        form = form + var(f"{name}{t}") * c
        top = t + 1 == len(steps)
        env[f"{name}{t}"] = (fdiv(lo, c), fdiv(hi, c)) if top else (0, steps[t + 1] // c - 1)
    return form, env


def subst(lin: Lin, forms: dict[str, Lin], env: dict[str, Any]) -> Lin:
    """Replace q and k by digits; floors whose argument stays inside one period become constants."""
    out = Lin((), lin.const)
    for g, c in lin.terms:
        match g:
            case Var(n):
                new = forms.get(n) or one(g)
            case Floor(a, m):
                new = floor_(subst(a, forms, env), m)
                for h, d in new.terms:
                    if isinstance(h, Floor):
                        lo, hi = bounds(h.arg, env)
                        if lo // h.m == hi // h.m:
                            new = new.without(h) + d * (lo // h.m)
            case Table(n, a):
                new = Lin({Table(n, subst(a, forms, env)): 1})
            case Prod(a, b):
                new = Lin({Prod(subst(a, forms, env), subst(b, forms, env)): 1})
            case _:
                new = one(g)
        out = out + new * c
    return out


def subst_range(r: Range, forms: dict[str, Lin], env: dict[str, Any]) -> Range:
    """A Range in digits; a remainder of a form that meets only one multiple becomes an equality."""
    lin = subst(r.lin, forms, env)
    mod = as_mod(lin)
    if mod and r.lo == r.hi:
        u, m, off = mod
        lo, hi = bounds(u, env)
        if lo > -BIG and hi < BIG:
            first = r.lo - off + m * -((r.lo - off - lo) // m)
            if first <= hi < first + m:
                return Range(Lin(u.terms), first - u.const, first - u.const)
    lo, hi = r.lo, r.hi
    return Range(
        Lin(lin.terms), lo - lin.const if lo > -BIG else lo, hi - lin.const if hi < BIG else hi
    )


@lru_cache(maxsize=1 << 14)
def _generators(lin: Lin) -> frozenset[Generator]:
    return frozenset(g for g, _ in lin.terms)


@lru_cache(maxsize=1 << 14)
def _rests(lin: Lin, known: Lin) -> tuple[tuple[int, Lin], ...]:
    """(s, lin - s * known) for every s that removes a term, where no more terms are left than before."""
    have = dict(lin.terms)
    scales = {have[g] // c for g, c in known.terms if g in have and have[g] % c == 0}
    return tuple((s, lin - known * s) for s in sorted(scales) if terms_more(lin, known, s) <= 0)


@lru_cache(maxsize=1 << 8)
def _digits(chain: tuple[int, ...], dom: Domain) -> tuple[dict[str, Lin], dict[str, Any]]:
    """q and k in the digits of a chain, and the interval of every digit and length.  Not to be changed."""
    fq, eq = axes("x", chain, dom.q_lo, dom.q_hi)
    fk, ek = axes("y", chain, 0, dom.k_hi)
    lengths = {"q_len": (1, dom.len_hi), "kv_len": (1, dom.len_hi)}
    return {"q": fq, "k": fk}, {**eq, **ek, **lengths}


@lru_cache(maxsize=1 << 13)
def _in_digits(r: Range, chain: tuple[int, ...], dom: Domain) -> tuple[Range, ...]:
    """A Range in digits and what follows from it alone; the same ranges come back in cube after cube."""
    forms, static = _digits(chain, dom)
    r = subst_range(r, forms, static)
    return (r, *_split(r, static))


def _split(r: Range, static: dict[str, Any]) -> Iterator[Range]:
    """g*A + R in [lo, hi] with R small: bounds on A alone, and on R where A is one value."""
    for g in sorted({abs(c) for _, c in r.lin.terms if abs(c) > 1}):
        big = Lin([(x, c // g) for x, c in r.lin.terms if c % g == 0])
        small = Lin([(x, c) for x, c in r.lin.terms if c % g])
        if not big.terms or not small.terms:
            continue
        rlo, rhi = bounds(small, static)
        lo = -((rhi - r.lo) // g) if r.lo > -BIG else -BIG
        hi = (r.hi - rlo) // g if r.hi < BIG else BIG
        yield Range(big, lo, hi)
        if lo == hi:
            yield Range(small, r.lo - g * lo, r.hi - g * lo)


@lru_cache(maxsize=1 << 13)
def facts_of(cube: Cube, chain: tuple[int, ...], dom: Domain) -> Facts:
    """Facts, made once."""
    return Facts(cube, chain, dom)


class Facts:
    """What a cube proves with the digits of one chain."""

    def __init__(self, cube: Cube, chain: tuple[int, ...], dom: Domain):
        self.memo: dict[Any, tuple[int, int]] = {}
        self.forms, self.static = _digits(chain, dom)
        self.known = [
            Range(self.forms["q"], dom.q_lo, dom.q_hi),
            Range(self.forms["k"], 0, dom.k_hi),
        ]
        for r in cube:
            self.known += _in_digits(r, chain, dom)
        self.known_of = [(r, _generators(r.lin)) for r in self.known]
        BUDGET.spend(8 * len(self.known))
        self.env = env = dict(self.static)
        names = [tuple(n for n in variables(r.lin) if n in env) for r in self.known]
        for _ in range(2):
            for r, own in zip(self.known, names, strict=True):
                env.update(zip(own, narrowed(r, own, tuple([env[n] for n in own]))))

    def bound(self, lin: Lin) -> tuple[int, int]:
        """Interval of a form in q and k."""
        if lin not in self.memo:
            self.memo[lin] = self._search(subst(lin, self.forms, self.static), 2)
        return self.memo[lin]

    def _search(self, lin: Lin, depth: int) -> tuple[int, int]:
        key = (lin, depth)
        if key in self.memo:
            return self.memo[key]
        BUDGET.spend(1)
        lo, hi = bounds(lin, self.env)
        if depth:
            own = _generators(lin)
            for f, generators in self.known_of:
                if own.isdisjoint(generators):
                    continue
                for s, rest in _rests(lin, f.lin):
                    deeper = depth - 1 if len(rest.terms) < len(lin.terms) else 0
                    rlo, rhi = self._search(rest, deeper)
                    a, b = (f.lo, f.hi) if s > 0 else (f.hi, f.lo)
                    lo = max(lo, rlo + s * a) if abs(a) < BIG else lo
                    hi = min(hi, rhi + s * b) if abs(b) < BIG else hi
        self.memo[key] = lo, hi
        return lo, hi


def residue_bound(cube: Cube, lin: Lin) -> tuple[int, int]:
    """Interval of L % m (+ const) given every remainder known of the same L: exact, on residues modulo the lcm."""
    mod = as_mod(lin)
    if not mod:
        return -BIG, BIG
    inner, m, off = mod
    same = [(x, r) for r in cube if (x := as_mod(r.lin)) and x[0].terms == inner.terms]
    period = math.lcm(m, *[x[1] for x, _ in same])
    if not same or period > 1 << 14:
        return -BIG, BIG
    v = np.arange(period)
    for (a, n, o), r in same:
        u = (v + a.const) % n + o
        v = v[(u >= r.lo) & (u <= r.hi)]
    u = (v + inner.const) % m + off
    return (int(u.min()), int(u.max())) if len(v) else (BIG, -BIG)


def bound(
    within: Cube, r: Range, chain_list: Iterable[tuple[int, ...]], dom: Domain
) -> tuple[int, int]:
    """Interval of the form of ``r`` under ``within``: the best of the remainders and of all chains.  Empty: lo > hi.

    Chains are tried until ``r`` is proven or refuted; the interval returned is then wider than it could be.
    """
    lo, hi = residue_bound(within, r.lin)
    for c in chain_list:
        if (lo >= r.lo and hi <= r.hi) or lo > r.hi or hi < r.lo:
            break
        a, b = facts_of(within, c, dom).bound(r.lin)
        lo, hi = max(lo, a), min(hi, b)
    return lo, hi
