"""Recordings for tests, made of formulas and never of a GPU: grids to search, and problems to cover."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from sparsegen.tune.recording import Entry, Feature, Origin, Recorded, Recorder
from sparsegen.tune.space import Space
from sparsegen.tune.store import Measured
from tests.tune.standin import DEFAULT, KNOBS, time_of

VERSIONS = {"driver": "none", "torch": "none", "triton": "none"}
PLAIN: dict[str, Feature] = {
    "specialised": True,
    "residues": False,
    "boxes": False,
    "split": False,
    "row_keys": 1000.0,
    "head_dim": 128,
    "q_len": 4096,
    "kv_len": 4096,
    "group": 1,
    "rows": 4096,
}


def origin(synthetic: bool = True, template: str = "forward", digest: str = "0" * 64) -> Origin:
    return Origin("nvidia-h200", template, digest, VERSIONS, "2026-11-30T00:00:00+00:00", synthetic)


def write_grids(path: Path, patterns: Mapping[str, int]) -> Path:
    """The whole stand-in space for shipped patterns (their first lengths); the number makes their times differ."""
    recorder = Recorder(path, origin())
    for name, factor in patterns.items():
        pattern = Pattern.from_yaml(name)
        problem = pattern.problem or Problem()
        measured = Measured.of(problem, *problem.lengths[0])
        starts = (LaunchConfig.of({**DEFAULT.as_dict(), "warps": 8}),)
        recorder.problem(Recorded(name, name, pattern.digest(), measured, KNOBS, DEFAULT, starts))
        for config in Space(KNOBS).enumerate():
            us = time_of(config) * factor
            recorder.trial(Entry(name, config, us, (us,), 0.0))
    recorder.close()
    return path


def write_times(
    path: Path,
    problems: Mapping[str, Mapping[str, Feature]],
    configs: Mapping[str, LaunchConfig],
    time: Callable[[str, str], float | None],
    **of: object,
) -> Path:
    """Problems by name with features beside ``PLAIN``; ``time(problem, configuration)`` None: not measured."""
    recorder = Recorder(path, origin(**of))  # type: ignore[arg-type]
    for name, change in problems.items():
        features = {**PLAIN, **change}
        measured = Measured(
            int(features["head_dim"]),
            int(features["head_dim"]),
            8,
            8,
            1,
            "bfloat16",
            int(features["q_len"]),
            int(features["kv_len"]),
        )
        pattern = name.split()[0]
        recorder.problem(Recorded(name, pattern, "0" * 64, measured, features=features))
        for letter, config in configs.items():
            us = time(name, letter)
            if us is not None:
                recorder.trial(Entry(name, config, us, (us,), 0.0))
    recorder.close()
    return path
