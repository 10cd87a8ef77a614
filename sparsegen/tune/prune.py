"""Dropping candidates before any GPU is used: by rule, and by what the compiler says about them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.tune.candidates import CandidateSource, Compiled, Limits
from sparsegen.tune.worker import Message, Worker, wait


@dataclass(frozen=True)
class CompileResult:
    """The outcome of one compilation: ``facts`` by variant, or what went wrong (``kind``, ``reason``)."""

    config: LaunchConfig
    folder: Path
    facts: Mapping[str, Compiled]
    kind: str = (
        ""  # "", "spills", "shared memory", "compile error", "compile crash", "compile timeout"
    )
    reason: str = ""

    def details(self) -> dict[str, dict[str, dict[str, int | None]]]:
        """For the trial's record."""
        return {"compiled": {name: facts.as_dict() for name, facts in self.facts.items()}}


def too_much(facts: Mapping[str, Compiled], limits: Limits) -> tuple[str, str] | None:
    """(kind, reason) if a variant needs more than the limits.

    Every variant must fit into shared memory, for each may be launched; spills count only in the first, which is the
    one that is timed: the others serve odd views, where being right is enough.
    """
    for number, (variant, compiled) in enumerate(facts.items()):
        if compiled.shared_bytes > limits.shared_bytes:
            return (
                "shared memory",
                f"variant {variant} needs {compiled.shared_bytes} bytes of shared memory; "
                f"the GPU has {limits.shared_bytes}",
            )
        if number == 0 and (compiled.spill_bytes or 0) > limits.spill_bytes:
            return (
                "spills",
                f"variant {variant} spills {compiled.spill_bytes} bytes a thread; "
                f"at most {limits.spill_bytes} are allowed",
            )
    return None


class CompilePool:
    """Compiles candidates in ``jobs`` worker processes; a compiler that crashes or hangs loses only its own.

    Args:
        folder: each configuration compiles into its own folder below it.
        timeout_s: a compilation that takes longer is killed.
    """

    def __init__(
        self, source: CandidateSource, folder: Path, jobs: int, timeout_s: float = 120.0
    ) -> None:
        self._limits = source.limits
        self._folder = folder
        self._timeout_s = timeout_s
        self._idle = [Worker(source, "compile") for _ in range(max(jobs, 1))]
        self._busy: dict[LaunchConfig, Worker] = {}

    @property
    def free(self) -> int:
        """How many more compilations can begin now."""
        return len(self._idle)

    def begin(self, config: LaunchConfig) -> None:
        """Begin to compile; something must be ``free``."""
        worker = self._idle.pop()
        folder = self.folder_of(config)
        message = {"op": "compile", "config": config.as_dict(), "folder": str(folder)}
        self._busy[config] = worker
        worker.send(message, self._timeout_s)

    def next(self, timeout_s: float) -> CompileResult | None:
        """A finished compilation, or None if none ended within ``timeout_s``."""
        for attempt in range(2):
            for config, worker in list(self._busy.items()):
                message = worker.reply()
                if message is not None:
                    del self._busy[config]
                    self._idle.append(worker)
                    return self._result(config, message)
            if attempt == 0:
                wait(list(self._busy.values()), timeout_s)
        return None

    def folder_of(self, config: LaunchConfig) -> Path:
        """Where the configuration's binaries are."""
        return self._folder / hashlib.sha256(str(config).encode()).hexdigest()[:16]

    def stop(self) -> None:
        """Kill all compilations."""
        for worker in [*self._idle, *self._busy.values()]:
            worker.stop()

    def _result(self, config: LaunchConfig, message: Message) -> CompileResult:
        folder = self.folder_of(config)
        if "compiled" not in message:
            kind = {"crash": "compile crash", "timeout": "compile timeout"}.get(
                message.get("failure", ""), "compile error"
            )
            reason = message.get("reason") or message.get("error", "")
            return CompileResult(config, folder, {}, kind, reason)
        facts = {name: Compiled.of(values) for name, values in message["compiled"].items()}
        kind, reason = too_much(facts, self._limits) or ("", "")
        return CompileResult(config, folder, facts, kind, reason)
