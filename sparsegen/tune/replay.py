"""A replay: a tuning whose times come from trials on record instead of a GPU.

It shows how well a search works, and how jobs travel over machines, where no GPU is.  Nothing it finds is a measurement:
it is never kept in ``tuned/``, and everything it prints says "replay".
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sparsegen.codegen.knobs import Knob, LaunchConfig
from sparsegen.errors import ToolchainError, TuneError
from sparsegen.tune.candidates import Bench, Compiled, Limits
from sparsegen.tune.lane import Outcome
from sparsegen.tune.measure import Measurement, Turns
from sparsegen.tune.prune import CompileResult
from sparsegen.tune.recording import Entry, Recorded, Recording
from sparsegen.tune.store import Measured
from sparsegen.tune.study import PRUNED_KINDS

_COMPILED = (*PRUNED_KINDS, "compile error", "compile crash", "compile timeout")


@dataclass(frozen=True)
class ReplaySource:
    """A ``CandidateSource`` over the trials of one recorded problem; what is not on record cannot be asked for."""

    recorded: Recorded
    entries: Mapping[LaunchConfig, Entry]
    pause_s: float = 0.0  # how long each trial seems to take

    @property
    def key(self) -> str:
        """See ``CandidateSource``."""
        return f"replay {self.recorded.name}"

    @property
    def knobs(self) -> tuple[Knob, ...]:
        """See ``CandidateSource``: those that the record spans."""
        return self.recorded.knobs

    @property
    def default(self) -> LaunchConfig:
        """See ``CandidateSource``; where the template's choice is not on record, the first that is."""
        default = self.recorded.default
        return default if default and default in self.entries else next(iter(self.entries))

    @property
    def starts(self) -> tuple[LaunchConfig, ...]:
        """What a tuning without a row would measure first, as far as it is on record."""
        return tuple(c for c in self.recorded.starts if c in self.entries)

    @property
    def limits(self) -> Limits:
        """See ``CandidateSource``; the record says what was dropped."""
        return Limits(shared_bytes=0)

    def invalid(self, config: LaunchConfig) -> str | None:
        """See ``CandidateSource``."""
        entry = self.entries.get(config)
        if entry is None:
            return "not on record"
        return entry.reason if entry.kind == "invalid" else None

    def compile(self, config: LaunchConfig, folder: Path) -> dict[str, Compiled]:
        """See ``CandidateSource``."""
        raise ToolchainError("a replay compiles nothing")

    def bench(self) -> Bench:
        """See ``CandidateSource``."""
        raise ToolchainError("a replay has no GPU")


class ReplayLane:
    """A ``Lane`` that answers from the record, in this process."""

    def __init__(self, source: ReplaySource) -> None:
        self._entries, self._pause_s = source.entries, source.pause_s
        self._waiting: list[LaunchConfig] = []

    @property
    def free(self) -> int:
        """See ``Lane``."""
        return 1 - len(self._waiting)

    def begin(self, config: LaunchConfig) -> None:
        """See ``Lane``."""
        self._waiting.append(config)

    def compiled(self, timeout_s: float) -> CompileResult | None:
        """See ``Lane``."""
        if not self._waiting:
            return None
        entry = self._entries[self._waiting.pop(0)]
        kind, reason = (entry.kind, entry.reason) if entry.kind in _COMPILED else ("", "")
        return CompileResult(entry.config, Path(), {}, kind, reason)

    def measure(self, config: LaunchConfig, incumbent: LaunchConfig, turns: Turns) -> Outcome:
        """See ``Lane``."""
        time.sleep(self._pause_s)
        mine, rival = self._entries[config], self._entries[incumbent]
        if mine.time_us is None:
            return Outcome(None, mine.kind, mine.reason)
        assert rival.time_us is not None  # only what was measured becomes an incumbent
        noise = max(mine.noise, rival.noise)
        rounds = (mine.time_us,), (rival.time_us,)
        return Outcome(Measurement(mine.time_us, rival.time_us, noise, *rounds))

    def stop(self) -> None:
        """See ``Lane``."""


def find(
    recording: Recording, pattern: str, problem: Measured, pause_s: float = 0.0
) -> ReplaySource:
    """The source for a pattern and a problem on record.

    Raises:
        TuneError: it is not on record; the message lists what is.
    """
    for name, recorded in recording.problems.items():
        if (recorded.pattern, recorded.problem) == (pattern, problem):
            return ReplaySource(recorded, recording.trials[name], pause_s)
    known = "; ".join(recording.problems) or "nothing"
    raise TuneError(
        f"replay: {pattern} at {problem.q_len}x{problem.kv_len} with {problem.heads} heads of "
        f"{problem.head_dim} is not on record; there is {known}"
    )
