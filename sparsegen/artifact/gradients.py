"""Artifacts of gradients: the kernels of ``templates/backward``, under a key of their own beside the forward one's.

They hold both schedules of a pattern, one text a kernel, and every variant of each.  Queries and keys are tuned apart, so
each has a schedule and a configuration of its own, chosen as the forward kernel's are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsegen.artifact.build import Progress, Request
from sparsegen.artifact.compiler import Choice, Compiler, choice_of, compiled, studies
from sparsegen.artifact.entry import Artifact
from sparsegen.artifact.key import ArtifactKey
from sparsegen.artifact.manifest import LEVELS, Considered, Decision, Variant, level_at_least
from sparsegen.artifact.rendering import (
    PATTERN,
    SCHEDULE,
    check_masks,
    check_texts,
    considered,
    recorded,
)
from sparsegen.codegen.backward_planner import KEYS, OUTPUTS, QUERIES
from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.errors import ArtifactError, InputError, UnsupportedError
from sparsegen.tune.gradient_target import part_candidates, transposed_of
from sparsegen.tune.schedules import candidates_of, labels_of, split

if TYPE_CHECKING:
    from sparsegen.codegen.backward import BackwardSource
    from sparsegen.launch import Binary
    from sparsegen.schedule.search import Candidate
    from sparsegen.spec.gpu import Gpu
    from sparsegen.spec.pattern import Pattern
    from sparsegen.spec.problem import Problem

TEMPLATE = "backward"
TRANSPOSED = "transposed.txt"  # the schedule of keys; that of queries is SCHEDULE
FORWARD, BACKWARD = "forward", "backward"
KERNELS = {  # part and gradients of each kernel, by name
    QUERIES: (QUERIES, OUTPUTS[QUERIES]),
    KEYS: (KEYS, OUTPUTS[KEYS]),
    **{f"{KEYS}-{x}": (KEYS, (x,)) for x in OUTPUTS[KEYS]},
}
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
    """Builds the kernels of gradients with Triton.  No GPU is needed unless tuning is asked for.

    Fields as in ``artifact.compiler.Compiler``; each of the two tunings has ``full_budget_s``.
    """

    jobs: int | None = None
    storage: str | Path | None = None
    full_budget_s: float = 900.0

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
        """Tuned at the level asked; where nothing was tuned, also what ``tuned/`` gives today."""
        decision = artifact.manifest.decision
        if not level_at_least(decision.tune, request.tune):
            return False
        if decision.tune != "off":
            return True
        now = self._looked_up(request)
        both = both_of(request.pattern, request.problem, *(c.label for c in now.values()))
        kernels = _kernels(now, request.problem, request.gpu)
        return (decision.label, dict(decision.kernels)) == (both.label, kernels)

    def build(self, request: Request, directory: Path, progress: Progress | None) -> Decision:
        """Choose, render, compile."""
        from sparsegen.launch import Job, variants

        chosen = self._choose(request, progress)
        both = both_of(request.pattern, request.problem, *(c.label for c in chosen.values()))
        sources = rendered(request.pattern, both, request.problem)
        kernels = _kernels(chosen, request.problem, request.gpu)
        jobs = {
            f"{name}/{variant}": Job(
                source, kernels[name], variant, request.gpu, directory / name / variant
            )
            for name, source in sources.items()
            for variant in variants(source, kernels[name])
        }
        binaries = compiled(request, jobs, self.jobs)
        _write_texts(request.pattern, both, sources, directory)
        return _decision(request, both, chosen, kernels, binaries)

    def _choose(self, request: Request, progress: Progress | None) -> dict[str, Choice]:
        return self._looked_up(request) if request.tune == "off" else self._tuned(request, progress)

    def _looked_up(self, request: Request) -> dict[str, Choice]:
        """Schedule and configuration of each part by the steps of ``tune.store.lookup``."""
        from sparsegen.codegen.gradient_template import PARTS, gradient_template
        from sparsegen.tune.store import lookup

        out = {}
        for part in PARTS:
            labels = labels_of(part_candidates(request.pattern, request.problem, part))
            which = gradient_template(part)
            config, step = lookup(request.pattern, request.problem, request.gpu, which, labels)
            out[part] = Choice(*split(config, labels), step, "off")
        return out

    def _tuned(self, request: Request, progress: Progress | None) -> dict[str, Choice]:
        """Both parts, one after the other, each from the winner on record on."""
        from sparsegen.codegen.gradient_template import PARTS
        from sparsegen.tune.gradient_winners import tune_gradients
        from sparsegen.tune.tuner import QUICK, full

        out = {}
        for part in PARTS:
            target, result = tune_gradients(
                request.pattern,
                request.problem,
                request.gpu,
                part,
                budget=QUICK if request.tune == "quick" else full(self.full_budget_s),
                storage=studies(request) if self.storage is None else self.storage,
                jobs=self.jobs,
                progress=_named(part, progress),
            )
            out[part] = choice_of(target, result, request)
        return out


def _named(part: str, progress: Progress | None) -> Callable[[Any], None]:
    """Progress of one of the tunings, with the part's name before it."""

    def tell(p: Any) -> None:
        if progress is not None:
            progress(p.done, p.total, f"gradients of {part}: {p}")

    return tell


