"""What an AMD code object (hsaco) says about its kernels, and whether a description says the same.

HIP cannot be asked what a kernel takes, as NVIDIA's driver can.  Instead the binary is: an ELF file whose note
``NT_AMDGPU_METADATA`` is a map in MessagePack (LLVM's "User Guide for AMDGPU Backend", code object V3 and newer).
HIP itself finds there how many bytes of each argument it copies.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from sparsegen.errors import ToolchainError
from sparsegen.launch.description import BYTES, POINTER, SCRATCH, Description

_ELF64_LITTLE = b"\x7fELF\x02\x01"
_PT_NOTE = 4
_OWNER, _METADATA = b"AMDGPU\0", 32
_ARGUMENTS = (
    "by_value",
    "global_buffer",
)  # given by the caller; the hidden ones that follow are HIP's


def check(binary: bytes, description: Description) -> None:
    """ToolchainError unless the binary holds the described kernel, with these parameters and threads.

    Dynamic shared memory is a number of the launch alone, so no binary knows it.
    """
    name = description.kernel
    kernel = kernels(binary, f"the binary of {name}").get(name)
    if kernel is None:
        raise ToolchainError(f"the binary holds no {name}; build it again")
    given = [a for a in kernel.get(".args", ()) if not a[".value_kind"].startswith("hidden_")]
    other = [a[".value_kind"] for a in given if a[".value_kind"] not in _ARGUMENTS]
    if other:
        raise ToolchainError(
            f"the binary of {name} takes a {other[0]}, which the launcher does not know"
        )
    found = [(a[".value_kind"] == "global_buffer", a[".size"]) for a in given]
    wanted = [(kind == POINTER, BYTES[kind]) for kind in description.binary_kinds()]
    if found != wanted:
        raise ToolchainError(
            f"the binary of {name} takes {_counted(found)}, its description names {_counted(wanted)}"
            f"{_difference(found, wanted, description)}; build it again"
        )
    threads = kernel[".max_flat_workgroup_size"]
    if threads != description.threads:
        raise ToolchainError(
            f"the binary of {name} is for {threads} threads a program, its description names "
            f"{description.threads}; build it again"
        )


def kernels(binary: bytes, what: str = "the binary") -> dict[str, Any]:
    """The metadata of every kernel of a code object, by name; ToolchainError, which says ``what``, for anything else."""
    try:
        found = _unpack(_metadata(binary))
        return {kernel[".name"]: kernel for kernel in found["amdhsa.kernels"]}
    except (struct.error, LookupError, ValueError, TypeError, RecursionError) as error:
        raise ToolchainError(
            f"{what} is no code object of AMD's ({error}); build it again"
        ) from None


def _counted(parameters: list[tuple[bool, int]]) -> str:
    pointers = sum(pointer for pointer, _ in parameters)
    total = sum(size for _, size in parameters)
    return f"{len(parameters)} parameters of {total} bytes, {pointers} of them pointers"


def _difference(
    found: list[tuple[bool, int]], wanted: list[tuple[bool, int]], description: Description
) -> str:
    names = [*(p.name for p in description.parameters), *SCRATCH]
    for name, mine, other in zip(names, found, wanted):
        if mine != other:
            return f"; they differ from {name} on"
    return ""


# --- ELF: the note of a code object ---


def _metadata(binary: bytes) -> bytes:
    """The one metadata note of an ELF file, which is MessagePack."""
    if not binary.startswith(_ELF64_LITTLE):
        raise ValueError("no 64-bit ELF file")
    (headers,) = struct.unpack_from("<Q", binary, 0x20)
    size, count = struct.unpack_from("<HH", binary, 0x36)
    for i in range(count):
        kind, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", binary, headers + i * size)
        if kind == _PT_NOTE:
            found = _note(binary[offset : offset + length])
            if found is not None:
                return found
    raise ValueError("no note NT_AMDGPU_METADATA")


def _note(segment: bytes) -> bytes | None:
    at = 0
    while at < len(segment):
        owner, length, kind = struct.unpack_from("<III", segment, at)
        start = at + 12 + _padded(owner)
        if segment[at + 12 : at + 12 + owner] == _OWNER and kind == _METADATA:
            return segment[start : start + length]
        at = start + _padded(length)
    return None


def _padded(length: int) -> int:
    return -(-length // 4) * 4


# --- MessagePack, as much of it as metadata has: maps, lists, texts, numbers, truth values, nothing ---

_PLAIN: dict[int, Any] = {0xC0: None, 0xC2: False, 0xC3: True}
_NUMBERS = {0xCC: "B", 0xCD: "H", 0xCE: "I", 0xCF: "Q", 0xD0: "b", 0xD1: "h", 0xD2: "i", 0xD3: "q"}
# first byte -> (what follows, format of its length)
_LONG = {0xD9: ("text", "B"), 0xDA: ("text", "H"), 0xDB: ("text", "I")}
_LONG |= {0xDC: ("list", "H"), 0xDD: ("list", "I"), 0xDE: ("map", "H"), 0xDF: ("map", "I")}


def _unpack(data: bytes) -> Any:
    """The one value that ``data`` holds; ValueError, LookupError or struct.error for what is none."""
    value, end = _value(data, 0)
    if end != len(data):
        raise ValueError(f"{len(data) - end} bytes behind the metadata")
    return value


def _value(data: bytes, at: int) -> tuple[Any, int]:
    """The value at a place, and where the next one begins."""
    first, at = data[at], at + 1
    if first < 0x80:
        return first, at
    if first >= 0xE0:
        return first - 0x100, at
    if first < 0xC0:  # short map, list, text: the length is in the byte
        kind, bits = ("map", 4) if first < 0x90 else ("list", 4) if first < 0xA0 else ("text", 5)
        return _LONGER[kind](data, at, first & ((1 << bits) - 1))
    if first in _PLAIN:
        return _PLAIN[first], at
    if first in _NUMBERS:
        return _number(data, at, _NUMBERS[first])
    if first in _LONG:
        kind, form = _LONG[first]
        length, at = _number(data, at, form)
        return _LONGER[kind](data, at, length)
    raise ValueError(f"byte {first:#x} in the metadata")


def _number(data: bytes, at: int, form: str) -> tuple[int, int]:
    (value,) = struct.unpack_from(">" + form, data, at)
    return value, at + struct.calcsize(form)


def _text(data: bytes, at: int, length: int) -> tuple[str, int]:
    if at + length > len(data):
        raise ValueError("the metadata ends within a text")
    return data[at : at + length].decode(), at + length


def _list(data: bytes, at: int, length: int) -> tuple[list[Any], int]:
    out = []
    for _ in range(length):
        value, at = _value(data, at)
        out.append(value)
    return out, at


def _map(data: bytes, at: int, length: int) -> tuple[dict[Any, Any], int]:
    flat, at = _list(data, at, 2 * length)
    return dict(zip(flat[::2], flat[1::2])), at


_LONGER: dict[str, Callable[[bytes, int, int], tuple[Any, int]]] = {
    "text": _text,
    "list": _list,
    "map": _map,
}
