"""Which HIP runtime is opened, and its functions against HIP's header."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent

import pytest

from sparsegen.errors import ToolchainError
from sparsegen.launch import hip
from sparsegen.launch.hip import HipDriver, loaded_library
from tests.launch.fake_driver import FakeHip


def maps(folder: Path, *paths: object) -> Path:
    """A list of what a process has loaded, as Linux writes it."""
    rows = [f"7f00-7f01 r-xp 00000000 08:01 77                  {p}" for p in paths]
    (folder / "maps").write_text("\n".join(["7ffe-7fff rw-p 00000000 00:00 0 ", *rows, ""]))
    return folder / "maps"


def test_the_library_is_the_one_that_torch_has_loaded(tmp_path: Path) -> None:
    torchs = tmp_path / "a folder" / "libamdhip64.so.7"
    found = loaded_library(maps(tmp_path, "/lib/libm.so.6", torchs, torchs, "[heap]"))
    assert found == str(torchs)
    with pytest.raises(ToolchainError, match="has loaded no libamdhip64.so: torch must be one for"):
        loaded_library(maps(tmp_path, "/lib/libm.so.6"))
    with pytest.raises(ToolchainError, match=r"several HIP runtimes.*: /a/libamd.*\.6, /b/libamd"):
        loaded_library(maps(tmp_path, "/b/libamdhip64.so.7", "/a/libamdhip64.so.6"))
    with pytest.raises(ToolchainError, match="cannot be looked for"):
        loaded_library(tmp_path / "none")


REAL = """
    import ctypes, sys
    from sparsegen.errors import ToolchainError
    from sparsegen.launch.hip import hip, loaded_library

    def said():
        try:
            hip()
        except ToolchainError as error:
            return str(error)

    print(said())
    ctypes.CDLL(sys.argv[1])
    assert loaded_library() == sys.argv[1]
    print(said())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux' list of loaded files")
def test_a_library_of_this_process_is_opened(tmp_path: Path) -> None:
    """Another library under HIP's name: it is found where it was loaded from, and has none of HIP's functions."""
    import _ctypes

    library = tmp_path / "libamdhip64.so.7"
    shutil.copyfile(_ctypes.__file__, library)
    command = [sys.executable, "-c", dedent(REAL), str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("this process has loaded no libamdhip64.so")
    assert second == "the GPU's driver has no hipSetDevice: update it"


def test_a_library_that_cannot_be_opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hip, "loaded_library", lambda: str(tmp_path / "libamdhip64.so"))
    with pytest.raises(ToolchainError, match="HIP's runtime cannot be opened"):
        hip.hip.__wrapped__()


@pytest.mark.parametrize("name", HipDriver.functions)
def test_a_function_that_is_missing_is_named(name: str) -> None:
    with pytest.raises(ToolchainError, match=f"driver has no {name}: update it"):
        HipDriver(FakeHip({}, absent=(name,)))


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton's wheel brings HIP's headers")
@pytest.mark.parametrize("name", HipDriver.functions)
def test_functions_have_the_types_of_the_header(name: str) -> None:
    import triton

    place = Path(triton.__file__).parent / "backends" / "amd" / "include" / "hip"
    if not place.is_dir():
        pytest.skip("this Triton brings no headers")
    text = (place / "hip_runtime_api.h").read_text()
    found = re.findall(rf"^(hipError_t|const char\*) {name}\(([^)]*)\);", text, re.M)
    assert found
    answer, words = found[0]
    plain = {"int": ctypes.c_int, "unsigned int": ctypes.c_uint, "size_t": ctypes.c_size_t}
    plain |= {"hipError_t": ctypes.c_int, "hipFunction_attribute": ctypes.c_int}
    wanted = []
    for word in [" ".join(w.split()) for w in words.split(",") if w.strip() not in ("", "void")]:
        kind = word.rsplit(" ", 1)[0]
        handle = kind in ("hipFunction_t", "hipModule_t", "hipStream_t") or kind.endswith("*")
        wanted.append(ctypes.c_void_p if handle else plain[kind])
    mine = [ctypes.c_void_p if t is ctypes.c_char_p else t for t in HipDriver.functions[name]]
    assert mine == wanted
    assert (answer == "const char*") == name.startswith("hipGetErr")
