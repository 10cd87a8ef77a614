"""Integer and boolean expressions over a query position and a key position: the meaning of every mask.

    Int   = Const | Name | Neg | Abs | Add | Sub | Mul | FloorDiv | Mod | Min | Max
    Bool  = Truth | Compare | And | Or | Not | Term

A primitive of the language is written once as a ``Bool``.  It is read three ways: ``evaluate`` (here; the
reference), bounds over a tile (``sparsegen.schedule``), and Triton text (``sparsegen.codegen``).
``//`` and ``%`` floor, as in Python; arithmetic is exact in 64 bits (``spec`` refuses what could exceed them).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import eq, ge, gt, le, lt, ne
from typing import Any

NAMES = ("q", "k", "q_len", "kv_len")
RUNTIME_NAMES = ("prefix_length", "document_start")


@dataclass(frozen=True)
class Const:
    value: int


@dataclass(frozen=True)
class Name:
    """``q``/``k``: absolute positions; ``q_len``/``kv_len``: lengths of the call (of the batch entry, if ragged).

    Known only at run time: ``prefix_length`` of the batch entry; ``document_start``, the first position of the
    document that q lies in (the same for k wherever it is used: it always stands beside the documents term).
    """

    name: str


@dataclass(frozen=True)
class Neg:
    a: Int


@dataclass(frozen=True)
class Abs:
    a: Int


@dataclass(frozen=True)
class Add:
    a: Int
    b: Int


@dataclass(frozen=True)
class Sub:
    a: Int
    b: Int


@dataclass(frozen=True)
class Mul:
    a: Int
    b: Int


@dataclass(frozen=True)
class FloorDiv:
    a: Int
    b: Int


@dataclass(frozen=True)
class Mod:
    a: Int
    b: Int


@dataclass(frozen=True)
class Min:
    args: tuple[Int, ...]


@dataclass(frozen=True)
class Max:
    args: tuple[Int, ...]


@dataclass(frozen=True)
class Truth:
    value: bool


@dataclass(frozen=True)
class Compare:
    """``a op b`` with op one of < <= > >= == !=.  A chain ``a < b < c`` is an ``And`` of two."""

    op: str
    a: Int
    b: Int


@dataclass(frozen=True)
class And:
    args: tuple[Bool, ...]


@dataclass(frozen=True)
class Or:
    args: tuple[Bool, ...]


@dataclass(frozen=True)
class Not:
    a: Bool


@dataclass(frozen=True)
class Term:
    """Visibility decided by data and not by arithmetic: random_blocks (baked), documents, block_mask, key_padding …

    ``kind`` is the node's name in the language, ``params`` its settings as sorted (name, value) pairs.
    """

    kind: str
    params: tuple[tuple[str, Any], ...] = ()

    def __getitem__(self, name: str) -> Any:
        return dict(self.params)[name]


Int = Const | Name | Neg | Abs | Add | Sub | Mul | FloorDiv | Mod | Min | Max
Bool = Truth | Compare | And | Or | Not | Term

TRUE, FALSE = Truth(True), Truth(False)
Q, K, Q_LEN, KV_LEN = (Name(n) for n in NAMES)


_COMPARE = {"<": lt, "<=": le, ">": gt, ">=": ge, "==": eq, "!=": ne}


def in_document(e: Any) -> Any:
    """``e`` with positions counted from the start of the query's document; differences q - k stay as they are."""
    match e:
        case Name("q" | "k"):
            return Sub(e, Name("document_start"))
        case Sub(Name("q" | "k") as a, Name("q" | "k") as b):
            return Sub(a, b)
        case And(args) | Or(args) | Min(args) | Max(args):
            return type(e)(tuple(map(in_document, args)))
        case Compare(op, a, b):
            return Compare(op, in_document(a), in_document(b))
        case Neg(a) | Abs(a) | Not(a):
            return type(e)(in_document(a))
        case Add(a, b) | Sub(a, b) | Mul(a, b) | FloorDiv(a, b) | Mod(a, b):
            return type(e)(in_document(a), in_document(b))
    return e


def evaluate(e: Any, env: dict[str, Any], terms: Any = None) -> Any:
    """Value of ``e``; ``env`` maps each name to an int64 tensor or array (broadcast together).

    ``terms`` maps a ``Term`` to its boolean array, broadcastable with the others.
    """
    ev = lambda x: evaluate(x, env, terms)
    match e:
        case Const(v) | Truth(v):
            return v
        case Name(n):
            return env[n]
        case Neg(a):
            return -ev(a)
        case Abs(a):
            return abs(ev(a))
        case Add(a, b):
            return ev(a) + ev(b)
        case Sub(a, b):
            return ev(a) - ev(b)
        case Mul(a, b):
            return ev(a) * ev(b)
        case FloorDiv(a, b):
            return ev(a) // ev(b)
        case Mod(a, b):
            return ev(a) % ev(b)
        case Min(args):
            return reduce(lambda x, y: _pick(x, y, x <= y), map(ev, args))
        case Max(args):
            return reduce(lambda x, y: _pick(x, y, x >= y), map(ev, args))
        case Compare(op, a, b):
            return _COMPARE[op](ev(a), ev(b))
        case And(args):
            return reduce(lambda x, y: x & y, map(ev, args), True)
        case Or(args):
            return reduce(lambda x, y: x | y, map(ev, args), False)
        case Not(a):
            value = ev(a)
            return (not value) if isinstance(value, bool) else ~value
        case Term():
            return terms(e)
    raise TypeError(f"not an expression: {e!r}")


def _pick(x: Any, y: Any, first: Any) -> Any:
    """x where ``first`` holds, else y: works for ints, numpy arrays and tensors alike."""
    return (x if first else y) if isinstance(first, bool) else x * first + y * ~first
