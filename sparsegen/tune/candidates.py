"""The seam between the tuner and what it tunes: a source of candidates, and a bench that runs them.

The tuner knows nothing else of kernels, so its own tests run real processes and real storage on stand-ins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from sparsegen.codegen.knobs import Knob, LaunchConfig
from sparsegen.tune.measure import Clock


@dataclass(frozen=True)
class Compiled:
    """What the compiler says about one configuration; bytes are of a block (shared) and of a thread (spill).

    ``registers`` and ``spill_bytes`` are None where no tool reads them (AMD).
    """

    registers: int | None
    spill_bytes: int | None
    shared_bytes: int

    def as_dict(self) -> dict[str, int | None]:
        """For the record and the pipe."""
        return asdict(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Compiled:
        """Back from the record."""
        return cls(values["registers"], values["spill_bytes"], values["shared_bytes"])


@dataclass(frozen=True)
class Limits:
    """What a compiled configuration may use before it is dropped unmeasured.

    ``spill_bytes`` > 0 leaves room for the few bytes that cost nothing: what spills a little can still be fastest.
    """

    shared_bytes: int
    spill_bytes: int = 64


class CandidateSource(Protocol):
    """What a study tunes.  It is pickled to worker processes, so it holds descriptions and no tensors."""

    @property
    def key(self) -> str:
        """The problem's name in a storage: equal keys are one study."""
        ...

    @property
    def knobs(self) -> tuple[Knob, ...]:
        """The template's knobs."""
        ...

    @property
    def default(self) -> LaunchConfig:
        """The template's own choice for this problem and GPU: the baseline."""
        ...

    @property
    def limits(self) -> Limits:
        """What a configuration may use on this GPU."""
        ...

    def invalid(self, config: LaunchConfig) -> str | None:
        """Why this configuration cannot run for this problem and GPU; None if it can, as far as is known."""
        ...

    def compile(self, config: LaunchConfig, folder: Path) -> dict[str, Compiled]:
        """Compile every variant into ``folder`` without a GPU; the facts by name, the one that is timed first."""
        ...

    def bench(self) -> Bench:
        """Called once in the worker process that owns the GPU."""
        ...


class Candidate(Protocol):
    """A loaded configuration."""

    def check(self) -> str:
        """Run on fresh inputs and poisoned outputs; what is wrong with the result, "" if nothing is."""
        ...

    def launch(self) -> None:
        """One launch of the problem that is timed."""
        ...


class Bench(Protocol):
    """Inputs, clock and loader, in the worker process."""

    @property
    def clock(self) -> Clock:
        """What times launches here."""
        ...

    def load(self, config: LaunchConfig, folder: Path) -> Candidate:
        """Load what ``compile`` left in ``folder``."""
        ...
