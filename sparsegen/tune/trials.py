"""The rows of a study's record: one configuration each, and what became of it.

States: COMPLETE = measured and right.  PRUNED = compiled, and not worth the GPU (does not fit, spills).  FAIL =
crashed, hung, wrong, or left behind by a process that died.  A configuration with an outcome is never tried again;
one that was left behind is, once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sparsegen.codegen.knobs import LaunchConfig

if TYPE_CHECKING:
    import optuna

PRUNED_KINDS = ("spills", "shared memory")


@dataclass(frozen=True)
class Trial:
    """One row of the record.

    ``state`` is Optuna's, in lower case; ``kind`` and ``reason`` say why a trial is not complete; ``time_us`` is on
    the scale of the first baseline (see ``Study.complete``); ``details`` holds compile results and raw rounds.
    """

    number: int
    config: LaunchConfig | None
    state: str
    kind: str = ""
    reason: str = ""
    time_us: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """The incumbent: the fastest of those that beat the incumbent of their time by more than the noise."""
    winners = [t for t in trials if t.state == "complete" and t.details.get("won")]
    return min(winners, key=lambda t: (t.time_us or 0.0, t.number), default=None)


def value_of(trials: Sequence[Trial], config: LaunchConfig) -> float | None:
    """The recorded time of a configuration in µs, None if it was not measured."""
    times = [t.time_us for t in trials if t.config == config and t.time_us is not None]
    return times[0] if times else None


def trial_of(frozen: optuna.trial.FrozenTrial) -> Trial:
    """What Optuna keeps of a trial, as a row of the record."""
    notes = frozen.user_attrs
    outcome = dict(notes.get("outcome", {}))
    state = {"fail": "failed"}.get(frozen.state.name.lower(), frozen.state.name.lower())
    left = state == "failed" and not outcome
    reason = "the process that ran it ended before it did" if left else outcome.pop("reason", "")
    return Trial(
        number=frozen.number,
        config=LaunchConfig.of(notes["config"]) if "config" in notes else None,
        state=state,
        kind="left behind" if left else outcome.pop("kind", ""),
        reason=reason,
        time_us=frozen.value if state == "complete" else None,
        details=outcome,
    )


def taken_by(trials: Sequence[Trial]) -> set[LaunchConfig]:
    """Configurations with an outcome or in work; one that was left behind twice is suspect and counts too."""
    taken, left = set(), []
    for trial in trials:
        if trial.config is None or trial.kind == "stopped":
            continue
        if trial.kind == "left behind":
            left.append(trial.config)
        else:
            taken.add(trial.config)
    return taken | {config for config in left if left.count(config) > 1}
