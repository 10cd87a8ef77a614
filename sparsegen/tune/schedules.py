"""The schedule as a tuning decision: a pattern's candidates, and the knob that chooses among them.

Where a pattern has one candidate there is no knob, and configurations are the template's alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from sparsegen.codegen.knobs import Knob, LaunchConfig
from sparsegen.errors import TuneError

if TYPE_CHECKING:
    from sparsegen.schedule.search import Candidate
    from sparsegen.spec.pattern import Pattern
    from sparsegen.spec.problem import Problem
    from sparsegen.tune.study import Trial

SCHEDULE = "SCHEDULE"  # the knob's name; no template may declare it


@lru_cache(maxsize=64)
def candidates_of(pattern: Pattern, problem: Problem) -> tuple[Candidate, ...]:
    """``schedule.build.candidates``, kept: key, look-up, tuning and build all ask for them."""
    from sparsegen.schedule.build import candidates

    return candidates(pattern, problem)


def labels_of(candidates: Iterable[Candidate]) -> tuple[str, ...]:
    """Labels of those worth a measurement, best prediction first."""
    return tuple(c.schedule.label for c in candidates if c.to_measure)


def knobs_of(labels: Sequence[str]) -> tuple[Knob, ...]:
    """The knob that chooses among ``labels``; none where there is nothing to choose."""
    if len(labels) < 2:
        return ()
    summary = "how query and key tiles lie on the positions, best prediction first"
    return (Knob(SCHEDULE, tuple(labels), labels[0], summary),)


def joined(config: LaunchConfig, label: str, labels: Sequence[str]) -> LaunchConfig:
    """A configuration of a study: the template's, and the schedule where there is a choice."""
    if len(labels) < 2:
        return config
    return LaunchConfig.of({**config.as_dict(), SCHEDULE: label})


def split(config: LaunchConfig, labels: Sequence[str]) -> tuple[str, LaunchConfig]:
    """(label, the template's configuration): the inverse of ``joined``.

    A configuration without a schedule means the best prediction.

    Raises:
        TuneError: the schedule is not among ``labels``.
    """
    values = config.as_dict()
    label = str(values.pop(SCHEDULE, labels[0]))
    if label not in labels:
        known = ", ".join(map(repr, labels))
        raise TuneError(f"schedule {label!r} is no candidate; there are {known}")
    return label, LaunchConfig.of(values)


def times_of(trials: Iterable[Trial], knob: str) -> dict[str, float]:
    """Best recorded time in µs by the value of a knob."""
    best: dict[str, float] = {}
    for trial in trials:
        if trial.config is not None and trial.time_us is not None:
            value = str(trial.config[knob])
            best[value] = min(trial.time_us, best.get(value, trial.time_us))
    return best


def times_us(trials: Iterable[Trial], labels: Sequence[str]) -> dict[str, float]:
    """Best recorded time by label, of those schedules that have a complete trial."""
    best: dict[str, float] = {}
    for trial in trials:
        if trial.config is not None and trial.time_us is not None:
            label, _ = split(trial.config, labels)
            best[label] = min(trial.time_us, best.get(label, trial.time_us))
    return best
