"""``predicate``: a small language of its own for masks that no primitive says.  Parsed here, never evaluated as Python.

    or       := and ("or" and)*                 and  := not ("and" not)*         not := "not" not | compare
    compare  := sum (("<"|"<="|">"|">="|"=="|"!=") sum)*                         a < b < c means a < b and b < c
    sum      := product (("+"|"-") product)*    product := sign (("*"|"//"|"%") sign)*
    sign     := ("-"|"+") sign | atom           atom := integer | name | "(" or ")" | abs(sum) | min(sum, …) | max(sum, …)

Names are q, k (absolute positions), q_len and kv_len.  Numbers and truth values never mix.  Two things are proven by
interval arithmetic over |q|, |k| <= 2^31 and 1 <= lengths <= 2^31: every divisor is at least 1, and no
sub-expression leaves 64 bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sparsegen.spec import expr
from sparsegen.spec.fields import did_you_mean

LONGEST = 2000  # characters
DEEPEST = 60  # levels of the expression tree: the readers of an Expr recurse

_TOKEN = re.compile(
    r"\s*(?:(?P<int>[0-9]+(?:_[0-9]+)*)|(?P<name>[A-Za-z_]\w*)|(?P<op>//|<=|>=|==|!=|[-+*%<>(),])|(?P<bad>\S))"
)
_WORDS = ("and", "or", "not", "abs", "min", "max")
_RANGE = 2**31
_BOUNDS = {
    "q": (-_RANGE, _RANGE),
    "k": (-_RANGE, _RANGE),
    "q_len": (1, _RANGE),
    "kv_len": (1, _RANGE),
}
_INT64 = 2**63


class PredicateError(ValueError):
    """A predicate is not of the language; the message says where and what is allowed."""


@dataclass(frozen=True)
class _Token:
    kind: str  # int | name | op | end
    text: str
    start: int
    end: int


@dataclass(frozen=True)
class _Value:
    """A parsed sub-expression: its Expr, its place in the text, its depth; ``bounds`` is None for a truth value."""

    expr: Any
    start: int
    end: int
    depth: int
    bounds: tuple[int, int] | None


def parse(text: str) -> expr.Bool:
    """The ``Bool`` that a predicate stands for; ``PredicateError`` with one sentence if it has a mistake."""
    if len(text) > LONGEST:
        raise PredicateError(f"is {len(text)} characters long; at most {LONGEST} are allowed")
    parser = _Parser(text)
    value = parser.any_of()
    if parser.token.kind != "end":
        raise parser.unexpected("an operator or the end")
    parser.truth(value, "the whole predicate")
    return value.expr


def _tokens(text: str) -> list[_Token]:
    tokens, at = [], 0
    while match := _TOKEN.match(text, at):
        kind, at = str(match.lastgroup), match.end()
        tokens.append(_Token(kind, match[kind], match.start(kind), at))
        if kind == "bad":
            at_word = f"at character {match.start(kind) + 1}"
            raise PredicateError(
                f"has {match[kind]!r} {at_word}, which is not part of the language"
            )
    return [*tokens, _Token("end", "", len(text), len(text))]


class _Parser:
    """Recursive descent with one token of look-ahead; ``depth`` counts open rules and bounds the recursion."""

    def __init__(self, text: str):
        self.text, self.tokens, self.at, self.depth = text, _tokens(text), 0, 0

    @property
    def token(self) -> _Token:
        return self.tokens[self.at]

    def take(self, *texts: str) -> _Token | None:
        """The next token if it is one of these words or signs."""
        token = self.token
        if token.kind in ("op", "name") and token.text in texts:
            self.at += 1
            return token
        return None

    # ------------------------------------------------------------------ grammar
    def any_of(self) -> _Value:
        return self._joined("or", self.all_of, expr.Or)

    def all_of(self) -> _Value:
        return self._joined("and", self.negation, expr.And)

    def _joined(self, word: str, part: Callable[[], _Value], make: Any) -> _Value:
        parts = [part()]
        while self.take(word):
            parts.append(part())
        if len(parts) == 1:
            return parts[0]
        for value in parts:
            self.truth(value, f"each side of {word!r}")
        return self.build(make(tuple(p.expr for p in parts)), parts, parts[0].start, None)

    def negation(self) -> _Value:
        token = self.take("not")
        if not token:
            return self.comparison()
        with_depth = self.deeper(self.negation)
        self.truth(with_depth, "what follows 'not'")
        return self.build(expr.Not(with_depth.expr), [with_depth], token.start, None)

    def comparison(self) -> _Value:
        values, signs = [self.sum()], []
        while sign := self.take("<", "<=", ">", ">=", "==", "!="):
            signs.append(sign.text)
            values.append(self.sum())
        if not signs:
            return values[0]
        for value in values:
            self.number(value, "each side of a comparison")
        pairs = [expr.Compare(s, a.expr, b.expr) for s, a, b in zip(signs, values, values[1:])]
        whole = pairs[0] if len(pairs) == 1 else expr.And(tuple(pairs))
        return self.build(whole, values, values[0].start, None)

    def sum(self) -> _Value:
        return self._chain(("+", "-"), self.product)

    def product(self) -> _Value:
        return self._chain(("*", "//", "%"), self.sign)

    def _chain(self, signs: tuple[str, ...], part: Callable[[], _Value]) -> _Value:
        left = part()
        while sign := self.take(*signs):
            right = part()
            for side in (left, right):
                self.number(side, f"each side of {sign.text!r}")
            left = self.operation(sign.text, left, right)
        return left

    def sign(self) -> _Value:
        token = self.take("-", "+")
        if not token:
            return self.atom()
        value = self.deeper(self.sign)
        low, high = self.number(value, f"what follows {token.text!r}")
        if token.text == "+":
            return value
        return self.build(expr.Neg(value.expr), [value], token.start, (-high, -low))

    def atom(self) -> _Value:
        token = self.token
        if token.kind == "int":
            return self.literal(token)
        if open_ := self.take("("):
            inner = self.deeper(self.any_of)
            self.close(open_)
            return _Value(
                inner.expr, open_.start, self.tokens[self.at - 1].end, inner.depth, inner.bounds
            )
        if function := self.take("abs", "min", "max"):
            return self.call(function)
        if token.kind == "name" and token.text not in _WORDS:
            if token.text not in _BOUNDS:
                near = did_you_mean(token.text, [*_BOUNDS, *_WORDS])
                at = f"at character {token.start + 1}"
                raise PredicateError(
                    f"has an unknown name {token.text[:40]!r} {at}{near}; names are q, k, q_len, kv_len"
                )
            self.at += 1
            return _Value(expr.Name(token.text), token.start, token.end, 1, _BOUNDS[token.text])
        raise self.unexpected("a number, a name or '('")

    def literal(self, token: _Token) -> _Value:
        if len(token.text) > 20 or int(token.text) >= _INT64:
            raise PredicateError(f"has a number beyond 64 bits at character {token.start + 1}")
        if token.text[0] == "0" != token.text:  # some languages read 010 as eight
            raise PredicateError(
                f"has {token.text!r} at character {token.start + 1}; a number starts with no zero"
            )
        self.at += 1
        value = int(token.text)
        return _Value(expr.Const(value), token.start, token.end, 1, (value, value))

    def call(self, function: _Token) -> _Value:
        if not (open_ := self.take("(")):
            raise self.unexpected(f"'(' after {function.text}")
        args = [self.deeper(self.any_of)]
        while self.take(","):
            args.append(self.deeper(self.any_of))
        self.close(open_)
        ranges = [self.number(a, f"what {function.text} is given") for a in args]
        if (function.text == "abs") != (len(args) == 1):
            needs = "exactly one argument" if function.text == "abs" else "at least two arguments"
            raise PredicateError(
                f"gives {function.text} {len(args)} argument(s) at character {function.start + 1}; it takes {needs}"
            )
        if function.text == "abs":
            low, high = ranges[0]
            bounds = (max(low, -high, 0), max(-low, high))
            return self.build(expr.Abs(args[0].expr), args, function.start, bounds)
        pick, make = (min, expr.Min) if function.text == "min" else (max, expr.Max)
        bounds = (pick(r[0] for r in ranges), pick(r[1] for r in ranges))
        return self.build(make(tuple(a.expr for a in args)), args, function.start, bounds)

    # ------------------------------------------------------------------ meaning
    def operation(self, sign: str, a: _Value, b: _Value) -> _Value:
        (al, ah), (bl, bh) = a.bounds or (0, 0), b.bounds or (0, 0)
        make: Any
        if sign in ("//", "%") and bl <= 0:
            raise PredicateError(
                f"divides by {self.words(b)!r} at character {b.start + 1}, which can be 0 or less; "
                "a divisor must be at least 1 for every q, k and length"
            )
        if sign == "+":
            make, bounds = expr.Add, (al + bl, ah + bh)
        elif sign == "-":
            make, bounds = expr.Sub, (al - bh, ah - bl)
        elif sign == "*":
            ends = [x * y for x in (al, ah) for y in (bl, bh)]
            make, bounds = expr.Mul, (min(ends), max(ends))
        elif sign == "//":
            ends = [x // y for x in (al, ah) for y in (bl, bh)]
            make, bounds = expr.FloorDiv, (min(ends), max(ends))
        else:
            inside = al >= 0 and ah < bl
            make, bounds = expr.Mod, (al, ah) if inside else (0, bh - 1)
            if al >= 0:
                bounds = (bounds[0], min(bounds[1], ah))
        return self.build(make(a.expr, b.expr), [a, b], a.start, bounds)

    def build(
        self, node: Any, parts: list[_Value], start: int, bounds: tuple[int, int] | None
    ) -> _Value:
        value = _Value(
            node, start, self.tokens[self.at - 1].end, 1 + max(p.depth for p in parts), bounds
        )
        if value.depth > DEEPEST:
            raise self.too_deep()
        if bounds and not -_INT64 <= bounds[0] <= bounds[1] < _INT64:
            size = max(abs(bounds[0]), abs(bounds[1])).bit_length()
            raise PredicateError(
                f"can overflow: {self.words(value)!r} at character {start + 1} may need {size + 1} bits; "
                "64 are allowed, for |q|, |k| and lengths up to 2147483648"
            )
        return value

    def truth(self, value: _Value, what: str) -> None:
        if value.bounds is not None:
            at = f"at character {value.start + 1}"
            raise PredicateError(
                f"uses the number {self.words(value)!r} {at} as a truth value; {what} must be a condition"
            )

    def number(self, value: _Value, what: str) -> tuple[int, int]:
        if value.bounds is None:
            at = f"at character {value.start + 1}"
            raise PredicateError(
                f"uses the condition {self.words(value)!r} {at} as a number; {what} must be a number"
            )
        return value.bounds

    # ------------------------------------------------------------------ mistakes
    def deeper(self, part: Callable[[], _Value]) -> _Value:
        self.depth += 1
        if self.depth > DEEPEST:
            raise self.too_deep()
        value = part()
        self.depth -= 1
        return value

    def close(self, open_: _Token) -> None:
        if not self.take(")"):
            raise self.unexpected(f"')' for the '(' at character {open_.start + 1}")

    def unexpected(self, wanted: str) -> PredicateError:
        token = self.token
        if token.kind == "end":
            return PredicateError(f"ends where {wanted} is needed")
        return PredicateError(
            f"has {token.text[:40]!r} at character {token.start + 1} where {wanted} is needed"
        )

    def too_deep(self) -> PredicateError:
        return PredicateError(f"is nested deeper than {DEEPEST} levels")

    def words(self, value: _Value) -> str:
        words = self.text[value.start : value.end]
        return words if len(words) <= 60 else words[:59] + "…"
