"""Jobs over a Ray cluster: each goes to a node with its type of GPU, and again to another if its worker is lost.

A cluster that has no such GPU is an error at once, and one that loses the last of them is soon: nothing waits for ever.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparsegen.errors import SparsegenError, ToolchainError
from sparsegen.tune.job import Done, Job

if TYPE_CHECKING:
    from sparsegen.spec.gpu import Gpu

TRIES = 3  # a job whose worker was lost so often is given up
_GONE_S = (
    30.0  # without a node of its type a job is given up; a node that starts again is back sooner
)
_QUIET_S = 30.0  # a line of progress at least as often
_CONNECT_S = 10.0
_PREFIX = "accelerator_type:"  # of the resource that a node has for its type of GPU

OnEvent = Callable[[int, int, str], None]  # jobs done, jobs in all, one line


@dataclass(frozen=True)
class Failed:
    """A job without a result, and why, in one sentence."""

    job: Job
    reason: str


def spread(
    jobs: Sequence[Job],
    run: Callable[[Job], Done],
    address: str,
    progress: OnEvent = lambda done, total, message: None,
) -> list[Done | Failed]:
    """Run all jobs on the cluster at ``address``; outcomes in their order.

    Args:
        run: importable on the nodes, where sparsegen must be installed in the same version.

    Raises:
        ToolchainError: Ray is not installed, the cluster cannot be reached, or it lacks a type of GPU that is asked for.
    """
    ray = _connected(address)
    run_it = _Spread(ray, jobs, run, progress)
    try:
        _refuse_absent(ray, jobs, address)
        return run_it.outcomes()
    finally:
        run_it.cancel()  # what is left after Ctrl-C, and nothing otherwise
        ray.shutdown()


def types_of(address: str, known: Sequence[Gpu]) -> list[Gpu]:
    """The GPU types of a cluster that are among ``known``.

    Raises:
        ToolchainError: as in ``spread``, or none of them is there.
    """
    ray = _connected(address)
    try:
        there = _there(ray)
    finally:
        ray.shutdown()
    found = [gpu for gpu in known if accelerator_of(gpu) in there]
    if not found:
        raise ToolchainError(
            f"the Ray cluster at {address} has no GPU that is known here; {_listed(there)}"
        )
    return found


def accelerator_of(gpu: Gpu) -> str:
    """Ray's word for a type of GPU: nvidia-h200 is H200."""
    from ray.util.accelerators import AMD_INSTINCT_MI300x

    if gpu.name == "amd-mi300x":
        return str(AMD_INSTINCT_MI300x)
    return gpu.name.removeprefix("nvidia-").upper()


