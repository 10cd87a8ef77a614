"""Shared by all tests.

Kernels run on a GPU where there is one, else on the CPU through Triton's interpreter.  The interpreter must be
chosen before triton is imported, so it is chosen here; compiling for a GPU type then happens in child processes
that do not have the variable.
"""

from __future__ import annotations

import os
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest


def _gpu_here() -> bool:
    """A GPU device file that is not hidden.  Asks no driver and imports no torch: most tests need neither."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return False
    return Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()


GPU_HERE = _gpu_here()
if not GPU_HERE:
    os.environ["TRITON_INTERPRET"] = "1"

# Tests never read or write the user's own cache.
_CACHE = tempfile.TemporaryDirectory(prefix="sparsegen-tests-")
os.environ["SPARSEGEN_CACHE"] = _CACHE.name


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def pytest_configure(config: pytest.Config) -> None:
    """Stop early, with the cure, where the interpreter is known to fail."""
    triton, numpy = _version("triton"), _version("numpy")
    old_triton = triton is not None and _numbers(triton) < (3, 7)
    if not GPU_HERE and old_triton and numpy is not None and _numbers(numpy) >= (2, 4):
        raise pytest.UsageError(
            f"triton {triton}'s interpreter fails with numpy {numpy}; "
            "install '.[test,triton36]' (numpy < 2.4) or a newer triton"
        )


def pytest_report_header(config: pytest.Config) -> str:
    versions = ", ".join(f"{p} {_version(p) or 'absent'}" for p in ("torch", "triton", "numpy"))
    return f"kernels run on: {'the GPU' if GPU_HERE else 'the CPU (interpreter)'}; {versions}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if GPU_HERE:
        return
    skip = pytest.mark.skip(reason="needs a GPU")
    for item in items:
        if item.get_closest_marker("gpu"):  # keywords would also match folders and names
            item.add_marker(skip)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files")


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run in this session: "cuda", or "cpu" through the interpreter."""
    return "cuda" if GPU_HERE else "cpu"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory for this test and the processes that it starts."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("SPARSEGEN_CACHE", str(folder))
    return folder
