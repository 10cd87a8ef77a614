"""Tighter intervals of variables from what one range says of them: one step of bounds propagation."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from sparsegen.schedule.forms import BIG, Floor, Lin, Var, inside
from sparsegen.schedule.formula import Range
from sparsegen.schedule.intervals import bounds, cdiv, fdiv, vmax, vmin


# Differences are kept: a proof of one cube asks for the same ones as that of its neighbours.
@lru_cache(maxsize=1 << 13)
def _each_alone(lin: Lin) -> tuple[tuple[Var | Floor, int, frozenset[str], Lin], ...]:
    """(generator, coefficient, its names, the other terms) for all that bounds can be narrowed of."""
    return tuple(
        (g, c, inside(g), lin.without(g)) for g, c in lin.terms if isinstance(g, (Var, Floor))
    )


def narrow(lin: Lin, lo: Any, hi: Any, env: dict[str, Any], names: set[str]) -> None:
    """Tighten env[v] for v in names from lo <= lin <= hi (None: no bound).  One pass of bounds propagation."""
    for g, c, own, rest in _each_alone(lin):
        if own.isdisjoint(names):
            continue
        rlo, rhi = bounds(rest, env)
        a, b = (None if lo is None else lo - rhi), (None if hi is None else hi - rlo)
        if c < 0:
            a, b = (None if b is None else -b), (None if a is None else -a)
        a, b = (None if a is None else cdiv(a, abs(c))), (None if b is None else fdiv(b, abs(c)))
        if isinstance(g, Floor):
            up = None if b is None else b * g.m + (g.m - 1)
            narrow(g.arg, None if a is None else a * g.m, up, env, names)
        elif g.name in names:
            low, high = env[g.name]
            env[g.name] = (
                low if a is None else vmax(low, a),
                high if b is None else vmin(high, b),
            )


# Cubes of one formula share most of their ranges, so most intervals are narrowed as they were before.
@lru_cache(maxsize=1 << 12)
def narrowed(r: Range, names: tuple[str, ...], intervals: tuple[Any, ...]) -> tuple[Any, ...]:
    """``narrow`` of all variables in a Range, from their intervals to their intervals."""
    env = dict(zip(names, intervals, strict=True))
    lo, hi = (None if r.lo <= -BIG else r.lo), (None if r.hi >= BIG else r.hi)
    narrow(r.lin, lo, hi, env, set(names))
    return tuple(env.values())
