"""How good is the search?  Replays of tunings over a recorded grid, many seeds, against random choice at equal trials.

    python benchmarks/search_quality.py benchmarks/records/grid.jsonl [--seeds 20] [--share 0.15] [--json FILE]

A tuning begins as with an empty tuned/: the template's default, then what the template starts with, then the sampler.  It
may measure --share of the valid configurations of the grid.  Random choice draws as many, all of them valid; in a second
row it measures the same first configurations before it draws.  A figure is best of the grid / best found, 1 at best.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sparsegen.codegen import LaunchConfig
from sparsegen.tune import recording
from sparsegen.tune.replay import ReplayLane, ReplaySource
from sparsegen.tune.tuner import Budget, tune

GOAL = 0.97


@dataclass(frozen=True)
class Quality:
    """One problem: figures of each seed, by way of searching."""

    problem: str
    valid: int
    trials: int
    best_us: float
    search: tuple[float, ...]
    random: tuple[float, ...]
    random_after_starts: tuple[float, ...]

    @property
    def ok(self) -> bool:
        """The goal is reached, and chance is beaten."""
        found = statistics.median(self.search)
        return found >= GOAL and found > statistics.median(self.random)


def quality(
    source: ReplaySource, times: dict[LaunchConfig, float], share: float, seeds: int
) -> Quality:
    """Search and chance on one recorded problem."""
    best, trials = min(times.values()), int(share * len(times))
    valid = sorted(times, key=str)
    starts = [c for c in dict.fromkeys((source.default, *source.starts)) if c in times][:trials]
    rows: dict[str, list[float]] = {"search": [], "random": [], "random_after_starts": []}
    for seed in range(seeds):
        result = tune(
            source,
            budget=Budget(trials, 3600.0),
            seeds=source.starts,
            lane=ReplayLane(source),
            seed=seed,
        )
        assert result.complete <= trials
        rows["search"].append(best / times[result.config])
        drawn = random.Random(seed).sample(valid, trials)
        rows["random"].append(best / min(times[c] for c in drawn))
        after = [*starts, *drawn[: trials - len(starts)]]
        rows["random_after_starts"].append(best / min(times[c] for c in after))
    figures = {name: tuple(found) for name, found in rows.items()}
    return Quality(source.recorded.name, len(times), trials, best, **figures)


def line(name: str, found: Sequence[float]) -> str:
    """Median, quartiles and the worst seed."""
    low, middle, high = statistics.quantiles(found, n=4)
    return (
        f"  {name:<20} median {middle:.3f}  quartiles {low:.3f} {high:.3f}  worst {min(found):.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recording", type=Path)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--share", type=float, default=0.15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    grid = recording.read(options.recording)
    o = grid.origin
    print(f"replay of {options.recording.name}: {o.gpu}, {o.date}" + " (synthetic)" * o.synthetic)
    found = []
    for name, recorded in grid.problems.items():
        times = grid.times(name)
        source = ReplaySource(recorded, grid.trials[name])
        one = quality(source, times, options.share, options.seeds)
        found.append(one)
        print(f"{name}: {one.valid} valid, {one.trials} trials, best {one.best_us:.1f} us")
        for way in ("search", "random", "random_after_starts"):
            print(line(way, getattr(one, way)), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(q) for q in found], indent=1))
    sys.exit(0 if all(q.ok for q in found) else 1)


if __name__ == "__main__":
    main()
