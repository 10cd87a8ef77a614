"""From a boolean expression (``spec.expr``) to a DNF over integer forms.

An integer expression becomes a list of (guard cubes, value); a value is a *lattice*: max over i of min over j of
forms, as a tuple of tuples.  Sums, negation, floor and positive factors keep that shape exactly, so abs, min and max
need no case split except under % and products.  What does not fit (a divisor that is not a positive constant, a
normal form past its cap) stays one ``Opaque`` generator over the smallest expression that holds it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from sparsegen.errors import UnsupportedError
from sparsegen.schedule.forms import BIG, Lin, Opaque, floor_, mod_, product, var
from sparsegen.schedule.formula import (
    Blowup,
    Dnf,
    Range,
    dnf_and,
    dnf_not,
    dnf_or,
    lift,
    ranged,
)
from sparsegen.spec import expr as ex

Lattice = tuple[tuple[Lin, ...], ...]
Cases = list[tuple[Dnf, Lattice]]

# Decided by positions alone; every other Term needs run-time data.
STATIC_TERMS = ("random_blocks",)
MOST_BLOWUPS = (
    2  # parts of a conjunction that may fail before the others of their kind are not tried
)
MOST_FORMS = 64  # forms in one lattice

_SATISFIED = {"<": (-BIG, -1), "<=": (-BIG, 0), ">": (1, BIG), ">=": (0, BIG), "==": (0, 0)}
_OPPOSITE = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}


def to_dnf(e: ex.Bool, positive: bool = True) -> Dnf:
    """DNF of ``e`` (of its complement if not ``positive``).  Raises UnsupportedError on run-time terms."""
    match e:
        case ex.Truth(v):
            return [()] if v == positive else []
        case ex.Not(a):
            return to_dnf(a, not positive)
        case ex.Term(kind):
            if kind not in STATIC_TERMS:
                raise UnsupportedError(
                    f"node {kind}: masks decided by run-time data are not compiled yet"
                )
            return opaque(e, positive)
        case ex.Compare(op, a, b):
            op = op if positive else _OPPOSITE[op]
            try:
                return _compare(op, a, b)
            except (Blowup, _NotNormal):
                return opaque(e, positive)
        case ex.And(args) | ex.Or(args):
            parts = [to_dnf(a, positive) for a in args]
            if isinstance(e, ex.And) != positive:
                try:
                    return dnf_or(parts)
                except Blowup:
                    return opaque(e, positive)
            return _all_of(e, parts, positive)
    raise TypeError(f"not a boolean expression: {e!r}")


def opaque(e: ex.Bool, positive: bool = True) -> Dnf:
    """The DNF that only names ``e``."""
    return [(Range(Lin({Opaque(e): 1}), int(positive), int(positive)),)]


def _all_of(e: ex.And | ex.Or, parts: list[Dnf], positive: bool) -> Dnf:
    """Conjunction, plainest parts first; parts that would blow it up are kept together as one opaque generator."""
    out: Dnf = [()]
    left_out: list[int] = []
    for i in sorted(range(len(parts)), key=lambda j: len(parts[j])):
        try:
            if len(left_out) > MOST_BLOWUPS and len(parts[i]) > 1:
                raise Blowup
            out = dnf_and(out, parts[i])
        except Blowup:
            left_out.append(i)
    if left_out:
        rest = type(e)(tuple(e.args[i] for i in sorted(left_out)))
        out = dnf_and(out, opaque(rest, positive))
    return out


class _NotNormal(Exception):
    """No form says this."""


def _compare(op: str, a: ex.Int, b: ex.Int) -> Dnf:
    if op == "!=":
        return dnf_not(_compare("==", a, b))
    lo, hi = _SATISFIED[op]
    cases = _number(ex.Sub(a, b))
    return dnf_or(dnf_and(guard, _between(v, lo, hi)) for guard, v in cases)


def _between(v: Lattice, lo: int, hi: int) -> Dnf:
    """DNF of lo <= v <= hi: an upper bound is AND of ORs, a lower bound OR of ANDs."""
    if len(v) == len(v[0]) == 1:
        return lift(ranged(v[0][0], lo, hi))
    out: Dnf = [()]
    if hi < BIG:
        for x in v:
            out = dnf_and(out, dnf_or(lift(ranged(form, -BIG, hi)) for form in x))
    if lo > -BIG:
        low = []
        for x in v:
            part: Dnf = [()]
            for form in x:
                part = dnf_and(part, lift(ranged(form, lo, BIG)))
            low.append(part)
        out = dnf_and(out, dnf_or(low))
    return out


def _number(e: ex.Int) -> Cases:
    match e:
        case ex.Const(v):
            return _one(Lin((), int(v)))
        case ex.Name(n):
            if n not in ex.NAMES:
                raise UnsupportedError(f"{n}: lengths given at run time are not compiled yet")
            return _one(var(n))
        case ex.Neg(a):
            return [(g, _neg(v)) for g, v in _number(a)]
        case ex.Abs(a):
            return [(g, _within(v + _neg(v))) for g, v in _number(a)]
        case ex.Min(args) | ex.Max(args):
            out: Cases = []
            for chosen in itertools.product(*map(_number, args)):
                guard: Dnf = [()]
                for g, _ in chosen:
                    guard = dnf_and(guard, g)
                values = [v for _, v in chosen]
                if isinstance(e, ex.Min):
                    joined = _neg(_within(sum(map(_neg, values), ())))
                else:
                    joined = sum(values, ())
                if guard:
                    out.append((guard, _within(joined)))
            return out
        case ex.Add(a, b) | ex.Sub(a, b):
            right = _number(b) if isinstance(e, ex.Add) else [(g, _neg(v)) for g, v in _number(b)]
            return _pairs(_number(a), right, _add)
        case ex.Mul(a, b):
            return _pairs(_split(_number(a)), _split(_number(b)), _mul)
        case ex.FloorDiv(a, b):
            m = _divisor(b)
            return [(g, tuple(tuple(floor_(x, m) for x in p) for p in v)) for g, v in _number(a)]
        case ex.Mod(a, b):
            m = _divisor(b)
            return [(g, ((mod_(v[0][0], m),),)) for g, v in _split(_number(a))]
    raise TypeError(f"not an integer expression: {e!r}")


def _one(lin: Lin) -> Cases:
    return [([()], ((lin,),))]


def _divisor(e: ex.Int) -> int:
    cases = _number(e)
    lin = cases[0][1][0][0]
    if len(cases) > 1 or sum(map(len, cases[0][1])) > 1 or lin.terms or lin.const <= 0:
        raise _NotNormal
    return lin.const


def _within(v: Lattice) -> Lattice:
    if sum(map(len, v)) > MOST_FORMS:
        raise Blowup
    return v


def _neg(v: Lattice) -> Lattice:
    count = 1
    for p in v:
        count *= len(p)
    if count * len(v) > MOST_FORMS * 4:
        raise Blowup
    picks = (tuple(dict.fromkeys(-x for x in p)) for p in itertools.product(*v))
    return tuple(dict.fromkeys(picks))


def _add(v: Lattice, w: Lattice) -> Lattice:
    return tuple(tuple(dict.fromkeys(a + b for a in x for b in y)) for x in v for y in w)


def _mul(v: Lattice, w: Lattice) -> Lattice:
    return ((product(v[0][0], w[0][0]),),)


def _pairs(left: Cases, right: Cases, join: object) -> Cases:
    out: Cases = []
    for (g, x), (h, y) in itertools.product(left, right):
        both = dnf_and(g, h)
        if both:
            out.append((both, _within(join(x, y))))  # type: ignore[operator]
    return out


def _split(cases: Cases) -> Cases:
    """Guarded cases until every value is one form (pure max or pure min only)."""
    return [(g, ((x,),)) for guard, v in cases for g, x in _winners(guard, v)]


def _winners(guard: Dnf, v: Lattice) -> Iterator[tuple[Dnf, Lin]]:
    if len(v) > 1 and any(len(x) > 1 for x in v):
        raise _NotNormal
    forms, sign = ([x[0] for x in v], 1) if len(v) > 1 else (list(v[0]), -1)
    for i, a in enumerate(forms):
        won = guard
        for j, b in enumerate(forms):
            if i != j:  # a wins: it beats b, and b's that stand earlier strictly
                won = dnf_and(won, lift(ranged((a - b) * sign, 1 if j < i else 0, BIG)))
        if won:
            yield won, a
