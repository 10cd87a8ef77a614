"""The way of a candidate: compiled in one of several processes, then checked and timed in the one that has the GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.errors import ToolchainError
from sparsegen.tune.candidates import CandidateSource
from sparsegen.tune.measure import Measurement, Turns
from sparsegen.tune.prune import CompilePool, CompileResult
from sparsegen.tune.worker import Message, Worker


@dataclass(frozen=True)
class Outcome:
    """A measurement, or why there is none (``kind`` and ``reason`` as in ``study``)."""

    measured: Measurement | None
    kind: str = ""
    reason: str = ""


class Lane(Protocol):
    """What the tuner drives; tests put a stand-in here where processes are not what they test."""

    @property
    def free(self) -> int:
        """How many candidates may begin now."""
        ...

    def begin(self, config: LaunchConfig) -> None:
        """Begin to compile."""
        ...

    def compiled(self, timeout_s: float) -> CompileResult | None:
        """The next finished compilation, None if there is none within ``timeout_s``."""
        ...

    def measure(self, config: LaunchConfig, incumbent: LaunchConfig, turns: Turns) -> Outcome:
        """Check and time a compiled candidate in turns with the incumbent."""
        ...

    def stop(self) -> None:
        """End all processes."""
        ...


class ProcessLane:
    """The real lane: ``jobs`` compile workers and one GPU worker.

    Args:
        folder: for the binaries; kept by the caller if they are wanted afterwards.
        measure_timeout_s: checking and timing of one candidate; then its worker is killed.
    """

    def __init__(
        self,
        source: CandidateSource,
        folder: Path,
        jobs: int,
        compile_timeout_s: float = 120.0,
        measure_timeout_s: float = 60.0,
    ) -> None:
        self._pool = CompilePool(source, folder, jobs, compile_timeout_s)
        self._gpu = Worker(source, "measuring")
        self._measure_timeout_s = measure_timeout_s
        self._good: set[LaunchConfig] = set()
        self._done: list[CompileResult] = []

    def open(self) -> None:
        """Start the GPU worker and make its bench.

        Raises:
            ToolchainError: no GPU, or not the one that is tuned for; the message is the bench's.
        """
        answer = self._gpu.request({"op": "open"}, self._measure_timeout_s)
        if "opened" not in answer:
            reason = answer.get("error") or answer.get("reason")
            raise ToolchainError(f"cannot measure here: {reason}")

    @property
    def free(self) -> int:
        """See ``Lane``."""
        return self._pool.free

    def begin(self, config: LaunchConfig) -> None:
        """See ``Lane``."""
        self._pool.begin(config)

    def compiled(self, timeout_s: float) -> CompileResult | None:
        """See ``Lane``."""
        result = self._done.pop(0) if self._done else self._pool.next(timeout_s)
        if result is not None and not result.kind:
            self._good.add(result.config)
        return result

    def measure(self, config: LaunchConfig, incumbent: LaunchConfig, turns: Turns) -> Outcome:
        """See ``Lane``.  An incumbent of an earlier session is compiled first."""
        for needed in (config, incumbent):
            missing = self._compile_now(needed)
            if missing is not None:
                return Outcome(None, missing.kind, f"[{needed}] {missing.reason}")
        message = {
            "op": "measure",
            "candidate": self._named(config),
            "incumbent": self._named(incumbent),
            "turns": asdict(turns),
        }
        answer = self._gpu.request(message, self._measure_timeout_s)
        if "measured" in answer:
            return Outcome(Measurement.of(answer["measured"]))
        if "wrong" in answer:
            return Outcome(None, "wrong result", answer["wrong"])
        # After an exception too: an illegal access leaves the CUDA context unusable for the next candidate.
        self._gpu.stop()
        return Outcome(None, *_failure(answer))

    def stop(self) -> None:
        """See ``Lane``."""
        self._pool.stop()
        self._gpu.stop()

    def _compile_now(self, config: LaunchConfig) -> CompileResult | None:
        """None once ``config`` is compiled in this session, else how that failed."""
        if config in self._good:
            return None
        while not self._pool.free:
            self._done += [r for r in [self._pool.next(1.0)] if r is not None]
        self._pool.begin(config)
        while True:
            result = self._pool.next(1.0)
            if result is None:
                continue
            if result.config != config:
                self._done.append(result)
                continue
            if result.kind:
                return result
            self._good.add(config)
            return None

    def _named(self, config: LaunchConfig) -> Mapping[str, Any]:
        return {"config": config.as_dict(), "folder": str(self._pool.folder_of(config))}


def _failure(answer: Message) -> tuple[str, str]:
    kind = {"crash": "crash", "timeout": "hang"}.get(answer.get("failure", ""), "error")
    return kind, str(answer.get("reason") or answer.get("error"))
