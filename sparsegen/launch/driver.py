"""The CUDA driver's C interface, as much of it as a launch needs, through ctypes.

The driver library comes with the GPU's driver and its functions are stable, so nothing is compiled, installed or matched
to a version of CUDA.  Descriptors are written where a launch reads them, and a call holds no lock of Python's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from sparsegen.errors import ToolchainError
from sparsegen.launch.description import BYTES, Box, Description

LIBRARY = "libcuda.so.1"
# numbers of the driver's interface, as cuda.h has them
INVALID_CONTEXT, INVALID_HANDLE = 201, 400
_DYNAMIC_SHARED, _MAX_THREADS = 8, 0  # CU_FUNC_ATTRIBUTE_*
_PREFER_SHARED = 1  # CU_FUNC_CACHE_PREFER_SHARED
_L2_128_BYTES = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B
_USUAL_SHARED = 48 << 10  # bytes a program may have without being asked for

_INT, _UINT, _SIZE, _POINTER = ctypes.c_int, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuDeviceGet": (_POINTER, _INT),
    "cuDevicePrimaryCtxRetain": (_POINTER, _INT),
    "cuCtxSetCurrent": (_POINTER,),
    "cuModuleLoadData": (_POINTER, _POINTER),
    "cuModuleGetFunction": (_POINTER, _POINTER, ctypes.c_char_p),
    "cuFuncGetAttribute": (_POINTER, _INT, _POINTER),
    "cuFuncSetAttribute": (_POINTER, _INT, _INT),
    "cuFuncSetCacheConfig": (_POINTER, _INT),
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": (_POINTER, _POINTER, _INT, _SIZE),
    "cuGetErrorName": (_INT, _POINTER),
    "cuGetErrorString": (_INT, _POINTER),
    "cuLaunchKernel": (_POINTER, *[_UINT] * 7, _POINTER, _POINTER, _POINTER),
}
# newer than the oldest driver that runs what we launch
_OPTIONAL: dict[str, tuple[Any, ...]] = {
    "cuTensorMapEncodeTiled": (
        *(_POINTER, _INT, _UINT, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER),
        *(_INT, _INT, _INT, _INT),
    ),
    "cuFuncGetParamInfo": (_POINTER, _SIZE, _POINTER, _POINTER),
}


class DriverError(ToolchainError):
    """The GPU's driver refused something.  ``code`` is its number."""

    def __init__(self, what: str, code: int, said: str):
        self.code = code
        super().__init__(f"{what}: {said}")


