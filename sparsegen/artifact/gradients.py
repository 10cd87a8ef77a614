"""Artifacts of gradients: the kernels of ``templates/backward``, under a key of their own beside the forward one's.

They hold both schedules of a pattern, one text a kernel, and every variant of each.  Nothing is tuned: schedules are
the best predictions, and all kernels have the template's default configuration.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from sparsegen.artifact.build import Progress, Request
from sparsegen.artifact.compiler import Compiler, compiled
from sparsegen.artifact.entry import Artifact
from sparsegen.artifact.key import ArtifactKey
from sparsegen.artifact.manifest import Considered, Decision, Variant
from sparsegen.artifact.rendering import (
    PATTERN,
    SCHEDULE,
    check_masks,
    check_texts,
    considered,
    recorded,
)
from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.errors import ArtifactError, InputError, UnsupportedError
from sparsegen.tune.schedules import candidates_of

if TYPE_CHECKING:
    from sparsegen.codegen.backward import BackwardSource
    from sparsegen.schedule.search import Candidate
    from sparsegen.schedule.transpose import Transposed
    from sparsegen.spec.gpu import Gpu
    from sparsegen.spec.pattern import Pattern
    from sparsegen.spec.problem import Problem

TEMPLATE = "backward"
TRANSPOSED = "transposed.txt"  # the schedule of keys; that of queries is SCHEDULE
FORWARD, BACKWARD = "forward", "backward"
COMPILED = (FORWARD, BACKWARD)  # passes that have kernels; decoding runs the forward one


def passes_of(asked: Iterable[str] | None, problem: Problem) -> tuple[str, ...]:
    """The passes to build: ``asked``, else those that the problem names.  The forward one always is: gradients need it.

    InputError for a name that is no pass with kernels.
    """
    if asked is None:
        asked = [name for name in problem.passes if name in COMPILED]
    names = [asked] if isinstance(asked, str) else list(asked)
    odd = [name for name in names if name not in COMPILED]
    if odd:
        raise InputError(f"passes must be some of {', '.join(COMPILED)}, got {odd[0]!r}")
    return COMPILED if BACKWARD in names else (FORWARD,)


@dataclass(frozen=True)
class Both:
    """The two schedules of a pattern's gradients; ``shift`` as in ``schedule.transpose``."""

    queries: Candidate
    keys: Candidate
    shift: int

    @property
    def label(self) -> str:
        """Both schedules by name."""
        return f"dQ {self.queries.schedule.label}; dK, dV {self.keys.schedule.label}"


@dataclass(frozen=True)
class GradientCompiler:
    """Builds the kernels of gradients with Triton.  No GPU is needed, and a request's level of tuning changes nothing.

    ``jobs``: parallel compile processes (default: the machine's cores).
    """

    jobs: int | None = None

    def key(self, request: Request) -> ArtifactKey:
        """Key of the request; UnsupportedError where the schedules or the template cannot do it."""
        from sparsegen.codegen import load_template

        pattern, problem = request.pattern, request.problem
        pattern.head_rule_of(problem.heads)
        both = schedules_of(pattern, problem)
        rendered(pattern, both, problem)
        which, schedule = load_template(TEMPLATE), both.queries.schedule
        return ArtifactKey.of(pattern, problem, request.gpu, schedule, which)

    def versions(self) -> Mapping[str, str]:
        """Versions of all that makes the files."""
        return Compiler().versions()

    def is_current(self, request: Request, artifact: Artifact) -> bool:
        """Whether these schedules and this configuration would be chosen today."""
        decision = artifact.manifest.decision
        label = schedules_of(request.pattern, request.problem).label
        return (decision.label, decision.config) == (label, _config(request.problem, request.gpu))

    def build(self, request: Request, directory: Path, progress: Progress | None) -> Decision:
        """Schedule, render, compile."""
        from sparsegen.launch import Job, variants

        both = schedules_of(request.pattern, request.problem)
        sources = rendered(request.pattern, both, request.problem)
        config = _config(request.problem, request.gpu)
        jobs = {
            f"{name}/{variant}": Job(
                source, config, variant, request.gpu, directory / name / variant
            )
            for name, source in sources.items()
            for variant in variants(source, config)
        }
        binaries = compiled(request, jobs, self.jobs)
        _write_texts(request.pattern, both, sources, directory)
        candidates, predicted_for = _predicted(both)
        return Decision(
            label=both.label,
            candidates=candidates,
            predicted_for=predicted_for,
            config=config,
            chosen_by="template default",
            tune="off",
            variants=tuple(
                Variant(
                    name=name,
                    guard=_guard(b.variant),
                    registers=b.registers,
                    spill_bytes=b.spill_bytes,
                    shared_bytes=b.shared_bytes,
                    files=tuple(f"{name}/{file}" for file in b.files),
                )
                for name, b in binaries.items()
            ),
            schedule=SCHEDULE,
            source=module_of(next(iter(sources))),
            problem={f.name: getattr(request.problem, f.name) for f in fields(request.problem)},
        )


