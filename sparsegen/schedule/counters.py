"""Keys that one cube shows each row of a call, in closed form.

A cube shows a row an interval of keys, and of these

    all                              ``k <= q``
    certain remainders of one form   ``(q - k) % 4 == 0``, ``k % 31 < 3``
    a box of key digits              ``abs(q // 64 - k // 64) <= 3 and abs(q % 64 - k % 64) <= 3``
    those in drawn blocks            ``random_blocks``, with any of the above

On each axis a box is again an interval, or certain remainders, so an axis is counted as a cube is, the digit in place of k.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sparsegen.schedule import shapes
from sparsegen.schedule.branches import walked_term
from sparsegen.schedule.digits import Axes, Conjunct, axes_of
from sparsegen.schedule.facts import chains, moduli
from sparsegen.schedule.forms import (
    BIG,
    K,
    Lin,
    Opaque,
    Q,
    Var,
    floor_,
    substitute,
    value,
    variables,
)
from sparsegen.schedule.formula import ANYWHERE, Cube, Range, as_mod
from sparsegen.schedule.intervals import bounds
from sparsegen.schedule.limits import Limits, limits
from sparsegen.schedule.tree import Tiling
from sparsegen.schedule.verify import Call, block_table, environment
from sparsegen.spec.expr import Term

LONGEST_PERIOD = 1 << 16  # of remainders that are counted in closed form
BOX_COST = 8  # times an interval's, of one drawn block


class Rows:
    """Some rows of a call.  The value of every form is worked out once: the terms of a sum share most of them.

    ``watched``: ``signs`` are those of all differences that a counter has decided by, in the order of its steps.
    """

    def __init__(self, call: Call, q: np.ndarray, *, watched: bool = False):
        self.q, self.env = q, environment(call, q, q * 0)
        self.watched = watched
        self.signs: list[np.ndarray] = []
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
            if self.watched:  # twice and one more, as equal is on the side of greater
                at = self.of(test.lin)
                self.decide(2 * (at - test.lo) + 1 if test.lo > -BIG else at * 0)
                self.decide(2 * (test.hi - at) + 1 if test.hi < BIG else at * 0)
        return self._tests[test]

    def decide(self, difference: np.ndarray) -> None:
        """Note what hangs on whether this is above or below 0."""
        self.signs.append(np.sign(difference))


@dataclass(frozen=True)
class Counter:
    """An interval of keys, and of these certain remainders of ``sign * k + phase(q)``, or a box; or only drawn blocks."""

    got: Limits
    drawn: Term | None = None  # only keys in the blocks that this random_blocks term draws
    sign: int = 0  # 0: no remainders
    phase: Lin | None = None
    below: Any = (
        None  # int64 [period + 1]: how many values below an index pass, of one period of the form
    )
    box: Box | None = None

    @property
    def drawn_blocks(self) -> int:
        """Drawn blocks to look at for a row, weighed by the work that one is."""
        blocks = 0 if self.drawn is None else int(self.drawn["per_row"])
        return blocks * (1 if self.box is None else BOX_COST)

    def key(self) -> Any:
        """Equal for counters of the same keys."""
        got = self.got
        sets = [frozenset(x) for x in (got.lower, got.upper, got.rows)]
        passing = None if self.below is None else self.below.tobytes()
        box = None if self.box is None else self.box.key()
        return (*sets, self.drawn, self.sign, self.phase, passing, box)

    def per_row(self, rows: Rows) -> np.ndarray:
        """Visible keys of every row."""
        lo, hi = self.ends(rows, rows.env["k_first"], rows.env["k_last"])
        if self.drawn is None:
            return self.between(lo, hi, rows)
        runs = _drawn_runs(self.drawn, rows)
        parts = (self.between(np.maximum(lo, a), np.minimum(hi, b), rows) for a, b in runs)
        return sum(parts, np.zeros_like(lo))

    def ends(self, rows: Rows, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """First and last key of every row's interval; the last before the first where there is none."""
        lo = np.full(rows.q.shape, first, np.int64)
        hi = np.full(rows.q.shape, last, np.int64)
        for form in self.got.lower:
            if rows.watched:
                rows.decide(lo - rows.of(form))
            np.maximum(lo, rows.of(form), out=lo)
        for form in self.got.upper:
            if rows.watched:
                rows.decide(hi - rows.of(form))
            np.minimum(hi, rows.of(form), out=hi)
        for test in self.got.rows:
            hi = np.where(rows.hold(test), hi, lo - 1)
        return lo, hi

    def between(self, lo: np.ndarray, hi: np.ndarray, rows: Rows) -> np.ndarray:
        """Passing keys from ``lo`` to ``hi``, which lie in the interval."""
        if rows.watched:
            rows.decide(hi - lo + 1)
        if self.box is not None:
            inside = self.box.below(hi + 1, rows) - self.box.below(lo, rows)
            return np.where(hi >= lo, inside, 0)
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


