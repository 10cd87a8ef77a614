"""A compiled variant on a device: its binary, how it is launched, and one sentence when it cannot be loaded.

The driver launches the stored binary as its description says, NVIDIA's (``driver``) or HIP (``hip``): no compiler, no
Python headers and no Triton are needed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.codegen.source import KernelSource
from sparsegen.errors import ArtifactError, InputError
from sparsegen.launch import signature as sig
from sparsegen.launch.binary import folder_of
from sparsegen.launch.capture import refuse_capture
from sparsegen.launch.description import DESCRIPTOR, SUFFIXES, Description, read_description
from sparsegen.launch.driver import Driver, cuda
from sparsegen.launch.hip import hip
from sparsegen.launch.packing import Packed, address_of

WRITERS_KEPT = 256  # of descriptors, a layout and place each


class Prepared(Protocol):
    """A launch of which all but some addresses is known."""

    def __call__(self, addresses: Sequence[int]) -> None:
        """Launch on the current stream of the binary's device, whichever device is current."""


class Loaded(Protocol):
    """One binary, which is one launch of a variant, on one device."""

    constants: tuple[None, ...]  # what callers give for parameters that are in the binary
    block_m: int
    persistent: bool

    @property
    def resident(self) -> int:
        """Programs that the device runs at once."""

    def prepare(self, programs: int, args: Sequence[Any], moving: int) -> Prepared:
        """A launch with these arguments, ``constants`` left out; the first ``moving`` are addresses of a call."""

    def run(self, programs: int, args: Sequence[Any]) -> None:
        """Launch once with all arguments, on the current stream of the binary's device."""


def load(
    source: KernelSource,
    config: LaunchConfig,
    variant: str,
    directory: Path,
    device: int,
    launch: int = 0,
) -> Loaded:
    """One launch of a variant on a device; ``directory``: the variant's files.

    ``ToolchainError`` and ``ArtifactError`` say why it cannot be launched here.
    """
    refuse_capture(f"the {variant} kernel is not loaded yet")
    return DriverLoaded(source, config, variant, directory, device, launch)


class DriverLoaded:
    """A ``Loaded`` that the GPU's driver launches."""

    def __init__(
        self,
        source: KernelSource,
        config: LaunchConfig,
        variant: str,
        directory: Path,
        device: int,
        launch: int = 0,
        driver: Driver | None = None,
    ):
        import torch

        folder = folder_of(source, directory, launch)
        text, chosen = sig.unit(source, config, variant, launch)
        self.description, binary = _files(folder, text.entry)
        self._taken = _taken(source, config, variant, launch, self.description, folder)
        self.constants = (None,) * len(text.constexprs)
        self.block_m, self.persistent = int(chosen["BLOCK_M"]), bool(chosen["PERSISTENT"])
        self.device = device
        self.driver = driver or (cuda() if torch.version.hip is None else hip())
        if self.description.platform != self.driver.platform:
            raise ArtifactError(
                f"{folder} was built for {self.description.platform}, the GPU here needs {self.driver.platform}"
            )
        self.current_device = torch.cuda.current_device
        self.current_stream = torch._C._cuda_getCurrentRawStream
        with torch.cuda.device(device):
            self.driver.bind(device)
            self.function = self.driver.function(binary, self.description)
        self._lock = threading.Lock()  # of ``run`` and what it writes to
        self._packed: Packed | None = None
        self._writers: dict[Any, Callable[[int], None]] = {}

    @cached_property
    def resident(self) -> int:
        """Programs that the device runs at once."""
        import torch

        properties = torch.cuda.get_device_properties(self.device)
        each = self.driver.resident(self.function, self.description)
        return int(properties.multi_processor_count * max(1, each))

    def prepare(self, programs: int, args: Sequence[Any], moving: int) -> DriverLaunch:
        """See ``Loaded``."""
        self._check_size(programs)
        return DriverLaunch(self, programs, [args[i] for i in self._taken], moving)

    def run(self, programs: int, args: Sequence[Any]) -> None:
        """See ``Loaded``."""
        self._check_size(programs)
        if self.current_device() != self.device:
            import torch

            with torch.cuda.device(self.device):
                return self.run(programs, args)
        with self._lock:
            if self._packed is None:
                self._packed = Packed(self.description)
            self._packed.fill([args[i] for i in self._taken])
            for at, box, view in self._packed.views:
                key = at, view.shape, view.strides
                write = self._writers.get(key)
                if write is None:
                    if len(self._writers) >= WRITERS_KEPT:
                        self._writers.clear()
                    write = self.driver.encoder(at, box, view.shape, view.strides)
                    self._writers[key] = write
                write(address_of(view.base))
            self.launch(programs, self._packed)

    def _check_size(self, programs: int) -> None:
        threads, most = self.description.threads, self.driver.most_threads
        if programs * threads >= most:
            raise InputError(
                f"{programs} programs of {threads} threads are more than one launch may have on this GPU: fewer than "
                f"{most} threads"
            )

    def launch(self, programs: int, packed: Packed) -> None:
        """Launch with these parameters, on the current stream; the device is current."""
        for again in (False, True):
            code = self.driver.launch(
                *(self.function, programs, 1, 1, self.description.threads, 1, 1),
                *(self.description.shared_bytes, self.current_stream(self.device)),
                *(packed.pointers, None),
            )
            if not code:
                return
            if again or code not in self.driver.unbound:
                what = f"{self.description.kernel} cannot be launched as {programs} programs"
                self.driver.check(code, what)
            self.driver.bind(self.device)


