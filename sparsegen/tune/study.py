"""The record of a tuning: an Optuna study that several processes may fill, and that goes on after any kill.

Its rows are ``trials``: a configuration with an outcome is never tried again; one that was left behind is, once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.tune.measure import Measurement
from sparsegen.tune.owner import age_s, alive, close_session, open_session
from sparsegen.tune.sampler import Sampler
from sparsegen.tune.server import fail_silent
from sparsegen.tune.space import Space
from sparsegen.tune.storage import Storage
from sparsegen.tune.trials import PRUNED_KINDS, Trial, best_of, taken_by, trial_of, value_of

if TYPE_CHECKING:
    import optuna

__all__ = ["PRUNED_KINDS", "Asked", "Study", "Trial", "best_of", "trial_of", "value_of"]

_LOG = logging.getLogger("sparsegen.tune")


@dataclass(frozen=True)
class Asked:
    """A configuration that this process is to measure; ``trial_id`` is the storage's."""

    config: LaunchConfig
    trial_id: int
    number: int


class Study:
    """The study of one problem in one storage; ``name`` is the problem's key.

    Args:
        default: the template's own choice, the baseline; always the first to be measured.
        seeds: configurations to try next, before the sampler's own.
        invalid: why a configuration cannot run here at all, or None; such a one is never asked for.
        seed: of the sampler.

    Raises:
        StorageBusy: the storage stayed locked for longer than its patience.
    """

    def __init__(
        self,
        storage: Storage,
        name: str,
        space: Space,
        *,
        default: LaunchConfig,
        seeds: Sequence[LaunchConfig] = (),
        invalid: Callable[[LaunchConfig], str | None] = lambda config: None,
        seed: int = 0,
    ) -> None:
        self.name = name
        self.space = space
        self.default = space.canonical(default.as_dict())
        self.storage = storage
        self._invalid = invalid
        self._first = [space.canonical(config.as_dict()) for config in seeds]
        self._owner = open_session()
        with storage.locked(name):
            self._study = storage.patiently(self._load)
            self._id = storage.patiently(lambda: storage.backend.get_study_id_from_name(name))
        self._sampler = Sampler(space, invalid, seed, known=len(self._frozen()))

    def close(self) -> None:
        """Give up what this process still had running; others may take it over."""
        close_session(self._owner)
        self.storage.close()

    # ---- asking

    def ask(self, limit: int) -> Asked | str:
        """The next configuration that is new, fits, and that nobody else is measuring.

        Returns "full" when ``limit`` trials are complete or nothing new is left, and "wait" when other processes
        are at work on the last ones.
        """
        with self.storage.locked(self.name):
            frozen = self._without_dead(self._frozen())
            trials = [trial_of(one) for one in frozen]
            complete = sum(trial.state == "complete" for trial in trials)
            running = sum(trial.state == "running" for trial in trials)
            if complete >= limit:
                return "full"
            if complete + running >= limit:
                return "wait"
            config = self._next(frozen, trials)
            if config is None:
                return "wait" if running else "full"
            return self._begin(config, len(trials))

    def _next(
        self, frozen: Sequence[optuna.trial.FrozenTrial], trials: Sequence[Trial]
    ) -> LaunchConfig | None:
        """The baseline, then what a dead process left, then the seeds, then what the sampler suggests."""
        taken = taken_by(trials)
        left = [t.config for t in trials if t.kind == "left behind" and t.config is not None]
        for config in (self.default, *left, *self._first):
            if config not in taken and self._invalid(config) is None:
                return config
        self._sampler.learn(frozen)
        best = best_of(trials)
        return self._sampler.suggest(taken, best.config if best else None)

    def _begin(self, config: LaunchConfig, number: int) -> Asked:
        """Write the trial, whole and signed, in one transaction."""
        import optuna

        parameters = self.space.parameters(config)
        choices = {knob.name: knob.choices for knob in self.space.knobs}
        trial = optuna.trial.create_trial(
            state=optuna.trial.TrialState.RUNNING,
            params=parameters,
            distributions={
                name: optuna.distributions.CategoricalDistribution(choices[name])
                for name in parameters
            },
            user_attrs={"config": config.as_dict(), "owner": self._owner},
        )
        backend = self.storage.backend
        trial_id = self.storage.patiently(lambda: backend.create_new_trial(self._id, trial))
        if self.storage.heartbeat is not None:
            self.storage.heartbeat.begin(trial_id)
        return Asked(config, trial_id, number)

    def _without_dead(
        self, frozen: list[optuna.trial.FrozenTrial]
    ) -> list[optuna.trial.FrozenTrial]:
        """Mark what dead processes left running as failed; ``_next`` then tries each once more."""
        from optuna.trial import TrialState

        running = [one for one in frozen if one.state == TrialState.RUNNING]
        many_hosts = self.storage.heartbeat is not None
        if running and many_hosts:
            self.storage.patiently(lambda: fail_silent(self._study))
            frozen = self._frozen()
        running = [one for one in frozen if one.state == TrialState.RUNNING]
        dead = [one for one in running if _is_dead(one, many_hosts)]
        for one in dead:
            self.storage.patiently(partial(self._fail, one.number))
        return self._frozen() if dead else frozen

    def _fail(self, number: int) -> None:
        from optuna.trial import TrialState

        self._study.tell(number, state=TrialState.FAIL, skip_if_finished=True)

    # ---- telling

    def complete(
        self,
        asked: Asked,
        measured: Measurement,
        against: Trial | None,
        details: Mapping[str, Any],
    ) -> None:
        """Record a right and measured candidate.

        The value is the candidate's time scaled by how the incumbent ``against`` did in the same rounds, compared
        with its own record: a GPU that is slower today than at the study's start does not bend the comparison.
        Without an incumbent the candidate was timed against itself and becomes the first one.
        """
        rival = against.time_us if against else None
        scale = rival / measured.incumbent_us if rival is not None else 1.0
        outcome = {
            **details,
            "won": against is None or measured.beats,
            "against": against.number if against else asked.number,
            "measured": measured.as_dict(),
        }
        self._tell(asked, outcome, "COMPLETE", measured.time_us * scale)

    def drop(
        self, asked: Asked, kind: str, reason: str, details: Mapping[str, Any] | None = None
    ) -> None:
        """Record that a candidate was not measured, or not to the end, and why."""
        state = "PRUNED" if kind in PRUNED_KINDS else "FAIL"
        self._tell(asked, {**(details or {}), "kind": kind, "reason": reason}, state, None)

    def _tell(
        self, asked: Asked, outcome: Mapping[str, Any], state: str, value: float | None
    ) -> None:
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        backend, trial_id = self.storage.backend, asked.trial_id
        values = None if value is None else [value]
        try:
            with self.storage.locked(self.name):
                self.storage.patiently(
                    lambda: backend.set_trial_user_attr(trial_id, "outcome", dict(outcome))
                )
                self.storage.patiently(
                    lambda: backend.set_trial_state_values(trial_id, TrialState[state], values)
                )
        except UpdateFinishedTrialError:
            # Either our own message arrived although the answer did not, or others took us for dead and go on.
            _LOG.warning("trial %d of %s has an outcome already", asked.number, self.name)
        if self.storage.heartbeat is not None:
            self.storage.heartbeat.end(trial_id)

    # ---- reading

    def trials(self) -> list[Trial]:
        """The whole record in order of number, as it is now."""
        return [trial_of(one) for one in self._frozen()]

    def note(self, name: str, value: Any) -> None:
        """Keep a fact about the whole study."""
        with self.storage.locked(self.name):
            self.storage.patiently(lambda: self._study.set_user_attr(name, value))

    def noted(self, name: str) -> Any:
        """The fact kept under ``name``, or None."""
        return self.storage.patiently(lambda: self._study.user_attrs).get(name)

    def _frozen(self) -> list[optuna.trial.FrozenTrial]:
        return self.storage.patiently(lambda: self._study.get_trials(deepcopy=False))

    def _load(self) -> optuna.Study:
        import optuna

        return optuna.create_study(
            storage=self.storage.backend,
            study_name=self.name,
            direction="minimize",
            load_if_exists=True,
        )


def _is_dead(frozen: optuna.trial.FrozenTrial, many_hosts: bool) -> bool:
    owner = frozen.user_attrs.get("owner")
    if owner is None:  # not one of ours: somebody tried the study by hand
        return age_s(frozen.datetime_start) > 3600.0
    return not alive(owner, frozen.datetime_start, many_hosts)
