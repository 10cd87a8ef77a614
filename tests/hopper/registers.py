"""What a partition holds in registers: numbers and tensors with the arithmetic of a GPU, and pointers.

Layouts are not modelled: the compiler checks those (tests/launch/test_hopper.py).  Integers are exact, floats are
float32, and division of integers truncates.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch


class OutOfBounds(AssertionError):
    """An address outside of the tensor that it was made from."""


class Value:
    """A number, or a torch tensor of int64, bool or float32."""

    def __init__(self, data: Any):
        self.data = data

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=None)

    def to(self, dtype: DType, bitcast: bool = False) -> Value:
        return Value(dtype.of_bits(self.data) if bitcast else dtype.of(self.data))

    def reshape(self, shape: list[int]) -> Value:
        return Value(self.data.reshape(shape))

    def broadcast_to(self, shape: list[int]) -> Value:
        return Value(self.data.expand(shape))

    def __getitem__(self, index: Any) -> Value:
        return Value(self.data[index])

    def __bool__(self) -> bool:
        assert not isinstance(self.data, torch.Tensor), "a branch asks for one truth, not for many"
        return bool(self.data)

    def __index__(self) -> int:
        assert isinstance(self.data, int), f"{self.data!r} is no whole number"
        return self.data

    def __neg__(self) -> Value:
        return Value(-self.data)

    def __repr__(self) -> str:
        return f"Value({self.data!r})"

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class DType:
    """An element type; ``rounds`` is torch's type that values are rounded to, None leaves float32 as it is.

    ``wide``: 4 bytes an element in shared memory, and not 2.
    """

    name: str
    floating: bool = False
    rounds: torch.dtype | None = None
    wide: bool = False

    def of(self, data: Any) -> Any:
        if not isinstance(data, torch.Tensor):
            return float(data) if self.floating else int(data)
        if not self.floating:
            return data.to(torch.int64)
        return data.to(self.rounds).to(torch.float32) if self.rounds else data.to(torch.float32)

    def of_bits(self, data: torch.Tensor) -> torch.Tensor:
        """float32 as int32 and back."""
        assert self.name in ("float32", "int32") and self.floating == _whole(data)
        return (
            data.to(torch.int32).view(torch.float32)
            if self.floating
            else data.view(torch.int32).to(torch.int64)
        )


def plain(x: Any) -> Any:
    return x.data if isinstance(x, Value) else x


def _tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _whole(x: Any) -> bool:
    return not (x.is_floating_point() if _tensor(x) else isinstance(x, float))


def _divide(a: Any, b: Any) -> Any:
    """Integers: towards zero, as a GPU does."""
    assert _whole(a) and _whole(b), "// of floats"
    if _tensor(a) or _tensor(b):
        return torch.div(a, b, rounding_mode="trunc")
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def _remainder(a: Any, b: Any) -> Any:
    return a - _divide(a, b) * b


def _both(op: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
    def there(self: Value, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        return Value(op(self.data, plain(other)))

    def back(self: Value, other: Any) -> Value:
        return Value(op(plain(other), self.data))

    return there, back


OPERATORS = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv,
    "floordiv": _divide, "mod": _remainder, "and": operator.and_, "or": operator.or_, "xor": operator.xor,
    "rshift": operator.rshift, "lshift": operator.lshift,
}  # fmt: skip
for _name, _op in OPERATORS.items():
    _there, _back = _both(_op)
    setattr(Value, f"__{_name}__", _there)
    setattr(Value, f"__r{_name}__", _back)
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Value, f"__{_name}__", _both(getattr(operator, _name))[0])


def where(condition: Any, a: Any, b: Any) -> Value:
    condition, a, b = plain(condition), plain(a), plain(b)
    if not _tensor(condition):
        return Value(a if condition else b)
    return Value(torch.where(condition, _wide(a), _wide(b)))


def _wide(x: Any) -> Any:
    """A Python number beside tensors: as float32 where it is a float."""
    return torch.tensor(x, dtype=torch.float32) if isinstance(x, float) else x


def _extreme(by_torch: Any, by_python: Any) -> Callable[[Any, Any], Value]:
    def pick(a: Any, b: Any) -> Value:
        a, b = plain(a), plain(b)
        if not (_tensor(a) or _tensor(b)):
            return Value(by_python(a, b))
        return Value(by_torch(*(x if _tensor(x) else torch.tensor(x) for x in (a, b))))

    return pick


minimum, maximum = _extreme(torch.minimum, min), _extreme(torch.maximum, max)


def cdiv(a: Any, b: int) -> Value:
    return Value(_divide(plain(a) + (b - 1), b))


def exp2(x: Any) -> Value:
    return Value(torch.exp2(plain(x)))


def log2(x: Any) -> Value:
    return Value(torch.log2(plain(x)))


def absolute(x: Any) -> Value:
    return Value(abs(plain(x)))


def total(x: Value, axis: int) -> Value:
    return Value(x.data.sum(axis))


def largest(x: Value, axis: int) -> Value:
    return Value(x.data.amax(axis))


def arange(start: int, stop: int, layout: Any) -> Value:
    return Value(torch.arange(start, stop))


def full(shape: list[int], value: Any, dtype: DType, layout: Any) -> Value:
    return Value(dtype.of(torch.full(shape, plain(value))))


def zeros(shape: list[int], dtype: DType, layout: Any) -> Value:
    return full(shape, 0.0, dtype, layout)


class Pointer:
    """Addresses into the memory of a tensor, in elements from its first one."""

    def __init__(self, memory: torch.Tensor, offset: Any = 0):
        self.memory, self.offset = memory, offset

    @classmethod
    def to(cls, t: torch.Tensor) -> Pointer:
        """The address of a tensor's first element; rows of a view that skips elements stay where they are."""
        whole = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())
        return cls(whole, t.storage_offset())

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.offset + plain(other))

    def _checked(self, mask: Any) -> tuple[Any, Any]:
        """Offsets where ``mask`` holds, 0 elsewhere, and the mask of the same shape."""
        offset, mask = torch.broadcast_tensors(
            torch.as_tensor(self.offset), torch.as_tensor(plain(mask), dtype=torch.bool)
        )
        used = offset[mask]
        if used.numel() and not (int(used.min()) >= 0 and int(used.max()) < self.memory.numel()):
            raise OutOfBounds(
                f"elements {int(used.min())}..{int(used.max())} of {self.memory.numel()}"
            )
        return torch.where(mask, offset, 0), mask

    def load(self, mask: Any = True, other: Any = 0.0) -> Value:
        offset, mask = self._checked(mask)
        found = self.memory[offset]
        found = found.to(torch.float32 if found.is_floating_point() else torch.int64)
        out = torch.where(mask, found, torch.as_tensor(plain(other), dtype=found.dtype))
        return Value(out if out.ndim else out.item())

    def store(self, value: Any, mask: Any = True) -> None:
        offset, mask = self._checked(mask)
        value = torch.as_tensor(plain(value)).to(self.memory.dtype)
        self.memory[offset[mask]] = value.broadcast_to(offset.shape)[mask]


def load(pointer: Pointer, mask: Any = True, other: Any = math.nan) -> Value:
    return pointer.load(mask, other)


def store(pointer: Pointer, value: Any, mask: Any = True) -> None:
    pointer.store(value, mask)