class DriverLaunch:
    """A ``Prepared`` launch: the parameters lie in memory, a call writes the addresses and the descriptors of new ones.

    Calls from several threads take turns, since they write to one place.
    """

    def __init__(self, loaded: DriverLoaded, programs: int, args: Sequence[Any], moving: int):
        self._loaded, self._programs, self._kept = loaded, programs, args  # tensors stay alive
        self._packed = Packed(loaded.description)
        self._packed.fill(args)
        self._move, self._lock = self._packed.moving(moving), threading.Lock()
        # [number of its address in a call, address that it describes now, writer of the descriptor]
        self._described: list[list[Any]] = []
        for at, box, view in self._packed.views:
            write = loaded.driver.encoder(at, box, view.shape, view.strides)
            if view.moves is None:
                write(address_of(view.base))
            else:
                self._described.append([view.moves, None, write])

    def __call__(self, addresses: Sequence[int]) -> None:
        """See ``Prepared``."""
        loaded = self._loaded
        if loaded.current_device() != loaded.device:
            import torch

            with torch.cuda.device(loaded.device):
                return self(addresses)
        with self._lock:
            self._move(addresses)
            for described in self._described:
                number, now, write = described
                address = addresses[number]
                if now != address:
                    described[1] = None  # the memory is nothing until it is written
                    write(address)
                    described[1] = address
            loaded.launch(self._programs, self._packed)


def _files(folder: Path, entry: str) -> tuple[Description, bytes]:
    try:
        description = read_description(folder)
        binary = folder / f"{entry}.{SUFFIXES[description.platform]}"
        return description, binary.read_bytes()
    except FileNotFoundError as error:
        missing = Path(str(error.filename))
        if missing.parent.is_dir():
            raise ArtifactError(f"{missing} is missing; build the artifact again") from None
        raise ArtifactError(
            f"{missing} is gone since the artifact was opened; load it again"
        ) from None


def _taken(
    source: KernelSource,
    config: LaunchConfig,
    variant: str,
    launch: int,
    description: Description,
    folder: Path,
) -> list[int]:
    """Places, among the arguments that callers give, of those that the binary takes; ArtifactError if it takes others."""
    text, _ = sig.unit(source, config, variant, launch)
    fixed = sig.constants(source, config, variant, launch)
    kept = [(i, n, k) for i, (n, k) in enumerate(text.parameters) if n not in fixed]
    wanted = [(n, sig.described(k) is not None) for _, n, k in kept]
    if wanted != [(p.name, p.kind == DESCRIPTOR) for p in description.parameters]:
        raise ArtifactError(
            f"{folder}: the binary takes other arguments than this version gives; build it again"
        )
    return [i for i, _, _ in kept]
