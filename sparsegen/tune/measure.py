"""How a candidate is timed: in turns with the incumbent, so that both meet the same clocks and the same heat."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from sparsegen.errors import TuneError

Launch = Callable[[], None]


@dataclass(frozen=True)
class Turns:
    """The timing protocol: ``rounds`` turns of incumbent and candidate.

    ``idle_s`` lets the GPU cool before each turn (0.7 s for published figures, none while searching);
    ``warm_up_ms`` raises the clocks; ``measured_ms`` is how long launches are timed in a turn.  A candidate slower
    than ``give_up`` times the incumbent in its first round is not measured further.
    """

    rounds: int = 5
    idle_s: float = 0.0
    warm_up_ms: float = 6.0
    measured_ms: float = 30.0
    give_up: float = 1.5


SEARCH = Turns()  # while tuning
PUBLISHED = Turns(rounds=5, idle_s=0.7, give_up=float("inf"))


class Clock(Protocol):
    """What times launches: CUDA events on a GPU, something simulated in tests."""

    def times_us(self, launch: Launch, warm_up_ms: float, measured_ms: float) -> list[float]:
        """Microseconds of each timed launch, the L2 cache flushed before each."""
        ...


@dataclass(frozen=True)
class Measurement:
    """Medians over all rounds, in µs of one launch.

    ``noise`` says how far the ratio candidate / incumbent strays from round to round (``_noise``); the candidate
    ``beats`` the incumbent only by more than that.  The ratio and not the times: a GPU that grows hot slows both, by
    4 to 18 % within five rounds on long problems (H200, 2026-11-29).  ``rounds_us`` are the medians of each round.
    """

    time_us: float
    incumbent_us: float
    noise: float
    rounds_us: tuple[float, ...]
    incumbent_rounds_us: tuple[float, ...]

    @property
    def beats(self) -> bool:
        """Whether the candidate is faster than the incumbent by more than the noise."""
        return (
            statistics.median(_ratios(self.rounds_us, self.incumbent_rounds_us)) < 1.0 - self.noise
        )

    def as_dict(self) -> dict[str, Any]:
        """For the record."""
        return asdict(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Measurement:
        """Back from the record (lists become tuples)."""
        return cls(
            values["time_us"],
            values["incumbent_us"],
            values["noise"],
            tuple(values["rounds_us"]),
            tuple(values["incumbent_rounds_us"]),
        )


def measure(candidate: Launch, incumbent: Launch, clock: Clock, turns: Turns) -> Measurement:
    """Time two launches in turns; which of them goes first alternates from round to round."""
    candidate_us: list[float] = []
    incumbent_us: list[float] = []
    for number in range(turns.rounds):
        pair = [(incumbent, incumbent_us), (candidate, candidate_us)]
        for launch, medians in pair if number % 2 == 0 else reversed(pair):
            if turns.idle_s:
                time.sleep(turns.idle_s)
            times = clock.times_us(launch, turns.warm_up_ms, turns.measured_ms)
            if not times:
                raise TuneError("the clock timed no launch")
            medians.append(statistics.median(times))
        if candidate_us[0] > turns.give_up * incumbent_us[0]:
            break
    return Measurement(
        time_us=statistics.median(candidate_us),
        incumbent_us=statistics.median(incumbent_us),
        noise=_noise(_ratios(candidate_us, incumbent_us)),
        rounds_us=tuple(candidate_us),
        incumbent_rounds_us=tuple(incumbent_us),
    )


def _ratios(candidate_us: Sequence[float], incumbent_us: Sequence[float]) -> list[float]:
    """Candidate / incumbent in each round: what slows both leaves it alone."""
    return [mine / theirs for mine, theirs in zip(candidate_us, incumbent_us)]


def _noise(ratios: Sequence[float]) -> float:
    """Two standard deviations of the ratios, from their median absolute deviation: one odd round moves it little."""
    middle = statistics.median(ratios)
    return 2 * 1.4826 * statistics.median(abs(r - middle) for r in ratios)


class CudaClock:
    """Times launches on the current stream with events; works for CUDA and HIP builds of torch.

    ``l2_bytes`` is the GPU's cache; a buffer twice as large is zeroed before every timed launch, so that each finds
    the cache cold, as a layer in a model does.
    """

    def __init__(self, l2_bytes: int) -> None:
        import torch

        self._torch = torch
        self._flush = torch.empty(max(2 * l2_bytes, 1), dtype=torch.int8, device="cuda")

    def times_us(self, launch: Launch, warm_up_ms: float, measured_ms: float) -> list[float]:
        """See ``Clock``."""
        one_ms = self._launch_ms(launch)
        self._run(launch, _times(warm_up_ms, one_ms))
        pairs = self._run(launch, _times(measured_ms, one_ms))
        return [1e3 * start.elapsed_time(end) for start, end in pairs]

    def _launch_ms(self, launch: Launch) -> float:
        """One launch, flush not counted: the second of two, since the first may load code."""
        return float([start.elapsed_time(end) for start, end in self._run(launch, 2)][-1])

    def _run(self, launch: Launch, times: int) -> list[tuple[Any, Any]]:
        events = self._torch.cuda.Event
        pairs = [(events(enable_timing=True), events(enable_timing=True)) for _ in range(times)]
        for start, end in pairs:
            self._flush.zero_()
            start.record()
            launch()
            end.record()
        self._torch.cuda.synchronize()
        return pairs


def _times(wanted_ms: float, one_ms: float) -> int:
    """Launches that fill ``wanted_ms``: at least 3, and bounded for kernels too short to time well."""
    return min(max(round(wanted_ms / max(one_ms, 1e-3)), 3), 1000)
