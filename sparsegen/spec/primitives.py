"""The primitives that are arithmetic on positions.  Each class is one: its settings, and when a cell is visible.

``q`` and ``k`` are absolute positions: k = key index; q = query index + (kv_len - q_len), or + 0 with
``align: top_left``.  A docstring is the primitive's definition; it also becomes the text of the JSON Schema.
"""

from __future__ import annotations

from typing import Any

from pydantic import field_validator, model_validator

from sparsegen.spec.expr import (
    TRUE,
    And,
    Bool,
    Compare,
    Const,
    FloorDiv,
    Int,
    K,
    Mod,
    Name,
    Or,
    Q,
    Sub,
)
from sparsegen.spec.fields import integer, integer_or, integers, reach, rule, text, truth
from sparsegen.spec.node import Node
from sparsegen.spec.predicate import PredicateError, parse


def between(low: int | None, value: Int, high: int | None) -> Bool:
    """low <= value <= high, where None is no limit."""
    limits: list[Bool] = []
    if low is not None:
        limits.append(Compare("<=", Const(low), value))
    if high is not None:
        limits.append(Compare("<=", value, Const(high)))
    return both(limits)


def equal(a: Int, b: Int) -> Bool:
    """a == b."""
    return Compare("==", a, b)


def both(parts: list[Bool]) -> Bool:
    """All of the parts; no parts is true."""
    return parts[0] if len(parts) == 1 else And(tuple(parts)) if parts else TRUE


class Full(Node):
    """Every cell is visible."""

    keyword = "full"
    bare = True

    def expr(self) -> Bool:
        return TRUE


class Causal(Node):
    """Visible when k <= q."""

    keyword = "causal"
    bare = True

    def expr(self) -> Bool:
        return Compare("<=", K, Q)


class Sides(Node):
    """Base of bands around the diagonal: ``size``, or ``radius``, or ``left`` and ``right``."""

    size: integer(1) = None  # type: ignore[valid-type]
    radius: reach() = None  # type: ignore[valid-type]
    left: reach() = None  # type: ignore[valid-type]
    right: reach() = None  # type: ignore[valid-type]

    @model_validator(mode="before")
    @classmethod
    def _fill_sides(cls, data: Any) -> Any:
        # The side that is not written is 0; both are kept, so that two spellings of one band are equal.
        if isinstance(data, dict) and ("left" in data or "right" in data):
            return {"left": 0, "right": 0, **data}
        return data

    @model_validator(mode="after")
    def _one_form(self) -> Sides:
        forms = [self.size is not None, self.radius is not None, self.left is not None]
        if sum(forms) != 1:
            found = "none of them" if not any(forms) else "more than one"
            raise rule(f"needs one of: size, radius, or left and/or right; got {found}")
        return self

    def limits(self) -> tuple[int | None, int | None]:
        """(left, right) in steps, inclusive; None is no limit."""
        if self.size is not None:
            return self.size - 1, 0
        left, right = (self.radius,) * 2 if self.radius is not None else (self.left, self.right)
        return tuple(None if side == "inf" else side for side in (left, right))  # type: ignore[return-value]


class Window(Sides):
    """A sliding window: ``size: W`` sees 0 <= q - k <= W - 1 (W keys, the query's own among them); ``radius: R``
    sees -R <= q - k <= R; ``left: L, right: R`` sees -R <= q - k <= L (inclusive bounds, 0 when left out).
    """

    keyword = "window"

    def expr(self) -> Bool:
        left, right = self.limits()
        return between(None if right is None else -right, Sub(Q, K), left)


class Dilated(Sides):
    """A window that sees every d-th key: (q - k) % d == 0 and -R*d <= q - k <= L*d, sides counted in steps of the
    dilation d (``size: W`` is L = W - 1, R = 0: W keys).
    """

    keyword = "dilated"
    dilation: integer(1)  # type: ignore[valid-type]

    def expr(self) -> Bool:
        left, right = self.limits()
        step, distance = self.dilation, Sub(Q, K)
        same = equal(Mod(distance, Const(step)), Const(0))
        low, high = (None if side is None else side * step for side in (right, left))
        if low is None and high is None:
            return same
        return And((same, between(None if low is None else -low, distance, high)))


class Sink(Node):
    """The first n keys: k < n."""

    keyword = "sink"
    tokens: integer(0)  # type: ignore[valid-type]

    def expr(self) -> Bool:
        return Compare("<", K, Const(self.tokens))