class _Spread:
    """Jobs that wait or run, and what became of the others."""

    def __init__(
        self, ray: Any, jobs: Sequence[Job], run: Callable[[Job], Done], progress: OnEvent
    ) -> None:
        self._ray, self._jobs, self._progress = ray, jobs, progress
        # Ray's own retries are silent; ours are said.
        self._remote = ray.remote(max_retries=0, num_gpus=1)(run)
        self._open: dict[Any, int] = {}
        self._tries = [0] * len(jobs)
        self._outcomes: dict[int, Done | Failed] = {}
        self._seen = [time.monotonic()] * len(jobs)  # when a node of the job's type was last there

    def outcomes(self) -> list[Done | Failed]:
        """Begin all, and wait for the last."""
        for number in range(len(self._jobs)):
            self._begin(number)
        said = time.monotonic()
        while self._open:
            ready, _ = self._ray.wait(list(self._open), num_returns=1, timeout=1.0)
            for ref in ready:
                self._take(ref, self._open.pop(ref))
                said = time.monotonic()
            self._give_up_absent()
            if time.monotonic() - said > _QUIET_S:
                self._say(f"{len(self._open)} jobs wait or run")
                said = time.monotonic()
        return [self._outcomes[number] for number in range(len(self._jobs))]

    def cancel(self) -> None:
        """End what still runs; a worker takes its processes with it."""
        for ref in self._open:
            self._ray.cancel(ref, force=True)
        if self._open:
            self._ray.wait(list(self._open), num_returns=len(self._open), timeout=5.0)

    def _begin(self, number: int) -> None:
        job = self._jobs[number]
        self._tries[number] += 1
        task = self._remote.options(accelerator_type=accelerator_of(job.gpu))
        self._open[task.remote(job)] = number

    def _take(self, ref: Any, number: int) -> None:
        from ray import exceptions

        job = self._jobs[number]
        try:
            done: Done = self._ray.get(ref)
        except exceptions.RayTaskError as error:  # the job itself failed: it would again
            self._end(number, Failed(job, _of_task(error)))
        except (exceptions.RayError, OSError) as error:  # its worker or its node is gone
            lost = f"its worker was lost ({type(error).__name__})"
            if self._tries[number] >= TRIES:
                self._end(number, Failed(job, f"{lost}, {TRIES} times"))
            else:
                self._say(f"{job.name}: {lost}; try {self._tries[number] + 1} of {TRIES}")
                self._begin(number)
        else:
            self._end(number, done)

    def _end(self, number: int, outcome: Done | Failed) -> None:
        self._outcomes[number] = outcome
        if isinstance(outcome, Failed):
            self._say(f"{outcome.job.name}: failed: {outcome.reason}")
            return
        us = outcome.result.time_us
        best = "nothing measured" if us is None else f"best {us:,.1f} µs"
        self._say(f"{outcome.job.name}: {best}, {outcome.result.how}, on {outcome.host}")

    def _give_up_absent(self) -> None:
        there, now = _there(self._ray), time.monotonic()
        for ref, number in list(self._open.items()):
            job = self._jobs[number]
            if accelerator_of(job.gpu) in there:
                self._seen[number] = now
            elif now - self._seen[number] > _GONE_S:
                self._ray.cancel(ref, force=True)
                del self._open[ref]
                reason = f"the cluster has lost its last {accelerator_of(job.gpu)}"
                self._end(number, Failed(job, reason))

    def _say(self, message: str) -> None:
        self._progress(len(self._outcomes), len(self._jobs), message)


def _connected(address: str) -> Any:
    try:
        import ray
    except ImportError as error:
        raise ToolchainError("--ray needs Ray: pip install 'sparsegen[ray]'") from error
    _refuse_deaf(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        first = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ToolchainError(f"cannot reach a Ray cluster at {address}: {first}") from error
    return ray


def _refuse_deaf(address: str) -> None:
    """Whether anybody listens there at all: Ray itself would wait for minutes (2.60, 2026-11-30)."""
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ToolchainError(
            f"cannot reach a Ray cluster at {address}: an address is HOST:PORT, ray://HOST:PORT or auto"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        raise ToolchainError(f"cannot reach a Ray cluster at {address}: {error}") from error


def _there(ray: Any) -> dict[str, float]:
    """How many GPUs the nodes of each type have."""
    found: dict[str, float] = {}
    for node in ray.nodes():
        resources = node["Resources"] if node["Alive"] else {}
        for name in resources:
            if name.startswith(_PREFIX) and resources.get("GPU", 0):
                kind = name.removeprefix(_PREFIX)
                found[kind] = found.get(kind, 0) + resources["GPU"]
    return found


def _refuse_absent(ray: Any, jobs: Sequence[Job], address: str) -> None:
    there = _there(ray)
    for job in jobs:
        wanted = accelerator_of(job.gpu)
        if wanted not in there:
            raise ToolchainError(
                f"the Ray cluster at {address} has no {wanted} (for {job.gpu.name}); {_listed(there)}"
            )


def _listed(there: dict[str, float]) -> str:
    counts = ", ".join(f"{name} ({count:g})" for name, count in sorted(there.items()))
    return f"its GPUs: {counts or 'none'}"


def _of_task(error: Any) -> str:
    """The last words of what a job raised: our own errors as they are, others with their type."""
    cause = error.cause
    if isinstance(cause, SparsegenError):
        return " ".join(str(cause).split())
    return " ".join(f"{type(cause).__name__}: {cause}".split())[:400]
