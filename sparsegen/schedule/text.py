"""An expression over q and k as one line of text, for opaque generators in forms, dumps and digests."""

from __future__ import annotations

from typing import Any

from sparsegen.spec import expr as ex

# How tightly an operator binds; an operand that binds less is put in parentheses.
_OR, _AND, _NOT, _COMPARE, _SUM, _PRODUCT, _ATOM = range(7)


def expr_text(e: Any) -> str:
    """``e`` in the syntax of the language's predicates; a ``Term`` reads ``kind(name=value, ...)``."""
    return _text(e)[0]


def _text(e: Any) -> tuple[str, int]:
    def at(x: Any, level: int) -> str:
        s, binds = _text(x)
        return s if binds >= level else f"({s})"

    match e:
        case ex.Const(v):
            return (str(v), _ATOM) if v >= 0 else (f"({v})", _ATOM)
        case ex.Truth(v):
            return str(v), _ATOM
        case ex.Name(n):
            return n, _ATOM
        case ex.Neg(a):
            return f"-{at(a, _ATOM)}", _PRODUCT
        case ex.Abs(a):
            return f"abs({_text(a)[0]})", _ATOM
        case ex.Min(args) | ex.Max(args):
            name = "min" if isinstance(e, ex.Min) else "max"
            return f"{name}({', '.join(_text(a)[0] for a in args)})", _ATOM
        case ex.Add(a, b):
            return f"{at(a, _SUM)} + {at(b, _PRODUCT)}", _SUM
        case ex.Sub(a, b):
            return f"{at(a, _SUM)} - {at(b, _PRODUCT)}", _SUM
        case ex.Mul(a, b):
            return f"{at(a, _PRODUCT)} * {at(b, _ATOM)}", _PRODUCT
        case ex.FloorDiv(a, b):
            return f"{at(a, _PRODUCT)} // {at(b, _ATOM)}", _PRODUCT
        case ex.Mod(a, b):
            return f"{at(a, _PRODUCT)} % {at(b, _ATOM)}", _PRODUCT
        case ex.Compare(op, a, b):
            return f"{at(a, _SUM)} {op} {at(b, _SUM)}", _COMPARE
        case ex.And(args):
            return " and ".join(at(a, _NOT) for a in args) or "True", _AND
        case ex.Or(args):
            return " or ".join(at(a, _AND) for a in args) or "False", _OR
        case ex.Not(a):
            return f"not {at(a, _COMPARE)}", _NOT
        case ex.Term(kind, params):
            return f"{kind}({', '.join(f'{n}={v}' for n, v in params)})", _ATOM
    raise TypeError(f"not an expression: {e!r}")
