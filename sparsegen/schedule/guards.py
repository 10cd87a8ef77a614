"""Where a query tile has keys at all, and where it has a full part: conditions that no bound of keys says.

``live`` and ``guards`` are proofs for all rows of a tile.  ``ever_full`` only looks at many tiles: what it misses costs
speed, never a cell.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from sparsegen.schedule.digits import Axes, Conjunct, radices
from sparsegen.schedule.forms import BIG, Floor, Lin, inside, value
from sparsegen.schedule.formula import as_mod
from sparsegen.schedule.limits import over
from sparsegen.schedule.tree import NoneOf, Tiling

Ends = tuple[Lin, Lin]
Guards = tuple[tuple[Lin, ...], ...]

SHORTEST_RUN = 16  # rows in a row; remainders of q that hold for fewer never fill a tile
SMALLEST_BLOCK = 16  # rows and keys of a kernel's smallest tile; a smaller full part is no use
FAR_AWAY = 1 << 21  # positions at which full parts are looked for
FAR_KEYS = 1 << 28  # the last key there: beyond what a transposed schedule adds to positions
FIRSTS = 12  # first digits tried on a lower axis
TOPS = (
    *range(0, 20, 3),
    *range(48, 1600, 191),
)  # and on the top axis, in units of the tile's size there


def live(axes: Axes, rows: Iterable[Conjunct]) -> tuple[Lin, ...]:
    """Forms that are >= 0 wherever some row of the tile may pass."""
    out = []
    for c in rows:
        lo, hi = axes.ends(c.lin)
        out += [hi - c.lo] if c.lo > -BIG else []
        out += [-lo + c.hi] if c.hi < BIG else []
    return tuple(f for f in dict.fromkeys(out) if axes.least(f) < 0)


def guards(
    axes: Axes,
    conditions: Iterable[Conjunct],
    clauses: Iterable[NoneOf],
    inner: Sequence[Ends],
    full: Ends,
    begins: Guards = (),
) -> Guards | None:
    """Forms that prove the conditions and the exclusions on a full part, and ``begins``; None: they are never proven."""
    here = {**axes.on_tile, **dict(zip(axes.keys, inner))}
    out: list[tuple[Lin, ...]] = list(begins)
    for c in conditions:
        if _short_run(c):
            return None
        lo, hi = axes.ends(c.lin, here)
        out += [(lo - c.lo,)] if c.lo > -BIG else []
        out += [(-hi + c.hi,)] if c.hi < BIG else []
    here |= {axes.top: full}
    for clause in clauses:
        proofs: list[Lin] = []
        for r in clause.cubes[0]:  # one literal that is false on the whole part is enough
            c = axes.conjunct(r)
            lo, hi = axes.ends(c.lin, here)
            proofs += [lo - c.hi - 1] if c.hi < BIG else []
            proofs += [-hi + (c.lo - 1)] if c.lo > -BIG else []
        out.append(tuple(f for f in proofs if axes.most(f) >= 0 and not over(f)))
    out = [g for g in dict.fromkeys(out) if not any(axes.least(f) >= 0 for f in g)]
    possible = all(any(axes.most(f) >= 0 for f in g) for g in out)
    return tuple(out) if possible and axes.most(full[1] - full[0]) >= 0 else None


def _short_run(c: Conjunct) -> bool:
    """Does a remainder of q hold for a few neighbouring rows only?"""
    mod = as_mod(c.lin)
    if mod is None or len(mod[0].terms) != 1 or "q" not in inside(mod[0].terms[0][0]):
        return False
    g, times = mod[0].terms[0]
    period = g.m if isinstance(g, Floor) else 1
    return (c.hi - c.lo + 1) * period < SHORTEST_RUN * abs(times)


def ever_full(
    tiling: Tiling,
    tile: tuple[Lin, Lin],
    full: tuple[Lin, Lin],
    inner: Sequence[tuple[Lin, Lin]],
    guards: Sequence[Sequence[Lin]],
) -> bool:
    """Has any tile of the smallest size a full key tile?"""
    n, (env, shape) = SMALLEST_BLOCK, places(tiling)
    width: Any = 1
    for lo, hi in inner:
        width = width * np.maximum(value(hi, env) - value(lo, env) + 1, 0)
    start = value(tile[0], env)
    head = -((start - value(full[0], env)) * width // n)
    held = ((value(full[1], env) + 1 - start) * width) // n > head
    held = held & (value(tile[1], env) >= start)
    for group in guards:
        held = held & np.logical_or.reduce(
            [np.broadcast_to(value(f, env) >= 0, shape) for f in group]
        )
    return bool(np.any(held))


@lru_cache(maxsize=64)
def places(tiling: Tiling) -> tuple[dict[str, Any], tuple[int, ...]]:
    """The symbols of many query tiles of the smallest size, near the first key and far from it.  Not to be changed."""
    env: dict[str, Any] = {"k_first": 0, "q_len": FAR_AWAY}
    m = SMALLEST_BLOCK
    if tiling.q_cuts:
        step = tiling.q_cuts[-1]
        env |= _digits(tiling, m)
        last = env[f"x{len(tiling.q_cuts)}_last"]
        env["k_last"] = np.where(last % 2 == 0, max(FAR_AWAY * step, FAR_KEYS), (last + 1) * step)
        shape = last.shape
    else:
        near, far = np.arange(0, 1 << 13, m), np.arange(0, FAR_AWAY, 37 * m)
        first = np.concatenate([near, far, near])
        env |= {"q_first": first, "q_last": first + m - 1}
        env["k_last"] = np.concatenate([near * 0 + FAR_KEYS, far * 0 + FAR_KEYS, near + 2 * m])
        shape = first.shape
    env["kv_len"] = env["k_last"] + 1
    return env, shape


def _digits(tiling: Tiling, m: int) -> dict[str, np.ndarray]:
    firsts = []
    for radix, extent in zip(radices(tiling.q_cuts), tiling.extent):
        every = np.arange(0, radix, extent)
        firsts.append(every[np.linspace(0, len(every) - 1, min(len(every), FIRSTS)).astype(int)])
    top = max(m // int(np.prod(tiling.extent)), 1)
    grid = [g.ravel() for g in np.meshgrid(*firsts, np.array(TOPS) * top, indexing="ij")]
    env: dict[str, np.ndarray] = {}
    for t, first in enumerate(grid):
        if t == len(tiling.extent):
            env |= {f"x{t}_first": first, f"x{t}_last": first + top - 1}
        elif tiling.extent[t] == 1:
            env[f"x{t}"] = first
        else:
            most = radices(tiling.q_cuts)[t] - 1
            last = np.minimum(first + tiling.extent[t] - 1, most)
            env |= {f"x{t}_first": first, f"x{t}_last": last}
    return env
