"""The real builder: schedule, render, choose, compile, in that order and without a branch between them."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

from sparsegen.artifact.build import Progress, Request
from sparsegen.artifact.entry import Artifact
from sparsegen.artifact.key import ArtifactKey, installed
from sparsegen.artifact.lengths import Built, bucket_of, by_lengths, decided_for
from sparsegen.artifact.manifest import Bucket, Decision, level_at_least
from sparsegen.artifact.rendering import (
    PATTERN,
    SCHEDULE,
    SOURCE,
    considered,
    rendered,
    schedule_of,
)
from sparsegen.artifact.store import default_root
from sparsegen.artifact.tools import tool_version
from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.tune.schedules import (
    candidates_of,
    joined,
    labels_of,
    split,
    times_of,
    times_us,
)

if TYPE_CHECKING:
    from sparsegen.codegen import KernelSource
    from sparsegen.launch import Binary, Job
    from sparsegen.schedule.tree import Schedule
    from sparsegen.spec.pattern import Pattern
    from sparsegen.tune.target import KernelTarget
    from sparsegen.tune.tuner import TuneResult

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """A schedule, a configuration of the template, and how they were found; times in µs where something was measured.

    ``times_us``: the best time of every schedule that was measured, by label.
    """

    label: str
    config: LaunchConfig
    how: str
    level: str  # tuning level that was reached
    time_us: float | None = None
    baseline_us: float | None = None
    measured: str = ""
    times_us: Mapping[str, float] = field(default_factory=dict)


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
        from sparsegen.codegen.source import outline

        request.pattern.head_rule_of(request.problem.heads)
        which = load_template(self.template)
        schedule = candidates_of(request.pattern, request.problem)[0].schedule
        outline(request.pattern, schedule, request.problem, self.template)
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
        """Tuned at the level asked, for all lengths if there are several; where nothing was tuned, what ``tuned/`` gives today."""
        decision, asked = artifact.manifest.decision, by_lengths(request)
        if not level_at_least(decision.tune, request.tune):
            return False
        if decision.tune != "off":
            known = {tuple(pair) for pair in decision.problem.get("lengths", ())}
            return len(asked) < 2 or all(r.problem.lengths[0] in known for r in asked)
        now = [(self._looked_up(r), r.problem.lengths[0]) for r in asked]
        return all(decided_for(decision, pair) == (c.label, c.config) for c, pair in now)

    def build(self, request: Request, directory: Path, progress: Progress | None) -> Decision:
        """The pipeline: for every pair of lengths, as far as the decisions differ."""
        made: dict[tuple[str, LaunchConfig], Built] = {}
        asked = by_lengths(request)
        choices = [self._choose(r, progress) for r in asked]
        for choice in choices:
            key = choice.label, choice.config
            if key not in made:
                folder = f"lengths{len(made)}" if made else ""
                made[key] = Built(folder, self._built(request, choice, directory / folder))
        buckets = [
            bucket_of(r, choice.label, choice.config, choice.how, made[choice.label, choice.config])
            for r, choice in zip(asked, choices)
        ]
        first = made[choices[0].label, choices[0].config]
        return _decision(request, choices[0], first, tuple(buckets) if len(made) > 1 else ())

    def _built(self, request: Request, choice: Choice, directory: Path) -> list[Binary]:
        """Binaries and texts of one decision."""
        schedule = schedule_of(request.pattern, request.problem, choice.label)
        source = rendered(request.pattern, schedule, request.problem, self.template)
        binaries = self._compile(request, source, choice.config, directory)
        _write_texts(request.pattern, schedule, source, directory)
        return binaries

    def _choose(self, request: Request, progress: Progress | None) -> Choice:
        return self._looked_up(request) if request.tune == "off" else self._tuned(request, progress)

    def _looked_up(self, request: Request) -> Choice:
        from sparsegen.codegen import load_template
        from sparsegen.tune.store import lookup

        which = load_template(self.template)
        labels = labels_of(candidates_of(request.pattern, request.problem))
        config, step = lookup(request.pattern, request.problem, request.gpu, which, labels)
        return Choice(*split(config, labels), step, "off")

    def _tuned(self, request: Request, progress: Progress | None) -> Choice:
        from sparsegen.tune.target import KernelTarget
        from sparsegen.tune.tuner import QUICK, full, tune

        target = KernelTarget.of(
            request.pattern, request.problem, request.gpu, template=self.template
        )
        known = self._looked_up(request)
        result = tune(
            target,
            budget=QUICK if request.tune == "quick" else full(self.full_budget_s),
            storage=studies(request) if self.storage is None else self.storage,
            seeds=[joined(known.config, known.label, target.labels), *target.starts],
            jobs=self.jobs,
            progress=lambda p: progress(p.done, p.total, str(p)) if progress else None,
        )
        return choice_of(target, result, request)

    def _compile(
        self, request: Request, source: KernelSource, config: LaunchConfig, directory: Path
    ) -> list[Binary]:
        """Each variant into a folder of its name."""
        from sparsegen.launch import Job, variants

        jobs = {
            variant: Job(source, config, variant, request.gpu, directory / variant)
            for variant in variants(source, config)
        }
        return list(compiled(request, jobs, self.jobs).values())


def choice_of(target: KernelTarget, result: TuneResult, request: Request) -> Choice:
    """What a study found for the request."""
    return Choice(
        *split(result.config, target.labels),
        f"study: {result.how}",
        request.tune if result.complete else "off",  # a study that was kept out reached nothing
        result.time_us,
        result.baseline_us,
        f"q_len, kv_len {request.problem.lengths[0]}{_kernels(result)}; study in {result.storage}",
        times_us(result.trials, target.labels),
    )


def compiled(request: Request, jobs: Mapping[str, Job], workers: int | None) -> dict[str, Binary]:
    """Binaries by the names of their jobs, made by processes that may crash without taking this one along.

    CompileError where the compiler refuses one, or one needs more shared memory than the GPU type has.
    """
    from sparsegen.launch import CompileError, compile_many

    out: dict[str, Binary] = {}
    gpu = request.gpu
    for label, outcome in zip(jobs, compile_many(list(jobs.values()), workers), strict=True):
        name, binary = f"{request.pattern.name} ({label}) for {gpu.name}", outcome.binary
        if binary is None:
            raise CompileError(f"{name} does not compile: {outcome.error}")
        if binary.shared_bytes > gpu.shared_bytes:  # would fail at its first launch
            raise CompileError(
                f"{name} needs {binary.shared_bytes} bytes of shared memory a program, "
                f"{gpu.name} has {gpu.shared_bytes}; it was compiled with {outcome.job.config}"
            )
        out[label] = binary
    return out


def _kernels(result: TuneResult) -> str:
    """The best time of each kernel, where more than one was measured."""
    times = times_of(result.trials, "KERNEL")
    return "".join(f"; {name} {us:.1f} µs" for name, us in times.items()) if len(times) > 1 else ""


def _write_texts(
    pattern: Pattern, schedule: Schedule, source: KernelSource, directory: Path
) -> None:
    from sparsegen.launch.module import write_modules
    from sparsegen.schedule.dump import dump

    (directory / SCHEDULE).write_text(dump(schedule), encoding="utf-8")
    write_modules(directory, source)
    (directory / PATTERN).write_text(pattern.to_yaml(), encoding="utf-8")


def _decision(
    request: Request, choice: Choice, built: Built, buckets: tuple[Bucket, ...]
) -> Decision:
    listed = candidates_of(request.pattern, request.problem)
    candidates, predicted_for = considered(listed, choice.times_us)
    return Decision(
        label=choice.label,
        candidates=candidates,
        predicted_for=predicted_for,
        config=choice.config,
        chosen_by=choice.how,
        tune=choice.level,
        variants=built.variants(),
        schedule=SCHEDULE,
        source=SOURCE,
        problem={f.name: getattr(request.problem, f.name) for f in fields(request.problem)},
        time_us=choice.time_us,
        baseline_us=choice.baseline_us,
        measured=choice.measured,
        buckets=buckets,
    )


def studies(request: Request) -> Path | None:
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
