"""A stand-in for the compiler, for tests of what an artifact holds beside machine code."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

import sparsegen.launch
from sparsegen.launch import Binary, Job, Outcome


def pretend(
    monkeypatch: pytest.MonkeyPatch, real: Callable[[Job], bool] = lambda job: False
) -> list[Job]:
    """Jobs of which ``real`` says so are compiled, the others have one file that stands for a binary: those are returned.

    The tests that look at real binaries of such kernels are named where this is used.
    """
    pretended: list[Job] = []
    compile_many = sparsegen.launch.compile_many

    def stand_in(
        jobs: Sequence[Job],
        workers: int | None = None,
        done: Callable[[Outcome], None] = lambda outcome: None,
    ) -> list[Outcome]:
        compiled = [job for job in jobs if real(job)]
        known = {id(o.job): o for o in (compile_many(compiled, workers) if compiled else [])}
        outcomes = [known.get(id(job)) or outcome(job) for job in jobs]
        for one in outcomes:
            done(one)
        return outcomes

    def outcome(job: Job) -> Outcome:
        pretended.append(job)
        job.directory.mkdir(parents=True)
        name = f"{job.source.entry}.cubin"
        (job.directory / name).write_bytes(b"no machine code")
        binary = Binary(job.variant, job.source.entry, job.directory, (name,), 64, 0, 1024)
        return Outcome(job, binary, "", 0.0)

    monkeypatch.setattr("sparsegen.launch.compile_many", stand_in)
    return pretended
