"""One tuning as a thing to send: a pattern, a problem and a GPU type, run here or on another machine."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparsegen.errors import ToolchainError
from sparsegen.tune import winners
from sparsegen.tune.gradient_winners import tune_gradients
from sparsegen.tune.replay import ReplayLane, ReplaySource
from sparsegen.tune.tuner import QUICK, Budget, TuneResult, tune

if TYPE_CHECKING:
    from sparsegen.spec.gpu import Gpu
    from sparsegen.spec.pattern import Pattern
    from sparsegen.spec.problem import Problem
    from sparsegen.tune.history import Entry
    from sparsegen.tune.store import Row
    from sparsegen.tune.target import KernelTarget


@dataclass(frozen=True)
class Job:
    """``lengths`` (q_len, kv_len) to time at; ``storage`` as in ``tune``; ``jobs``: compile processes there.

    ``replay``: answer from a record and not from a GPU (``replay``).  ``version`` of sparsegen that made the job.
    """

    pattern: Pattern
    problem: Problem
    gpu: Gpu
    lengths: tuple[int, int]
    budget: Budget = QUICK
    storage: str | None = None
    jobs: int | None = None
    replay: ReplaySource | None = None
    version: str = ""
    part: str | None = None  # a gradient kernel, "queries" or "keys"; None: the forward one

    @property
    def name(self) -> str:
        """For progress and messages."""
        p, (q_len, kv_len) = self.problem, self.lengths
        return (
            f"{self.pattern.name}{(self.part and f' gradients of {self.part}') or ''} "
            f"{q_len}x{kv_len} H{p.heads}:{p.kv_heads} D{p.head_dim} {p.dtype} "
            f"on {self.gpu.name}" + " (replay)" * (self.replay is not None)
        )


@dataclass(frozen=True)
class Done:
    """What a job found: the result, and its row and line of history where anything was measured; never of a replay."""

    job: Job
    result: TuneResult
    row: Row | None
    line: Entry | None
    host: str


def run(job: Job, **options: Any) -> Done:
    """Tune here.

    Args:
        options: further keywords of ``tune`` (progress, ...).

    Raises:
        ToolchainError: this machine has another GPU, or another version of sparsegen than the job's maker.
        TuneError, UnsupportedError: see ``tune_pattern``.
    """
    from sparsegen import __version__
    from sparsegen.spec.gpu import current_gpu

    host = socket.gethostname()
    if job.version and job.version != __version__:
        raise ToolchainError(
            f"{host} has sparsegen {__version__}, the job was made by {job.version}"
        )
    if job.replay is not None:
        result = tune(
            job.replay,
            budget=job.budget,
            storage=job.storage,
            seeds=job.replay.starts,
            lane=ReplayLane(job.replay),
            **options,
        )
        return Done(job, result, None, None, host)
    here = current_gpu()
    if here is None or here.name != job.gpu.name:
        name = here.name if here else "none"
        raise ToolchainError(f"the GPU of {host} is {name}; {job.gpu.name} was asked for")
    given: dict[str, Any] = {
        "lengths": job.lengths,
        "budget": job.budget,
        "storage": job.storage,
        "jobs": job.jobs,
        **options,
    }
    target: KernelTarget
    if job.part is None:
        target, result = winners.tune_pattern(job.pattern, job.problem, job.gpu, **given)
    else:
        target, result = tune_gradients(job.pattern, job.problem, job.gpu, job.part, **given)
    measured = None not in (result.time_us, result.baseline_us, result.noise)
    row, line = winners.row_of(target, result) if measured else (None, None)
    return Done(job, result, row, line, host)
