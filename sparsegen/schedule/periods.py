"""Sums over the rows of a call by periods: their cost hangs on the periods of a formula, hardly on the length.

After one period every form of a row has grown by a constant.  So the rows that lie whole periods apart see numbers of
keys on a straight line, for as long as no comparison between two forms turns round; where one does, is found by halving.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from sparsegen.schedule.counters import Counter, Rows
from sparsegen.schedule.forms import Floor, Lin, Var
from sparsegen.schedule.verify import Call

ROWS_AT_ONCE = 1 << 13  # the values of one form are 64 KiB: they stay in the cache of a core
WORTH = 8  # periods in a call from which on they are cheaper than its rows

MOST_ROWS = 1 << 26  # looked at one by one: some seconds

Terms = Sequence[tuple[int, Counter]]  # signed


def affordable(terms: Terms, q_len: int) -> bool:
    """Can so many rows be counted without looking at more than ``MOST_ROWS``?"""
    period, periods = _periods(terms, q_len)
    return q_len - period * periods + 2 * period <= MOST_ROWS


def total(terms: Terms, call: Call) -> int:
    """Keys that the counters show all rows of a call, each with its sign."""
    start, q_len, _, _ = call
    period, periods = _periods(terms, q_len)
    out = 0
    for q in _blocks(period * periods, q_len):
        out += _sum(_per_row(terms, Rows(call, start + q)))
    for q in _blocks(0, period):
        out += _along(terms, call, start + q, period, periods)
    return out


def _periods(terms: Terms, q_len: int) -> tuple[int, int]:
    """(rows of a period, whole periods of a call); (0, 0) where its rows are better looked at one by one."""
    period = period_of(terms)
    return (0, 0) if period is None or period * WORTH > q_len else (period, q_len // period)


def _blocks(first: int, end: int) -> Iterator[np.ndarray]:
    for i in range(first, end, ROWS_AT_ONCE):
        yield np.arange(i, min(i + ROWS_AT_ONCE, end), dtype=np.int64)


def _per_row(terms: Terms, rows: Rows) -> np.ndarray:
    return sum((sign * c.per_row(rows) for sign, c in terms), start=np.zeros_like(rows.q))


def _sum(values: np.ndarray) -> int:
    return int(values.sum())


def _along(terms: Terms, call: Call, q: np.ndarray, period: int, periods: int) -> int:
    """The sum over rows q, q + period, ..., so many of each."""

    def at(rows: np.ndarray, j: int) -> tuple[np.ndarray, list[np.ndarray]]:
        here = Rows(call, rows + j * period, watched=True)
        return _per_row(terms, here), here.signs

    return _halved(at, q, 0, periods - 1)


def _halved(
    at: Callable[[np.ndarray, int], tuple[np.ndarray, list[np.ndarray]]],
    rows: np.ndarray,
    first: int,
    last: int,
) -> int:
    """The sum of ``at`` over first..last.  Two values span a line wherever no sign is turned round between them."""
    out, todo = 0, [(rows, first, last)]
    while todo:
        rows, first, last = todo.pop()
        a, b = at(rows, first), at(rows, last)
        straight = np.full(rows.shape, last - first < 2)
        if last - first >= 2:
            straight = np.logical_and.reduce([x * y >= 0 for x, y in zip(a[1], b[1], strict=True)])
            straight = np.broadcast_to(straight, rows.shape)
        if first == last:
            out += _sum(a[0])
            continue
        # An arithmetic series, in ints of any size.
        out += (_sum(a[0][straight]) + _sum(b[0][straight])) * (last - first + 1) // 2
        rest, mid = rows[~straight], (first + last) // 2
        if len(rest):
            todo += [(rest, first, mid), (rest, mid + 1, last)]
    return out


def period_of(terms: Terms) -> int | None:
    """Rows after which every counter is where it was, a constant further; None: some counter never is."""
    try:
        return math.lcm(*(_of_counter(c) for _, c in terms))
    except _NoPeriod:
        return None


class _NoPeriod(Exception):
    """Some form has none."""


def _of_counter(counter: Counter, flat: bool = False) -> int:
    """``flat``: no end of its interval may grow at all."""
    if counter.drawn is not None:
        raise _NoPeriod
    grain = 1 if counter.below is None else len(counter.below) - 1
    out = math.lcm(*(_turn(r.lin)[0] for r in counter.got.rows))
    box = counter.box
    if box is not None:
        *lower, top = box.axes
        # Keys below a key are a product over the axes: a line only while all digits but the top one stand still.
        out = math.lcm(out, _of_counter(top), *(_of_counter(axis, flat=True) for axis in lower))
        grain = box.steps[-1] * (1 if top.below is None else len(top.below) - 1)
    phase = () if counter.phase is None else (counter.phase,)
    for form in (*counter.got.lower, *counter.got.upper, *phase):
        period, growth = _turn(form)
        if flat and growth:
            raise _NoPeriod
        out = math.lcm(out, period * (grain // math.gcd(growth, grain)))
    return out


def _turn(form: Lin) -> tuple[int, int]:
    """(period, growth): form(q + period) = form(q) + growth for every q."""
    parts: list[tuple[int, int, int]] = []
    for g, c in form.terms:
        if isinstance(g, Var):
            parts.append((c, 1, int(g.name == "q")))
        elif isinstance(g, Floor):
            period, growth = _turn(g.arg)
            times = g.m // math.gcd(growth, g.m)
            parts.append((c, period * times, growth * times // g.m))
        else:
            raise _NoPeriod
    period = math.lcm(*(p for _, p, _ in parts))
    return period, sum(c * growth * (period // p) for c, p, growth in parts)
