"""The parameters of one launch in memory, as a driver takes them."""

from __future__ import annotations

import ctypes
import itertools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sparsegen.errors import InputError
from sparsegen.launch.description import (
    BYTES,
    DESCRIPTOR,
    FLOAT32,
    INT32,
    INT64,
    POINTER,
    SCRATCH,
    Box,
    Description,
    Parameter,
)

ALIGNMENT = 64  # bytes, of a CUtensorMap
_SLOT = (
    8  # bytes that a plain parameter takes here; the driver reads as many as the kernel declares
)
_MAP = BYTES[DESCRIPTOR]
_FORMATS = {POINTER: "Q", INT32: "i4x", INT64: "q", FLOAT32: "f4x"}


@dataclass(frozen=True)
class View:
    """What a descriptor describes: ``base`` a tensor or an address, shape and strides in elements, outermost first.

    ``moves``: number of the address of a call that takes the place of ``base``; None: it stays.
    """

    base: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    moves: int | None = None


class Packed:
    """Room for all parameters of a launch, and their addresses in ``pointers``.

    Descriptors lie first; ``views`` says where each is and what it is of, and the caller writes them.
    """

    def __init__(self, description: Description):
        self._description = description
        kinds = description.binary_kinds()
        maps, plain = kinds.count(DESCRIPTOR), [k for k in kinds if k != DESCRIPTOR]
        self._memory = ctypes.create_string_buffer(maps * _MAP + len(plain) * _SLOT + ALIGNMENT)
        start = ctypes.addressof(self._memory)
        self._first = -start % ALIGNMENT  # offset of the first descriptor
        self._plain = self._first + maps * _MAP  # offset of the first plain parameter
        self._put = struct.Struct("<" + "".join(_FORMATS[kind] for kind in plain)).pack_into
        self.views: list[tuple[int, Box, View]] = []  # (address of the descriptor, box, view)
        self._scratch = [0] * len(SCRATCH)  # pointers to memory that there is none of
        described, placed = itertools.count(), itertools.count()
        places = (
            self._first + _MAP * next(described)
            if kind == DESCRIPTOR
            else self._plain + _SLOT * next(placed)
            for kind in kinds
        )
        self.pointers = (ctypes.c_void_p * len(kinds))(*(start + place for place in places))

    def fill(self, values: Sequence[Any]) -> None:
        """Put the arguments in, in the order of the description.

        Pointers are tensors, addresses or None; descriptors are views, or what has ``base``, ``shape`` and ``strides``.
        ``InputError`` names the one that does not fit.
        """
        parameters = self._description.parameters
        if len(values) != len(parameters):
            raise InputError(
                f"{self._description.kernel} takes {len(parameters)} arguments, got {len(values)}"
            )
        plain: list[Any] = []
        self.views = []
        at = ctypes.addressof(self._memory) + self._first
        for parameter, value in zip(parameters, values):
            if parameter.box is not None:
                view = _view(value, parameter)
                self.views.append((at + _MAP * len(self.views), parameter.box, view))
                plain += view.shape
                plain += view.strides
            elif parameter.kind == POINTER:
                plain.append(address_of(value))
            else:
                plain.append(value)
        try:
            self._put(self._memory, self._plain, *plain, *self._scratch)
        except struct.error:
            raise InputError(self._misfit(values)) from None

    def moving(self, count: int) -> Callable[[Sequence[int]], None]:
        """A function that puts addresses in the places of the first ``count`` arguments, which are pointers."""
        kinds = [p.kind for p in self._description.parameters[:count]]
        if kinds != [POINTER] * count:
            raise InputError(
                f"the first {count} arguments of {self._description.kernel} are {', '.join(kinds)}"
            )
        put, memory, plain = struct.Struct(f"<{count}Q").pack_into, self._memory, self._plain
        return lambda addresses: put(memory, plain, *addresses)

    def _misfit(self, values: Sequence[Any]) -> str:
        for parameter, value in zip(self._description.parameters, values):
            each = [(parameter.kind, value)]
            if parameter.box is not None:
                view = _view(value, parameter)
                each = [*((INT32, n) for n in view.shape), *((INT64, n) for n in view.strides)]
            for kind, n in each:
                try:
                    struct.pack("<" + _FORMATS[kind], address_of(n) if kind == POINTER else n)
                except struct.error as error:
                    return f"argument {parameter.name}: {n!r} is no {kind} ({error})"
        raise AssertionError("every argument fits")


def address_of(value: Any) -> int:
    """The address of a tensor, of a number that is one, or 0 for None."""
    if value is None:
        return 0
    return value if type(value) is int else int(value.data_ptr())


def _view(value: Any, parameter: Parameter) -> View:
    """What a descriptor is of; also a descriptor that another library made, as Triton's."""
    if not isinstance(value, View):
        value = View(value.base, tuple(map(int, value.shape)), tuple(map(int, value.strides)))
    assert parameter.box is not None
    if len(value.shape) != len(parameter.box.shape) or value.strides[-1] != 1:
        raise InputError(f"{parameter.name}: shape {value.shape} and strides {value.strides}")
    return value
