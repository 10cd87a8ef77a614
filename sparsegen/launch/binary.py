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
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.codegen.source import KernelSource
from sparsegen.errors import ToolchainError
from sparsegen.launch import code_object
from sparsegen.launch import signature as sig
from sparsegen.launch.description import LAUNCH, describe
from sparsegen.launch.module import HOPPER_MODULE, ast_source, write_modules
from sparsegen.launch.sass import listing_of, unset_registers
from sparsegen.spec.gpu import Gpu

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
    """One compiled variant: files below ``directory`` and the resources that one program takes."""

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
    """Compile into ``directory`` (made if missing) and return what came out, of several launches the most of each.

    Raises ``CompileError`` when the compiler refuses.  Triton's own cache is not used or touched.
    """
    directory = Path(directory)
    module = write_modules(directory, source)
    with _isolated_triton() as triton:
        parts = [
            _compile_launch(triton, source, config, variant, gpu, directory, module, i)
            for i in range(len(source.grids))
        ]
    for written in (module, module.with_name(HOPPER_MODULE)):
        written.unlink(missing_ok=True)
    return Binary(
        variant,
        source.entry,
        directory,
        tuple(sorted(name for part in parts for name in part.files)),
        _most(part.registers for part in parts),
        _most(part.spill_bytes for part in parts),
        max(part.shared_bytes for part in parts),
    )


def folder_of(source: KernelSource, directory: Path, launch: int) -> Path:
    """Where a variant's folder holds the files of a launch: in the folder itself if there is one launch alone."""
    return directory if len(source.grids) == 1 else directory / f"sweep{launch}"


def _most(numbers: Iterable[int | None]) -> int | None:
    known = [n for n in numbers if n is not None]
    return max(known) if known else None


def _compile_launch(
    triton: Any,
    source: KernelSource,
    config: LaunchConfig,
    variant: str,
    gpu: Gpu,
    directory: Path,
    module: Path,
    launch: int,
) -> Binary:
    from triton.backends.compiler import GPUTarget

    folder = folder_of(source, directory, launch)
    folder.mkdir(exist_ok=True)
    unit = ast_source(module, source, config, variant, launch)
    entry = sig.unit(source, config, variant, launch)[0].entry
    target = GPUTarget(gpu.backend, gpu.arch, gpu.warp_size)
    part = f", launch {launch}" if len(source.grids) > 1 else ""
    what = f"{entry} ({variant}, {config}{part}) for {gpu.name}"
    try:
        # where ptxas refuses, Triton prints the whole PTX: thousands of lines that are no message
        with contextlib.redirect_stdout(io.StringIO()):
            compiled = triton.compile(
                unit, target=target, options=sig.options(source, config, variant, launch)
            )
    except Exception as error:  # Triton raises many unrelated types; all of them mean "refused"
        raise CompileError(f"{what}: {_reason(error)}") from error
    files = []
    for name, path in compiled.metadata_group.items():
        if Path(name).suffix in KEPT:
            shutil.copyfile(path, folder / name)
            files.append((folder / name).relative_to(directory).as_posix())
    signature = sig.signature(source, config, variant, launch)
    description = describe(signature, read_metadata(folder, entry))
    (folder / LAUNCH).write_text(description.to_json(), encoding="utf-8")
    files.append((folder / LAUNCH).relative_to(directory).as_posix())
    registers, spills = None, None
    if gpu.backend == "hip":
        code_object.check((folder / f"{entry}.hsaco").read_bytes(), description)
    if gpu.backend == "cuda":
        registers, spills = _resources(folder, entry)
        _refuse_broken(folder, entry, what)
    shared = int(compiled.metadata.shared)
    return Binary(variant, entry, folder, tuple(files), registers, spills, shared)


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
