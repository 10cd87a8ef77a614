"""The schedule of the transposed mask, for gradients of keys and values: its rows are keys, its keys are queries.

The mask's formula is written with q and k swapped and goes through the same analysis, so a column that many queries
see (a sink, a global key) is a heavy row there and is split over the queries.  Two things are not symmetric:

Queries may lie before position 0 and keys may not.  The analysis takes keys to be at positions >= 0, so a query at
position p is the key p + ``shift`` of the transposed schedule.  The shift is 0 where queries before position 0 see
nothing: then a call leaves these out.  Else it is a multiple of every modulus in the formula, so that all forms keep
their shape, and calls that begin before ``-shift`` are not served.

Keys are known to be at positions >= 0, so rows of the transposed schedule are: proofs take that into account.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from sparsegen.schedule import search
from sparsegen.schedule.branches import simplify
from sparsegen.schedule.build import refuse_run_time_data
from sparsegen.schedule.canonical import reduced
from sparsegen.schedule.cost import Call
from sparsegen.schedule.facts import ANALYSIS, ANY_LENGTH, Domain, moduli
from sparsegen.schedule.forms import (
    BIG,
    Floor,
    K,
    Lin,
    Opaque,
    Pick,
    Prod,
    Q,
    Table,
    Var,
    floor_,
    product,
    var,
)
from sparsegen.schedule.formula import Cube, Range, conj, ranged
from sparsegen.schedule.machine import H200, Machine, Sizes
from sparsegen.schedule.prepare import Draft, Rules, prepare
from sparsegen.schedule.search import TILE, Candidate
from sparsegen.schedule.tree import Schedule
from sparsegen.spec import expr as ex

ROWS = Domain(0, ANY_LENGTH.q_hi, ANY_LENGTH.k_hi, ANY_LENGTH.len_hi)  # keys are the rows
SHIFT = 1 << 24  # queries before position 0 that a call may have, at least
MOST_SHIFT = (
    1 << 27
)  # beyond it a multiple of all moduli would eat up the reach of 32-bit arithmetic


@dataclass(frozen=True)
class Transposed:
    """Candidate schedules of the transposed mask, cheapest first, and what is added to the position of a query there.

    ``max_position`` and ``min_position`` of the schedules are about positions before they are shifted, as in
    ``tree.Schedule``: what is proven for the mask is proven for both readings of it.
    """

    candidates: tuple[Candidate, ...]
    shift: int

    @property
    def schedule(self) -> Schedule:
        return self.candidates[0].schedule


def transpose(pattern: Any, problem: Any = None, tile: tuple[int, int] = TILE) -> Transposed:
    """The transposed schedules of a pattern.  ``tile``: keys and queries of a tile that they are compared at."""
    refuse_run_time_data(pattern)
    problem = problem if problem is not None else pattern.problem
    grids = [prod(shape) for _, node in pattern.nodes() if (shape := node.grid()) is not None]
    return transpose_exprs(
        pattern.exprs,
        pattern.align,
        problem.lengths if problem else (),
        tile,
        most_keys=min(grids, default=None),
        sizes=_by_group(Sizes.of(problem)) if problem else None,
    )


def transpose_exprs(
    rules: Rules,
    align: str = "bottom_right",
    lengths: Iterable[tuple[int, int]] = (),
    tile: tuple[int, int] = TILE,
    *,
    most_keys: int | None = None,
    sizes: Sizes | None = None,
    machine: Machine = H200,
) -> Transposed:
    """The same for masks per group of heads, see ``search.candidates``."""
    lengths = tuple(lengths)
    q_len, kv_len = search.typical_call(lengths, most_keys)
    with ANALYSIS:
        plan = prepare(rules, align, lengths)
        shift = shift_of(plan.classes)
        drafts = tuple(replace(c, cubes=swapped(c.cubes, shift)) for c in plan.classes)
        plan = replace(plan, align="top_left", classes=drafts)
        first = max(kv_len - q_len if align == "bottom_right" else 0, -shift)
        call: Call = (0, kv_len, first + shift, q_len)
        found = search.of_plan(plan, call, tile, sizes or Sizes(), machine, ROWS)
    return Transposed(found, shift)


def _by_group(sizes: Sizes) -> Sizes:
    return replace(sizes, group=sizes.heads // sizes.kv_heads)


# ---- queries before position 0 ----


def shift_of(classes: Iterable[Draft]) -> int:
    """What is added to query positions, for all classes alike: 0 where no query before position 0 sees anything."""
    classes = tuple(classes)
    if not any(_sees_before_zero(c) for c in classes):
        return 0
    cubes = [cube for c in classes for cube in c.cubes]
    step = math.lcm(*moduli(cubes), *(t["block"] for t in _terms(cubes)))
    return -(-SHIFT // step) * step if step <= MOST_SHIFT else SHIFT


def _sees_before_zero(c: Draft) -> bool:
    if c.min_position is not None and c.min_position >= 0:
        return False  # nothing is promised there
    for cube in c.cubes:
        before = conj([*cube, Range(Q, -BIG, -1)])
        drawn = any(_drawn(r) for r in cube)
        if before is not None and not drawn and simplify(before, (), ANY_LENGTH) is not None:
            return True
    return False


def _drawn(r: Range) -> bool:
    """Is it membership in random_blocks?  Queries before position 0 have no block there."""
    (g, _), *_ = r.lin.terms
    return isinstance(g, Opaque) and isinstance(g.expr, ex.Term) and r.lo == 1


def _terms(cubes: Iterable[Cube]) -> Iterable[ex.Term]:
    for cube in cubes:
        for r in cube:
            for g, _ in r.lin.terms:
                if isinstance(g, Opaque):
                    yield from _terms_in(g.expr)


def _terms_in(e: Any) -> Iterable[ex.Term]:
    if isinstance(e, ex.Term):
        yield e
    for part in _parts(e):
        yield from _terms_in(part)


def _parts(e: Any) -> tuple[Any, ...]:
    if isinstance(e, (ex.And, ex.Or, ex.Min, ex.Max)):
        return e.args
    return tuple(getattr(e, name) for name in ("a", "b") if hasattr(e, name))


# ---- the swap ----


def swapped(cubes: tuple[Cube, ...], shift: int) -> tuple[Cube, ...]:
    """The cubes with q and k swapped and ``shift`` taken off the new k, reduced for rows from 0 on."""
    out = []
    for cube in cubes:
        parts = [ranged(swap_form(r.lin, shift), r.lo, r.hi) for r in cube]
        joined = None if False in parts else conj(r for r in parts if isinstance(r, Range))
        if joined is not None:
            out.append(joined)
    return reduced(tuple(out), ROWS).cubes


def swap_form(lin: Lin, shift: int) -> Lin:
    """A form with q and k, q_len and kv_len swapped; the new k is less by ``shift``."""
    swap = lambda a: swap_form(a, shift)
    out = Lin((), lin.const)
    for g, c in lin.terms:
        match g:
            case Var(name):
                new = {"q": K - shift, "k": Q}.get(name, var(_OTHER.get(name, name)))
            case Floor(a, m):
                new = floor_(swap(a), m)
            case Prod(a, b):
                new = product(swap(a), swap(b))
            case Pick(op, args):
                new = Lin({Pick(op, tuple(map(swap, args))): 1})
            case Table(name, a):
                new = Lin({Table(name, swap(a)): 1})
            case Opaque(e):
                new = Lin({Opaque(swap_expr(e, shift)): 1})
        out = out + new * c
    return out


TRANSPOSED = (
    "transposed"  # setting of a term that is asked with q and k swapped: its value is the shift
)
_OTHER = {"q_len": "kv_len", "kv_len": "q_len"}


def swap_expr(e: Any, shift: int) -> Any:
    """The same for an expression that has no normal form."""
    swap = lambda a: swap_expr(a, shift)
    match e:
        case ex.Name("q"):
            return ex.Sub(ex.K, ex.Const(shift)) if shift else ex.K
        case ex.Name("k"):
            return ex.Q
        case ex.Name(name):
            return ex.Name(_OTHER.get(name, name))
        case ex.Term(kind, params):
            return ex.Term(kind, tuple(sorted((*params, (TRANSPOSED, shift)))))
        case ex.And(args) | ex.Or(args) | ex.Min(args) | ex.Max(args):
            return type(e)(tuple(map(swap, args)))
        case ex.Compare(op, a, b):
            return ex.Compare(op, swap(a), swap(b))
        case ex.Neg(a) | ex.Abs(a) | ex.Not(a):
            return type(e)(swap(a))
        case ex.Add(a, b) | ex.Sub(a, b) | ex.Mul(a, b) | ex.FloorDiv(a, b) | ex.Mod(a, b):
            return type(e)(swap(a), swap(b))
    return e
