"""Artifacts of gradients: the kernels of ``templates/backward``, under a key of their own beside the forward one's.

They hold both schedules of a pattern, one text a kernel, and every variant of each.  Queries and keys are tuned apart, so
each has a schedule and a configuration of its own, chosen as the forward kernel's are.  Where gradients need not be the
same to the bit, the fused kernel is a third one, and in the artifact where it is the fastest way (``tune.gradient_designs``);
the others stay, for calls that it does not take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsegen.artifact.binaries import compiled
from sparsegen.artifact.build import Progress, Request
from sparsegen.artifact.compiler import Choice, Compiler, choice_of, looked_up, studies
from sparsegen.artifact.entry import Artifact
from sparsegen.artifact.gradient_decision import decision_of
from sparsegen.artifact.gradient_texts import (
    KERNELS,
    Both,
    both_of,
    rendered,
    schedules_of,
    write_texts,
)
from sparsegen.artifact.key import ArtifactKey
from sparsegen.artifact.manifest import Decision, level_at_least
from sparsegen.artifact.refused import OnRecord, Refused, build_past, refused_by
from sparsegen.codegen.backward_planner import FUSED, KEYS, QUERIES
from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.errors import InputError, UnsupportedError
from sparsegen.tune import gradient_designs as designs
from sparsegen.tune.gradient_target import SPILLED, part_candidates
from sparsegen.tune.schedules import labels_of

if TYPE_CHECKING:
    from sparsegen.spec.gpu import Gpu
    from sparsegen.spec.problem import Problem

# of the key: deterministic, not, and with a workspace
TEMPLATE, ANY_ORDER, WITH_WORKSPACE = "backward", "backward_fused", "backward_stored"
FORWARD, BACKWARD = "forward", "backward"
COMPILED = (FORWARD, BACKWARD)  # passes that have kernels; decoding runs the forward one


def passes_of(asked: Iterable[str] | None, problem: Problem) -> tuple[str, ...]:
    """The passes to build: ``asked``, else those that the problem names.  The forward one always is: gradients need it.

    InputError for a name that is no pass with kernels.
    """
    if asked is None:
        asked = [name for name in problem.passes if name in COMPILED]
    names = list(asked) if isinstance(asked, Iterable) and not isinstance(asked, str) else [asked]
    odd = [name for name in names if name not in COMPILED]
    if odd:
        raise InputError(f"passes must be some of {', '.join(COMPILED)}, got {odd[0]!r}")
    return COMPILED if BACKWARD in names else (FORWARD,)


@dataclass(frozen=True)
class GradientCompiler:
    """Builds the kernels of gradients with Triton.  No GPU is needed unless tuning is asked for.

    Fields as in ``artifact.compiler.Compiler``; each of the tunings has ``full_budget_s``.  ``deterministic``: gradients
    are the same to the bit from run to run; without it the fused kernel may give them.  ``stored``: calls have a workspace
    for dS; how large it is the kernels do not know.
    """

    jobs: int | None = None
    storage: str | Path | None = None
    full_budget_s: float = 900.0
    deterministic: bool = True
    stored: bool = False

    def key(self, request: Request) -> ArtifactKey:
        """Key of the request; UnsupportedError where the schedules or the template cannot do it."""
        from sparsegen.codegen import load_template

        pattern, problem = request.pattern, request.problem
        pattern.head_rule_of(problem.heads)
        both = schedules_of(pattern, problem)
        rendered(pattern, both, problem)
        which = load_template(
            WITH_WORKSPACE if self.stored else TEMPLATE if self.deterministic else ANY_ORDER
        )
        schedule = both.queries.schedule
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
        refused = refused_by(artifact)
        now, _ = self._designed(request, self._looked_up(request, refused), refused)
        both = self._both(request, now)
        kernels = self._kernels(request, both, now)
        return (decision.label, dict(decision.kernels)) == (both.label, kernels)

    def build(self, request: Request, directory: Path, progress: Progress | None) -> Decision:
        """Choose, render, compile, without what the compiler here refuses of ``tuned/``."""
        if request.tune != "off":
            chosen, why = self._designed(request, self._tuned(request, progress))
            return self._build(request, chosen, why, directory, progress)

        def attempt(refused: Refused) -> Decision:
            found = self._looked_up(request, refused)
            chosen, why = self._designed(request, found, refused)
            return self._build(request, chosen, why, directory, progress)

        return build_past(attempt, directory)

    def _build(
        self,
        request: Request,
        chosen: dict[str, Choice],
        why: str,
        directory: Path,
        progress: Progress | None,
    ) -> Decision:
        """``why``: the design was chosen."""
        from sparsegen.launch import Job, variants

        both = self._both(request, chosen)
        sources = rendered(request.pattern, both, request.problem)
        kernels = self._kernels(request, both, chosen)
        jobs, given = {}, {}
        for name, source in sources.items():
            names = variants(source, kernels[name])
            for variant in names:
                job, folder = f"{name}/{variant}", directory / name / variant
                jobs[job] = Job(source, kernels[name], variant, request.gpu, folder)
                given[job] = _given(name, kernels[name], chosen, timed=variant == names[0])
        binaries = compiled(request, jobs, self.jobs, given, progress)
        write_texts(request.pattern, both, sources, directory)
        return decision_of(request, both, chosen, kernels, binaries, why)

    def _both(self, request: Request, chosen: Mapping[str, Choice]) -> Both:
        given = request.pattern, request.problem
        labels = [c.label for c in chosen.values()]
        stored = self.stored and designs.why_not_stored(*given, request.gpu) is None
        return both_of(*given, *labels, stored=stored)

    def _kernels(
        self, request: Request, both: Both, chosen: Mapping[str, Choice]
    ) -> dict[str, LaunchConfig]:
        """Those of ``_kernels``; the kernels with stored dS are not tuned and take the template's default."""
        from sparsegen.codegen import backward_stored

        out = _kernels(chosen, request.problem, request.gpu)
        if both.stored is not None:
            for name, part in zip(designs.STORES, (KEYS, QUERIES), strict=True):
                given = request.problem, request.gpu, part
                out[name] = backward_stored.default_config(*given)
        return out

    def _parts(self, request: Request) -> tuple[str, ...]:
        return designs.parts(request.pattern, request.problem, request.gpu, self.deterministic)

    def _designed(
        self, request: Request, chosen: dict[str, Choice], refused: Refused | None = None
    ) -> tuple[dict[str, Choice], str]:
        """The kernels of the design that is taken, and why; "" where only the split one is allowed."""
        if self.stored:
            why = designs.why_not_stored(request.pattern, request.problem, request.gpu)
            return chosen, f"split, {why}" if why else "stored: a workspace is given"
        if self.deterministic:
            return chosen, ""
        if FUSED not in chosen:
            why = designs.why_not_fused(request.pattern, request.problem, request.gpu)
            return chosen, f"split, {why}"
        times = {part: c.time_us for part, c in chosen.items()}
        if all(c.level == "off" for c in chosen.values()):
            # the time on record is that of what was refused
            times = {
                p: None if (refused or {}).get(p) else self._recorded(request, p) for p in chosen
            }
        fused, why = designs.fused_is_chosen(times, request.problem)
        if not fused and (refused or {}).get(FUSED):
            why = f"{why}; fused: {chosen[FUSED].how}"
        return {part: c for part, c in chosen.items() if fused or part != FUSED}, why

    def _recorded(self, request: Request, part: str) -> float | None:
        from sparsegen.codegen.gradient_template import gradient_template

        name = gradient_template(part).name
        return designs.recorded_us(request.pattern, request.problem, request.gpu, name)

    def _looked_up(self, request: Request, refused: Refused | None = None) -> dict[str, Choice]:
        """Schedule and configuration of each part by the steps of ``tune.store.lookup``."""
        from sparsegen.codegen.gradient_template import gradient_template

        out = {}
        for part in self._parts(request):
            labels = labels_of(part_candidates(request.pattern, request.problem, part))
            of_part = (refused or {}).get(part, {})
            out[part] = looked_up(request, gradient_template(part), labels, of_part)
        return out

    def _tuned(self, request: Request, progress: Progress | None) -> dict[str, Choice]:
        """The parts, one after the other, each from the winner on record on."""
        from sparsegen.tune.gradient_winners import tune_gradients
        from sparsegen.tune.tuner import QUICK, full

        out = {}
        for part in self._parts(request):
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


def _given(
    name: str, config: LaunchConfig, chosen: Mapping[str, Choice], *, timed: bool
) -> OnRecord | None:
    """What is on record for a kernel: that of its part, unless it has a default.

    ``timed``: the variant is the one that a tuning times.  Kernels that give dK or dV alone it does not even compile.
    """
    part = name if name in designs.STORES or name == FUSED else KERNELS[name][0]
    if part not in chosen or config != chosen[part].config:
        return None
    return chosen[part].given(part, SPILLED if timed and name == part else None)


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
    return out | ({FUSED: chosen[FUSED].config} if FUSED in chosen else {})
