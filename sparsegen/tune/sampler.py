"""What to try next: Optuna's TPE on a copy of the record in memory.

The sampler asks for one knob after the other (define by run), and each answer would be several transactions in a
database.  On a copy they cost nothing, a suggestion that is already known leaves no trace, and the storage gets each
trial whole, in one transaction.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.tune.space import Space

if TYPE_CHECKING:
    import optuna

_SUGGESTIONS = 5  # of the sampler, before something near the best is taken instead
_DRAWS = 200  # random draws, before the whole space is looked through for what is new


class Sampler:
    """Suggests configurations that are new and valid.

    ``seed`` fixes what is suggested, together with ``known``, the number of trials at the start: going on after a
    kill does not repeat the beginning.
    """

    def __init__(
        self, space: Space, invalid: Callable[[LaunchConfig], str | None], seed: int, known: int
    ) -> None:
        import optuna

        self._space = space
        self._invalid = invalid
        self._random = random.Random(seed * 1_000_003 + known)
        tpe = optuna.samplers.TPESampler(seed=self._random.getrandbits(32), n_startup_trials=8)
        self._study = optuna.create_study(sampler=tpe, direction="minimize")
        self._copied: set[int] = set()

    def learn(self, trials: Sequence[optuna.trial.FrozenTrial]) -> None:
        """Copy finished trials; failures teach the sampler nothing, since a crash is no bad time."""
        for trial in trials:
            if trial.state.name in ("COMPLETE", "PRUNED") and trial.number not in self._copied:
                self._copied.add(trial.number)
                self._study.add_trial(trial)

    def suggest(self, taken: set[LaunchConfig], best: LaunchConfig | None) -> LaunchConfig | None:
        """A valid configuration that is not ``taken``; None when there is none left."""
        from optuna.trial import TrialState

        new = self._unseen(taken, best)
        if new is None:
            return None
        for _ in range(_SUGGESTIONS):
            trial = self._study.ask()
            config = self._space.suggest(trial)
            valid = self._invalid(config) is None
            # A taken one must not count twice; an invalid one shall look bad.
            self._study.tell(trial, state=TrialState.FAIL if valid else TrialState.PRUNED)
            if valid and config not in taken:
                return config
        return new

    def _unseen(self, taken: set[LaunchConfig], best: LaunchConfig | None) -> LaunchConfig | None:
        """Next to the best if something is new there, else anywhere at random."""
        near = self._space.neighbours(best) if best else []
        self._random.shuffle(near)
        draws = (self._space.draw(self._random) for _ in range(_DRAWS))
        for source in (near, draws, self._space.enumerate()):
            for config in source:
                if config not in taken and self._invalid(config) is None:
                    return config
        return None
