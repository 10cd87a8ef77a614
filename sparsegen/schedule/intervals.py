"""Intervals of forms, on numbers, on arrays over all tiles, and on schedule symbols: one analysis, three readings.

On symbols an interval's ends are forms again (``q_first - 1023``), and ``pick`` keeps them short by what is known of
the symbols on every call.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from sparsegen.schedule.forms import (
    BIG,
    K_FIRST,
    Q_FIRST,
    UNREAD,
    Env,
    Floor,
    Generator,
    Lin,
    Opaque,
    Pick,
    Prod,
    Table,
    Var,
    as_form,
    floor_,
    least_or_most,
    product,
    substitute,
    var,
)


def fdiv(a: Any, m: int) -> Any:
    """floor(a / m) of an int, an array or a form."""
    return floor_(a, m) if isinstance(a, Lin) else a // m


def cdiv(a: Any, m: int) -> Any:
    """ceil(a / m) of an int, an array or a form."""
    return fdiv(a + (m - 1), m)


def vmax(a: Any, b: Any) -> Any:
    """The greater of two ints, arrays or forms."""
    if type(a) is int and type(b) is int:  # by far the most
        return a if a >= b else b
    return _vpick("max", a, b)


def vmin(a: Any, b: Any) -> Any:
    """The less of two ints, arrays or forms."""
    if type(a) is int and type(b) is int:
        return a if a <= b else b
    return _vpick("min", a, b)


def _vpick(op: str, a: Any, b: Any) -> Any:
    if isinstance(a, Lin) or isinstance(b, Lin):
        return pick(op, [x if isinstance(x, Lin) else Lin((), int(x)) for x in (a, b)])
    return least_or_most(op, a, b)


def pick_args(lin: Lin, op: str) -> tuple[Lin, ...]:
    """The arguments where ``lin`` is a plain Pick of this kind, else ``lin`` itself."""
    if len(lin.terms) == 1 and lin.terms[0][1] == 1 and not lin.const:
        g = lin.terms[0][0]
        if isinstance(g, Pick) and g.op == op:
            return g.args
    return (lin,)


def pick(op: str, forms: Iterable[Lin]) -> Lin:
    """Least or greatest of several forms in schedule symbols, without arguments that another one always beats."""
    args = list(dict.fromkeys(y for x in forms for y in pick_args(x, op)))
    for x in list(args):
        if any(y != x and (at_least(y, x) if op == "max" else at_least(x, y)) for y in args):
            args.remove(x)
    return args[0] if len(args) == 1 else Lin({Pick(op, tuple(sorted(args, key=str))): 1})


@lru_cache(maxsize=1 << 14)
def at_least(a: Lin, b: Lin) -> bool:
    """Is a >= b proven for all values of the schedule symbols?"""
    if len(args := pick_args(a, "min")) > 1:
        return all(at_least(x, b) for x in args)
    if len(args := pick_args(b, "max")) > 1:
        return all(at_least(a, x) for x in args)
    # Only now the steps that may lose a proof: one argument need not do it everywhere.
    if len(args := pick_args(a, "max")) > 1:
        return any(at_least(x, b) for x in args)
    if len(args := pick_args(b, "min")) > 1:
        return any(at_least(a, x) for x in args)
    return bool(bounds(ordered(a - b), SYMBOLS)[0] >= 0)


MOST_AXES = 4  # digits of a position at most
_AFTER_FIRST = {"q_last": Q_FIRST + var("rows"), "k_last": K_FIRST + var("keys")} | {
    f"x{t}_last": var(f"x{t}_first") + var(f"x{t}_rows") for t in range(MOST_AXES)
}


@lru_cache(maxsize=1 << 14)
def ordered(lin: Lin) -> Lin:
    """The form with q_last = q_first + rows and the like, so that bounds see which symbol is the greater."""
    return substitute(lin, _AFTER_FIRST)


class _Symbols(dict):  # type: ignore[type-arg]
    """What is known of schedule symbols on any call: keys are >= 0, a tile has a row, a call has a key.

    Digits have more bounds, but these depend on the tiling (``digits``); x0 is never a top axis, so never negative.
    """

    def __missing__(self, name: str) -> tuple[int, int]:
        if name in ("q_len", "kv_len"):
            return 1, BIG
        if name in _NOT_NEGATIVE or name[0] == "y" or name.endswith("_rows"):
            return 0, BIG
        return -BIG, BIG


_NOT_NEGATIVE = {"k", "k_first", "k_last", "rows", "keys", "x0", "x0_first", "x0_last"}


SYMBOLS = _Symbols()


def gen_bounds(g: Generator, env: Env) -> tuple[Any, Any]:
    """Interval of a generator."""
    if type(g) is Floor:  # by far the most
        lo, hi = bounds(g.arg, env)
        return fdiv(lo, g.m), fdiv(hi, g.m)
    match g:
        case Var(n):
            return env[n]  # type: ignore[no-any-return]
        case Table(n, a):
            return -BIG, BIG
        case Opaque(_):
            return 0, 1
        case Prod(a, b):
            (alo, ahi), (blo, bhi) = bounds(a, env), bounds(b, env)
            if any(isinstance(x, Lin) for x in (alo, ahi, blo, bhi)) and _never_negative(a, b):
                # on symbols nobody knows which corner is the least: here it is that of the least factors
                ends = (alo, blo), (ahi, bhi)
                return tuple(product(*map(as_form, pair)) for pair in ends)  # type: ignore[return-value]
            corners = [x * y if not (isinstance(x, Lin) and isinstance(y, Lin)) else product(x, y)
                       for x in (alo, ahi) for y in (blo, bhi)]  # fmt: skip
            lo = hi = corners[0]
            for c in corners[1:]:
                lo, hi = vmin(lo, c), vmax(hi, c)
            if a == b:  # a square
                lo = vmax(lo, 0)
            return lo, hi
        case Pick(op, args):
            (lo, hi), *more = [bounds(a, env) for a in args]
            for low, high in more:
                lo, hi = _vpick(op, lo, low), _vpick(op, hi, high)
            return lo, hi
    raise TypeError(f"not a generator: {g!r}")


def _never_negative(*forms: Lin) -> bool:
    return all(at_least(form, Lin()) for form in forms)


def bounds(lin: Lin, env: Env) -> tuple[Any, Any]:
    """Interval of a form.  A floor paired with its own argument is a remainder: a - m*floor(a/m) lies in [0, m-1].

    ``env`` maps each variable to (lo, hi): ints, arrays, or forms (then the result is a pair of forms).
    """
    lo: Any = lin.const
    hi: Any = lin.const
    for g, c in lin.terms:
        glo, ghi = env[g.name] if type(g) is Var else gen_bounds(g, env)
        lo, hi = (lo + c * glo, hi + c * ghi) if c > 0 else (lo + c * ghi, hi + c * glo)
    split = lin._remainder
    if split is UNREAD:
        split = lin._remainder = _remainder_in(lin)
    if split is not None:
        inner, m, s, rest = split
        rlo, rhi = bounds(rest, env)
        alo, ahi = bounds(inner, env)
        mlo = vmax(alo - fdiv(ahi, m) * m, 0)
        mhi = vmin(ahi - fdiv(alo, m) * m, m - 1)
        lo = vmax(lo, rlo + (s * mlo if s > 0 else s * mhi))
        hi = vmin(hi, rhi + (s * mhi if s > 0 else s * mlo))
    return lo, hi


@lru_cache(maxsize=1 << 14)
def _remainder_in(lin: Lin) -> tuple[Lin, int, int, Lin] | None:
    """(inner, m, s, rest) with lin = s * (inner mod m) + rest and a rest of fewer terms, the first there is; else None."""
    for g, c in lin.terms:
        if isinstance(g, Floor):
            for inner, m in remainders(g, lin):
                s = -c // m
                if terms_more(lin, inner, s) <= 0:  # and the floor itself leaves
                    return inner, m, s, (lin - inner * s).without(g)
    return None


def terms_more(lin: Lin, other: Lin, s: int) -> int:
    """How many terms more lin - s * other has than lin."""
    have, more = dict(lin.terms), 0
    for g, c in other.terms:
        here = have.get(g)
        more += 1 if here is None else -(here == s * c)
    return more


def remainders(g: Floor, lin: Lin) -> Iterable[tuple[Lin, int]]:
    """Ways to read c*g = c*floor(inner/m) so that inner - m*g can be split off."""
    c = next(d for h, d in lin.terms if h == g)
    if c % g.m == 0:
        yield g.arg, g.m
    for h, _ in lin.terms:
        if not isinstance(h, Floor) or h.arg != g.arg or h.m >= g.m or g.m % h.m:
            continue
        if c % (g.m // h.m) == 0:
            yield Lin({h: 1}), g.m // h.m
