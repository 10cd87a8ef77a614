"""Shared memory of a program: arrays of tiles, barriers with phases and counts, boxes that land some time.

It is as unkind as the hardware may be.  Memory starts as NaN; from the moment a box is asked for until it lands, its
place holds NaN; an asynchronous product must find the same operands when it is asked for and when it is waited for;
what a partition stores is for the asynchronous units only after a fence of its own.  Boxes that stop an H200 with an
illegal instruction are a ``Misuse``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.hopper.registers import Value, plain
from tests.hopper.schedulers import Scheduler


class Race(AssertionError):
    """Something is read or written while something else has it."""


class Misuse(AssertionError):
    """A barrier or a box is used as the hardware does not allow."""


@dataclass(frozen=True)
class View:
    """A part of an array in shared memory."""

    name: str
    data: torch.Tensor
    dirty: torch.Tensor  # elements that were stored without a fence since
    stored: Callable[[View], None]  # told of every store
    element: int = 2  # bytes

    @classmethod
    def allocate(
        cls, name: str, shape: list[int], stored: Callable[[View], None], element: int = 2
    ) -> View:
        dirty = torch.zeros(shape, dtype=torch.bool)
        return cls(name, torch.full(shape, math.nan), dirty, stored, element)

    @property
    def bytes(self) -> int:
        return self.data.numel() * self.element

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    def index(self, i: Any) -> View:
        i = int(plain(i))
        if not 0 <= i < self.shape[0]:
            raise Misuse(f"{self.name}[{i}]: there are {self.shape[0]}")
        return self._of(lambda t: t[i], f"{self.name}[{i}]")

    def slice(self, start: int, length: int, dim: int = 0) -> View:
        assert start + length <= self.shape[dim]
        return self._of(lambda t: t.narrow(dim, start, length))

    def reshape(self, shape: list[int]) -> View:
        return self._of(lambda t: t.view(shape))

    def permute(self, order: tuple[int, ...]) -> View:
        return self._of(lambda t: t.permute(order))

    def _of(self, take: Callable[[torch.Tensor], torch.Tensor], name: str = "") -> View:
        data, dirty = take(self.data), take(self.dirty)
        return View(name or self.name, data, dirty, self.stored, self.element)

    def load(self, layout: Any) -> Value:
        return Value(self.data.clone())

    def store(self, value: Value) -> None:
        assert list(value.shape) == self.shape, f"{value.shape} into {self.name} {self.shape}"
        self.data.copy_(value.data)
        self.dirty.fill_(True)
        self.stored(self)

    def check_fenced(self, who: str) -> None:
        if self.dirty.any():
            raise Race(f"{who} takes {self.name}, which was stored to and not fenced")


# Bytes that the innermost coordinate of a box is a multiple of, and every stride of its tensor but the last.  Another
# coordinate is an illegal instruction, another stride no descriptor (Triton's pull request 9112, tilelang's issue 2527).
BOX_UNIT = 16


def check_aligned(descriptor: Any, corner: list[int], element: int, who: str) -> None:
    """What every box must have, loaded, stored or added; ``element``: bytes of one.  Its other coordinates are any."""
    if corner[-1] * element % BOX_UNIT:
        raise Misuse(
            f"{who}: its innermost coordinate {corner[-1]} is byte {corner[-1] * element} of a row, no multiple of "
            f"{BOX_UNIT}"
        )
    if any(stride * element % BOX_UNIT for stride in descriptor.strides[:-1]):
        raise Misuse(
            f"{who}: strides {list(descriptor.strides)} of {element} bytes, no multiples of {BOX_UNIT}"
        )


class Barriers:
    """An array of barriers; each has a shape of its own, [1]."""

    def __init__(self, name: str, count: int, scheduler: Scheduler):
        self._all = [Barrier(f"{name}[{i}]", scheduler) for i in range(count)]

    def index(self, i: Any) -> Barrier:
        i = int(plain(i))
        if not 0 <= i < len(self._all):
            raise Misuse(f"barrier {i} of {len(self._all)}")
        return self._all[i]

    def __iter__(self) -> Any:
        return iter(self._all)


class Barrier:
    """A phase ends when all arrivals and all bytes are there; the next one starts at once."""

    def __init__(self, name: str, scheduler: Scheduler):
        self.name, self._scheduler = name, scheduler
        self.count = self._missing = self._bytes = self.ended = 0
        self.fenced = False

    def init(self, count: int) -> None:
        self.count = self._missing = int(plain(count))

    def arrive(self, count: int = 1, expected: int = 0) -> None:
        """``expected``: bytes to come besides, in this phase."""
        self._ready_for_use()
        if count > self._missing:
            raise Misuse(f"{self._scheduler.current} arrives at {self.name} beyond its count")
        self._missing -= count
        self._bytes += expected
        self._turn()

    def land(self, bytes_: int) -> None:
        self._ready_for_use()
        self._bytes -= bytes_
        self._turn()

    def passed(self, parity: int) -> bool:
        """Whether the last phase of this parity has ended; a fresh barrier says so of parity 1."""
        return (self.ended - 1) % 2 == parity

    def wait(self, parity: Any) -> None:
        self._ready_for_use()
        parity = int(plain(parity))
        assert parity in (0, 1), f"parity {parity}"
        what = f"{self.name}, phase {self.ended} of parity {parity}"
        self._scheduler.wait(lambda: self.passed(parity), what)

    @property
    def at_rest(self) -> bool:
        return self._bytes == 0

    def _ready_for_use(self) -> None:
        if not self.count or not self.fenced:
            raise Misuse(f"{self.name} is used before it is there for all")

    def _turn(self) -> None:
        if self._missing == 0 and self._bytes == 0:
            self.ended += 1
            self._missing = self.count


def load_box(
    scheduler: Scheduler, descriptor: Any, corner: list[Any], barrier: Barrier, place: View
) -> None:
    """Copy a box of a tensor into shared memory some time; outside of the tensor it reads zero."""
    corner = [int(plain(c)) for c in corner]
    shape = list(descriptor.block_shape)
    if place.shape != shape or len(corner) != len(shape):
        raise Misuse(f"a box of {shape} at {corner} into {place.name} {place.shape}")
    who = f"the box at {corner}"
    check_aligned(descriptor, corner, place.element, f"{who} into {place.name}")
    place.check_fenced(who)
    barrier._ready_for_use()
    place.data.fill_(math.nan)
    box = box_of(descriptor, corner)

    def land() -> None:
        place.check_fenced(who)
        place.data.copy_(box)
        barrier.land(place.bytes)

    scheduler.later(f"{who} into {place.name}", land)


class Outgoing:
    """A box of shared memory that is written, or added, to a tensor some time; outside of the tensor nothing is."""

    def __init__(
        self, scheduler: Scheduler, descriptor: Any, corner: list[Any], source: View, adds: bool
    ):
        self.done = False
        corner = [int(plain(c)) for c in corner]
        if source.shape != list(descriptor.block_shape) or len(corner) != len(source.shape):
            raise Misuse(f"a box of {source.shape} at {corner} of {descriptor.block_shape}")
        who = f"the box at {corner}, on its way out"
        check_aligned(descriptor, corner, source.element, f"{who} from {source.name}")
        source.check_fenced(who)
        starts = [max(c, 0) for c in corner]
        ends = [min(c + n, size) for c, n, size in zip(corner, source.shape, descriptor.shape)]
        if any(a >= b for a, b in zip(starts, ends)):
            raise Misuse(f"{who}, lies outside of {list(descriptor.shape)}")
        then = source.data.clone()

        def leave() -> None:
            source.check_fenced(who)
            if not torch.equal(source.data.nan_to_num(math.pi), then.nan_to_num(math.pi)):
                raise Race(f"{source.name} changes under {who}")
            t = descriptor.base
            whole = torch.as_strided(t, descriptor.shape, descriptor.strides, t.storage_offset())
            there = tuple(slice(a - c, b - c) for a, b, c in zip(starts, ends, corner))
            place = tuple(slice(a, b) for a, b in zip(starts, ends))
            whole[place] = (whole[place] if adds else 0.0) + then[there]
            self.done = True

        scheduler.later(f"{who} from {source.name}", leave)


def box_of(descriptor: Any, corner: list[int]) -> torch.Tensor:
    """Elements of a box, float32; zero where a coordinate is outside of the tensor."""
    t = descriptor.base
    whole = torch.as_strided(t, descriptor.shape, descriptor.strides, t.storage_offset())
    out = torch.zeros(descriptor.block_shape)
    starts = [max(c, 0) for c in corner]
    ends = [min(c + n, size) for c, n, size in zip(corner, out.shape, whole.shape)]
    if all(a < b for a, b in zip(starts, ends)):
        inside = tuple(slice(a, b) for a, b in zip(starts, ends))
        there = tuple(slice(a - c, b - c) for a, b, c in zip(starts, ends, corner))
        out[there] = whole[inside].to(torch.float32)
    return out


class Product(Value):
    """An asynchronous product: its registers hold nothing until it is waited for."""

    def __init__(self, who: str, a: Value | View, b: View, acc: Any, use_acc: bool):
        self.who, self._a, self._b, self._acc, self._use_acc = who, a, b, acc, use_acc
        for operand in (a, b):
            if isinstance(operand, View):
                operand.check_fenced(f"a product of {who}")
        self._then = [x.data.clone() for x in (a, b)]
        assert self._then[0].shape[0] == 64 and self._then[0].shape[1] == self._then[1].shape[0]
        self._done: torch.Tensor | None = None

    @property
    def data(self) -> torch.Tensor:
        if self._done is None:
            raise Race(f"{self.who} uses a product that it has not waited for")
        return self._done

    def finish(self) -> None:
        for operand, then in zip((self._a, self._b), self._then):
            if not torch.equal(operand.data.nan_to_num(math.pi), then.nan_to_num(math.pi)):
                name = operand.name if isinstance(operand, View) else "registers"
                raise Race(f"{name} changes under a product of {self.who}")
        product = self._then[0] @ self._then[1]
        assert self._acc.data.shape == product.shape, f"{product.shape} onto {self._acc.data.shape}"
        self._done = self._acc.data + product if self._use_acc else product