def _kernels(chosen: Mapping[str, Choice], problem: Problem, gpu: Gpu) -> dict[str, LaunchConfig]:
    """The configuration of every kernel by name: that of its part, where it fits.

    Kernels that give dK or dV alone are not tuned.  They take that of the keys, else the template's default;
    UnsupportedError where that one does not fit the GPU type either.
    """
    from sparsegen.codegen.backward import default_config, unfit

    out = {}
    for name, (part, outputs) in KERNELS.items():
        config = chosen[part].config
        if unfit(config, problem, gpu, outputs) is not None:
            config = default_config(problem, gpu)
        why = unfit(config, problem, gpu, outputs)
        if why is not None:
            raise UnsupportedError(f"no configuration of the gradient kernels fits: {why}")
        out[name] = config
    return out


def _decision(
    request: Request,
    both: Both,
    chosen: Mapping[str, Choice],
    kernels: Mapping[str, LaunchConfig],
    binaries: Mapping[str, Binary],
) -> Decision:
    candidates, predicted_for = _predicted(both)
    steps = {c.how for c in chosen.values()}
    said = "; ".join(f"{part}: {c.how}" for part, c in chosen.items())
    first, *others = chosen.values()
    return Decision(
        label=both.label,
        candidates=candidates,
        predicted_for=predicted_for,
        config=first.config,
        kernels=kernels,
        chosen_by=first.how if len(steps) == 1 else said,
        # the lower of the two: a study that was kept out reached nothing
        tune=min((c.level for c in chosen.values()), key=LEVELS.index),
        variants=tuple(
            Variant(
                name=name,
                guard=_guard(b.variant, kernels[name.split("/")[0]]),
                registers=b.registers,
                spill_bytes=b.spill_bytes,
                shared_bytes=b.shared_bytes,
                files=tuple(f"{name}/{file}" for file in b.files),
            )
            for name, b in binaries.items()
        ),
        schedule=SCHEDULE,
        source=module_of(QUERIES),
        problem={f.name: getattr(request.problem, f.name) for f in fields(request.problem)},
        time_us=_total(c.time_us for c in chosen.values()),
        baseline_us=_total(c.baseline_us for c in chosen.values()),
        measured="; ".join(f"{part}: {c.measured}" for part, c in chosen.items() if c.measured),
    )


def _total(times: Iterable[float | None]) -> float | None:
    """Both parts together, each with the launch that prepares; None where one was not measured."""
    found = list(times)
    known = [t for t in found if t is not None]
    return sum(known) if len(known) == len(found) else None


def schedules_of(pattern: Pattern, problem: Problem) -> Both:
    """The best prediction for each of the two."""
    found = transposed_of(pattern, problem)
    return Both(candidates_of(pattern, problem)[0], found.candidates[0], found.shift)


def both_of(pattern: Pattern, problem: Problem, queries: str, keys: str) -> Both:
    """The candidates of these labels.  ArtifactError where this version finds none."""
    pair = []
    for part, label in ((QUERIES, queries), (KEYS, keys)):
        known = {c.schedule.label: c for c in part_candidates(pattern, problem, part)}
        if label not in known:
            raise ArtifactError(f"{pattern.name} has no candidate schedule {label!r} of {part}")
        pair.append(known[label])
    return Both(pair[0], pair[1], transposed_of(pattern, problem).shift)


def _labelled(pattern: Pattern, problem: Problem, label: str) -> Both:
    """The candidates of a pair's label.  ArtifactError where this version finds none."""
    found = transposed_of(pattern, problem)
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
    from sparsegen.codegen.backward import render_backward

    made = [render_backward(pattern, both.queries.schedule, problem)]
    for outputs in (o for part, o in KERNELS.values() if part == KEYS):
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
    check_texts(artifact, _texts(sources))
    if set(decision.kernels) != set(sources):
        raise ArtifactError(
            f"{artifact.path}: its kernels are not those of this version; build it again"
        )
    kernels = decision.kernels
    wanted = [f"{n}/{v}" for n, s in sources.items() for v in variants(s, kernels[n])]
    if sorted(wanted) != sorted(v.name for v in decision.variants):
        raise ArtifactError(
            f"{artifact.path}: its variants are not those of this version; build it again"
        )
    return sources


def module_of(name: str) -> str:
    """The file that holds the text of a kernel."""
    return f"{name}.py"


def _texts(sources: Mapping[str, BackwardSource]) -> dict[str, str]:
    """All texts by the names of their files: the portable one of a kernel, and the warp-specialised one where there is one."""
    texts = {module_of(name): source.text for name, source in sources.items()}
    special = {n: s.hopper.text for n, s in sources.items() if s.hopper is not None}
    return texts | {module_of(f"{name}.hopper"): text for name, text in special.items()}


def _guard(variant: str, config: LaunchConfig) -> str:
    """When a variant may be launched; descriptors are the warp-specialised kernel's alone."""
    from sparsegen.launch import signature as sig
    from sparsegen.launch.backward_boxes import GUARD
    from sparsegen.launch.kernel import VARIANT_GUARDS

    plain = VARIANT_GUARDS[sig.POINTERS if variant == sig.FAST else variant]
    if variant != sig.FAST or not sig.by_boxes(config):
        return plain
    return f"{plain}; with descriptors also {GUARD}"


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

    texts = _texts(sources) | {
        SCHEDULE: dump(both.queries.schedule),
        TRANSPOSED: dump(both.keys.schedule),
        PATTERN: pattern.to_yaml(),
    }
    for name, text in texts.items():
        (directory / name).write_text(text, encoding="utf-8")