class Driver:
    """The functions of a driver library.  ``library``: what ctypes opened, or a stand-in with the same functions."""

    def __init__(self, library: Any):
        for name, types in {**_FUNCTIONS, **_OPTIONAL}.items():
            function = getattr(library, name, None)
            if function is not None:
                function.argtypes, function.restype = types, _INT
            elif name in _FUNCTIONS:
                raise ToolchainError(f"the GPU's driver has no {name}: update it")
        self._library = library
        self.launch = library.cuLaunchKernel

    def check(self, code: int, what: str) -> None:
        """DriverError unless ``code`` is success."""
        if code:
            raise DriverError(what, code, self._said(code))

    def context(self, device: int) -> int:
        """The context of a device that torch uses, made current in this thread."""
        found, handle = _INT(), _POINTER()
        what = f"GPU {device} cannot be used"
        self.check(self._library.cuDeviceGet(ctypes.byref(found), device), what)
        self.check(self._library.cuDevicePrimaryCtxRetain(ctypes.byref(handle), found.value), what)
        self.check(self._library.cuCtxSetCurrent(handle), what)
        return int(handle.value or 0)

    def function(self, binary: bytes, description: Description) -> int:
        """A kernel's handle in the current context, fit to be launched as described.

        It stays loaded as long as the process.
        """
        module, handle = _POINTER(), _POINTER()
        name = description.kernel
        self.check(
            self._library.cuModuleLoadData(ctypes.byref(module), binary), f"{name} cannot be loaded"
        )
        found = self._library.cuModuleGetFunction(ctypes.byref(handle), module, name.encode())
        self.check(found, f"the binary holds no {name}")
        function = int(handle.value or 0)
        self._check_parameters(function, description)
        threads = self._attribute(function, _MAX_THREADS)
        if description.threads > threads:
            raise ToolchainError(
                f"{name} needs {description.threads} threads a program, this GPU gives {threads}"
            )
        if description.shared_bytes > _USUAL_SHARED:
            what = f"{name} needs {description.shared_bytes} bytes of shared memory a program"
            self.check(self._library.cuFuncSetCacheConfig(function, _PREFER_SHARED), what)
            code = self._library.cuFuncSetAttribute(
                function, _DYNAMIC_SHARED, description.shared_bytes
            )
            self.check(code, what)
        return function

    def resident(self, function: int, description: Description) -> int:
        """Programs that a multiprocessor runs at once."""
        count = _INT()
        code = self._library.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            ctypes.byref(count), function, description.threads, description.shared_bytes
        )
        self.check(code, f"{description.kernel} cannot run")
        return count.value

    def encoder(
        self, at: int, box: Box, shape: Sequence[int], strides: Sequence[int]
    ) -> Callable[[int], None]:
        """A function that writes, to memory address ``at``, the descriptor of a tensor whose address it is given.

        Shape and strides in elements, outermost first; all of a call but the address is made here.
        """
        encode = getattr(self._library, "cuTensorMapEncodeTiled", None)
        if encode is None:
            raise ToolchainError("the GPU's driver knows no tensor descriptors: update it")
        rank = len(shape)
        sizes = (ctypes.c_uint64 * rank)(*reversed(shape))
        steps = (ctypes.c_uint64 * rank)(*(n * box.element_bytes for n in reversed(strides[:-1])))
        rows, ones = (_UINT * rank)(*reversed(box.shape)), (_UINT * rank)(*[1] * rank)
        layout = sizes, steps, rows, ones
        rest = (0, box.swizzle, _L2_128_BYTES, 0)  # not interleaved; zeros beyond the ends

        def write(address: int) -> None:
            code = encode(at, box.element, rank, address, *layout, *rest)
            if code:
                where = f"shape {tuple(shape)}, strides {tuple(strides)}, boxes {box.shape}"
                self.check(code, f"no tensor descriptor for {where} at {address:#x}")

        return write

    def _check_parameters(self, function: int, description: Description) -> None:
        """ToolchainError unless the binary declares the parameters that its description names."""
        ask = getattr(self._library, "cuFuncGetParamInfo", None)
        if ask is None:
            return
        wanted = [BYTES[kind] for kind in description.binary_kinds()]
        offset, size, found = _SIZE(), _SIZE(), []
        for i in range(len(wanted) + 1):
            at = ctypes.byref(offset), ctypes.byref(size)
            if ask(function, i, *at):
                break
            found.append(size.value)
        if found != wanted:
            raise ToolchainError(
                f"the binary of {description.kernel} takes {len(found)} parameters of {sum(found)} bytes, its "
                f"description names {len(wanted)} of {sum(wanted)}; build it again"
            )

    def _attribute(self, function: int, which: int) -> int:
        value = _INT()
        code = self._library.cuFuncGetAttribute(ctypes.byref(value), which, function)
        self.check(code, "a kernel cannot be asked for its resources")
        return value.value

    def _said(self, code: int) -> str:
        texts = []
        for ask in (self._library.cuGetErrorName, self._library.cuGetErrorString):
            text = ctypes.c_char_p()
            if not ask(code, ctypes.byref(text)) and text.value:
                texts.append(text.value.decode(errors="replace"))
        return ", ".join(texts) or f"error {code}"


@cache
def cuda() -> Driver:
    """The driver of this machine; ToolchainError where there is none."""
    try:
        return Driver(ctypes.CDLL(LIBRARY))
    except OSError as error:
        raise ToolchainError(f"the GPU's driver library cannot be opened: {error}") from None
