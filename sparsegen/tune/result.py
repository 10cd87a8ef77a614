"""What a tuning found, as its record says."""

from __future__ import annotations

from dataclasses import dataclass

from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.tune.measure import Measurement
from sparsegen.tune.study import Study, Trial, best_of, value_of


@dataclass(frozen=True)
class TuneResult:
    """What a tuning found.

    ``config`` is never absent: with nothing measured it is the template default, and ``how`` says so.  ``time_us``
    and ``baseline_us`` (the default configuration) come from the same interleaved rounds; ``noise`` is how
    far their ratio strayed from round to round there.
    """

    config: LaunchConfig
    time_us: float | None
    baseline_us: float | None
    noise: float | None
    trials: tuple[Trial, ...]
    how: str
    storage: str

    @property
    def complete(self) -> int:
        """How many configurations were measured, ever."""
        return sum(trial.state == "complete" for trial in self.trials)


def result_of(study: Study, where: str) -> TuneResult:
    """What the record of a study says now; ``where`` it is kept."""
    trials = tuple(study.trials())
    best = best_of(trials)
    if best is None or best.config is None:
        how = "template default: no trial is complete"
        return TuneResult(study.default, None, None, None, trials, how, where)
    count = sum(trial.state == "complete" for trial in trials)
    final = study.noted("final")
    if final is not None and final["config"] == best.config.as_dict():
        measured = Measurement.of(final["measured"])
        baseline_us, noise = measured.incumbent_us, measured.noise
        if not measured.beats:
            how = f"template default: not beaten by more than the noise in {count} trials"
            return TuneResult(study.default, baseline_us, baseline_us, noise, trials, how, where)
        how = f"best of {count} trials"
        return TuneResult(best.config, measured.time_us, baseline_us, noise, trials, how, where)
    relative = Measurement.of(best.details["measured"]).noise
    how = "template default" if best.config == study.default else "best"
    baseline = value_of(trials, study.default)
    how = f"{how} of {count} trials"
    return TuneResult(best.config, best.time_us, baseline, relative, trials, how, where)