@dataclass(frozen=True)
class Box:
    """Keys by their digits, each free of the others.  ``steps``: of the axes, the top one last."""

    steps: tuple[int, ...]
    axes: tuple[Counter, ...]  # the digit in place of k

    def key(self) -> Any:
        """Equal for boxes of the same keys."""
        return self.steps, tuple(axis.key() for axis in self.axes)

    def below(self, x: np.ndarray, rows: Rows) -> np.ndarray:
        """Keys of the box in [0, x), for every row.

        From the lowest axis up: below x are the keys with a lesser digit, and those with x's own digit that are below x
        on the axes beneath.  So the ragged last row of a grid, and any other interval of keys, needs no care.
        """
        found, every = np.zeros_like(x), np.ones_like(x)
        for t, (step, axis) in enumerate(zip(self.steps, self.axes, strict=True)):
            top = t + 1 == len(self.steps)
            radix = None if top else self.steps[t + 1] // step
            digit = x // step if radix is None else x // step % radix
            lo, hi = axis.ends(rows, 0, rows.env["k_last"] // step if radix is None else radix - 1)
            if rows.watched:
                for difference in (hi - digit + 1, hi - digit, lo - digit):
                    rows.decide(difference)
            less = axis.between(lo, np.minimum(hi, digit - 1), rows)
            same = axis.between(np.maximum(lo, digit), np.minimum(hi, digit), rows)
            found = less * every + same * found
            every = every if top else every * axis.between(lo, hi, rows)
        return found


def _drawn_runs(term: Term, rows: Rows) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """First and last key of every block drawn for each row; runs of blocks that are not there end before they begin."""
    place = rows.q // term["block"]
    table = block_table(term, int(place[0]), int(place[-1]), rows.env["kv_len"])
    for one in table[place - place[0]].astype(np.int64).T:
        first = one * term["block"]
        yield first, np.where(one < 0, first - 1, first + term["block"] - 1)


def _strictest(forms: tuple[Lin, ...], sign: int) -> tuple[Lin, ...]:
    """The forms without those that another one always exceeds (``sign`` 1) or undercuts (-1)."""
    kept = list(dict.fromkeys(forms))
    for f in kept[:]:
        others = (g for g in kept if g is not f)
        if any(bounds((g - f) * sign, ANYWHERE)[0] >= 0 for g in others):
            kept.remove(f)
    return tuple(kept)


def counter_of(cube: Cube) -> Counter | None:
    """What counts a cube; None where nothing here does."""
    drawn = walked_term(cube)
    got = limits(tuple(r for r in cube if drawn is None or r.lin != Lin({Opaque(drawn): 1})))
    got = replace(got, lower=_strictest(got.lower, 1), upper=_strictest(got.upper, -1))
    found = _of_remainders(got) or _of_box(got)
    return found if found is None else replace(found, drawn=drawn)


def _of_remainders(got: Limits) -> Counter | None:
    """Where there are no tests, or all are of remainders of one form."""
    if not got.tests:
        return Counter(got)
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
    below = np.concatenate([[0], np.cumsum(ok)])
    return Counter(got, None, sign, phase, below)


def _of_box(got: Limits) -> Counter | None:
    """Where, in the digits of some chain of their moduli, each test is of one digit or of the row."""
    single, apart = shapes.moduli([got.tests], "k")
    for chain in chains(sorted(single | apart)[: shapes.MOST_MODULI])[1:]:
        parts = _by_digit(got.tests, axes_of(Tiling(chain, (1,) * len(chain), chain)))
        if parts is None:
            continue
        axes = [_of_remainders(limits(tuple(tests))) for tests in parts.digits]
        if all(axis is not None for axis in axes):
            box = Box((1, *chain), tuple(axis for axis in axes if axis is not None))
            return Counter(replace(got, rows=(*got.rows, *parts.rows), tests=()), box=box)
    return None


@dataclass(frozen=True)
class _Parts:
    """Conjuncts by what they are of: the row alone, or one key digit, there written ``k``.  Digits of q are written out."""

    rows: tuple[Range, ...]
    digits: tuple[tuple[Range, ...], ...]


def _by_digit(tests: Iterable[Range], axes: Axes) -> _Parts | None:
    """The tests in digits; None where one couples two key digits, or reads the key itself."""
    parts: dict[str, list[Range]] = {name: [] for name in ("", *axes.keys)}
    for c in map(axes.conjunct, tests):
        names = variables(c.lin) & axes.key_names
        if len(names) > 1 or "k" in names:
            return None
        name = next(iter(names), "")
        parts[name].append(_written_out(c, name, axes))
    return _Parts(tuple(parts[""]), tuple(tuple(parts[y]) for y in axes.keys))


def _written_out(c: Conjunct, digit: str, axes: Axes) -> Range:
    """A conjunct with its key digit as k and the digits of q as forms of q: values on rows are shared between chains."""
    tops = [floor_(Q, step) for step in (1, *axes.tiling.q_cuts)]
    forms = {digit: K, axes.rows[-1]: tops[-1]}
    for x, (low, high) in zip(axes.rows, itertools.pairwise(tops)):
        forms[x] = low - high * axes.radix(x)
    return Range(substitute(c.lin, forms), c.lo, c.hi)


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
