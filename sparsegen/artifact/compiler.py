"""The real builder: schedule, render, choose, compile, in that order and without a branch between them."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

from sparsegen.artifact.binaries import compiled
from sparsegen.artifact.build import Progress, Request
from sparsegen.artifact.entry import Artifact
from sparsegen.artifact.key import ArtifactKey, installed
from sparsegen.artifact.lengths import Built, bucket_of, by_lengths, decided_for
from sparsegen.artifact.manifest import Bucket, Decision, level_at_least
from sparsegen.artifact.refused import OnRecord, Refused, build_past, refused_by
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
    from sparsegen.codegen import KernelSource, Template
    from sparsegen.launch import Binary
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
    on_record: bool = False  # looked up, and not the template's default

    def given(self, part: str, spill_bytes: int | None) -> OnRecord | None:
        """The same for ``artifact.binaries``; None where it is on no record."""
        return OnRecord(part, self.label, self.config, spill_bytes) if self.on_record else None


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
        refused = refused_by(artifact)
        now = [(self._looked_up(r, refused), r.problem.lengths[0]) for r in asked]
        return all(decided_for(decision, pair) == (c.label, c.config) for c, pair in now)

    def build(self, request: Request, directory: Path, progress: Progress | None) -> Decision:
        """The pipeline, without what the compiler here refuses of ``tuned/``."""
        if request.tune != "off":
            tuned = [self._tuned(r, progress) for r in by_lengths(request)]
            return self._build(request, tuned, directory, progress)

        def attempt(refused: Refused) -> Decision:
            choices = [self._looked_up(r, refused) for r in by_lengths(request)]
            return self._build(request, choices, directory, progress)

        return build_past(attempt, directory)

    def _build(
        self,
        request: Request,
        choices: list[Choice],
        directory: Path,
        progress: Progress | None,
    ) -> Decision:
        """Binaries for every pair of lengths, as far as the decisions differ."""
        made: dict[tuple[str, LaunchConfig], Built] = {}
        for choice in choices:
            key = choice.label, choice.config
            if key not in made:
                folder = f"lengths{len(made)}" if made else ""
                binaries = self._built(request, choice, directory / folder, progress)
                made[key] = Built(folder, binaries)
        buckets = [
            bucket_of(r, choice.label, choice.config, choice.how, made[choice.label, choice.config])
            for r, choice in zip(by_lengths(request), choices)
        ]
        first = made[choices[0].label, choices[0].config]
        return _decision(request, choices[0], first, tuple(buckets) if len(made) > 1 else ())

    def _built(
        self, request: Request, choice: Choice, directory: Path, progress: Progress | None
    ) -> list[Binary]:
        """Binaries and texts of one decision."""
        schedule = schedule_of(request.pattern, request.problem, choice.label)
        source = rendered(request.pattern, schedule, request.problem, self.template)
        binaries = self._compile(request, source, choice, directory, progress)
        _write_texts(request.pattern, schedule, source, directory)
        return binaries

    def _looked_up(self, request: Request, refused: Refused | None = None) -> Choice:
        """By the steps of ``tune.store.lookup``."""
        from sparsegen.codegen import load_template

        which = load_template(self.template)
        labels = labels_of(candidates_of(request.pattern, request.problem))
        return looked_up(request, which, labels, (refused or {}).get(self.template, {}))

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
        self,
        request: Request,
        source: KernelSource,
        choice: Choice,
        directory: Path,
        progress: Progress | None,
    ) -> list[Binary]:
        """Each variant into a folder of its name."""
        from sparsegen.launch import Job, variants
        from sparsegen.tune.candidates import Limits

        names = variants(source, choice.config)
        jobs = {
            variant: Job(source, choice.config, variant, request.gpu, directory / variant)
            for variant in names
        }
        # the first variant is what a tuning compiles and times
        spilled = {names[0]: Limits.spill_bytes}
        given = {name: choice.given(self.template, spilled.get(name)) for name in names}
        return list(compiled(request, jobs, self.jobs, given, progress).values())


def looked_up(
    request: Request,
    template: Template,
    labels: Sequence[str],
    refused: Mapping[tuple[str, LaunchConfig], str],
) -> Choice:
    """What ``tuned/`` has for a kernel, without what the compiler refuses of it; see ``tune.store.lookup``."""
    from sparsegen.tune.store import DEFAULT_STEP, lookup

    given = request.pattern, request.problem, request.gpu, template, labels
    config, step = lookup(*given, refused=refused)
    on_record = not step.startswith(DEFAULT_STEP)
    return Choice(*split(config, labels), step, "off", on_record=on_record)


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
