"""Compile one variant of a kernel for a GPU type.  No GPU is needed: Triton cross-compiles for a named target."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.codegen.source import KernelSource
from sparsegen.errors import ToolchainError
from sparsegen.launch import signature as sig
from sparsegen.launch.sass import listing_of, unset_registers
from sparsegen.spec.gpu import Gpu

MODULE = "kernel.py"  # name of the rendered module beside its binaries
KEPT = (
    ".json",
    ".cubin",
    ".hsaco",
    ".ptx",
)  # of Triton's outputs: what loads, and the PTX for people


class CompileError(ToolchainError):
    """Triton or the vendor's assembler refused a kernel; the message holds their reason."""


@dataclass(frozen=True)
class Binary:
    """One compiled variant: files in ``directory`` and the resources that one program takes."""

    variant: str
    entry: str
    directory: Path
    files: tuple[str, ...]
    registers: int | None  # per thread; None where no tool reads them (AMD)
    spill_bytes: int | None  # local memory per thread that holds spilled registers
    shared_bytes: int  # per program


def compile_kernel(
    source: KernelSource, config: LaunchConfig, variant: str, gpu: Gpu, directory: Path
) -> Binary:
    """Compile into ``directory`` (made if missing) and return what came out.

    Raises ``CompileError`` when the compiler refuses.  Triton's own cache is not used or touched.
    """
    from sparsegen.launch.module import ast_source

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / MODULE).write_text(source.text)
    with _isolated_triton() as triton:
        from triton.backends.compiler import GPUTarget

        unit = ast_source(directory / MODULE, source, config, variant)
        target = GPUTarget(gpu.backend, gpu.arch, gpu.warp_size)
        try:
            # where ptxas refuses, Triton prints the whole PTX: thousands of lines that are no message
            with contextlib.redirect_stdout(io.StringIO()):
                compiled = triton.compile(
                    unit, target=target, options=sig.options(source, config, variant)
                )
        except Exception as error:  # Triton raises many unrelated types; all of them mean "refused"
            raise CompileError(
                f"{source.entry} ({variant}, {config}) for {gpu.name}: {_reason(error)}"
            ) from error
        files = []
        for name, path in compiled.metadata_group.items():
            if Path(name).suffix in KEPT:
                shutil.copyfile(path, directory / name)
                files.append(name)
    (directory / MODULE).unlink()
    shared = int(compiled.metadata.shared)
    registers, spills = None, None
    if gpu.backend == "cuda":
        registers, spills = _resources(directory, source.entry)
        _refuse_broken(
            directory, source.entry, f"{source.entry} ({variant}, {config}) for {gpu.name}"
        )
    return Binary(variant, source.entry, directory, tuple(sorted(files)), registers, spills, shared)


class _isolated_triton:
    """Triton with a throw-away cache and without its interpreter."""

    def __enter__(self) -> Any:
        if os.environ.get("TRITON_INTERPRET") == "1":
            raise ToolchainError(
                "compiling needs a process without TRITON_INTERPRET=1; use launch.compile_many"
            )
        try:
            import triton
        except ImportError as error:
            raise ToolchainError("compiling needs triton: pip install 'triton>=3.6'") from error
        self._folder = tempfile.mkdtemp(prefix="sparsegen-triton-")
        self._cache = triton.knobs.cache
        self._old = self._cache.dir
        self._cache.dir = self._folder
        return triton

    def __exit__(self, *_: object) -> None:
        self._cache.dir = self._old
        shutil.rmtree(self._folder, ignore_errors=True)


def _reason(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    said = f"{type(error).__name__}: " + (" / ".join(lines[-3:]) if lines else "no message")
    if "gpu-name" in said or "Unsupported .version" in said:
        said += "; this ptxas is too old for it: install a newer triton, or set TRITON_PTXAS_PATH to a newer ptxas"
    return said


def _tool(name: str) -> Path:
    """A tool of NVIDIA's that Triton ships; the path may not exist."""
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name


def _refuse_broken(directory: Path, entry: str, what: str) -> None:
    """CompileError for machine code that reads a register nothing set (``launch.sass``)."""
    unset = unset_registers(listing_of(directory / f"{entry}.cubin", _tool("nvdisasm")))
    if unset:
        register, instruction = unset[0]
        raise CompileError(
            f"{what}: a fault of ptxas: UR{register} is read by '{instruction}' and never set; "
            "another configuration or a newer Triton avoids it"
        )


def _resources(directory: Path, entry: str) -> tuple[int | None, int | None]:
    """Registers and spilled bytes per thread, read from the cubin with the cuobjdump that Triton ships."""
    tool = _tool("cuobjdump")
    if not tool.exists():
        return None, None
    run = subprocess.run(
        [tool, "-res-usage", directory / f"{entry}.cubin"],
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.search(r"REG:(\d+) STACK:(\d+)", run.stdout)
    return (int(found[1]), int(found[2])) if found else (None, None)


def record(binary: Binary) -> dict[str, Any]:
    """The binary as plain data, for manifests and for workers in other processes."""
    return {
        "variant": binary.variant,
        "entry": binary.entry,
        "directory": str(binary.directory),
        "files": list(binary.files),
        "registers": binary.registers,
        "spill_bytes": binary.spill_bytes,
        "shared_bytes": binary.shared_bytes,
    }


def from_record(data: dict[str, Any]) -> Binary:
    """Inverse of ``record``."""
    return Binary(**{**data, "directory": Path(data["directory"]), "files": tuple(data["files"])})


def read_metadata(directory: Path, entry: str) -> dict[str, Any]:
    """Triton's own description of a compiled kernel."""
    return dict(json.loads((directory / f"{entry}.json").read_text()))
