"""Visible cells of one segment, row by row in closed form: no mask, no list of cells.

A cube shows a row an interval of keys, and of these the ones with certain remainders of one form (``(q - k) % 4``,
``k % 31``), or those in the blocks that ``random_blocks`` draws.  Unions and exclusions of such cubes go by inclusion
and exclusion.  What is left is walked cell by cell while that is cheap, else on sampled rows, and said to be an estimate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sparsegen.schedule.branches import Branch, walked_term
from sparsegen.schedule.facts import moduli
from sparsegen.schedule.forms import K, Lin, Opaque, Var, value, variables
from sparsegen.schedule.formula import ANYWHERE, Cube, Range, as_mod, conj
from sparsegen.schedule.intervals import bounds
from sparsegen.schedule.limits import Limits, limits
from sparsegen.schedule.verify import Call, block_table, environment
from sparsegen.spec.expr import Term

ROWS_AT_ONCE = 1 << 13  # the values of one form are 64 KiB: they stay in the cache of a core
LONGEST_PERIOD = 1 << 16  # of remainders that are counted in closed form
MOST_CUBES = 6  # of inclusion and exclusion: 2^6 terms
MOST_DRAWN = 1 << 25  # blocks looked at for one cube of a table; beyond: sampled
CELLS_AT_ONCE = 1 << 20
MOST_CELLS = 1 << 24  # walked one by one at most; beyond: sampled
SAMPLED_ROWS = 256


def visible_cells(branch: Branch, call: Call) -> tuple[int, bool]:
    """(cells that a branch shows in a call, exact); estimated from sampled rows where not exact."""
    start, q_len, _, kv_len = call
    terms = _terms(branch)
    drawn = [c.drawn["per_row"] for _, c in terms or () if c.drawn is not None]
    if terms is None or max(drawn, default=0) * q_len > MOST_DRAWN:
        return _walked(branch, start, q_len, kv_len)
    total = 0
    for first in range(0, q_len, ROWS_AT_ONCE):
        q = start + np.arange(first, min(first + ROWS_AT_ONCE, q_len), dtype=np.int64)
        rows = _Rows(call, q)
        total += sum(sign * int(counter.per_row(rows).sum()) for sign, counter in terms)
    return total, True


class _Rows:
    """Some rows of a call.  The value of every form is worked out once: the terms of a sum share most of them."""

    def __init__(self, call: Call, q: np.ndarray):
        self.q, self.env = q, environment(call, q, q * 0)
        self._values: dict[Lin, np.ndarray] = {}
        self._tests: dict[Range, np.ndarray] = {}

    def of(self, form: Lin) -> np.ndarray:
        """Value of a form on every row."""
        if form not in self._values:
            self._values[form] = np.broadcast_to(value(form, self.env), self.q.shape)
        return self._values[form]

    def hold(self, test: Range) -> np.ndarray:
        """Truth of a condition on every row."""
        if test not in self._tests:
            self._tests[test] = np.broadcast_to(test.test(self.env), self.q.shape)
        return self._tests[test]


@dataclass(frozen=True)
class _Counter:
    """Keys that a cube shows a row: an interval, and remainders of one form ``sign * k + phase(q)``, or drawn blocks."""

    got: Limits
    drawn: Term | None = None  # only keys in the blocks that this random_blocks term draws
    sign: int = 0  # 0: no remainders
    phase: Lin | None = None
    below: Any = (
        None  # int64 [period + 1]: how many values below an index pass, of one period of the form
    )

    def key(self) -> Any:
        """Equal for counters of the same keys."""
        got = self.got
        sets = [frozenset(x) for x in (got.lower, got.upper, got.rows)]
        passing = None if self.below is None else self.below.tobytes()
        return (*sets, self.drawn, self.sign, self.phase, passing)

    def per_row(self, rows: _Rows) -> np.ndarray:
        """Visible keys of every row."""
        lo = np.full(rows.q.shape, rows.env["k_first"], np.int64)
        hi = np.full(rows.q.shape, rows.env["k_last"], np.int64)
        for form in self.got.lower:
            np.maximum(lo, rows.of(form), out=lo)
        for form in self.got.upper:
            np.minimum(hi, rows.of(form), out=hi)
        for test in self.got.rows:
            hi = np.where(rows.hold(test), hi, lo - 1)
        if self.drawn is None:
            return self._between(lo, hi, rows)
        runs = _drawn_runs(self.drawn, rows)
        parts = (self._between(np.maximum(lo, a), np.minimum(hi, b), rows) for a, b in runs)
        return sum(parts, np.zeros_like(lo))

    def _between(self, lo: np.ndarray, hi: np.ndarray, rows: _Rows) -> np.ndarray:
        if not self.sign:
            return np.maximum(hi - lo + 1, 0)
        at = rows.of(self.phase) if self.phase is not None else 0
        first, last = (at + lo, at + hi) if self.sign > 0 else (at - hi, at - lo)
        return np.where(hi >= lo, self._passing(last + 1) - self._passing(first), 0)

    def _passing(self, x: np.ndarray) -> np.ndarray:
        """Passing values in [0, x), counted down for negative x."""
        period = len(self.below) - 1
        periods = x // period
        return periods * self.below[-1] + self.below[x - periods * period]


def _drawn_runs(term: Term, rows: _Rows) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """First and last key of every block drawn for each row; runs of blocks that are not there end before they begin."""
    place = rows.q // term["block"]
    table = block_table(term, int(place[0]), int(place[-1]), rows.env["kv_len"])
    for one in table[place - place[0]].astype(np.int64).T:
        first = one * term["block"]
        yield first, np.where(one < 0, first - 1, first + term["block"] - 1)


def _terms(branch: Branch) -> list[tuple[int, _Counter]] | None:
    """|any(alts) and not any(minus)| as a signed sum of cubes; None where some cube is not countable.

    Where cubes nest (chunks of 2048 in chunks of 4096) most terms are alike and cancel.
    """
    if len(branch.alts) + len(branch.minus) > MOST_CUBES:
        return None
    signs: dict[Any, int] = {}
    counters: dict[Any, _Counter] = {}
    for n in range(1, len(branch.alts) + 1):
        for some in itertools.combinations(branch.alts, n):
            for m in range(len(branch.minus) + 1):
                for off in itertools.combinations(branch.minus, m):
                    cube = conj(r for c in (*some, *off) for r in c)
                    if cube is None:
                        continue
                    counter = _counter(cube)
                    if counter is None:
                        return None
                    key = counter.key()
                    counters.setdefault(key, counter)
                    signs[key] = signs.get(key, 0) + (-1) ** (n + 1 + m)
    return [(sign, counters[key]) for key, sign in signs.items() if sign]


def _strictest(forms: tuple[Lin, ...], sign: int) -> tuple[Lin, ...]:
    """The forms without those that another one always exceeds (``sign`` 1) or undercuts (-1)."""
    kept = list(dict.fromkeys(forms))
    for f in kept[:]:
        others = (g for g in kept if g is not f)
        if any(bounds((g - f) * sign, ANYWHERE)[0] >= 0 for g in others):
            kept.remove(f)
    return tuple(kept)


def _counter(cube: Cube) -> _Counter | None:
    drawn = walked_term(cube)
    got = limits(tuple(r for r in cube if drawn is None or r.lin != Lin({Opaque(drawn): 1})))
    got = replace(got, lower=_strictest(got.lower, 1), upper=_strictest(got.upper, -1))
    if not got.tests:
        return _Counter(got, drawn)
    read = [_remainder(r) for r in got.tests]
    keys = {(sign, phase) for sign, phase, _ in read}
    period = math.lcm(*(p for _, _, p in read))
    if len(keys) != 1 or (key := keys.pop())[0] == 0 or period > LONGEST_PERIOD:
        return None
    sign, phase = key
    points = {"k": np.arange(period), "q": np.zeros(period, np.int64)}
    ok = np.ones(period, bool)
    for r in got.tests:
        # The form's own variable stands for the whole sign * k + phase: it only occurs modulo the period.
        mod = as_mod(r.lin)
        assert mod is not None
        inner = K if variables(r.lin) != {"k"} else mod[0]
        u = (value(inner, points) + (mod[0].const if inner is K else 0)) % mod[1] + mod[2]
        ok &= (u >= r.lo) & (u <= r.hi)
    return _Counter(got, drawn, sign, phase, np.concatenate([[0], np.cumsum(ok)]))


def _remainder(r: Range) -> tuple[int, Lin | None, int]:
    """(sign, phase, period) of a remainder in k; sign 0 where it is none of the countable kind."""
    mod = as_mod(r.lin)
    if mod is None:
        return 0, None, 1
    inner, m, _ = mod
    if variables(inner) == {"k"}:
        return 1, None, math.lcm(*moduli([(r,)]))
    with_k = [(g, c) for g, c in inner.terms if g == Var("k")]
    rest = Lin([(g, c) for g, c in inner.terms if g != Var("k")])
    if len(with_k) != 1 or abs(with_k[0][1]) != 1 or "k" in variables(rest):
        return 0, None, 1
    return with_k[0][1], rest, m


def _walked(branch: Branch, start: int, q_len: int, kv_len: int) -> tuple[int, bool]:
    """Cell by cell: all rows while that is cheap, else rows spread irregularly over the call."""
    rows = np.arange(q_len, dtype=np.int64)
    exact = q_len * kv_len <= MOST_CELLS
    if not exact:
        many = max(min(SAMPLED_ROWS, MOST_CELLS // kv_len, q_len), 1)
        edges = np.linspace(0, q_len, many + 1)
        # Irregular steps: regular ones would agree with a stride of the pattern.
        jitter = np.random.default_rng(0).random(many)
        rows = (edges[:-1] + jitter * np.diff(edges)).astype(np.int64)
    total, k = 0, np.arange(kv_len, dtype=np.int64)[None, :]
    step = max(CELLS_AT_ONCE // kv_len, 1)
    for first in range(0, len(rows), step):
        q = start + rows[first : first + step, None]
        env = environment((start, q_len, 0, kv_len), q, k)
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
