"""A mask's expression as text that the compilers of peers read: plain arithmetic over q and k, as written by hand.

``plain`` first puts the lengths in, folds constants and takes negations away, so that neither dialect needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sparsegen.spec import expr as ex

OPERATORS: dict[type, str] = {
    ex.Add: "+",
    ex.Sub: "-",
    ex.Mul: "*",
    ex.FloorDiv: "//",
    ex.Mod: "%",
}
_NEGATED = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}
_FURTHEST = 1 << 26  # positions and their differences, where one is divided (``cute_text``)

Terms = Callable[[ex.Term], str]


def plain(e: Any, lengths: Mapping[str, int]) -> Any:
    """The same truth over q and k for these ``lengths`` (q_len, kv_len).

    No Truth below the root, no arithmetic of constants alone, Not only right before a Term.
    """
    again = lambda x: plain(x, lengths)
    match e:
        case ex.Name(n) if n in lengths:
            return ex.Const(lengths[n])
        case ex.Neg(a) | ex.Abs(a):
            return _folded(type(e)(again(a)))
        case ex.Add(a, b) | ex.Sub(a, b) | ex.Mul(a, b) | ex.FloorDiv(a, b) | ex.Mod(a, b):
            return _folded(type(e)(again(a), again(b)))
        case ex.Min(args) | ex.Max(args):
            return _extreme(type(e), tuple(map(again, args)))
        case ex.Compare(op, a, b):
            return _folded(ex.Compare(op, again(a), again(b)))
        case ex.And(args):
            return _joined(ex.And, tuple(map(again, args)), idle=ex.TRUE)
        case ex.Or(args):
            return _joined(ex.Or, tuple(map(again, args)), idle=ex.FALSE)
        case ex.Not(a):
            return _negated(again(a))
    return e


def _negated(e: Any) -> Any:
    match e:
        case ex.Truth(v):
            return ex.Truth(not v)
        case ex.Compare(op, a, b):
            return ex.Compare(_NEGATED[op], a, b)
        case ex.And(args):
            return ex.Or(tuple(map(_negated, args)))
        case ex.Or(args):
            return ex.And(tuple(map(_negated, args)))
        case ex.Not(a):
            return a
    return ex.Not(e)


def _folded(e: Any) -> Any:
    parts = [getattr(e, n) for n in ("a", "b") if hasattr(e, n)]
    if not all(isinstance(p, ex.Const) for p in parts):
        return e
    value = ex.evaluate(e, {})
    return ex.Truth(bool(value)) if isinstance(e, ex.Compare) else ex.Const(int(value))


def _joined(kind: Any, args: tuple[Any, ...], idle: ex.Truth) -> Any:
    kept = tuple(a for a in args if a != idle)
    if any(isinstance(a, ex.Truth) for a in kept):
        return ex.Truth(not idle.value)
    return kept[0] if len(kept) == 1 else kind(kept) if kept else idle


def _extreme(kind: Any, args: tuple[Any, ...]) -> Any:
    """Constants last, and one of them at most."""
    numbers = [a.value for a in args if isinstance(a, ex.Const)]
    others = tuple(a for a in args if not isinstance(a, ex.Const))
    if numbers:
        others += (ex.Const(min(numbers) if kind is ex.Min else max(numbers)),)
    return others[0] if len(others) == 1 else kind(others)


def _no_term(term: ex.Term) -> str:
    raise TypeError(f"{term.kind} is decided by data and is no arithmetic")


def python_text(e: Any, term: Terms = _no_term) -> str:
    """A ``plain`` expression as Python over integer tensors q and k, with ``torch`` in scope.

    ``term`` gives the text of a Term; without it one is a ``TypeError``.
    """
    p = lambda x: python_text(x, term)
    match e:
        case ex.Truth(v):
            return "(k == k)" if v else "(k != k)"
        case ex.Const(v):
            return str(v) if v >= 0 else f"({v})"
        case ex.Name(n):
            return n
        case ex.Neg(a):
            return f"(-{p(a)})"
        case ex.Abs(a):
            return f"abs({p(a)})"
        case ex.Add(a, b) | ex.Sub(a, b) | ex.Mul(a, b) | ex.FloorDiv(a, b) | ex.Mod(a, b):
            return f"({p(a)} {OPERATORS[type(e)]} {p(b)})"
        case ex.Compare(op, a, b):
            return f"({p(a)} {op} {p(b)})"
        case ex.And(args):
            return "(" + " & ".join(map(p, args)) + ")"
        case ex.Or(args):
            return "(" + " | ".join(map(p, args)) + ")"
        case ex.Not(a):
            return f"(~{p(a)})"
        case ex.Min(args) | ex.Max(args):
            least = isinstance(e, ex.Min)
            out = p(args[0])
            for a in args[1:]:
                if isinstance(a, ex.Const):
                    out = f"torch.clamp({out}, {'max' if least else 'min'}={a.value})"
                else:
                    out = f"torch.{'minimum' if least else 'maximum'}({out}, {p(a)})"
            return out
        case ex.Term():
            return term(e)
    raise TypeError(f"no text for {e!r}")


def cute_text(e: Any, q_from_zero: bool = True) -> str:
    """A ``plain`` expression over vectors q and k of CuTe, with ``number`` (a constant as a vector) and ``where`` in scope.

    Division there may round towards zero, so what could be below zero is moved up by a multiple of the divisor first;
    dividends beyond 2^26 are not looked after.  ``q_from_zero``: no query lies before position 0.  A divisor that is
    no constant, and a Term, are a ``TypeError``.
    """
    p = lambda x: cute_text(x, q_from_zero)
    match e:
        case ex.Truth(v):
            return "(k >= number(0))" if v else "(k < number(0))"
        case ex.Const(v):
            return f"number({v})"
        case ex.Name(n):
            return n
        case ex.Neg(a):
            return f"(number(0) - {p(a)})"
        case ex.Abs(a):
            return f"where({p(a)} < number(0), number(0) - {p(a)}, {p(a)})"
        case ex.FloorDiv(a, ex.Const(m)) | ex.Mod(a, ex.Const(m)) if m > 0:
            turns = 0 if _from_zero(a, q_from_zero) else _FURTHEST // m + 1
            moved = f"({p(a)} + number({turns * m}))" if turns else p(a)
            if isinstance(e, ex.Mod):
                return f"({moved} % number({m}))"
            divided = f"({moved} // number({m}))"
            return f"({divided} - number({turns}))" if turns else divided
        case ex.Add(a, b) | ex.Sub(a, b) | ex.Mul(a, b):
            return f"({p(a)} {OPERATORS[type(e)]} {p(b)})"
        case ex.Compare(op, a, b):
            return f"({p(a)} {op} {p(b)})"
        case ex.And(args):
            return "(" + " & ".join(map(p, args)) + ")"
        case ex.Or(args):
            return "(" + " | ".join(map(p, args)) + ")"
        case ex.Min(args) | ex.Max(args):
            op = "<" if isinstance(e, ex.Min) else ">"
            out = p(args[0])
            for a in args[1:]:
                out = f"where({out} {op} {p(a)}, {out}, {p(a)})"
            return out
    raise TypeError(f"no text for {e!r}")


def _from_zero(e: Any, q_from_zero: bool) -> bool:
    """Is it plain to see that ``e`` is never below 0?"""
    all_of = lambda *parts: all(_from_zero(x, q_from_zero) for x in parts)
    match e:
        case ex.Const(v):
            return v >= 0
        case ex.Name(n):
            return n == "k" or (n == "q" and q_from_zero)
        case ex.Add(a, b) | ex.Mul(a, b):
            return all_of(a, b)
        case ex.FloorDiv(a, ex.Const(m)) if m > 0:
            return all_of(a)
        case ex.Abs():
            return True
        case ex.Mod(_, ex.Const(m)):
            return m > 0
        case ex.Min(args) | ex.Max(args):
            return all_of(*args)
    return False
