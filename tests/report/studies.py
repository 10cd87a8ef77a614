"""Real studies of a stand-in kernel, as the tuner writes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.tune.tuner import Budget, tune
from tests.tune.standin import DEFAULT, InProcessLane, StandInSource

GOOD = "nvidia-h200 causal 16384x16384 bfloat16 forward triton 3.6.0 0123456789ab fedcba987654"
ODD = 'nvidia-h200 <script>alert("x")</script> 64x64'
TRIALS = 25


def write_studies(folder: Path) -> Path:
    """A folder with one SQLite file of two studies: one plain, one with a hostile name and a wrong result."""
    wrong = LaunchConfig.of({**DEFAULT.as_dict(), "warps": 8})
    good = StandInSource(key=GOOD)
    for source, trials in ((good, TRIALS), (replace(good, key=ODD, wrong=(wrong,)), 6)):
        storage = folder / "nvidia-h200.sqlite"
        tune(source, budget=Budget(trials, 600), storage=storage, lane=InProcessLane(source))
    return folder
