"""The binaries of an artifact, made by processes that may crash without taking this one along."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from sparsegen.artifact.build import Progress, Request
from sparsegen.artifact.refused import OnRecord, RefusedError

if TYPE_CHECKING:
    from sparsegen.launch import Binary, Job, Outcome

# What says nothing of a configuration (``launch.pool``): too slow, killed (often for memory), or an error outside the compiler.
OF_THE_MACHINE = (
    "took over",
    "died with exit code -9",
    "died with exit code -15",
    "died with exit code 1",
)


def compiled(
    request: Request,
    jobs: Mapping[str, Job],
    workers: int | None,
    on_record: Mapping[str, OnRecord | None] | None = None,
    progress: Progress | None = None,
) -> dict[str, Binary]:
    """Binaries by the names of their jobs; ``progress`` hears of each that the compiler is through with.

    ``on_record``: what the look-up gave a job, by name; the others have a default or what was measured here.

    CompileError where the compiler refuses one, or one needs more shared memory than the GPU type has; RefusedError where
    that one is on record, or spills more than a tuning allows.  A compiler that was stopped refuses nothing.
    """
    from sparsegen.launch import CompileError, compile_many

    out: dict[str, Binary] = {}
    told: dict[str, Any] = {} if progress is None else {"done": _told(jobs, progress)}
    outcomes = compile_many(list(jobs.values()), workers, **told)
    for label, outcome in zip(jobs, outcomes, strict=True):
        name = f"{request.pattern.name} ({label}) for {request.gpu.name}"
        given = (on_record or {}).get(label)
        wrong = _wrong(outcome, name, request.gpu.shared_bytes, given)
        if wrong is not None and given is not None and not _stopped(outcome):
            raise RefusedError(given, wrong)
        if wrong is not None:
            raise CompileError(wrong)
        assert outcome.binary is not None
        out[label] = outcome.binary
    return out


def _told(jobs: Mapping[str, Job], progress: Progress) -> Callable[[Outcome], None]:
    """Counts what threads are through with."""
    names = {id(job): name for name, job in jobs.items()}
    lock, done = threading.Lock(), itertools.count(1)

    def tell(outcome: Outcome) -> None:
        with lock:
            progress(next(done), len(jobs), f"compiled {names[id(outcome.job)]}")

    return tell


def _stopped(outcome: Outcome) -> bool:
    said = outcome.error.removeprefix("compiler ")
    return said in OF_THE_MACHINE or said.startswith(OF_THE_MACHINE[0])


def _wrong(outcome: Outcome, name: str, shared_bytes: int, given: OnRecord | None) -> str | None:
    """Why a binary cannot be taken, in one sentence."""
    binary = outcome.binary
    if binary is None:
        return f"{name} does not compile: {outcome.error}"
    if binary.shared_bytes > shared_bytes:  # would fail at its first launch
        return (
            f"{name} needs {binary.shared_bytes} bytes of shared memory a program, "
            f"{outcome.job.gpu.name} has {shared_bytes}; it was compiled with {outcome.job.config}"
        )
    most = None if given is None else given.spill_bytes
    if most is not None and (binary.spill_bytes or 0) > most:
        return (
            f"{name} spills {binary.spill_bytes} bytes a thread, at most {most} are allowed; "
            f"it was compiled with {outcome.job.config}"
        )
    return None
