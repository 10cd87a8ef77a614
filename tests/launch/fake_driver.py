"""Stand-ins for the libraries that launch, CUDA's driver and HIP's runtime: C functions that write down what they are given."""

from __future__ import annotations

import contextlib
import ctypes
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from sparsegen.launch.code_object import kernels
from sparsegen.launch.driver import Driver
from sparsegen.launch.hip import HipDriver

SIZES = {"b8": 1, "u16": 2, "b16": 2, "u32": 4, "b32": 4, "f32": 4, "u64": 8, "b64": 8}


def ptx_parameters(text: str) -> list[tuple[int, int]]:
    """(bytes, alignment) of every parameter of the one kernel in a PTX text, as its assembler reads them."""
    entry = re.search(r"\.entry \w+\((.*?)\)\s", text, re.DOTALL)
    assert entry is not None
    out = []
    for line in entry[1].split(","):
        words = re.fullmatch(
            r"\s*\.param (?:\.align (\d+) )?\.(\w+)(?: \.ptr.*)? \w+?(?:\[(\d+)\])?\s*", line
        )
        assert words is not None, line
        size = SIZES[words[2]] * int(words[3] or 1)
        out.append((size, int(words[1] or SIZES[words[2]])))
    return out


@dataclass(frozen=True)
class Map:
    """Arguments of one ``cuTensorMapEncodeTiled``."""

    element: int
    rank: int
    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...]
    rest: tuple[int, ...]  # interleave, swizzle, L2 promotion, fill


