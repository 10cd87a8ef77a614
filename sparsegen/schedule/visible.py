"""Visible cells of one segment, row by row in closed form: no mask, no list of cells.

Unions and exclusions of cubes go by inclusion and exclusion; ``counters`` counts the keys that one cube shows a row.
What is left is walked cell by cell while that is cheap, else on sampled rows, and said to be an estimate.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from sparsegen.errors import InputError
from sparsegen.schedule import periods
from sparsegen.schedule.branches import Branch
from sparsegen.schedule.counters import Counter, Rows, counter_of
from sparsegen.schedule.formula import Cube, conj
from sparsegen.schedule.verify import Call, environment

MOST_CUBES = 6  # of inclusion and exclusion: 2^6 terms
MOST_DRAWN = 1 << 25  # blocks looked at for one cube of a table; beyond: sampled
CELLS_AT_ONCE = 1 << 20
MOST_CELLS = 1 << 24  # walked one by one at most; beyond: sampled
SAMPLED_ROWS = 256


def visible_cells(branch: Branch, call: Call) -> tuple[int, bool]:
    """(cells that a branch shows in a call, exact); estimated from sampled rows where not exact."""
    _, q_len, _, kv_len = call
    terms = _terms(branch)
    drawn = max((c.drawn_blocks for _, c in terms or ()), default=0)
    if terms is not None and drawn * q_len <= MOST_DRAWN and periods.affordable(terms, q_len):
        return periods.total(terms, call), True
    if kv_len <= MOST_CELLS:
        return _walked(branch, call)
    if terms is None:
        raise InputError(
            f"visible cells of {branch} are counted key by key, for at most {MOST_CELLS:,} keys; "
            f"this call has {kv_len:,}"
        )
    return _sampled(terms, call), False


def _terms(branch: Branch) -> list[tuple[int, Counter]] | None:
    """|any(alts) and not any(minus)| as a signed sum of cubes; None where some cube is not countable.

    Where cubes nest (chunks of 2048 in chunks of 4096) most terms are alike and cancel.
    """
    if len(branch.alts) + len(branch.minus) > MOST_CUBES:
        return None
    signs: dict[Any, int] = {}
    counters: dict[Any, Counter] = {}
    for n in range(1, len(branch.alts) + 1):
        for some in itertools.combinations(branch.alts, n):
            for m in range(len(branch.minus) + 1):
                for off in itertools.combinations(branch.minus, m):
                    cube = conj(r for c in (*some, *off) for r in c)
                    if cube is None:
                        continue
                    counter = counter_of(cube)
                    if counter is None:
                        return None
                    key = counter.key()
                    counters.setdefault(key, counter)
                    signs[key] = signs.get(key, 0) + (-1) ** (n + 1 + m)
    return [(sign, counters[key]) for key, sign in signs.items() if sign]


def _sampled(terms: list[tuple[int, Counter]], call: Call) -> int:
    """From rows that are counted one by one: their drawn blocks lie far apart."""
    start, q_len, _, _ = call
    rows = _spread(q_len, min(SAMPLED_ROWS, q_len))
    some = (Rows(call, start + rows[i : i + 1]) for i in range(len(rows)))
    found = sum(sign * int(c.per_row(row)[0]) for row in some for sign, c in terms)
    return found * q_len // len(rows)


def _spread(q_len: int, many: int) -> np.ndarray:
    """So many rows, irregular steps apart: regular ones would agree with a stride of the pattern."""
    edges = np.linspace(0, q_len, many + 1)
    jitter = np.random.default_rng(0).random(many)
    return (edges[:-1] + jitter * np.diff(edges)).astype(np.int64)


def _walked(branch: Branch, call: Call) -> tuple[int, bool]:
    """Cell by cell: all rows while that is cheap, else rows spread irregularly over the call."""
    start, q_len, k_start, kv_len = call
    rows = np.arange(q_len, dtype=np.int64)
    exact = q_len * kv_len <= MOST_CELLS
    if not exact:
        rows = _spread(q_len, max(min(SAMPLED_ROWS, MOST_CELLS // kv_len, q_len), 1))
    total, k = 0, (k_start + np.arange(kv_len, dtype=np.int64))[None, :]
    step = max(CELLS_AT_ONCE // kv_len, 1)
    for first in range(0, len(rows), step):
        q = start + rows[first : first + step, None]
        env = environment(call, q, k)
        total += int(np.broadcast_to(_holds(branch, env), (len(q), kv_len)).sum())
    return (total if exact else round(total * q_len / len(rows))), exact


def _holds(branch: Branch, env: dict[str, Any]) -> Any:
    def any_of(cubes: tuple[Cube, ...]) -> Any:
        found: Any = False
        for c in cubes:
            every: Any = True
            for r in c:
                every = every & r.test(env)
            found = found | every
        return found

    return any_of(branch.alts) & ~np.asarray(any_of(branch.minus), bool)
