"""A compiled variant that Triton's own runtime launches: on AMD's GPUs.

Triton builds its launcher with a C compiler when a kernel is first loaded; ``loading`` needs none.
"""

from __future__ import annotations

import logging
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.codegen.source import KernelSource
from sparsegen.errors import ArtifactError, ToolchainError
from sparsegen.launch import signature as sig
from sparsegen.launch.binary import folder_of
from sparsegen.launch.module import ast_source

log = logging.getLogger(__name__)

NEEDS_COMPILER = (
    "Triton builds its launcher with a C compiler when a kernel is first loaded: "
    "install gcc and Python's headers (Debian: apt-get install gcc python3-dev), or set CC"
)


class TritonLoaded:
    """A ``loading.Loaded`` that Triton launches.  It takes no tensor descriptors."""

    def __init__(
        self,
        source: KernelSource,
        config: LaunchConfig,
        variant: str,
        module: Path,
        directory: Path,
        device: int,
        launch: int = 0,
    ):
        import torch
        from triton.runtime import driver

        with torch.cuda.device(device):
            compiled = _compiled(source, config, variant, module, directory, launch)
            self._launch = compiled.run
        self._function, self._metadata = compiled.function, compiled.packed_metadata
        self._device, self._current = device, torch.cuda.current_device
        self._stream = driver.active.get_current_stream
        text, chosen = sig.unit(source, config, variant, launch)
        self.constants = (None,) * len(text.constexprs)  # they are in the binary
        self.block_m, self.persistent = int(chosen["BLOCK_M"]), bool(chosen["PERSISTENT"])
        threads = int(compiled.metadata.num_warps) * int(compiled.metadata.target.warp_size)
        properties = torch.cuda.get_device_properties(device)
        by_registers = 65_536 // max(1, compiled.n_regs * threads)
        by_shared = properties.shared_memory_per_multiprocessor // (compiled.metadata.shared + 1024)
        self.resident = properties.multi_processor_count * max(1, min(by_registers, by_shared))

    def prepare(
        self, programs: int, args: Sequence[Any], moving: int
    ) -> Callable[[Sequence[int]], None]:
        """See ``loading.Loaded``."""
        rest = (*args[moving:], *self.constants)

        def launch(addresses: Sequence[int]) -> None:
            self.run(programs, (*addresses, *rest))

        return launch

    def run(self, programs: int, args: Sequence[Any]) -> None:
        """See ``loading.Loaded``."""
        if self._current() != self._device:
            import torch

            with torch.cuda.device(self._device):
                return self.run(programs, args)
        stream = self._stream(self._device)
        self._launch(
            programs, 1, 1, stream, self._function, self._metadata, None, None, None, *args
        )


def _compiled(
    source: KernelSource,
    config: LaunchConfig,
    variant: str,
    module: Path,
    directory: Path,
    launch: int = 0,
) -> Any:
    """Triton's kernel object around the stored files, loaded: nothing is compiled but Triton's own launcher."""
    from triton.compiler import CompiledKernel

    writable_triton_cache()
    try:
        unit = ast_source(module, source, config, variant, launch)
        folder = folder_of(source, directory, launch)
        entry = sig.unit(source, config, variant, launch)[0].entry
        files = {p.name: str(p) for p in sorted(folder.iterdir()) if p.stem == entry}
        compiled = CompiledKernel(unit, files, source.digest)
        compiled.run  # noqa: B018  loads the cubin and makes the launcher
    except FileNotFoundError as error:
        if Path(str(error.filename or "")).is_relative_to(directory.parent):
            raise ArtifactError(
                f"{error.filename} is gone since the artifact was opened; load it again"
            ) from None
        raise ToolchainError(
            f"the {variant} kernel cannot be loaded: {error}; {NEEDS_COMPILER}"
        ) from error
    except Exception as error:  # Triton raises many types here; each means that the kernel cannot run on this machine
        raise ToolchainError(
            f"the {variant} kernel cannot be loaded: {load_failure(error)}"
        ) from error
    return compiled


def load_failure(error: Exception) -> str:
    """Why Triton could not load a kernel, and what to do about it where that is known."""
    lines = str(error).strip().splitlines() or ["no message"]
    if isinstance(error, subprocess.CalledProcessError) or "compiler" in str(error).lower():
        return f"{lines[0]}; {NEEDS_COMPILER}"
    return f"{type(error).__name__}: {lines[0]}"


@cache
def writable_triton_cache() -> str:
    """Where Triton keeps its launchers; a private folder of this process, said once, where its own cannot be written."""
    import triton

    folder = Path(triton.knobs.cache.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return str(folder)
        reason = "it cannot be written"
    except OSError as error:
        reason = error.strerror or str(error)
    private = tempfile.mkdtemp(prefix="sparsegen-triton-")
    log.warning(
        "Triton's launchers go to %s for this process, not to %s: %s", private, folder, reason
    )
    triton.knobs.cache.dir = private
    return private