def schedules_of(pattern: Pattern, problem: Problem) -> Both:
    """The best prediction for each of the two."""
    found = _transposed(pattern, problem)
    return Both(candidates_of(pattern, problem)[0], found.candidates[0], found.shift)


@lru_cache(maxsize=64)
def _transposed(pattern: Pattern, problem: Problem) -> Transposed:
    from sparsegen.schedule.transpose import transpose

    return transpose(pattern, problem)


def _labelled(pattern: Pattern, problem: Problem, label: str) -> Both:
    """The candidates of that label.  ArtifactError where this version finds none."""
    found = _transposed(pattern, problem)
    for queries in candidates_of(pattern, problem):
        for keys in found.candidates:
            both = Both(queries, keys, found.shift)
            if both.label == label:
                return both
    raise ArtifactError(f"{pattern.name} has no candidate schedules {label!r} in this version")


@lru_cache(maxsize=64)
def _rendered(
    pattern: Pattern, both: Both, problem: Problem
) -> tuple[tuple[str, BackwardSource], ...]:
    from sparsegen.codegen.backward import KEYS, render_backward

    made = [render_backward(pattern, both.queries.schedule, problem)]
    for outputs in (("DK", "DV"), ("DK",), ("DV",)):
        one = render_backward(pattern, both.keys.schedule, problem, KEYS, both.shift, outputs)
        made.append(one)
    drawn = [[(t.block, t.per_row) for t in source.tables] for source in made]
    if any(d != drawn[0] for d in drawn):  # a call has one list of tables for all of them
        raise UnsupportedError(
            f"{pattern.name}: gradients of queries and of keys draw other random_blocks"
        )
    return tuple((source.name, source) for source in made)


def rendered(pattern: Pattern, both: Both, problem: Problem) -> dict[str, BackwardSource]:
    """The kernels by name: of queries, of keys and values, and of either alone.  Kept, as those of the forward pass."""
    return dict(_rendered(pattern, both, problem))


def sources_of(pattern: Pattern, problem: Problem, artifact: Artifact) -> dict[str, BackwardSource]:
    """The kernels that ``artifact`` must hold, see ``rendering.source_of``.

    Raises:
        ArtifactError: this version finds no such schedules, renders other texts, has other variants, or the record is
            not of this key.
    """
    from sparsegen.launch import variants

    decision = artifact.manifest.decision
    try:
        both = _labelled(*recorded(artifact, problem), decision.label)
    except ArtifactError as error:
        raise ArtifactError(f"{artifact.path}: {error}; build it again") from None
    check_masks(artifact, both.queries.schedule)
    sources = rendered(pattern, both, problem)
    check_texts(artifact, {module_of(name): s.text for name, s in sources.items()})
    wanted = [f"{n}/{v}" for n, s in sources.items() for v in variants(s, decision.config)]
    if sorted(wanted) != sorted(v.name for v in decision.variants):
        raise ArtifactError(
            f"{artifact.path}: its variants are not those of this version; build it again"
        )
    return sources


def module_of(name: str) -> str:
    """The file that holds the text of a kernel."""
    return f"{name}.py"


def _config(problem: Problem, gpu: Gpu) -> LaunchConfig:
    """The default; UnsupportedError where it does not fit the GPU type."""
    from sparsegen.codegen.backward import default_config, unfit

    config = default_config(problem, gpu)
    why = unfit(config, problem, gpu)
    if why is not None:
        raise UnsupportedError(f"no configuration of the gradient kernels fits: {why}")
    return config


def _guard(variant: str) -> str:
    """No gradient kernel takes tensor descriptors: the fast ones need what forward ones without them do."""
    from sparsegen.launch import signature as sig
    from sparsegen.launch.kernel import VARIANT_GUARDS

    return VARIANT_GUARDS[sig.POINTERS if variant == sig.FAST else variant]


def _predicted(both: Both) -> tuple[tuple[Considered, ...], str]:
    """What the schedules were chosen by: the time of a forward pass over each, added up."""
    (queries,), predicted_for = considered((both.queries,), {})
    (keys,), _ = considered((both.keys,), {})
    total = round(queries.predicted_ms + keys.predicted_ms, 4)
    listed = (Considered(both.label, total, None),)
    return listed, f"a forward pass over each schedule, {predicted_for}"


def _write_texts(
    pattern: Pattern, both: Both, sources: Mapping[str, BackwardSource], directory: Path
) -> None:
    from sparsegen.schedule.dump import dump

    texts = {module_of(name): source.text for name, source in sources.items()} | {
        SCHEDULE: dump(both.queries.schedule),
        TRANSPOSED: dump(both.keys.schedule),
        PATTERN: pattern.to_yaml(),
    }
    for name, text in texts.items():
        (directory / name).write_text(text, encoding="utf-8")