class GlobalTokens(Node):
    """Global tokens: visible when k is global (``columns``) or when 0 <= q and q is global (``rows``).  Global are
    the first n ``tokens``, or the listed ``positions``.
    """

    keyword = "global"
    tokens: integer(0) = None  # type: ignore[valid-type]
    positions: integers(0) = None  # type: ignore[valid-type]
    rows: truth() = True  # type: ignore[valid-type]
    columns: truth() = True  # type: ignore[valid-type]

    @model_validator(mode="before")
    @classmethod
    def _sort(cls, data: Any) -> Any:
        # A set of positions: order and repeats mean nothing, so they do not make two patterns of one.
        listed = data.get("positions") if isinstance(data, dict) else None
        if isinstance(listed, (list, tuple)) and all(type(p) is int and p >= 0 for p in listed):
            return {**data, "positions": sorted(set(listed))}
        return data

    @model_validator(mode="after")
    def _one_form(self) -> GlobalTokens:
        if (self.tokens is None) == (self.positions is None):
            found = "neither" if self.tokens is None else "both"
            raise rule(f"needs one of: tokens, positions; got {found}")
        if not (self.rows or self.columns):
            raise rule("rows and columns are both false: nothing would be global")
        return self

    def expr(self) -> Bool:
        parts: list[Bool] = []
        if self.columns:
            parts.append(self._is_global(K, starts_at_zero=True))
        if self.rows:
            parts.append(self._is_global(Q, starts_at_zero=False))
        return parts[0] if len(parts) == 1 else Or(tuple(parts))

    def _is_global(self, position: Int, *, starts_at_zero: bool) -> Bool:
        if self.positions is None:
            high = Compare("<", position, Const(self.tokens))
            return high if starts_at_zero else And((Compare("<=", Const(0), position), high))
        runs = [
            equal(position, Const(first)) if first == last else between(first, position, last)
            for first, last in _runs(self.positions)
        ]
        return runs[0] if len(runs) == 1 else Or(tuple(runs))


def _runs(positions: tuple[int, ...]) -> list[tuple[int, int]]:
    """Sorted positions as (first, last) runs of neighbours."""
    runs: list[tuple[int, int]] = []
    for p in positions:
        if runs and p == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], p)
        else:
            runs.append((p, p))
    return runs


class Strided(Node):
    """Every s-th key counted from the query's own, in both directions: (q - k) % s == 0."""

    keyword = "strided"
    stride: integer(1)  # type: ignore[valid-type]

    def expr(self) -> Bool:
        return equal(Mod(Sub(Q, K), Const(self.stride)), Const(0))


class Columns(Node):
    """The last w keys of every run of s keys: k % s >= s - w."""

    keyword = "columns"
    stride: integer(1)  # type: ignore[valid-type]
    width: integer(1)  # type: ignore[valid-type]

    @model_validator(mode="after")
    def _fits(self) -> Columns:
        if self.width > self.stride:
            raise rule(
                f"width must be at most stride, got width {self.width}, stride {self.stride}"
            )
        return self

    def expr(self) -> Bool:
        return Compare(">=", Mod(K, Const(self.stride)), Const(self.stride - self.width))


class Chunks(Node):
    """Query and key in the same chunk of c positions: q // c == k // c."""

    keyword = "chunks"
    size: integer(1)  # type: ignore[valid-type]

    def expr(self) -> Bool:
        return equal(FloorDiv(Q, Const(self.size)), FloorDiv(K, Const(self.size)))


class Prefix(Node):
    """The first n keys: k < n.  With ``tokens: runtime`` n is given for each batch entry by ``prefix_lengths``."""

    keyword = "prefix"
    tokens: integer_or("runtime")  # type: ignore[valid-type]

    def needs(self) -> tuple[tuple[str, ...], ...]:
        return (("prefix_lengths",),) if self.tokens == "runtime" else ()

    def expr(self) -> Bool:
        # A name and not a Term: k < n stays a closed-form range whatever n turns out to be.
        length = Name("prefix_length") if self.tokens == "runtime" else Const(self.tokens)
        return Compare("<", K, length)


class Predicate(Node):
    """Any condition over q, k, q_len and kv_len, written as text: + - * // %, comparisons and chains of them, and, or,
    not, abs, min, max.  ``//`` and ``%`` floor.  Parsed, never evaluated as Python; exact 64-bit integers.
    """

    keyword = "predicate"
    shorthand = "text"
    text: text(1_000_000)  # type: ignore[valid-type]

    @field_validator("text")
    @classmethod
    def _parses(cls, value: str) -> str:
        try:
            parse(value)
        except PredicateError as error:
            raise rule(str(error)) from None
        return value

    def expr(self) -> Bool:
        return parse(self.text)
