"""The studies of a storage as one recording, so that few configurations can be found in what tunings have left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.errors import TuneError
from sparsegen.tune.measure import Measurement
from sparsegen.tune.recording import Entry, Origin, Recorded, Recording
from sparsegen.tune.schedules import SCHEDULE
from sparsegen.tune.storage import open_storage
from sparsegen.tune.study import Trial, trial_of
from sparsegen.tune.tuner import quiet_optuna

Group = tuple[str, str, str]  # GPU, template, its digest: times of two are not compared


def of_studies(storage: str | Path, gpu: str | None = None) -> Recording:
    """All studies in ``storage`` that say what they are of; those of one GPU if several are in there.

    Only trials on the schedule that was predicted best count: the rule is for problems where none was measured.

    Raises:
        TuneError: no study says it, or trials of several GPUs or template versions are there and ``gpu`` does not decide.
    """
    groups: dict[Group, Recording] = {}
    with quiet_optuna():
        opened = open_storage(storage)
        try:
            for study in opened.patiently(opened.backend.get_all_studies):
                about = study.user_attrs.get("about")
                if about is None or gpu not in (None, about["origin"]["gpu"]):
                    continue
                frozen = opened.backend.get_all_trials(study._study_id, deepcopy=False)
                _add(groups, about, [trial_of(one) for one in frozen])
        finally:
            opened.close()
    if len(groups) != 1:
        found = (
            "; ".join(f"{g} {t} {d[:12]}" for g, t, d in groups) or "none that say what they are of"
        )
        raise TuneError(
            f"{opened.where}: one GPU and one version of the template are needed, there are studies of: {found}"
        )
    return next(iter(groups.values()))


def _add(groups: dict[Group, Recording], about: Mapping[str, Any], trials: list[Trial]) -> None:
    origin, problem = Origin(**about["origin"]), Recorded.of(about["problem"])
    group = origin.gpu, origin.template, origin.template_digest
    into = groups.setdefault(group, Recording(origin, {}, {}))
    schedules = [knob.default for knob in problem.knobs if knob.name == SCHEDULE]
    entries = {}
    for trial in trials:
        entry = _entry(problem.name, trial, schedules[0] if schedules else None)
        if entry is not None:
            entries[entry.config] = entry
    groups[group] = replace(
        into,
        problems={**into.problems, problem.name: problem},
        trials={**into.trials, problem.name: {**into.trials.get(problem.name, {}), **entries}},
    )


def _entry(name: str, trial: Trial, first: Any) -> Entry | None:
    """A trial with an outcome, without its schedule; None for others and for those on another schedule."""
    if trial.config is None or trial.state == "running" or trial.kind in ("stopped", "left behind"):
        return None
    values = trial.config.as_dict()
    if values.pop(SCHEDULE, first) != first:
        return None
    config = LaunchConfig.of(values)
    if trial.time_us is None:
        return Entry(name, config, kind=trial.kind, reason=trial.reason)
    measured = Measurement.of(trial.details["measured"])
    return Entry(name, config, trial.time_us, (trial.time_us,), measured.noise)
