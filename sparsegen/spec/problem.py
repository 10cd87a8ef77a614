"""What a pattern is compiled for: dimensions, heads, dtype and typical lengths.  Asked for, never decided here."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic.dataclasses import dataclass

from sparsegen.spec.fields import LIMIT, integer, rule, speaks, word, wrong

DTYPES = ("bfloat16", "float16", "float32")
PASSES = ("forward", "backward", "decode")

_LENGTHS = f"a list of lengths from 1 to {LIMIT}, each one number or [q_len, kv_len]"


def _pairs(value: Any) -> tuple[tuple[int, int], ...]:
    if not isinstance(value, (list, tuple)) or not 1 <= len(value) <= 1000:
        raise wrong(_LENGTHS)
    pairs = [(n, n) if type(n) is int else n for n in value]
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise wrong(_LENGTHS)
        if not all(type(n) is int and 1 <= n <= LIMIT for n in pair):
            raise wrong(_LENGTHS)
    return tuple((q_len, kv_len) for q_len, kv_len in pairs)


def _known_passes(value: Any) -> tuple[str, ...]:
    known = isinstance(value, (list, tuple)) and value and all(p in PASSES for p in map(str, value))
    if not known or len(set(value)) != len(value):
        raise wrong("a list of some of " + ", ".join(PASSES))
    return tuple(value)


_NATURAL = {"type": "integer", "minimum": 1, "maximum": LIMIT}
_PAIR = {"type": "array", "items": _NATURAL, "minItems": 2, "maxItems": 2}
Lengths = Annotated[
    tuple[tuple[int, int], ...],
    BeforeValidator(_pairs),
    WithJsonSchema({"type": "array", "minItems": 1, "items": {"anyOf": [_NATURAL, _PAIR]}}),
    Field(description=_LENGTHS[0].upper() + _LENGTHS[1:] + "."),
]
Passes = Annotated[
    tuple[str, ...],
    BeforeValidator(_known_passes),
    WithJsonSchema(
        {"type": "array", "minItems": 1, "uniqueItems": True, "items": {"enum": list(PASSES)}}
    ),
    Field(description="A list of some of " + ", ".join(PASSES) + "."),
]


@speaks
@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Problem:
    """Sizes to compile and tune for.

    ``value_dim`` defaults to ``head_dim`` and ``kv_heads`` to ``heads``; after construction neither is None.
    ``lengths`` are (q_len, kv_len) in tokens: what is measured, never a limit.  ``heads`` is a multiple of ``kv_heads``.
    """

    head_dim: integer(1, 4096) = 128  # type: ignore[valid-type]
    value_dim: integer(1, 4096) = None  # type: ignore[valid-type]
    heads: integer(1, 65536) = 8  # type: ignore[valid-type]
    kv_heads: integer(1, 65536) = None  # type: ignore[valid-type]
    batch: integer(1, 65536) = 1  # type: ignore[valid-type]
    dtype: word(*DTYPES) = "bfloat16"  # type: ignore[valid-type]
    lengths: Lengths = ((4096, 4096),)
    passes: Passes = ("forward",)

    def __post_init__(self) -> None:
        if self.value_dim is None:
            object.__setattr__(self, "value_dim", self.head_dim)
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.heads % self.kv_heads:
            raise rule(
                f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}"
            )

    def to_data(self) -> dict[str, Any]:
        """The problem as it is written in a file: plain values, defaults left out."""
        data: dict[str, Any] = {}
        for name, default in _DEFAULTS.items():
            value = getattr(self, name)
            if value != (
                getattr(self, default)
                if isinstance(default, str) and default in _DEFAULTS
                else default
            ):
                data[name] = value
        if "lengths" in data:
            data["lengths"] = [q if q == k else [q, k] for q, k in self.lengths]
        if "passes" in data:
            data["passes"] = list(self.passes)
        return data


_DEFAULTS = {
    "head_dim": 128,
    "value_dim": "head_dim",
    "heads": 8,
    "kv_heads": "heads",
    "batch": 1,
    "dtype": "bfloat16",
    "lengths": ((4096, 4096),),
    "passes": ("forward",),
}
