"""Kernels that were compiled beforehand, maybe where there is no GPU: a benchmark then measures from its first second.

    python benchmarks/session.py PLAN --compile-only h200 --binaries DIR     # on any machine with the same Triton
    python benchmarks/session.py PLAN --binaries DIR                         # on the one with the GPU, DIR taken along

Both name their folder to the stages (``BINARIES``), and the first the type of GPU (``TYPE``).  Benchmarks ask ``gpu_here`` which GPU
they are for, compile by this module's ``compile_many``, and ``turn.take`` ends a process that only compiles.  A kernel is known by
its text, configuration, variant and type of GPU, and by the version of Triton; what a compiler refused is not kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sparsegen.launch import Job, Outcome
from sparsegen.launch import compile_many as compile_now
from sparsegen.launch.binary import Binary
from sparsegen.spec.gpu import Gpu, current_gpu, find_gpu

BINARIES, TYPE = "SPARSEGEN_BENCH_BINARIES", "SPARSEGEN_BENCH_COMPILES_FOR"
FACTS = "binary.json"


def compiles_only() -> bool:
    """Whether this process is to compile and to measure nothing."""
    return bool(os.environ.get(TYPE))


def gpu_here() -> Gpu | None:
    """The GPU of this machine, or the type that is compiled for."""
    return find_gpu(os.environ[TYPE]) if compiles_only() else current_gpu()


def compile_many(
    jobs: Sequence[Job], done: Callable[[Outcome], None] | None = None
) -> list[Outcome]:
    """``sparsegen.launch.compile_many``, which takes from the session's folder what is there and leaves there what is new."""
    named = os.environ.get(BINARIES)
    if not named:
        return compile_now(jobs, done=done)
    root = Path(named)
    found = {i: made for i, job in enumerate(jobs) if (made := _taken(root, job)) is not None}
    for outcome in found.values():
        if done is not None:
            done(outcome)

    def kept(outcome: Outcome) -> None:
        _keep(root, outcome)
        if done is not None:
            done(outcome)

    left = [i for i in range(len(jobs)) if i not in found]
    if left:
        found |= dict(zip(left, compile_now([jobs[i] for i in left], done=kept)))
    print(f"{len(jobs) - len(left)} of {len(jobs)} kernels compiled beforehand", flush=True)
    return [found[i] for i in range(len(jobs))]


def place_of(root: Path, job: Job) -> Path:
    """Where a kernel lies."""
    text = f"{job.source.digest} {job.config} {job.variant} {job.gpu.name} {version('triton')}"
    return root / hashlib.sha256(text.encode()).hexdigest()[:24]


def _taken(root: Path, job: Job) -> Outcome | None:
    place = place_of(root, job)
    try:
        facts: dict[str, Any] = json.loads((place / FACTS).read_text())
    except OSError:
        return None
    left_out = shutil.ignore_patterns(FACTS)
    shutil.copytree(place, job.directory, ignore=left_out, dirs_exist_ok=True)
    binary = Binary(**facts | {"directory": Path(job.directory), "files": tuple(facts["files"])})
    return Outcome(job, binary, "", 0.0)


def _keep(root: Path, outcome: Outcome) -> None:
    """Whole or not at all: two processes may compile the same kernel."""
    job, binary = outcome.job, outcome.binary
    if binary is None:
        return
    place = place_of(root, job)
    made = place.with_name(f".{place.name}.{os.getpid()}.{id(outcome)}")
    listings = shutil.ignore_patterns("*.ptx")  # for people, and most of the bytes
    shutil.copytree(binary.directory, made, ignore=listings)
    (made / FACTS).write_text(json.dumps({**asdict(binary), "directory": ""}))
    try:
        made.rename(place)
    except OSError:  # the other process was first
        shutil.rmtree(made)


def over() -> None:
    """Ends a process that only compiles; nothing otherwise."""
    if compiles_only():
        print("compiled; nothing was measured", flush=True)
        sys.exit()
