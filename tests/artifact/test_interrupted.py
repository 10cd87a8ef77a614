"""``warm`` that is interrupted: what its threads compile ends with it, and nothing half-built stays."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sparsegen.artifact import folder
from sparsegen.artifact.fleet import warm
from sparsegen.artifact.store import Store
from sparsegen.errors import ToolchainError
from sparsegen.launch import Job, compile_many, pool
from sparsegen.spec.pattern import Pattern
from tests.artifact.standin import StandinBuilder

NEVER = (
    "import sys, time; sys.stdin.readline(); print(flush=True, file=sys.stderr); time.sleep(900)"
)


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[str]]:
    """Compilers that take a job and never answer; the processes that were started."""
    started: list[subprocess.Popen[str]] = []

    def start(worker: Any) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        words = [sys.executable, "-c", NEVER]
        worker.process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        started.append(worker.process)
        return worker.process

    monkeypatch.setattr(pool._Worker, "_start", start)
    return started


def jobs(count: int, folder: Path) -> list[Job]:
    """Nothing looks into them."""
    return [Job("source", "config", "fast", "gpu", folder / str(i)) for i in range(count)]  # type: ignore[arg-type]


class Endless(StandinBuilder):
    """Compiles what never ends, but for "quick", which is there at once."""

    def build(self, request: Any, directory: Path, progress: Any) -> Any:
        if request.pattern.name != "quick":
            compile_many(jobs(3, directory), 1)
        return super().build(request, directory, progress)


def test_an_interrupted_warm_ends_its_compilers(
    endless: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    """They are in threads, which no Ctrl-C reaches: it was answered when they were through with all kernels."""
    names = ("slow", "slower", "quick")
    patterns = [Pattern.from_dict({"name": n, "mask": {"window": {"size": 8 + i}}}) for i, n in enumerate(names)]  # fmt: skip

    def interrupt(done: int, total: int, message: str) -> None:
        while len(endless) < 2:
            time.sleep(0.01)
        for process in endless:  # both are at work
            assert process.stderr is not None
            process.stderr.readline()
        raise KeyboardInterrupt

    store, builder = Store(tmp_path), Endless()
    with pytest.raises(KeyboardInterrupt):
        warm(["h200"], patterns, jobs=3, store=store, builder=builder, progress=interrupt)
    assert [process.wait() for process in endless] == [-9, -9]  # no second job was begun
    assert [name for name, _ in builder.built] == ["quick"]
    (entry,) = folder.entry_names(store.artifacts)
    assert entry.name.startswith("quick-")
    assert [p.name for p in store.artifacts.iterdir()] == [str(entry)]


def test_who_is_stopped_is_told(endless: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(compile_many, jobs(2, tmp_path), 1)
        while not future.done():
            for process in list(endless):
                assert process.stderr is not None
                process.stderr.readline()
                pool.stop_compiling()
        with pytest.raises(ToolchainError, match="^compiling was stopped$"):
            future.result()
    assert not pool._ENDS and len(endless) == 1
    pool.stop_compiling()  # nothing is under way: nothing happens
