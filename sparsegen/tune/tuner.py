"""One tuning from start to result: seeds, candidates, measuring, and the last comparison with the baseline."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.errors import TuneError
from sparsegen.tune.candidates import CandidateSource
from sparsegen.tune.lane import Lane, ProcessLane
from sparsegen.tune.measure import SEARCH, Turns
from sparsegen.tune.progress import OnProgress, Progress
from sparsegen.tune.result import TuneResult, result_of
from sparsegen.tune.space import Space
from sparsegen.tune.storage import StorageBusy, open_storage
from sparsegen.tune.study import Asked, Study, best_of, value_of

__all__ = [
    "QUICK",
    "Budget",
    "TuneResult",
    "TuningWarning",
    "full",
    "quiet_optuna",
    "recorded",
    "tune",
]

_LOG = logging.getLogger("sparsegen.tune")


@dataclass(frozen=True)
class Budget:
    """When a tuning ends: after ``trials`` complete trials in the record, or ``seconds`` of this call."""

    trials: int
    seconds: float


QUICK = Budget(trials=40, seconds=110.0)  # with starting and the last comparison about two minutes


def full(budget_s: float) -> Budget:
    """As many trials as fit into ``budget_s`` seconds."""
    return Budget(trials=100_000, seconds=budget_s)


class TuningWarning(UserWarning):
    """Tuning did not give what was asked for; the text says what is used instead."""


def tune(
    source: CandidateSource,
    *,
    budget: Budget = QUICK,
    storage: str | Path | None = None,
    seeds: Sequence[LaunchConfig] = (),
    jobs: int | None = None,
    seed: int = 0,
    turns: Turns = SEARCH,
    progress: OnProgress = lambda progress: None,
    folder: Path | None = None,
    about: Mapping[str, Any] | None = None,
    lane: Lane | None = None,
    patience_s: float = 120.0,
    compile_timeout_s: float = 120.0,
    measure_timeout_s: float = 60.0,
) -> TuneResult:
    """Tune one problem, going on from whatever ``storage`` already holds under ``source.key``.

    Args:
        storage: path of a SQLite file, database URL, or None to keep nothing.
        seeds: configurations to try after the default, best guess first; their neighbours follow.
        jobs: compile processes (default: the CPU cores this process may use, at most 8).
        folder: where binaries go; None for a temporary folder.
        about: what the study is of, kept with it for those who read many (``recorded_studies``).
        patience_s: how long to wait for a storage that other processes keep locked.

    Returns:
        The winner; the template default with a ``TuningWarning`` if the storage stayed locked.

    Raises:
        TuneError: called while a CUDA graph is being captured, or the storage cannot be used.
        ToolchainError: there is no GPU to measure on.
    """
    _refuse_capture()
    space = Space(source.knobs)
    default = space.canonical(source.default.as_dict())
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(quiet_optuna())
            opened = open_storage(storage, patience_s)
            study = Study(
                opened,
                source.key,
                space,
                default=default,
                seeds=_with_neighbours(space, default, seeds),
                invalid=source.invalid,
                seed=seed,
            )
            stack.callback(study.close)
            if about is not None and study.noted("about") is None:
                study.note("about", dict(about))
            if lane is None:
                if folder is None:
                    folder = Path(stack.enter_context(tempfile.TemporaryDirectory("-sparsegen")))
                lane = ProcessLane(
                    source, folder, jobs or _jobs(), compile_timeout_s, measure_timeout_s
                )
                stack.callback(lane.stop)
                if not _finished(study, budget):
                    lane.open()
            run = _Run(study, lane, budget, turns, progress)
            run.search()
            return run.result(opened.where)
    except StorageBusy as error:
        text = f"{error}; using the template default [{default}]"
        warnings.warn(text, TuningWarning, stacklevel=2)
        return TuneResult(default, None, None, None, (), f"template default: {error}", str(storage))


def recorded(source: CandidateSource, storage: str | Path) -> TuneResult:
    """What the record says now, without measuring: the default configuration if no trial is complete."""
    space = Space(source.knobs)
    with quiet_optuna():
        opened = open_storage(storage)
        study = Study(opened, source.key, space, default=source.default, invalid=source.invalid)
        try:
            return result_of(study, opened.where)
        finally:
            study.close()


class _Run:
    """The loop of one process: keep the compilers busy, measure what they finish."""

    def __init__(
        self, study: Study, lane: Lane, budget: Budget, turns: Turns, progress: OnProgress
    ) -> None:
        self._study = study
        self._lane = lane
        self._budget = budget
        self._turns = turns
        self._progress = progress
        self._end = time.monotonic() + budget.seconds
        self._total = min(budget.trials, study.space.cardinality)
        self._pending: dict[LaunchConfig, Asked] = {}

    def search(self) -> None:
        """Ask, compile and measure until the budget is used or nothing new is left."""
        try:
            self._report()
            while time.monotonic() < self._end:
                full = self._fill()
                if not self._pending:
                    if full == "full":
                        return
                    time.sleep(0.2)  # others are at work on the last trials
                    continue
                self._take(min(1.0, max(self._end - time.monotonic(), 0.0)))
        finally:
            for asked in self._pending.values():
                self._study.drop(asked, "stopped", "the tuning ended before this was measured")

    def result(self, where: str) -> TuneResult:
        """The winner, compared with the baseline once more."""
        trials = self._study.trials()
        best = best_of(trials)
        default = self._study.default
        measured = value_of(trials, default) is not None
        if measured and best and best.config is not None and best.config != default:
            self._settle(best.config, default)
        return result_of(self._study, where)

    def _fill(self) -> str:
        while self._lane.free and time.monotonic() < self._end:
            asked = self._study.ask(self._budget.trials)
            if isinstance(asked, str):
                return asked
            self._pending[asked.config] = asked
            self._lane.begin(asked.config)
        return ""

    def _take(self, timeout_s: float) -> None:
        """One finished compilation, to the end of its trial."""
        compiled = self._lane.compiled(timeout_s)
        if compiled is None:
            return
        asked = self._pending[compiled.config]
        details: dict[str, Any] = compiled.details()
        if compiled.kind:
            self._study.drop(asked, compiled.kind, compiled.reason, details)
        else:
            self._fill()  # the compilers go on while the GPU measures
            self._measure(asked, details)
        del self._pending[compiled.config]
        self._report()

    def _measure(self, asked: Asked, details: Mapping[str, Any]) -> None:
        against = best_of(self._study.trials())
        rival = against.config if against and against.config else asked.config
        outcome = self._lane.measure(asked.config, rival, self._turns)
        if outcome.measured is None:
            self._study.drop(asked, outcome.kind, outcome.reason, details)
        else:
            self._study.complete(asked, outcome.measured, against, details)

    def _settle(self, best: LaunchConfig, default: LaunchConfig) -> None:
        """Winner against baseline in the same rounds: a chain of small wins may be luck."""
        known = self._study.noted("final")
        if known is not None and known["config"] == best.as_dict():
            return
        turns = replace(self._turns, give_up=float("inf"))
        outcome = self._lane.measure(best, default, turns)
        if outcome.measured is None:
            _LOG.warning("the last comparison of [%s] failed: %s", best, outcome.reason)
            return
        self._study.note(
            "final", {"config": best.as_dict(), "measured": outcome.measured.as_dict()}
        )

    def _report(self) -> None:
        trials = self._study.trials()
        best = best_of(trials)
        self._progress(
            Progress(
                sum(trial.state == "complete" for trial in trials),
                self._total,
                best.time_us if best else None,
                value_of(trials, self._study.default),
            )
        )


def _with_neighbours(
    space: Space, default: LaunchConfig, seeds: Sequence[LaunchConfig]
) -> list[LaunchConfig]:
    """The seeds, then one step around the best guess, few enough to leave room for the sampler."""
    canonical = [space.canonical(seed.as_dict()) for seed in seeds]
    start = canonical[0] if canonical else default
    return [*canonical, *space.neighbours(start)[:6]]


def _finished(study: Study, budget: Budget) -> bool:
    trials = study.trials()
    return sum(trial.state == "complete" for trial in trials) >= budget.trials


def _jobs() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(cores or 1, 8))


def _refuse_capture() -> None:
    """Tuning takes minutes and synchronises; inside a graph capture that would come out as a late, odd error."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return
    if torch.cuda.is_current_stream_capturing():
        raise TuneError(
            "cannot tune while a CUDA graph is being captured; call the kernel once before the capture, "
            'or compile it with tune="off"'
        )


@contextlib.contextmanager
def quiet_optuna() -> Iterator[None]:
    """Optuna reports every trial on stderr; our own progress says the same better.  Its setting is put back.

    Its warnings are silenced too: a lost connection is one, and we try again and say so if it stays lost.
    """
    import optuna

    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(level)
