"""The doctor: every lack is named with what to do, and nothing makes it raise."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from sparsegen.artifact import doctor, tools
from sparsegen.artifact.doctor import diagnose
from sparsegen.artifact.manifest import MANIFEST
from sparsegen.artifact.store import Store
from tests.artifact.standin import build


@pytest.fixture(autouse=True)
def fresh():
    tools.tool_version.cache_clear()


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "cache")


def look(store, name):
    found = [f for f in diagnose(store) if f.name == name]
    assert len(found) == 1, found
    return found[0]


def test_every_finding_says_what_to_do(store):
    found = diagnose(store)
    assert {f.state for f in found} <= {"ok", "warn", "lack"}
    for finding in found:
        assert finding.found, finding
        assert finding.state == "ok" or finding.advice, finding
    names = {f.name for f in found}
    assert {
        "python",
        "torch",
        "triton",
        "gpu",
        "driver",
        "ptxas",
        "cache",
    } <= names
    assert len(names) == len(found)
    assert not store.root.exists(), "looking makes nothing"


@pytest.mark.parametrize(
    "version, state", [(None, "lack"), ("2.9.1", "lack"), ("2.10.0+cpu", "ok"), ("3", "ok")]
)
def test_versions(store, monkeypatch, version, state):
    monkeypatch.setattr(doctor, "installed", lambda name: version if name == "torch" else "99.0")
    finding = look(store, "torch")
    assert finding.state == state
    assert state == "ok" or "pip install 'torch>=2.10'" in finding.advice


def test_interpreter_and_numpy(store, monkeypatch):
    versions = {"triton": "3.6.0", "numpy": "2.4.6"}
    monkeypatch.setattr(doctor, "installed", lambda name: versions.get(name, "99.0"))
    assert "numpy<2.4" in look(store, "triton and numpy").advice
    versions["numpy"] = "2.3.5"
    assert not [f for f in diagnose(store) if f.name == "triton and numpy"]


def test_tools(store, monkeypatch, tmp_path):
    monkeypatch.setattr(tools, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert look(store, "ptxas").state == "lack"
    (tmp_path / "ptxas").write_text("#!/bin/false\n")
    (tmp_path / "ptxas").chmod(0o755)
    tools.tool_version.cache_clear()
    finding = look(store, "ptxas")
    assert finding.state == "warn" and "does not run" in finding.found


def test_no_gpu_is_no_lack(store, monkeypatch):
    monkeypatch.setattr("sparsegen.spec.gpu.current_gpu", lambda: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    finding = look(store, "gpu")
    assert (finding.state, finding.found) == ("warn", "none (CUDA_VISIBLE_DEVICES='')")
    assert "--gpu" in finding.advice


def test_a_broken_driver_is_a_finding(store, monkeypatch):
    def fail():
        raise OSError("libcuda is too old")

    monkeypatch.setattr("sparsegen.spec.gpu.current_gpu", fail)
    assert "libcuda is too old" in look(store, "gpu").found


def test_a_gpu_that_was_not_measured(store, monkeypatch, tmp_path):
    from sparsegen.spec.gpu import find_gpu

    (tmp_path / "nvidia-h200").mkdir()
    monkeypatch.setattr("sparsegen.spec.gpu.current_gpu", lambda: find_gpu("h200"))
    monkeypatch.setattr("sparsegen.paths.data_dir", lambda name: tmp_path)
    assert look(store, "gpu").found == "nvidia-h200 (cuda 90)"
    finding = look(store, "measured here")
    assert finding.state == "warn" and "sparsegen tune" in finding.advice


def test_cache(store):
    build(store)
    assert store.root.as_posix() in look(store, "cache").found
    assert look(store, "cache entries").found == "1"
    (build(store).path / MANIFEST).write_text("{")
    assert look(store, "damaged entries").advice == "`sparsegen cache prune` removes them"
    store.root.chmod(0o777)
    assert "chmod go-w" in look(store, "cache permissions").advice


def test_cache_that_cannot_be_written(tmp_path, monkeypatch):
    def refuse(**options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    finding = look(Store(tmp_path), "cache")
    assert finding.state == "warn" and "SPARSEGEN_CACHE" in finding.advice


def test_a_look_that_fails_is_a_finding(store, monkeypatch):
    monkeypatch.setattr(doctor, "find_tool", lambda name: 1 / 0)
    assert "ZeroDivisionError" in look(store, "tools").found
    assert look(store, "cache").state == "ok"


def test_without_torch_and_triton(tmp_path):
    """As on a laptop or a build node; the cache can be listed there, too."""
    code = """
        import importlib.abc, importlib.metadata, importlib.util, sys

        class Hide(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path, target=None):
                if name.split(".")[0] in ("torch", "triton"):
                    raise ModuleNotFoundError(name)

        sys.meta_path.insert(0, Hide())
        find = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *a: None if name in ("torch", "triton") else find(name, *a)
        real = importlib.metadata.version

        def version(name):
            if "torch" in name or "triton" in name:
                raise importlib.metadata.PackageNotFoundError(name)
            return real(name)

        importlib.metadata.version = version
        from sparsegen.artifact.cache import list_entries
        from sparsegen.artifact.doctor import diagnose

        print({f.name: f.state for f in diagnose()}, list_entries())
        assert "torch" not in sys.modules and "triton" not in sys.modules
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "SPARSEGEN_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    assert "'torch': 'lack'" in run.stdout and "'triton': 'lack'" in run.stdout


def test_an_amd_gpu(store, monkeypatch):
    """HIP launches there; that it was never tried is said, and what stands in its way is."""
    from sparsegen.launch import hip
    from sparsegen.spec.gpu import find_gpu

    monkeypatch.setattr("sparsegen.spec.gpu.current_gpu", lambda: find_gpu("mi300x"))
    monkeypatch.setattr(hip, "loaded_library", lambda: "/torch/lib/libamdhip64.so")
    monkeypatch.setattr(hip, "hip", lambda: None)
    finding = look(store, "HIP")
    assert finding.state == "warn" and finding.found.startswith("/torch/lib/libamdhip64.so")
    assert "never run on an AMD GPU" in finding.found and "sparsegen.reference" in finding.advice
    assert not [f for f in diagnose(store) if "compiler" in f.name or f.name == "Python.h"]
    monkeypatch.undo()
    monkeypatch.setattr("sparsegen.spec.gpu.current_gpu", lambda: find_gpu("mi300x"))
    finding = look(store, "HIP")  # this machine's torch
    assert finding.state == "lack" and "loaded no libamdhip64.so" in finding.found
