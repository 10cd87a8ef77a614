"""Shorter forms by what is known of their variables, and what is known of a form: digits have small ranges."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from sparsegen.schedule.forms import Env, Floor, Lin, Pick, Prod, floor_, one, product, size
from sparsegen.schedule.intervals import bounds, ordered, pick, pick_args

LONGEST_PROOF = 100  # operations; picks of longer forms are not taken apart, which doubles with every one of them


def effort(lin: Lin) -> int:
    """What a form costs to compute, roughly: operations, and more for floors by other than powers of two."""
    total = size(lin)
    for g, c in lin.terms:
        total += abs(c) != 1
        match g:
            case Floor(a, m):
                total += effort(a) - size(a) + (8 if m & (m - 1) else 1)
            case Prod(a, b):
                total += effort(a) - size(a) + effort(b) - size(b)
    return total


def least(form: Lin | int, symbols: Env) -> int:
    """A bound below all values of a form in symbols."""
    if not isinstance(form, Lin):
        return form
    if size(form) > LONGEST_PROOF:
        return int(bounds(form, symbols)[0])
    found = [int(bounds(x, symbols)[0]) for x in (form, ordered(form), *_joined_floors(form))]
    for g, c in form.terms:
        if isinstance(g, Pick):  # rest - min(a, b) is the greater of rest - a and rest - b
            rest = form.without(g)
            ends = [least(rest + a * c, symbols) for a in g.args]
            found.append(max(ends) if (g.op == "max") == (c > 0) else min(ends))
            break
    return max(found)


def _joined_floors(lin: Lin) -> Iterator[Lin]:
    """Forms below ``lin`` where floors stand against each other: floor(a / m) - floor(b / m) >= floor((a - b) / m)."""
    floors = [(g, c) for g, c in lin.terms if isinstance(g, Floor)]
    for (f, c), (h, d) in itertools.permutations(floors, 2):
        if f.m == h.m and c > 0 and c == -d:
            rest = lin - Lin([(f, c), (h, d)])
            yield ordered(rest + floor_(f.arg - h.arg, f.m) * c)


def tidy(lin: Lin, env: Env) -> Lin:
    """The same value everywhere in ``env`` (int ranges), in a shorter form where floors or picks are decided there."""
    out = Lin((), lin.const)
    for g, c in lin.terms:
        match g:
            case Floor(a, m):
                new = _floor(tidy(a, env), m, env)
            case Prod(a, b):
                new = product(tidy(a, env), tidy(b, env))
            case Pick(op, args):
                new = _pick(op, [tidy(a, env) for a in args], env)
            case _:
                new = one(g)
        out = out + new * c
    return out


def _floor(arg: Lin, m: int, env: Env) -> Lin:
    out = floor_(arg, m)
    for g, c in out.terms:
        if isinstance(g, Floor):
            shorter = _decided(g, env)
            if shorter is not None:
                out = out + (shorter - Lin({g: 1})) * c
    return out


def _decided(f: Floor, env: Env) -> Lin | None:
    """A floor whose argument stays in one period is constant; small + g * A has the floor of A, where small < g."""
    lo, hi = bounds(f.arg, env)
    if lo // f.m == hi // f.m:
        return Lin((), lo // f.m)
    for g in sorted({abs(c) for _, c in f.arg.terms if abs(c) > 1 and f.m % c == 0}, reverse=True):
        big = Lin([(x, c // g) for x, c in f.arg.terms if c % g == 0], f.arg.const // g)
        small = Lin([(x, c) for x, c in f.arg.terms if c % g], f.arg.const % g)
        lo, hi = bounds(small, env)
        if lo // g == hi // g:
            return _floor(big + lo // g, f.m // g, env)
    return None


def _pick(op: str, args: list[Lin], env: Env) -> Lin:
    kept = list(pick_args(pick(op, args), op))
    for x in list(kept):
        others = (y for y in kept if y != x)
        if any(least(y - x if op == "max" else x - y, env) >= 0 for y in others):
            kept.remove(x)
    return pick(op, kept)
