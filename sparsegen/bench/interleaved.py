"""Launches timed in turns, as docs/performance.md tells: medians over rounds, and back to back at the power limit."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sparsegen.tune.measure import PUBLISHED, Clock, Turns

Launch = Callable[[], Any]
SUSTAINED_S = 0.5  # long enough for an H200 to reach its power limit


@dataclass(frozen=True)
class Timed:
    """Microseconds of one launch: the median of the rounds' medians, their spread, and the mean back to back."""

    us: float
    spread_us: float
    sustained_us: float


def in_turns(
    launches: Mapping[str, Launch],
    clock: Clock,
    turns: Turns = PUBLISHED,
    sustained: bool = True,
) -> dict[str, Timed]:
    """Time all launches, one turn each a round; then each alone, back to back, nothing flushed."""
    rounds: dict[str, list[float]] = {name: [] for name in launches}
    for _ in range(turns.rounds):
        for name, launch in launches.items():
            time.sleep(turns.idle_s)
            times = clock.times_us(launch, turns.warm_up_ms, turns.measured_ms)
            rounds[name].append(statistics.median(times))
    return {
        name: Timed(
            statistics.median(rounds[name]),
            max(rounds[name]) - min(rounds[name]),
            back_to_back(launch) if sustained else 0.0,
        )
        for name, launch in launches.items()
    }


def back_to_back(launch: Launch, seconds: float = SUSTAINED_S) -> float:
    """Mean microseconds of a launch repeated for so long without a pause."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    launch()
    end.record()
    torch.cuda.synchronize()
    times = max(int(1e3 * seconds / max(start.elapsed_time(end), 1e-3)), 3)
    start.record()
    for _ in range(times):
        launch()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end) / times


def host_us(launch: Launch, calls: int = 200, times: int = 9) -> float:
    """Host microseconds of one call, nothing waited for: the median of ``times`` runs of ``calls`` calls.

    Tells the host's time only where the GPU is done sooner than the queue of launches is full (about a thousand).
    """
    import torch

    found = []
    for _ in range(times):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            launch()
        found.append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return statistics.median(found)
