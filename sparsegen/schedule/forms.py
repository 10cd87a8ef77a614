"""Integer forms: a sum of coefficient * generator + constant.  The language of conjuncts and of closed forms.

    Lin = Σ coefficient · generator + constant
    generator = Var | Floor(Lin, m) | Table(name, Lin) | Opaque(Bool) | Prod(Lin, Lin) | Pick(min|max, Lin...)

``x % m`` is ``x - m * Floor(x, m)``; there is no node for it.  Equal forms are equal objects by value, so a form is
also its own key.  Bounds and values of a form may be ints, numpy arrays (all tiles at once) or forms again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from typing import Any
from weakref import WeakValueDictionary

from sparsegen.schedule.text import expr_text
from sparsegen.spec import expr as ex

UNREAD: Any = object()  # what a form does not know of itself yet
BIG = 1 << 100  # "no bound" in ranges; every position, length and constant is far below FAR
FAR = 1 << 63


class Lin:
    """Canonical sum: generators sorted by their text, no zero coefficient."""

    __slots__ = ("_hash", "_remainder", "_str", "const", "terms")

    def __init__(self, terms: Any = (), const: int = 0):
        items = terms.items() if isinstance(terms, dict) else terms
        kept = [(g, c) for g, c in items if c]
        if len(kept) > 1:
            kept.sort(key=_key)
        self.terms: tuple[tuple[Generator, int], ...] = tuple(kept)
        self.const = const
        self._hash: int | None = None
        self._str: str | None = None
        self._remainder: Any = UNREAD

    @classmethod
    def _sorted(cls, terms: tuple[tuple[Generator, int], ...], const: int) -> Lin:
        """From terms that are in order already: the analysis spends most of its time here."""
        out = cls.__new__(cls)
        out.terms, out.const, out._hash, out._str = terms, const, None, None
        out._remainder = UNREAD
        return out

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Lin) and self.const == other.const and self.terms == other.terms
        )

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash((self.terms, self.const))
        return self._hash

    def __add__(self, other: Any) -> Lin:
        if not isinstance(other, Lin):
            return Lin._sorted(self.terms, self.const + int(other))
        if not other.terms or not self.terms:
            return Lin._sorted(self.terms or other.terms, self.const + other.const)
        out = dict(self.terms)
        for g, c in other.terms:
            out[g] = out.get(g, 0) + c
        if len(out) == len(self.terms):  # no generator is new, so they are in order
            kept = tuple([term for term in out.items() if term[1]])
            return Lin._sorted(kept, self.const + other.const)
        return Lin(out, self.const + other.const)

    __radd__ = __add__

    def __mul__(self, n: int) -> Lin:
        if n == 1:
            return self
        if not n:
            return Lin()
        return Lin._sorted(tuple([(g, c * n) for g, c in self.terms]), self.const * n)

    __rmul__ = __mul__

    def __neg__(self) -> Lin:
        return self * -1

    def __sub__(self, other: Any) -> Lin:
        return self + (-other)

    def __rsub__(self, other: Any) -> Lin:
        return -self + other

    def without(self, g: Generator) -> Lin:
        """The form less its term of a generator."""
        return Lin._sorted(tuple([term for term in self.terms if term[0] != g]), self.const)

    def __str__(self) -> str:
        if self._str is None:
            out = ""
            for g, c in sorted(
                self.terms, key=lambda t: t[1] < 0
            ):  # q - k reads better than -k + q
                out += " - " if c < 0 else " + "
                out += (f"{abs(c)}*" if abs(c) != 1 else "") + text(g)
            if self.const or not out:
                out += (" - " if self.const < 0 else " + ") + str(abs(self.const))
            self._str = out[3:] if out.startswith(" + ") else "-" + out[3:]
        return self._str

    __repr__ = __str__

    def __reduce__(
        self,
    ) -> Any:  # hashes of strings differ between processes: never pickle the cached one
        return Lin, (self.terms, self.const)


class _Node:
    """A generator.  Equal ones are one object: forms compare and look them up all the time, and so it costs nothing."""

    def __new__(cls, *parts: Any) -> Any:
        key = (cls, *parts)
        found = _NODES.get(key)
        return _NODES.setdefault(key, object.__new__(cls)) if found is None else found

    def __reduce__(self) -> Any:  # by its parts, so that it is the one object again
        return type(self), tuple(getattr(self, f.name) for f in fields(self))  # type: ignore[arg-type]


_NODES: WeakValueDictionary[Any, Any] = WeakValueDictionary()


@dataclass(frozen=True, eq=False)
class Var(_Node):
    name: str


@dataclass(frozen=True, eq=False)
class Floor(_Node):
    """floor(arg / m), m >= 2."""

    arg: Lin
    m: int


@dataclass(frozen=True, eq=False)
class Table(_Node):
    """A run-time integer table that never decreases in its argument (document start, document end)."""

    name: str
    arg: Lin


@dataclass(frozen=True, eq=False)
class Opaque(_Node):
    """1 where the expression holds, else 0; nothing else is known of it."""

    expr: ex.Bool


@dataclass(frozen=True, eq=False)
class Prod(_Node):
    a: Lin
    b: Lin


@dataclass(frozen=True, eq=False)
class Pick(_Node):
    """The least ("min") or greatest ("max") of the arguments.  Only in closed forms."""

    op: str
    args: tuple[Lin, ...]


Generator = Var | Floor | Table | Opaque | Prod | Pick
Env = Mapping[str, Any]


@cache
def text(g: Generator) -> str:
    """A generator as text; also its sort key."""
    match g:
        case Var(n):
            return n
        case Floor(a, m):
            return f"(({a}) // {m})" if len(a.terms) > 1 or a.const else f"({a} // {m})"
        case Table(n, a):
            return f"{n}[{a}]"
        case Opaque(e):
            return f"[{expr_text(e)}]"
        case Prod(a, b):
            return f"(({a}) * ({b}))"
        case Pick(op, args):
            return f"{op}({', '.join(map(str, args))})"
    raise TypeError(f"not a generator: {g!r}")


def _key(term: tuple[Generator, int]) -> str:
    return text(term[0])


def var(name: str) -> Lin:
    """The form that is one variable."""
    return one(Var(name))


def one(g: Generator) -> Lin:
    """The form that is one generator."""
    return Lin._sorted(((g, 1),), 0)


def as_form(x: Any) -> Lin:
    """An int as a form."""
    return x if isinstance(x, Lin) else Lin((), int(x))


Q, K = var("q"), var("k")
Q_FIRST, Q_LAST, K_FIRST, K_LAST = map(var, ("q_first", "q_last", "k_first", "k_last"))


@lru_cache(maxsize=1 << 16)
def floor_(lin: Lin, m: int) -> Lin:
    """floor(lin / m), with exact multiples pulled out, common factors cancelled, nested floors joined."""
    if m == 1:
        return lin
    # Truncated, so that the rest of -k is -k: a remainder of q - k stays one of q - k.
    out = [(g, abs(c) // m if c > 0 else -(abs(c) // m)) for g, c in lin.terms]
    whole = Lin(out, lin.const // m)
    rest = Lin(
        [(g, c - n * m) for (g, c), (_, n) in zip(lin.terms, out, strict=True)], lin.const % m
    )
    if not rest.terms:
        return whole
    g = math.gcd(m, *[c for _, c in rest.terms])
    if g > 1:
        return whole + floor_(Lin([(x, c // g) for x, c in rest.terms], rest.const // g), m // g)
    (gen, c), *more = rest.terms
    if not more and c == 1 and isinstance(gen, Floor):
        return whole + floor_(gen.arg + rest.const * gen.m, gen.m * m)
    return whole + one(Floor(rest, m))


def mod_(lin: Lin, m: int) -> Lin:
    """lin % m."""
    return lin - floor_(lin, m) * m


@lru_cache(maxsize=1 << 16)
def variables(lin: Lin) -> frozenset[str]:
    """Names that the value of ``lin`` depends on."""
    out: set[str] = set()
    for g, _ in lin.terms:
        out |= inside(g)
    return frozenset(out)


@lru_cache(maxsize=1 << 16)
def inside(g: Generator) -> frozenset[str]:
    """Names that a generator depends on; an opaque one may depend on everything."""
    match g:
        case Var(n):
            return frozenset((n,))
        case Floor(a, _) | Table(_, a):
            return variables(a)
        case Prod(a, b):
            return variables(a) | variables(b)
        case Opaque(_):
            return frozenset(ex.NAMES)
        case Pick(_, args):
            return frozenset().union(*map(variables, args))
    raise TypeError(f"not a generator: {g!r}")


@lru_cache(maxsize=1 << 16)
def size(lin: Lin) -> int:
    """Number of operations in a form."""
    n = 1
    for g, _ in lin.terms:
        match g:
            case Floor(a, _) | Table(_, a):
                n += size(a)
            case Prod(a, b):
                n += size(a) + size(b)
            case Pick(_, args):
                n += sum(map(size, args))
        n += 1
    return n


def substitute(lin: Lin, forms: Mapping[str, Lin]) -> Lin:
    """``lin`` with variables replaced by forms."""
    if not variables(lin) & forms.keys():
        return lin
    out = Lin((), lin.const)
    for g, c in lin.terms:
        match g:
            case Var(n):
                new = forms.get(n) or one(g)
            case Floor(a, m):
                new = floor_(substitute(a, forms), m)
            case Table(n, a):
                new = Lin({Table(n, substitute(a, forms)): 1})
            case Prod(a, b):
                new = Lin({Prod(substitute(a, forms), substitute(b, forms)): 1})
            case Pick(op, args):
                new = Lin({Pick(op, tuple(substitute(a, forms) for a in args)): 1})
            case _:
                new = one(g)
        out = out + new * c
    return out


def product(a: Lin, b: Lin) -> Lin:
    """a * b as a form."""
    if not a.terms or not b.terms:
        return b * a.const if not a.terms else a * b.const
    return Lin({Prod(*sorted((a, b), key=str)): 1})


def least_or_most(op: str, a: Any, b: Any) -> Any:
    """The less ("min") or greater ("max") of two ints or arrays."""
    if type(a) is int and type(b) is int:
        return (max if op == "max" else min)(a, b)
    import numpy as np

    return (np.maximum if op == "max" else np.minimum)(a, b)


def value(lin: Lin, env: Env) -> Any:
    """Value of a form.  ``env``: variable → int or array; ``"@terms"`` → function Term → boolean array."""
    out: Any = lin.const
    for g, c in lin.terms:
        v: Any
        match g:
            case Var(n):
                v = env[n]
            case Floor(a, m):
                v = value(a, env) // m
            case Table(n, a):
                v = env["@" + n][value(a, env)]
            case Opaque(e):
                v = as_number(ex.evaluate(e, dict(env), env.get("@terms")))
            case Prod(a, b):
                v = value(a, env) * value(b, env)
            case Pick(op, args):
                v = value(args[0], env)
                for a in args[1:]:
                    v = least_or_most(op, v, value(a, env))
        out = out + c * v
    return out


def as_number(b: Any) -> Any:
    """0 or 1 for a truth value or an array of them."""
    return int(b) if isinstance(b, bool) else b * 1
