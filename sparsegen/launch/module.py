"""A rendered kernel as a Python module, and as Triton's compilation unit."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.codegen.source import KernelSource
from sparsegen.launch import signature as sig

MODULE = "kernel.py"  # name of the rendered module beside its binaries
HOPPER_MODULE = "hopper.py"  # of the warp-specialised one, where there is one


def hopper_module(path: Path) -> Path:
    """Where the warp-specialised text of the module at ``path`` lies: beside it, under a name of its own."""
    return path.with_name(HOPPER_MODULE if path.name == MODULE else f"{path.stem}.{HOPPER_MODULE}")


def write_modules(folder: Path, source: KernelSource) -> Path:
    """Write a kernel's texts into a folder and return the path of the portable one."""
    folder.mkdir(parents=True, exist_ok=True)
    if source.hopper is not None:
        (folder / HOPPER_MODULE).write_text(source.hopper.text, encoding="utf-8")
    (folder / MODULE).write_text(source.text, encoding="utf-8")
    return folder / MODULE


def load_module(path: Path, digest: str) -> Any:
    """Import the generated file.  Triton reads the source of its functions from the file, so it must stay there."""
    name = f"sparsegen_kernel_{digest[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # inspect.getsource finds a function's file through here
    write, sys.dont_write_bytecode = (
        sys.dont_write_bytecode,
        True,
    )  # an artifact folder may be read-only
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = write
    return module


def ast_source(
    path: Path, source: KernelSource, config: LaunchConfig, variant: str, launch: int = 0
) -> Any:
    """Triton's ``ASTSource`` of one launch of a variant: types, constants and alignment are all fixed here.

    ``path`` is where the portable text is; the warp-specialised one lies beside it.
    """
    text, chosen = sig.unit(source, config, variant, launch)
    given = {
        "signature": sig.signature(source, config, variant, launch),
        "constexprs": sig.constants(source, config, variant, launch),
        "attrs": sig.attributes(source, config, variant, launch),
    }
    if chosen["KERNEL"] == sig.HOPPER:
        from triton.experimental.gluon._runtime import GluonASTSource

        module = load_module(hopper_module(path), text.digest)
        return GluonASTSource(getattr(module, text.entry), **given)
    from triton.compiler import ASTSource

    return ASTSource(getattr(load_module(path, source.digest), text.entry), **given)
