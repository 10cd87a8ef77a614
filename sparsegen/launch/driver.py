"""The CUDA driver's C interface, as much of it as a launch needs, through ctypes (AMD's is ``launch.hip``).

The driver library comes with the GPU's driver and its functions are stable, so nothing is compiled, installed or matched
to a version of CUDA.  Descriptors are written where a launch reads them, and a call holds no lock of Python's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, ClassVar

from sparsegen.errors import ToolchainError
from sparsegen.launch.description import BYTES, CUDA, Box, Description

LIBRARY = "libcuda.so.1"
# numbers of the driver's interface, as cuda.h has them; _MAX_THREADS is HIP's, too
_INVALID_CONTEXT, _INVALID_HANDLE = 201, 400
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

    platform = CUDA  # of the binaries that it launches
    # argument types by name; ``optional`` ones may be absent
    functions: ClassVar[dict[str, tuple[Any, ...]]] = _FUNCTIONS
    optional: ClassVar[dict[str, tuple[Any, ...]]] = _OPTIONAL
    most_threads = 1 << 41  # of a launch: 2^31 programs of 1,024
    # what a launch answers in a thread that torch has not bound to a device yet: it does when it first asks for something
    unbound: ClassVar[tuple[int, ...]] = (_INVALID_CONTEXT, _INVALID_HANDLE)
    # those that every platform has in this form
    _LOAD, _FIND, _ATTRIBUTE = "cuModuleLoadData", "cuModuleGetFunction", "cuFuncGetAttribute"
    _RESIDENT, _LAUNCH = "cuOccupancyMaxActiveBlocksPerMultiprocessor", "cuLaunchKernel"

    def __init__(self, library: Any):
        for name, types in {**self.functions, **self.optional}.items():
            function = getattr(library, name, None)
            if function is not None:
                function.argtypes, function.restype = types, _INT
            elif name in self.functions:
                raise ToolchainError(f"the GPU's driver has no {name}: update it")
        self._library = library
        self._load, self._find = getattr(library, self._LOAD), getattr(library, self._FIND)
        self.launch = getattr(library, self._LAUNCH)

    def check(self, code: int, what: str) -> None:
        """DriverError unless ``code`` is success."""
        if code:
            raise DriverError(what, code, self._said(code))

    def bind(self, device: int) -> None:
        """Make a device that torch uses current in this thread."""
        found, handle = _INT(), _POINTER()
        what = f"GPU {device} cannot be used"
        self.check(self._library.cuDeviceGet(ctypes.byref(found), device), what)
        self.check(self._library.cuDevicePrimaryCtxRetain(ctypes.byref(handle), found.value), what)
        self.check(self._library.cuCtxSetCurrent(handle), what)

    def function(self, binary: bytes, description: Description) -> int:
        """A kernel's handle on the current device, fit to be launched as described.

        It stays loaded as long as the process.
        """
        module, handle = _POINTER(), _POINTER()
        name = description.kernel
        self.check(self._load(ctypes.byref(module), binary), f"{name} cannot be loaded")
        found = self._find(ctypes.byref(handle), module, name.encode())
        self.check(found, f"the binary holds no {name}")
        function = int(handle.value or 0)
        threads = self._attribute(function, _MAX_THREADS)
        if description.threads > threads:
            raise ToolchainError(
                f"{name} needs {description.threads} threads a program, this GPU gives {threads}"
            )
        self._fit(function, description)
        return function

    def resident(self, function: int, description: Description) -> int:
        """Programs that a multiprocessor runs at once."""
        count = _INT()
        code = getattr(self._library, self._RESIDENT)(
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

    def _fit(self, function: int, description: Description) -> None:
        """Check what the driver knows of a function, and give it the shared memory that it needs."""
        self._check_parameters(function, description)
        if description.shared_bytes > _USUAL_SHARED:
            what = f"{description.kernel} needs {description.shared_bytes} bytes of shared memory a program"
            self.check(self._library.cuFuncSetCacheConfig(function, _PREFER_SHARED), what)
            code = self._library.cuFuncSetAttribute(
                function, _DYNAMIC_SHARED, description.shared_bytes
            )
            self.check(code, what)

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
        code = getattr(self._library, self._ATTRIBUTE)(ctypes.byref(value), which, function)
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
