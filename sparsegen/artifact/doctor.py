"""What this machine has and lacks for building and launching kernels, and what to do about each lack.

Nothing here raises, compiles, or writes more than a probe file: every look is caught and becomes a finding.
"""

from __future__ import annotations

import ctypes.util
import os
import platform
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from sparsegen.artifact.key import installed
from sparsegen.artifact.tools import find_tool, tool_version

if TYPE_CHECKING:
    from sparsegen.artifact.store import Store

OK, WARN, LACK = "ok", "warn", "lack"
_LOW_SPACE = 256 << 20  # bytes; a hundred artifacts and one study take less
# package -> least (major, minor), and what cannot be done without it
_NEEDED = {
    "torch": ((2, 10), "the reference, and launching kernels"),
    "triton": ((3, 6), "compiling and launching kernels"),
    "jinja2": ((3, 1), "rendering kernels"),
    "networkx": ((3, 0), "the schedule graph"),
    "pyyaml": ((6, 0), "reading patterns"),
    "pydantic": ((2, 7), "reading patterns"),
    "numpy": ((1, 26), "masks and pictures"),
    "filelock": ((3, 12), "the cache"),
    "platformdirs": ((4, 0), "the cache"),
    "optuna": ((4, 0), "tuning"),
    "sqlalchemy": ((2, 0), "tuning"),
    "typer": ((0, 12), "the command line"),
    "rich": ((13, 0), "the command line"),
    "matplotlib": ((3, 8), "pictures (show --png)"),
}
_OPTIONAL = {"transformers": "the examples", "psycopg2": "studies in PostgreSQL"}


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    state    ``ok``; ``warn``: works, but not as well as it could, or only a part of it; ``lack``: something that
             sparsegen needs for building is missing
    found    what is there, in words
    advice   what to do; empty where nothing needs to be done
    """

    name: str
    state: str
    found: str
    advice: str = ""


def diagnose(store: Store | None = None) -> list[Finding]:
    """Look at Python, packages, GPUs, driver, tools, the cache and the files that come along."""
    looks: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
        ("python", _python),
        ("packages", _packages),
        ("driver", _driver),
        ("gpu", _gpu),
        ("tools", _tools),
        ("cache", lambda: _cache(store)),
        ("data files", _data),
    )
    found: list[Finding] = []
    for name, look in looks:
        try:
            found.extend(look())
        except Exception as error:  # a look that fails is a finding too
            said = f"cannot be looked at: {type(error).__name__}: {error}"
            found.append(Finding(name, WARN, said, "report this: a look should not fail"))
    return found


def _python() -> Iterator[Finding]:
    good = sys.version_info >= (3, 10)
    advice = "" if good else "install Python 3.10 or newer"
    yield Finding(
        "python", OK if good else LACK, f"{platform.python_version()} ({sys.executable})", advice
    )
    linux = sys.platform == "linux"
    machine = f"{platform.system()} {platform.machine()}"
    advice = (
        ""
        if linux
        else "Triton has wheels for Linux only: patterns and the reference work here, kernels do not"
    )
    yield Finding("platform", OK if linux else WARN, machine, advice)


def _packages() -> Iterator[Finding]:
    for name, (least, purpose) in _NEEDED.items():
        wanted = f"{name}>={least[0]}.{least[1]}"
        found = installed(name)
        if found is None:
            yield Finding(name, LACK, "absent", f"for {purpose}: pip install '{wanted}'")
        elif _numbers(found) < least:
            yield Finding(name, LACK, f"{found}, too old", f"for {purpose}: pip install '{wanted}'")
        else:
            yield Finding(name, OK, found)
    triton, numpy = installed("triton"), installed("numpy")
    if triton and numpy and _numbers(triton) < (3, 7) and _numbers(numpy) >= (2, 4):
        yield Finding(
            "triton and numpy",
            WARN,
            f"triton {triton}'s interpreter fails with numpy {numpy}",
            "only for tests on the CPU: pip install 'numpy<2.4', or a newer triton; GPUs are not affected",
        )
    for name, purpose in _OPTIONAL.items():
        found = installed(name)
        advice = "" if found else f"nothing, unless you want {purpose}: pip install {name}"
        yield Finding(name, OK, found or "absent (optional)", advice)


def _driver() -> Iterator[Finding]:
    version = _read("/proc/driver/nvidia/version")
    if version:
        found = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d+[\d.]*)", version)
        yield Finding("driver", OK, f"NVIDIA {found[1] if found else version.splitlines()[0]}")
    elif Path("/dev/kfd").exists():
        yield Finding("driver", OK, f"AMD {_read('/sys/module/amdgpu/version').strip()}".strip())
    elif ctypes.util.find_library("cuda"):
        yield Finding("driver", OK, "NVIDIA (libcuda is here, its version is not told)")
    else:
        yield Finding(
            "driver",
            WARN,
            "none",
            "nothing, for building (--gpu NAME cross-compiles); to launch kernels install the GPU's driver",
        )


def _gpu() -> Iterator[Finding]:
    if find_spec("torch") is None:
        yield Finding(
            "gpu", WARN, "not asked: torch is absent", "install torch; building works without a GPU"
        )
        return
    from sparsegen.spec.gpu import current_gpu

    try:
        gpu = current_gpu()
    except Exception as error:  # a broken torch or driver raises anything
        said = f"torch cannot see one: {type(error).__name__}: {error}"
        yield Finding(
            "gpu",
            WARN,
            said,
            "check that torch was built for this driver; building works without a GPU",
        )
        return
    if gpu is None:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = f"none (CUDA_VISIBLE_DEVICES={hidden!r})" if hidden is not None else "none"
        yield Finding(
            "gpu", WARN, why, "nothing, for building: use --gpu NAME; launching kernels needs one"
        )
        return
    yield Finding("gpu", OK, f"{gpu.name} ({gpu.backend} {gpu.arch})")
    if gpu.backend == "hip":
        yield _hip()
    from sparsegen.paths import data_dir

    measured = len(list((data_dir("tuned") / gpu.name).glob("*.json")))
    advice = "" if measured else "`sparsegen tune PATTERN` measures on this GPU"
    yield Finding(
        "measured here",
        OK if measured else WARN,
        f"{measured} patterns in tuned/ for {gpu.name}",
        advice,
    )


def _hip() -> Finding:
    """HIP's runtime, which launches on AMD's GPUs; torch is imported, and has loaded it."""
    from sparsegen.errors import ToolchainError
    from sparsegen.launch.hip import hip, loaded_library

    try:
        hip()
    except ToolchainError as error:
        return Finding("HIP", LACK, str(error), "install torch for ROCm: HIP launches the kernels")
    said = f"{loaded_library()}; sparsegen has never run on an AMD GPU"
    return Finding(
        "HIP", WARN, said, "compare results with sparsegen.reference before you use them"
    )


def _tools() -> Iterator[Finding]:
    purposes = {"ptxas": "compiling for NVIDIA GPUs", "cuobjdump": "reading registers and spills"}
    for name, purpose in purposes.items():
        place, version = find_tool(name), tool_version(name)
        if place is None:
            state = LACK if name == "ptxas" else WARN
            yield Finding(
                name,
                state,
                "absent",
                f"for {purpose}: Triton's wheel brings it: install triton again",
            )
        elif version is None:
            yield Finding(
                name, WARN, f"{place} does not run", f"for {purpose}: install triton again"
            )
        else:
            yield Finding(name, OK, f"{version} ({place})")


def _cache(store: Store | None) -> Iterator[Finding]:
    from sparsegen.artifact.store import Store

    store = Store() if store is None else store
    name = f"{store.root}"
    faulty = good = 0
    for _, manifest in store.entries():
        faulty, good = (
            faulty + isinstance(manifest, Exception),
            good + (not isinstance(manifest, Exception)),
        )
    place = next(p for p in (store.root, *store.root.parents) if p.is_dir())
    try:  # the nearest folder that exists decides: looking must not make the cache
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        advice = "what is built is lost at the end of each process: set SPARSEGEN_CACHE to a folder you can write"
        yield Finding("cache", WARN, f"{name} cannot be written: {error.strerror}", advice)
    else:
        free = shutil.disk_usage(place).free
        low = free < _LOW_SPACE
        advice = "`sparsegen cache prune`, free some space, or set SPARSEGEN_CACHE" if low else ""
        yield Finding("cache", WARN if low else OK, f"{name}, {free >> 20} MiB free", advice)
    yield Finding("cache entries", OK, str(good))
    if faulty:
        yield Finding("damaged entries", WARN, str(faulty), "`sparsegen cache prune` removes them")
    if store.root.is_dir():
        status = store.root.stat()
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            said = f"mode {stat.S_IMODE(status.st_mode):o}, owner {status.st_uid}"
            advice = f"others can put code there that you will run: chmod go-w {store.root}"
            yield Finding("cache permissions", WARN, said, advice)


def _data() -> Iterator[Finding]:
    from sparsegen.errors import SparsegenError
    from sparsegen.paths import DataName, data_dir

    names: tuple[DataName, ...] = ("templates", "patterns", "tuned")
    for name in names:
        try:
            yield Finding(f"{name}/", OK, str(data_dir(name)))
        except SparsegenError as error:
            yield Finding(f"{name}/", LACK, "absent", str(error))


def _numbers(text: str) -> tuple[int, int]:
    """(major, minor) of a version text; a part that is no number counts as 0."""
    found = re.match(r"(\d+)(?:\.(\d+))?", text)
    return (int(found[1]), int(found[2] or 0)) if found else (0, 0)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
