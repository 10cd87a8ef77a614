"""How much of every block of a pattern is visible, branch by branch, without walking its cells.

A picture has rows x columns blocks.  In each block row a few query rows are looked at; for each of them a segment
gives its range of keys in closed form.  Without further tests the overlap with a block is counted exactly, with
tests it is sampled.  The cost depends on the picture, never on the length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from sparsegen.schedule.forms import Lin
    from sparsegen.schedule.formula import Cube, Range
    from sparsegen.schedule.tree import HeadClass, Schedule, Segment
    from sparsegen.spec.expr import Term

Env = dict[str, Any]

_ROWS = 4  # query rows looked at in a block row
_POINTS = 24  # keys looked at in a block, for one row, where a segment has tests
_AT_ONCE = 32  # rows: the keys that they look at are a few megabytes


@dataclass(frozen=True)
class Grid:
    """Visible cells among those looked at.

    ``counts``: branch -> float [rows, cols]; ``looked``: float [rows, cols]; ``q_edges``, ``k_edges``: first index of each
    block and the length at the end.  ``exact``: every cell was looked at.
    """

    counts: dict[str, Any]
    looked: Any
    q_edges: tuple[int, ...]
    k_edges: tuple[int, ...]
    exact: bool

    @property
    def shares(self) -> dict[str, Any]:
        """Branch -> visible share of every block, 0 to 1."""
        return {name: count / self.looked for name, count in self.counts.items()}

    def total(self) -> Any:
        """Visible share of every block over all branches (they are disjoint); float [rows, cols]."""
        return sum(self.counts.values(), self.looked * 0.0) / self.looked


def edges(length: int, most: int) -> tuple[int, ...]:
    """Cuts 0..length into at most ``most`` runs whose sizes differ by one at most."""
    parts = min(length, most)
    return tuple(length * i // parts for i in range(parts + 1))


def of_schedule(
    schedule: Schedule,
    head: HeadClass,
    q_len: int,
    kv_len: int,
    size: tuple[int, int],
) -> Grid:
    """Grid of one head class of a position-only pattern, at most ``size`` = (rows, columns) blocks."""
    q_edges, k_edges = edges(q_len, size[0]), edges(kv_len, size[1])
    rows, looked = sample_rows(q_edges)
    q = rows + (kv_len - q_len if schedule.align == "bottom_right" else 0)
    env: Env = {"k_first": 0, "k_last": kv_len - 1, "q_len": q_len, "kv_len": kv_len}
    counts: dict[str, Any] = {}
    for sweep in head.sweeps:
        for segment in sweep.segments:
            parts = [
                _visible(
                    segment, some, k_edges, {**env, "q": some, "q_first": some, "q_last": some}
                )
                for some in np.array_split(q, -(-len(q) // _AT_ONCE))
            ]
            by_block = over_rows(np.concatenate(parts), q_edges, looked)
            counts[segment.name] = counts.get(segment.name, 0.0) + by_block
    area = over_rows(np.broadcast_to(np.diff(k_edges), (len(q), len(k_edges) - 1)), q_edges, looked)
    exact = looked == 1 and q_len == len(rows) and max(np.diff(k_edges)) <= _POINTS
    return Grid(counts, area, q_edges, k_edges, bool(exact))


def sample_rows(q_edges: tuple[int, ...], most: int = _ROWS) -> tuple[Any, int]:
    """Row indexes, the same number in every block row (int64, block rows outermost), and that number."""
    first, size = np.array(q_edges[:-1]), np.diff(q_edges)
    looked = int(min(most, size.min()))
    # First and last row of a block are always among them: corners of bands show.
    steps = np.arange(looked) / max(looked - 1, 1)
    return (first[:, None] + np.round(steps * (size[:, None] - 1)).astype(np.int64)).ravel(), looked


def over_rows(values: Any, q_edges: tuple[int, ...], looked: int) -> Any:
    """Sum over the rows looked at in each block row: the ends stand for themselves, those between for all the others."""
    values = values.reshape(len(q_edges) - 1, looked, -1)
    weights = np.ones((len(q_edges) - 1, looked))
    if looked > 2:
        weights[:, 1:-1] = ((np.diff(q_edges) - 2) / (looked - 2))[:, None]
    return (values * weights[..., None]).sum(1)


def _visible(segment: Segment, q: Any, k_edges: tuple[int, ...], env: Env) -> Any:
    """Visible keys of every row in every block column, float [rows, cols].

    Alternatives of a masked branch are taken one by one, each without the earlier ones: the range of each is narrow
    where the range of all may be wide, so that thin bands are met.
    """
    from sparsegen.schedule.branches import walked_term
    from sparsegen.schedule.limits import limits

    first, last = np.array(k_edges[:-1])[None], np.array(k_edges[1:])[None] - 1
    total = np.zeros((len(q), len(k_edges) - 1))
    excluded: list[Cube] = list(segment.branch.minus)
    for cube in segment.branch.alts:
        term = walked_term(cube)
        plain = tuple(r for r in cube if term is None or not _reads(r, term))
        got = limits(plain)
        live = np.ones(len(q), bool)
        for row in got.rows:
            live &= row.test(env)
        lo, hi = _on_rows(got.row_lo, q, env), _on_rows(got.row_hi, q, env)
        for run_lo, run_hi in [(0, env["kv_len"])] if term is None else _drawn_runs(term, q, env):
            a = np.maximum(np.maximum(lo, run_lo)[:, None], first)
            b = np.minimum(np.minimum(hi, run_hi)[:, None], last)
            many = np.where(live[:, None], np.maximum(b - a + 1, 0), 0)
            total += _count(a, many, q, got.tests, excluded, env)
        excluded.append(cube)
    return total


def _reads(r: Range, term: Term) -> bool:
    from sparsegen.schedule.forms import Opaque

    return Opaque(term) in dict(r.lin.terms)


def _on_rows(form: Lin, q: Any, env: Env) -> Any:
    from sparsegen.schedule.forms import value

    return np.broadcast_to(value(form, env), q.shape)


def _count(lo: Any, many: Any, q: Any, tests: Any, excluded: list[Cube], env: Env) -> Any:
    """Of the ``many`` keys from ``lo`` on, those that pass; float, estimated from some of them if there are tests."""
    out: Any = many.astype(float)
    if not tests and not excluded:
        return out
    met = np.nonzero(many)  # most blocks of a picture have no key of a row
    if not len(met[0]):
        return out
    k, inside = _sample_keys(lo[met], many[met])
    points: Env = {**env, "q": q[met[0]][:, None], "k": k}
    at: Env = {**points, "@terms": lambda term: _truth(term, points)}
    seen = inside
    for test in tests:
        seen = seen & test.test(at)
    for cube in excluded:
        hidden: Any = True
        for r in cube:
            hidden = hidden & r.test(at)
        seen = seen & ~np.asarray(hidden, bool)
    out[met] = seen.sum(-1) * many[met] / inside.sum(-1)
    return out


def _sample_keys(lo: Any, many: Any) -> tuple[Any, Any]:
    """Up to ``_POINTS`` keys of each run [lo, lo + many): all of a short run, else spread irregularly.

    Regular steps would agree with a stride of the pattern and see all of it or nothing.
    """
    at = np.arange(_POINTS)
    jitter = np.random.default_rng(0).random(_POINTS)
    spread = ((at + jitter) * many[..., None] / _POINTS).astype(np.int64)
    step = np.where(many[..., None] <= _POINTS, at, spread)
    return lo[..., None] + step, step < many[..., None]


def _drawn_blocks(term: Term, q: Any, env: Env) -> tuple[Any, Any]:
    """Key blocks that a random_blocks term draws: int64 [different block rows, per_row] (-1: none), and each row's place."""
    from sparsegen.spec.random_blocks import random_block_table

    block, blocks = term["block"], -(-env["kv_len"] // term["block"])
    per_row = min(term["per_row"], blocks)
    numbers, place = np.unique(q // block, return_inverse=True)
    drawn = [random_block_table(block, per_row, term["seed"], int(r), 1, blocks) for r in numbers]
    return np.concatenate(drawn).astype(np.int64), place.reshape(np.shape(q))


def _drawn_runs(term: Term, q: Any, env: Env) -> Iterator[tuple[Any, Any]]:
    """The runs of keys (first, last) of every row's drawn blocks; empty runs end before they begin."""
    drawn, place = _drawn_blocks(term, q, env)
    for one in drawn[place].T:
        yield one * term["block"], np.where(one < 0, -1, (one + 1) * term["block"] - 1)


def _truth(term: Term, at: Env) -> Any:
    """Whether a random_blocks term shows the points (q, k) of ``at``."""
    drawn, place = _drawn_blocks(term, at["q"], at)
    member = np.zeros((len(drawn), -(-at["kv_len"] // term["block"]) + 1), bool)
    member[np.arange(len(drawn))[:, None], drawn] = True  # -1 marks the extra column
    # Sampled keys may lie beyond the last one; the caller does not count those.
    return member[place, np.minimum(at["k"], at["kv_len"] - 1) // term["block"]]
