"""HIP's module functions, which launch on AMD's GPUs, through ctypes: the CUDA driver's under other names.

What differs: a device is made current by its number; nobody has to ask for shared memory; HIP does not tell what a
kernel takes, so the binary is read (``launch.code_object``).  Names and types are those of ``hip_runtime_api.h``.
Tried with a stand-in for the library only, never on an AMD GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from sparsegen.errors import ToolchainError
from sparsegen.launch import code_object
from sparsegen.launch.description import HIP, Box, Description
from sparsegen.launch.driver import Driver

LIBRARY = "libamdhip64.so"
_INT, _UINT, _SIZE, _POINTER = ctypes.c_int, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p
_TEXTS = ("hipGetErrorName", "hipGetErrorString")  # code -> text


class HipDriver(Driver):
    """A ``Driver`` whose library is HIP's runtime."""

    platform = HIP
    functions = {  # noqa: RUF012  declared by Driver
        "hipSetDevice": (_INT,),
        "hipModuleLoadData": (_POINTER, _POINTER),
        "hipModuleGetFunction": (_POINTER, _POINTER, ctypes.c_char_p),
        "hipFuncGetAttribute": (_POINTER, _INT, _POINTER),
        "hipModuleOccupancyMaxActiveBlocksPerMultiprocessor": (_POINTER, _POINTER, _INT, _SIZE),
        "hipGetErrorName": (_INT,),
        "hipGetErrorString": (_INT,),
        "hipGetLastError": (),
        "hipModuleLaunchKernel": (_POINTER, *[_UINT] * 7, _POINTER, _POINTER, _POINTER),
    }
    optional = {}  # noqa: RUF012
    most_threads = 1 << 32  # fewer than this many, says HIP of hipModuleLaunchKernel
    unbound = ()  # a thread of HIP's always has a current device
    _LOAD, _FIND, _ATTRIBUTE = "hipModuleLoadData", "hipModuleGetFunction", "hipFuncGetAttribute"
    _RESIDENT = "hipModuleOccupancyMaxActiveBlocksPerMultiprocessor"
    _LAUNCH = "hipModuleLaunchKernel"

    def __init__(self, library: Any):
        super().__init__(library)
        for name in _TEXTS:
            getattr(library, name).restype = ctypes.c_char_p
        self._binaries: list[bytes] = []

    def check(self, code: int, what: str) -> None:
        """See ``Driver``."""
        if code:
            self._library.hipGetLastError()  # takes it back: torch would report it as its own
        super().check(code, what)

    def bind(self, device: int) -> None:
        """See ``Driver``."""
        self.check(self._library.hipSetDevice(device), f"GPU {device} cannot be used")

    def function(self, binary: bytes, description: Description) -> int:
        """See ``Driver``."""
        code_object.check(binary, description)
        # HIP does not promise to copy what it is given
        self._binaries.append(binary)
        return super().function(binary, description)

    def encoder(
        self, at: int, box: Box, shape: Sequence[int], strides: Sequence[int]
    ) -> Callable[[int], None]:
        """See ``Driver``: always an error here."""
        raise ToolchainError("AMD's GPUs take no tensor descriptors")

    def _fit(self, function: int, description: Description) -> None:
        """Nothing: the binary was read before, and a launch may ask for all shared memory there is.

        ``hipFuncSetAttribute`` takes the address of a function in the host's program and none of a module.
        """

    def _said(self, code: int) -> str:
        texts = [getattr(self._library, name)(code) for name in _TEXTS]
        return ", ".join(t.decode(errors="replace") for t in texts if t) or f"error {code}"


@cache
def hip() -> HipDriver:
    """HIP's runtime in this process; ToolchainError where there is none."""
    place = loaded_library()
    try:
        return HipDriver(ctypes.CDLL(place))
    except OSError as error:
        raise ToolchainError(f"HIP's runtime cannot be opened: {error}") from None


def loaded_library(maps: Path = Path("/proc/self/maps")) -> str:
    """The path of the HIP runtime that this process has loaded; torch for ROCm does so when it is imported.

    No other is looked for: streams and addresses of torch's mean nothing to a second runtime.  ``maps`` is Linux' list of what
    a process has loaded.  ToolchainError unless there is exactly one.
    """
    try:
        rows = [line.split(maxsplit=5) for line in maps.read_text(errors="replace").splitlines()]
    except OSError as error:
        raise ToolchainError(f"HIP's runtime cannot be looked for: {error}") from None
    paths = [row[5] for row in rows if len(row) > 5]
    found = sorted({path for path in paths if Path(path).name.startswith(LIBRARY)})
    if not found:
        raise ToolchainError(f"this process has loaded no {LIBRARY}: torch must be one for ROCm")
    if len(found) > 1:
        raise ToolchainError(
            f"this process has loaded several HIP runtimes, and torch uses one: {', '.join(found)}"
        )
    return found[0]
