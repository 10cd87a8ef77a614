"""Lines of ``history.csv`` as series over time: our own time of one problem, and its ratio to each baseline."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from sparsegen.errors import ArtifactError
from sparsegen.tune import history


@dataclass(frozen=True)
class Point:
    """One line of the file; ``at``: seconds since 1970."""

    at: float
    entry: history.Entry

    @property
    def speedup(self) -> float:
        """How many times as fast as the baseline."""
        return self.entry.baseline_us / self.entry.median_us


@dataclass(frozen=True)
class Series:
    """All measurements of one pattern and problem on one GPU type, oldest first."""

    gpu: str
    pattern: str
    problem: str
    points: tuple[Point, ...]

    @property
    def baselines(self) -> tuple[str, ...]:
        """In the order in which they appear."""
        return tuple(dict.fromkeys(p.entry.baseline for p in self.points))

    def against(self, baseline: str) -> list[Point]:
        """The points of one baseline, oldest first."""
        return [p for p in self.points if p.entry.baseline == baseline]

    @property
    def ours(self) -> list[Point]:
        """Our own measurements; one beside several baselines is several lines of the file, and one point here."""
        same = {(p.at, p.entry.config, p.entry.median_us): p for p in reversed(self.points)}
        return sorted(same.values(), key=lambda p: p.at)


@dataclass(frozen=True)
class Standing:
    """The newest figures of every series against one baseline on one GPU type.

    ``mean`` is the geometric mean of the ratios, ``least`` and ``most`` are (pattern, ratio).
    """

    gpu: str
    baseline: str
    count: int
    mean: float
    least: tuple[str, float]
    most: tuple[str, float]


def read_series(path: Path) -> list[Series]:
    """Every (pattern, GPU type, problem) of the file, in that order; none where there is no file.

    Raises:
        ArtifactError: a line is broken; one sentence with its place.
    """
    grouped: dict[tuple[str, str, str], list[Point]] = {}
    for number, entry in enumerate(history.read(path), 1):
        grouped.setdefault((entry.pattern, entry.gpu, entry.problem), []).append(
            Point(_seconds(path, number, entry), entry)
        )
    return [
        Series(gpu, pattern, problem, tuple(sorted(points, key=lambda p: p.at)))
        for (pattern, gpu, problem), points in sorted(grouped.items())
    ]


def standings(series: Iterable[Series]) -> list[Standing]:
    """By GPU type and baseline: how the newest measurement of each series stands."""
    newest: dict[tuple[str, str], list[tuple[str, float]]] = {}
    for one in series:
        for baseline in one.baselines:
            last = one.against(baseline)[-1]
            newest.setdefault((one.gpu, baseline), []).append((one.pattern, last.speedup))
    return [
        Standing(
            gpu,
            baseline,
            len(ratios),
            geometric_mean([r for _, r in ratios]),
            min(ratios, key=lambda r: r[1]),
            max(ratios, key=lambda r: r[1]),
        )
        for (gpu, baseline), ratios in sorted(newest.items())
    ]


def geometric_mean(ratios: Iterable[float]) -> float:
    """Of numbers above 0; 1 of none."""
    logs = [math.log(r) for r in ratios]
    return math.exp(sum(logs) / len(logs)) if logs else 1.0


def seconds(date: str) -> float:
    """Seconds since 1970 of an ISO date; without an offset it is UTC.  ValueError if it is none."""
    moment = datetime.fromisoformat(date.replace("Z", "+00:00"))
    return moment.replace(tzinfo=moment.tzinfo or timezone.utc).timestamp()


def _seconds(path: Path, number: int, entry: history.Entry) -> float:
    place = f"{path}: entry {number} ({entry.pattern})"
    for name in ("median_us", "spread_us", "baseline_us"):
        value = getattr(entry, name)
        if not math.isfinite(value) or value < 0 or (value == 0 and name != "spread_us"):
            raise ArtifactError(f"{place}: {name} must be a number above 0, got {value}")
    try:
        return seconds(entry.date)
    except ValueError:
        raise ArtifactError(
            f"{place}: date must be ISO 8601, as 2026-11-30T03:22:12+00:00; got {entry.date[:60]!r}"
        ) from None
