"""The real builder: schedule, render, choose, compile, in that order and without a branch between them."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from sparsegen.artifact.build import Progress, Request
from sparsegen.artifact.entry import Artifact
from sparsegen.artifact.key import ArtifactKey, installed
from sparsegen.artifact.manifest import Decision, Variant, level_at_least
from sparsegen.artifact.store import default_root
from sparsegen.artifact.tools import tool_version
from sparsegen.codegen.knobs import LaunchConfig

if TYPE_CHECKING:
    from sparsegen.codegen import KernelSource
    from sparsegen.launch import Binary
    from sparsegen.schedule.tree import Schedule
    from sparsegen.spec.pattern import Pattern
    from sparsegen.spec.problem import Problem

log = logging.getLogger(__name__)

SCHEDULE, SOURCE, PATTERN = "schedule.txt", "kernel.py", "pattern.yaml"


@dataclass(frozen=True)
class Choice:
    """A configuration and how it was found; times in µs where something was measured."""

    config: LaunchConfig
    how: str
    level: str  # tuning level that was reached
    time_us: float | None = None
    baseline_us: float | None = None
    measured: str = ""


@dataclass(frozen=True)
class Compiler:
    """Builds with Triton.  No GPU is needed unless tuning is asked for.

    ``jobs``: parallel compile processes (default: the machine's cores).  ``storage``: where studies are kept, a path
    or a database URL (default: a SQLite file a GPU type beside the artifacts).  ``full_budget_s``: time of one full
    tuning.
    """

    template: str = "forward"
    jobs: int | None = None
    storage: str | Path | None = None
    full_budget_s: float = 900.0

    def key(self, request: Request) -> ArtifactKey:
        """Key of the request; UnsupportedError where the schedule or the template cannot do it."""
        from sparsegen.codegen import load_template

        request.pattern.head_rule_of(request.problem.heads)
        schedule, _ = _rendered(request.pattern, request.problem, self.template)
        which = load_template(self.template)
        return ArtifactKey.of(request.pattern, request.problem, request.gpu, schedule, which)

    def versions(self) -> Mapping[str, str]:
        """Versions of all that makes the files."""
        import sparsegen

        return {
            "python": platform.python_version(),
            "sparsegen": sparsegen.__version__,
            "triton": installed("triton") or "absent",
            "torch": installed("torch") or "absent",
            "ptxas": tool_version("ptxas") or "",
        }

    def is_current(self, request: Request, artifact: Artifact) -> bool:
        """Tuned at the level asked; where nothing was tuned, also what ``tuned/`` gives today."""
        decision = artifact.manifest.decision
        if not level_at_least(decision.tune, request.tune):
            return False
        return decision.tune != "off" or decision.config == self._looked_up(request).config

    def build(self, request: Request, directory: Path, progress: Progress | None) -> Decision:
        """The pipeline."""
        schedule, source = _rendered(request.pattern, request.problem, self.template)
        choice = self._choose(request, progress)
        binaries = self._compile(request, source, choice.config, directory)
        _write_texts(request.pattern, schedule, source, directory)
        return _decision(request, choice, binaries)

    def _choose(self, request: Request, progress: Progress | None) -> Choice:
        return self._looked_up(request) if request.tune == "off" else self._tuned(request, progress)

    def _looked_up(self, request: Request) -> Choice:
        from sparsegen.codegen import load_template
        from sparsegen.tune.store import lookup

        which = load_template(self.template)
        config, step = lookup(request.pattern, request.problem, request.gpu, which)
        return Choice(config, step, "off")

    def _tuned(self, request: Request, progress: Progress | None) -> Choice:
        from sparsegen.tune.target import KernelTarget
        from sparsegen.tune.tuner import QUICK, full, tune

        result = tune(
            KernelTarget.of(request.pattern, request.problem, request.gpu, template=self.template),
            budget=QUICK if request.tune == "quick" else full(self.full_budget_s),
            storage=_studies(request) if self.storage is None else self.storage,
            seeds=[self._looked_up(request).config],
            jobs=self.jobs,
            progress=lambda p: progress(p.done, p.total, str(p)) if progress else None,
        )
        return Choice(
            result.config,
            f"study: {result.how}",
            request.tune if result.complete else "off",  # a study that was kept out reached nothing
            result.time_us,
            result.baseline_us,
            f"q_len, kv_len {request.problem.lengths[0]}; study in {result.storage}",
        )

    def _compile(
        self, request: Request, source: KernelSource, config: LaunchConfig, directory: Path
    ) -> list[Binary]:
        """Each variant into a folder of its name, by processes that may crash without taking this one along."""
        from sparsegen.launch import CompileError, Job, compile_many, variants

        jobs = [
            Job(source, config, variant, request.gpu, directory / variant)
            for variant in variants(source, config)
        ]
        outcomes = compile_many(jobs, self.jobs)
        built = []
        for job, binary, error in ((o.job, o.binary, o.error) for o in outcomes):
            name = f"{request.pattern.name} ({job.variant}) for {request.gpu.name}"
            if binary is None:
                raise CompileError(f"{name} does not compile: {error}")
            if binary.shared_bytes > request.gpu.shared_bytes:  # would fail at its first launch
                raise CompileError(
                    f"{name} needs {binary.shared_bytes} bytes of shared memory a program, "
                    f"{request.gpu.name} has {request.gpu.shared_bytes}; it was compiled with {job.config}"
                )
            built.append(binary)
        return built


@lru_cache(maxsize=64)
def _rendered(pattern: Pattern, problem: Problem, template: str) -> tuple[Schedule, KernelSource]:
    """Schedule and kernel text; kept, since the key, the check and the build ask for the same ones."""
    from sparsegen.codegen import render
    from sparsegen.schedule.build import build

    schedule = build(pattern, problem)
    return schedule, render(pattern, schedule, problem, template)


def _write_texts(
    pattern: Pattern, schedule: Schedule, source: KernelSource, directory: Path
) -> None:
    from sparsegen.schedule.dump import dump

    (directory / SCHEDULE).write_text(dump(schedule), encoding="utf-8")
    (directory / SOURCE).write_text(source.text, encoding="utf-8")
    (directory / PATTERN).write_text(pattern.to_yaml(), encoding="utf-8")


def _decision(request: Request, choice: Choice, binaries: list[Binary]) -> Decision:
    from sparsegen.launch.kernel import VARIANT_GUARDS

    return Decision(
        config=choice.config,
        chosen_by=choice.how,
        tune=choice.level,
        variants=tuple(
            Variant(
                name=b.variant,
                guard=VARIANT_GUARDS[b.variant],
                registers=b.registers,
                spill_bytes=b.spill_bytes,
                shared_bytes=b.shared_bytes,
                files=tuple(f"{b.variant}/{name}" for name in b.files),
            )
            for b in binaries
        ),
        schedule=SCHEDULE,
        source=SOURCE,
        problem={f.name: getattr(request.problem, f.name) for f in fields(request.problem)},
        time_us=choice.time_us,
        baseline_us=choice.baseline_us,
        measured=choice.measured,
    )


def _studies(request: Request) -> Path | None:
    """The SQLite file of a GPU type's studies; ``None``, with a warning, where the cache cannot be written."""
    folder = default_root() / "studies"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        log.warning("the study is kept in memory only, %s cannot be made: %s", folder, error)
        return None
    if not os.access(folder, os.W_OK):
        log.warning("the study is kept in memory only, %s cannot be written", folder)
        return None
    return folder / f"{request.gpu.name}.sqlite"