@dataclass(frozen=True)
class Launched:
    """One ``cuLaunchKernel`` or ``hipModuleLaunchKernel``: grid, block, shared bytes, stream, and the bytes of every parameter."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    stream: int
    parameters: tuple[bytes, ...]


@dataclass
class FakeLibrary:
    """``sizes``: bytes of the parameters of each kernel that a binary holds, by the binary's bytes.

    ``codes``: what a function answers in its next calls, in place of success.  A descriptor is its number in ``maps``.
    """

    kind: ClassVar[type[Driver]] = Driver  # what this is a library of
    sizes: dict[bytes, list[int]]
    codes: dict[str, list[int]] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    threads: int = 1024
    maps: list[Map] = field(default_factory=list)
    launched: list[Launched] = field(default_factory=list)
    asked: list[tuple[Any, ...]] = field(default_factory=list)
    _binaries: list[bytes] = field(default_factory=list)
    _names: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, types in {**self.kind.functions, **self.kind.optional}.items():
            if name not in self.absent:
                answer = ctypes.c_void_p if name.startswith("hipGetError") else ctypes.c_int
                made = ctypes.CFUNCTYPE(answer, *types)(self._answering(name))
                setattr(self, name, made)

    def _answering(self, name: str) -> Any:
        do = getattr(self, f"_{name}", None)

        def answer(*args: Any) -> int:
            self.asked.append((name, *args))
            if self.codes.get(name):
                code = self.codes[name].pop(0)
                if code:
                    return code
            return int(do(*args) or 0) if do else 0

        return answer

    def count(self, name: str) -> int:
        """Calls of a function."""
        return sum(asked[0] == name for asked in self.asked)

    def _cuDeviceGet(self, out: int, device: int) -> None:
        ctypes.c_int.from_address(out).value = device

    def _cuDevicePrimaryCtxRetain(self, out: int, device: int) -> None:
        ctypes.c_void_p.from_address(out).value = 0x1000 + device

    def _cuModuleLoadData(self, out: int, binary: int) -> int:
        least = min(map(len, self.sizes), default=0)  # it lies in memory without its length
        known = [b for b in self.sizes if b[:least] == ctypes.string_at(binary, least)]
        if not known:
            return 200
        self._binaries.append(known[0])
        ctypes.c_void_p.from_address(out).value = len(self._binaries)
        return 0

    def _cuModuleGetFunction(self, out: int, module: int, name: bytes) -> int:
        if name not in self._binaries[module - 1]:
            return 500
        self._names[module] = name.decode()
        ctypes.c_void_p.from_address(out).value = module
        return 0

    def _cuFuncGetAttribute(self, out: int, which: int, function: int) -> None:
        ctypes.c_int.from_address(out).value = self.threads

    def _cuOccupancyMaxActiveBlocksPerMultiprocessor(
        self, out: int, function: int, threads: int, shared: int
    ) -> None:
        ctypes.c_int.from_address(out).value = 2

    def _cuGetErrorName(self, code: int, out: int) -> None:
        ctypes.c_char_p.from_address(out).value = b"FAKE_ERROR"

    def _cuFuncGetParamInfo(self, function: int, number: int, offset: int, size: int) -> int:
        sizes = self.sizes[self._binaries[function - 1]]
        if number >= len(sizes):
            return 1
        ctypes.c_size_t.from_address(size).value = sizes[number]
        return 0

    def _cuTensorMapEncodeTiled(
        self, at: int, element: int, rank: int, address: int, *rest: Any
    ) -> int:
        assert at % 64 == 0, "a CUtensorMap lies on 64 bytes"
        sizes, strides, box, steps, *numbers = rest
        of = lambda kind, where, n: tuple((kind * n).from_address(where))
        self.maps.append(
            Map(
                *(element, rank, address or 0, of(ctypes.c_uint64, sizes, rank)),
                *(of(ctypes.c_uint64, strides, rank - 1), of(ctypes.c_uint, box, rank)),
                *(of(ctypes.c_uint, steps, rank), tuple(numbers)),
            )
        )
        ctypes.memmove(at, struct.pack("<Q", len(self.maps) - 1).ljust(128, b"\xdd"), 128)
        return 0

    def _cuLaunchKernel(self, function: int, *rest: Any) -> int:
        *numbers, stream, parameters, extra = rest
        assert extra is None
        sizes = self.sizes[self._binaries[function - 1]]
        places = (ctypes.c_void_p * len(sizes)).from_address(parameters)
        read = tuple(ctypes.string_at(p, n) for p, n in zip(places, sizes, strict=True))
        grid, block, shared = tuple(numbers[:3]), tuple(numbers[3:6]), numbers[6]
        name = self._names[function]
        self.launched.append(Launched(name, grid, block, shared, stream or 0, read))
        return 0

    @classmethod
    def of_folder(cls, folder: Path, **settings: Any) -> FakeLibrary:
        """One that knows all binaries below a folder, their parameters read from the PTX beside them."""
        sizes = {
            path.read_bytes(): [n for n, _ in ptx_parameters(path.with_suffix(".ptx").read_text())]
            for path in folder.rglob("*.cubin")
        }
        return cls(sizes, **settings)


@dataclass
class FakeHip(FakeLibrary):
    """The same of HIP: it finds in a code object how many bytes of each argument a launch copies."""

    kind: ClassVar[type[Driver]] = HipDriver
    _text: Any = field(default_factory=lambda: ctypes.create_string_buffer(b"FAKE_ERROR"))

    _hipModuleLoadData = FakeLibrary._cuModuleLoadData
    _hipModuleGetFunction = FakeLibrary._cuModuleGetFunction
    _hipFuncGetAttribute = FakeLibrary._cuFuncGetAttribute
    _hipModuleLaunchKernel = FakeLibrary._cuLaunchKernel
    _hipModuleOccupancyMaxActiveBlocksPerMultiprocessor = (
        FakeLibrary._cuOccupancyMaxActiveBlocksPerMultiprocessor
    )

    def _hipGetErrorName(self, code: int) -> int:
        return ctypes.addressof(self._text)

    @classmethod
    def of_folder(cls, folder: Path, **settings: Any) -> FakeHip:
        """One that knows all code objects below a folder."""
        sizes = {}
        for binary in (path.read_bytes() for path in folder.rglob("*.hsaco")):
            (kernel,) = kernels(binary).values()
            sizes[binary] = [a[".size"] for a in kernel[".args"]]
        return cls(sizes, **settings)


@contextlib.contextmanager
def fake_torch(stream: int = 0x5EA) -> Iterator[list[Any]]:
    """torch without CUDA as far as a launch asks it; yields the devices that were made current."""
    from unittest.mock import patch

    import torch

    entered: list[Any] = [0]

    @contextlib.contextmanager
    def device(number: int) -> Iterator[None]:
        entered.append(number)
        try:
            yield
        finally:
            entered.append(entered[-2])

    with (
        patch.object(torch.cuda, "device", device),
        patch.object(torch.cuda, "current_device", lambda: entered[-1]),
        patch.object(torch._C, "_cuda_getCurrentRawStream", lambda d: stream, create=True),
    ):
        yield entered
