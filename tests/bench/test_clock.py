"""The clock hides the host: a batch that the GPU began too early is timed again behind a longer pause."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparsegen.bench import clock
from sparsegen.bench.clock import LONGEST_PAUSE_S, QueuedClock, nbytes


class StandInCuda:
    """Counts calls; a pause has ended when its host time has passed, which the test sets."""

    def __init__(self, host_s: float, now: list[float]) -> None:
        self.host_s, self.now, self.pause_s, self.begun = host_s, now, 0.0, 0.0
        self.log: list[str] = []
        self.pauses: list[float] = []

    def synchronize(self) -> None:
        self.begun = self.now[0]

    def _sleep(self, cycles: int) -> None:
        self.pause_s = cycles / clock.CYCLES_A_SECOND
        self.pauses.append(self.pause_s)
        self.log.append("pause")

    def Event(self, enable_timing: bool) -> Any:
        return SimpleNamespace(
            record=lambda: self.log.append("event"),
            elapsed_time=lambda end: 0.1,
            query=lambda: self.now[0] - self.begun >= self.pause_s,
        )


def made(host_s: float, monkeypatch: pytest.MonkeyPatch) -> tuple[QueuedClock, StandInCuda, Any]:
    """A clock, its GPU, and a launch that takes the host so long."""
    now = [0.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    cuda = StandInCuda(host_s, now)
    one = object.__new__(QueuedClock)
    one._torch = SimpleNamespace(cuda=cuda)
    one._flush = SimpleNamespace(zero_=lambda: cuda.log.append("flush"))
    one.late = False

    def launch() -> None:
        cuda.log.append("launch")
        now[0] += host_s

    return one, cuda, launch


def test_launches_wait_behind_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    one, cuda, launch = made(1e-6, monkeypatch)
    times = one.times_us(launch, 0.0, 6.0)
    assert times == [100.0] * 60 and not one.late
    assert cuda.log[:2] == ["pause", "event"]
    assert cuda.log[2:6] == ["flush", "event", "launch", "event"]
    assert len(cuda.pauses) == 1 + 1 + 2  # a look, the warm-up, 60 launches in two batches


def test_a_slow_host_gets_a_longer_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    one, cuda, launch = made(3e-3, monkeypatch)
    one.times_us(launch, 0.0, 0.0)
    assert not one.late
    assert cuda.pauses[:2] == [pytest.approx(0.002), pytest.approx(0.009)]


def test_a_host_that_waits_for_the_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    one, cuda, launch = made(1.0, monkeypatch)
    assert len(one.times_us(launch, 0.0, 0.0)) == 3
    assert one.late and max(cuda.pauses) == pytest.approx(LONGEST_PAUSE_S)


def test_bytes_of_tensors() -> None:
    assert nbytes(torch.zeros(3, 4), None, torch.zeros(5, dtype=torch.int8)) == 53
