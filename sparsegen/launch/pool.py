"""Compile many kernels in parallel processes.  A compiler that crashes or hangs takes only its own process along."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.codegen.source import KernelSource
from sparsegen.errors import ToolchainError
from sparsegen.launch.binary import Binary, from_record
from sparsegen.spec.gpu import Gpu

TIMEOUT_S = (
    300.0  # a kernel takes 1-5 s; the longest seen on a loaded machine stayed under a minute
)


WAKE_S = 0.5  # the main thread looks for signals at least so often


_ENDS: set[Callable[[], None]] = set()  # of every ``compile_many`` that is under way


@dataclass(frozen=True)
class Job:
    """One kernel to compile into one directory."""

    source: KernelSource
    config: LaunchConfig
    variant: str
    gpu: Gpu
    directory: Path


@dataclass(frozen=True)
class Outcome:
    """A binary, or why there is none."""

    job: Job
    binary: Binary | None
    error: str
    seconds: float


def compile_many(
    jobs: Sequence[Job],
    workers: int | None = None,
    timeout_s: float = TIMEOUT_S,
    done: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """Compile all jobs, ``workers`` at a time (default: the machine's cores); outcomes in the jobs' order.

    ToolchainError where ``stop_compiling`` ended it.
    """
    count = max(1, min(len(jobs), workers or os.cpu_count() or 1))
    shares = [jobs[i::count] for i in range(count)]
    workers_here = [_Worker() for _ in shares]
    stop = threading.Event()

    def run(worker: _Worker, share: Sequence[Job]) -> list[Outcome]:
        out: list[Outcome] = []
        try:
            for job in share:
                if stop.is_set():
                    break
                outcome = worker.compile(job, timeout_s)
                if stop.is_set():
                    break
                if done is not None:
                    done(outcome)
                out.append(outcome)
        finally:
            worker.close()
        return out

    def end() -> None:
        stop.set()
        for worker in workers_here:
            worker.kill()

    _ENDS.add(end)
    try:
        with ThreadPoolExecutor(count) as threads:
            try:
                results = _results(
                    [threads.submit(run, w, share) for w, share in zip(workers_here, shares)]
                )
            except BaseException:  # Ctrl-C, too: nobody waits for what is being compiled
                end()
                raise
    finally:
        _ENDS.discard(end)
    if stop.is_set():
        raise ToolchainError("compiling was stopped")
    by_share = [list(r) for r in results]
    return [by_share[i % count][i // count] for i in range(len(jobs))]


def _results(futures: Sequence[Future[list[Outcome]]]) -> list[list[Outcome]]:
    """What all of them gave, or the first exception.

    In short turns: the system may give Ctrl-C to any thread, and Python's own handler runs in the main one when that wakes.
    """
    left = set(futures)
    while left:
        done, left = wait(left, WAKE_S, FIRST_EXCEPTION)
        for future in done:
            future.result()
    return [future.result() for future in futures]


def stop_compiling() -> None:
    """End what other threads of this process compile: Ctrl-C reaches the main one alone."""
    for end in tuple(_ENDS):
        end()


class _Worker:
    """A child process that compiles what it is sent, one line of JSON a job; restarted when it dies."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def compile(self, job: Job, timeout_s: float) -> Outcome:
        import pickle

        started = time.monotonic()
        process = self.process or self._start()
        killer = threading.Timer(timeout_s, process.kill)
        killer.start()
        try:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(
                pickle.dumps(job).hex() + "\n"
            )  # our own child on a private pipe, never a file
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            killer.cancel()
        seconds = time.monotonic() - started
        if not line:
            code = process.wait()
            self.process = None
            why = (
                f"took over {timeout_s:.0f} s"
                if seconds >= timeout_s
                else f"compiler died with exit code {code}"
            )
            return Outcome(job, None, why, seconds)
        answer = json.loads(line)
        binary = from_record(answer["binary"]) if answer.get("binary") else None
        return Outcome(job, binary, answer.get("error", ""), seconds)

    def _start(self) -> subprocess.Popen[str]:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        root = str(Path(__file__).resolve().parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(
            [root, *filter(None, [environment.get("PYTHONPATH")])]
        )
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sparsegen.launch.compile_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches only us, and we end it
        )
        return self.process

    def kill(self) -> None:
        """End what it does at once; ``compile`` then returns."""
        if (process := self.process) is not None:
            process.kill()

    def close(self) -> None:
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait()
