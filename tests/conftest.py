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

from tests import interpreter


def _gpu_here() -> bool:
    """A GPU device file that is not hidden.  Asks no driver and imports no torch: most tests need neither."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return False
    return Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()


GPU_HERE = _gpu_here()
if not GPU_HERE:
    os.environ["TRITON_INTERPRET"] = "1"

WORKER = "PYTEST_XDIST_WORKER" in os.environ
if WORKER:  # workers share the cores; so do the processes that they start
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests never read or write the user's own cache.
_CACHE = tempfile.TemporaryDirectory(prefix="sparsegen-tests-")
os.environ["SPARSEGEN_CACHE"] = _CACHE.name

# A kernel is compiled once a session, by whichever process comes first (tests/compiled_once.py).  Workers have the folder
# of the process that started them, which removes it at its end.  On a GPU torch compiles kernels of its own, and looks for
# them where it said.
if not GPU_HERE and "SPARSEGEN_TESTS_COMPILED" not in os.environ:
    _COMPILED = tempfile.TemporaryDirectory(prefix="sparsegen-compiled-")
    os.environ["SPARSEGEN_TESTS_COMPILED"] = _COMPILED.name
    os.environ["TRITON_CACHE_MANAGER"] = "tests.compiled_once:Shared"

ONE_TRITON = (
    "one_triton: nothing in it depends on Triton's version, or a test beside it shows what does; "
    ".ci/run leaves it out with the older one"
)
MOST_WORKERS = 16  # each one imports torch, which takes memory


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Tests run in as many processes as there are cores, where pytest-xdist is installed and no ``-n`` was given.

    An idle process takes half of what the busiest one has left.  Tests stay in their order, so what a module makes
    is mostly made once.
    """
    if WORKER:  # asked this, too, and would start workers of its own, without end
        return
    option = config.option
    if getattr(option, "numprocesses", 0) is None and option.dist == "no" and not option.tx:
        named = any("::" in str(arg) for arg in config.args)  # too few to start workers for
        shown = option.usepdb or option.capture == "no" or option.update_golden
        option.numprocesses = 0 if named or shown else "auto"
        option.dist = "worksteal"  # xdist says "no" again where there are no workers


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """None: what xdist says, which a variable may set.  On a GPU one process: several would starve each other."""
    if GPU_HERE:
        return 0
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(cores or 1, MOST_WORKERS) if cores != 1 else 0


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
    config.addinivalue_line("markers", ONE_TRITON)
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


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """The interpreter is quick as soon as something has imported it; nothing is imported for that."""
    interpreter.quicken()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files")


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run in this session: "cuda", or "cpu" through the interpreter."""
    return "cuda" if GPU_HERE else "cpu"


@pytest.fixture
def compiles_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler runs, whatever other tests have compiled."""
    monkeypatch.delenv("TRITON_CACHE_MANAGER", raising=False)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory for this test and the processes that it starts."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("SPARSEGEN_CACHE", str(folder))
    return folder
