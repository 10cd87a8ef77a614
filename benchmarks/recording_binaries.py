"""The binaries of a recording: compiled in the background in the order of the work, and kept between runs."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sparsegen.codegen import LaunchConfig
from sparsegen.launch import Job, Outcome, compile_many
from sparsegen.tune.candidates import Compiled
from sparsegen.tune.recording import Recorded
from sparsegen.tune.target import KernelTarget

MADE = "made.json"


@dataclass(frozen=True, eq=False)
class Plan:
    """One problem: what is measured of it.  ``anchor`` is timed in turns with every configuration."""

    recorded: Recorded
    target: KernelTarget
    configs: tuple[LaunchConfig, ...]
    anchor: LaunchConfig


def folder_of(root: Path, plan: Plan, config: LaunchConfig) -> Path:
    """Where a configuration's binaries lie: problems with the same kernel share them."""
    source, plain = plan.target.parts(config)
    text = f"{source.digest} {plain} {plan.target.timed(source, plain)}"
    return root / hashlib.sha256(text.encode()).hexdigest()[:20]


class Compilers:
    """Compiles plans in their order, in the background; ``facts`` waits for one of them."""

    def __init__(self, root: Path, work: Sequence[tuple[Plan, LaunchConfig]], jobs: int) -> None:
        self._root, self._jobs = root, jobs
        self._finished: queue.Queue[Path] = queue.Queue()
        self._facts: dict[Path, dict[str, Compiled] | str] = {}
        self._left: dict[Path, int] = {}
        todo: list[Job] = []
        for plan, config in work:
            folder = folder_of(root, plan, config)
            if folder in self._left or folder in self._facts:
                continue
            made = _read_made(folder)
            if made is not None:
                self._facts[folder] = made
                continue
            source, plain = plan.target.parts(config)
            names = plan.target.timed(source, plain)
            todo += [Job(source, plain, n, plan.target.gpu, folder / n) for n in names]
            self._left[folder] = len(names)
        self.missing = len(self._left)
        self._collected: dict[Path, dict[str, Compiled] | str] = {f: {} for f in self._left}
        self._guard = threading.Lock()  # variants of one folder may end at the same moment
        self._thread = threading.Thread(target=self._run, args=(todo,), daemon=True)
        self._thread.start()

    def facts(self, folder: Path, wait_s: float) -> dict[str, Compiled] | str | None:
        """What the compiler says of a folder, its complaint, or None if that is not known within ``wait_s``."""
        end = time.monotonic() + wait_s
        while folder not in self._facts:
            try:
                self._finished.get(timeout=max(end - time.monotonic(), 0.001))
            except queue.Empty:
                return None
        return self._facts[folder]

    def _run(self, todo: Sequence[Job]) -> None:
        if todo:
            compile_many(todo, workers=self._jobs, done=self._done)

    def _done(self, outcome: Outcome) -> None:
        folder, variant = outcome.job.directory.parent, outcome.job.variant
        for listing in outcome.job.directory.rglob("*.ptx"):  # for people, and most of the bytes
            listing.unlink()
        with self._guard:
            collected, b = self._collected[folder], outcome.binary
            if b is None:
                self._collected[folder] = outcome.error
            elif isinstance(collected, dict):
                collected[variant] = Compiled(b.registers, b.spill_bytes, b.shared_bytes)
            self._left[folder] -= 1
            whole = not self._left[folder]
        if whole:
            facts = self._collected[folder]
            if isinstance(facts, dict):  # a complaint may be of the moment: it is tried again
                _write_made(folder, facts)
            self._facts[folder] = facts
            self._finished.put(folder)


def _read_made(folder: Path) -> dict[str, Compiled] | None:
    try:
        made = json.loads((folder / MADE).read_text())
    except (OSError, ValueError):
        return None
    return {n: Compiled.of(v) for n, v in made.items()}


def _write_made(folder: Path, facts: dict[str, Compiled]) -> None:
    plain = {n: f.as_dict() for n, f in facts.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f".{MADE}").write_text(json.dumps(plain))
    os.replace(folder / f".{MADE}", folder / MADE)
