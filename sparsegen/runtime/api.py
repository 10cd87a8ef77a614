"""``sparsegen.compile`` and ``sparsegen.load``: from a pattern to a callable."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsegen.artifact import build as artifacts
from sparsegen.artifact.compiler import Compiler
from sparsegen.artifact.entry import Artifact
from sparsegen.artifact.manifest import Bucket
from sparsegen.artifact.rendering import inside, outline_of
from sparsegen.artifact.store import Store
from sparsegen.errors import CacheMiss, InputError
from sparsegen.launch.buckets import BucketKernel
from sparsegen.launch.kernel import Kernel
from sparsegen.launch.signature import variants
from sparsegen.runtime.attend import Attend
from sparsegen.runtime.reference import ReferenceAttend
from sparsegen.spec.gpu import Gpu, current_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem

if TYPE_CHECKING:
    from sparsegen.artifact.gradients import GradientCompiler
    from sparsegen.launch.backward_kernel import BackwardKernel

log = logging.getLogger(__name__)
BACKENDS = ("triton", "reference")
MISSING = ("error", "build")  # what ``load`` does where an artifact is not there


def compile(
    pattern: Pattern | str | Path,
    problem: Problem | None = None,
    *,
    gpu: Gpu | str | None = None,
    tune: str = "quick",
    passes: Iterable[str] | None = None,
    deterministic: bool = True,
    workspace: int | None = None,
    backend: str = "triton",
    budget_s: float = 900.0,
    jobs: int | None = None,
    store: Store | None = None,
) -> Attend | ReferenceAttend:
    """A callable for ``pattern``, built on first use and cached; by default for the GPU of this machine.

    Args:
        pattern: a ``Pattern``, a file, or the name of a shipped pattern.
        problem: dims, dtype and lengths; default: the pattern's own.
        gpu: the GPU type or its name ("h200"); default: that of this machine.  For another one ``tune`` must be "off":
            the artifact is cross-compiled, and the callable runs on such a GPU only.
        tune: ``quick`` measures on this GPU for about two minutes a problem, once: what was tuned is kept.  ``off``
            takes the best configuration on record (tuned/ for this GPU, the same architecture, the template's
            default: the artifact says which).  ``full`` measures for ``budget_s`` seconds.
        passes: ``("forward", "backward")`` builds the kernels of gradients at once; default: the passes that ``problem``
            names, else forward alone.  Each gradient kernel is tuned as long as the forward one.
        deterministic: gradients are the same to the bit from run to run.  ``False`` allows a fused kernel on sm_90, which
            adds dQ up in no fixed order; it is taken where it measures faster.
        workspace: bytes that a backward pass may take for dS, so that two products a tile are saved on sm_90; a call whose
            dS of one key head is larger is an ``InputError``.  Problems that it is of no use for have the kernels of no
            workspace, and their artifact says why (docs/backward.md, "Stored dS").
        backend: ``triton``, or ``reference`` for the dense float64 reference on any device.
        jobs: parallel compile processes.

    The callable builds once more, without tuning, and logs it, when tensors of other dims, dtype or heads arrive, and
    when an input requires a gradient for the first time where ``passes`` did not name it.
    Raises ``UnsupportedError`` for what no template can do, ``ToolchainError`` where there is no GPU.
    """
    from sparsegen.artifact.gradients import BACKWARD, GradientCompiler, passes_of

    found = _pattern(pattern)
    check_designs(deterministic, workspace)
    check_store(store)
    _check_effort(budget_s, jobs)
    if backend not in BACKENDS:
        raise InputError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "reference":
        if gpu is not None:
            raise InputError("backend='reference' builds for no GPU type: leave gpu out")
        return ReferenceAttend(found)
    forwards = Compiler(jobs=jobs, full_budget_s=budget_s)
    stored = workspace is not None
    backwards = GradientCompiler(jobs, None, budget_s, deterministic, stored)
    if passes is not None:
        passes = passes_of(passes, Problem())  # a wrong name is said before a GPU is looked for
    request = artifacts.ask(found, problem, gpu, tune)
    if gpu is not None:
        artifacts.check_measurable(request.gpu, tune, current_gpu())

    def ensured(wanted: Problem, level: str, builder: Compiler | GradientCompiler) -> Artifact:
        told = _logged(found.name, level)
        how: dict[str, Any] = {"tune": level, "store": store, "builder": builder, "progress": told}
        return artifacts.ensure(found, wanted, request.gpu, **how)

    def build(wanted: Problem, level: str) -> Kernel:
        return open_kernel(found, wanted, ensured(wanted, level, forwards))

    def rebuild(wanted: Problem) -> Kernel:
        # inside a call of the user's: two minutes of tuning are no answer there
        log.warning("building %s once more, untuned, for %s", found.name, wanted)
        return build(wanted, "off")

    def build_gradients(wanted: Problem, level: str) -> BackwardKernel:
        artifact = ensured(wanted, level, backwards)
        return _with_workspace(open_gradients(found, wanted, artifact), workspace)

    def first_gradients(wanted: Problem) -> BackwardKernel:
        log.warning("building gradients of %s, untuned, for %s", found.name, wanted)
        return build_gradients(wanted, "off")

    forward = build(request.problem, tune)
    trains = BACKWARD in passes_of(passes, request.problem)
    backward = build_gradients(request.problem, tune) if trains else None
    return Attend(found, request.problem, forward, rebuild, first_gradients, backward)


def load(
    pattern: Pattern | str | Path,
    problem: Problem | None = None,
    *,
    gpu: Gpu | str | None = None,
    store: Store | None = None,
    missing: str = "error",
    deterministic: bool = True,
    workspace: int | None = None,
) -> Attend:
    """The callable of a stored artifact, by exact key.  Never tunes or guesses, and builds only where ``missing`` says so.

    Args:
        gpu: the GPU type or its name ("h200"); default: that of this machine.
        store: default ``Store()``; ``Store(archive="kernels.tar.gz")`` also looks into one file, which may hold entries
            for many GPU types.
        missing: what a miss is: ``error``, or ``build``, which says so in a warning of the log and builds untuned.
        deterministic, workspace: as of ``compile``: gradients of each kind are an artifact of their own, whatever the number.

    Raises ``CacheMiss``, which names the GPU types that it is built for, or the field in which the nearest stored artifact
    differs.  Gradients are an artifact of their own, opened at the first call that needs them: a ``CacheMiss`` there says
    how they are built.
    """
    found = _pattern(pattern)
    check_designs(deterministic, workspace)
    check_store(store)
    if missing not in MISSING:
        raise InputError(f"missing must be one of {', '.join(MISSING)}, got {missing!r}")
    request = artifacts.ask(found, problem, gpu)

    def stored_or_built(wanted: Problem, builder: Compiler | GradientCompiler) -> Artifact:
        try:
            return artifacts.load(found, wanted, request.gpu, store=store, builder=builder)
        except CacheMiss as error:
            if missing == "error":
                raise
            log.warning("building it now, untuned: %s", error)
        return artifacts.ensure(found, wanted, request.gpu, store=store, builder=builder)

    artifact = stored_or_built(request.problem, Compiler())

    def gradients(wanted: Problem) -> BackwardKernel:
        from sparsegen.artifact.gradients import GradientCompiler  # a third of a load

        try:
            how = {"deterministic": deterministic, "stored": workspace is not None}
            stored = stored_or_built(wanted, GradientCompiler(**how))  # type: ignore[arg-type]
        except CacheMiss as error:
            flag = word = ""
            if not deterministic:
                flag, word = " --no-deterministic", ", deterministic=False"
            if workspace is not None:
                flag, word = f" --workspace {workspace}", f", workspace={workspace}"
            raise CacheMiss(
                f"gradients are not built ({error}); `sparsegen compile PATTERN --passes forward,backward{flag}` builds "
                f"them, as does sparsegen.compile(..., passes=('forward', 'backward'){word})"
            ) from None
        return _with_workspace(open_gradients(found, wanted, stored), workspace)

    forward = open_kernel(found, request.problem, artifact)
    return Attend(found, request.problem, forward, gradients=gradients)


def open_kernel(pattern: Pattern, problem: Problem, artifact: Artifact) -> Kernel:
    """The launchable kernel of an artifact; nothing is loaded on the GPU before its first launch."""
    decision = artifact.manifest.decision
    opened = {
        (b.q_len, b.kv_len): partial(_open, pattern, problem, artifact, b) for b in decision.buckets
    }
    first = _open(pattern, problem, artifact)
    return BucketKernel(first, opened) if opened else first


def _open(
    pattern: Pattern, problem: Problem, artifact: Artifact, bucket: Bucket | None = None
) -> Kernel:
    # the driver launches a binary (launch.loading): its text is data
    source = outline_of(pattern, problem, artifact, bucket)
    decided = artifact.manifest.decision if bucket is None else bucket
    directories = {v.name: artifact.path / inside(bucket, v.name) for v in decided.variants}
    return Kernel(source, decided.config, directories)


def open_gradients(pattern: Pattern, problem: Problem, artifact: Artifact) -> BackwardKernel:
    """The same for the kernels of gradients."""
    from sparsegen.artifact.gradient_texts import sources_of
    from sparsegen.launch.backward_kernel import BackwardKernel

    sources, configs = sources_of(pattern, problem, artifact), artifact.manifest.decision.kernels
    return BackwardKernel(
        sources,
        configs,
        {
            name: {v: artifact.path / name / v for v in variants(source, configs[name])}
            for name, source in sources.items()
        },
    )


def check_designs(deterministic: Any, workspace: Any) -> None:
    """InputError unless the two are of their kinds and go together."""
    if not isinstance(deterministic, bool):
        raise InputError(f"deterministic must be True or False, got {deterministic!r}")
    if workspace is None:
        return
    if not isinstance(workspace, int) or isinstance(workspace, bool) or workspace < 1:
        raise InputError(f"workspace must be a number of bytes, 1 or more, got {workspace!r}")
    if not deterministic:
        raise InputError(
            "workspace is for gradients that are the same to the bit; deterministic=False needs none: leave one of them out"
        )


def check_store(store: Any) -> None:
    """InputError for what is no store: a path is the argument of one."""
    if store is not None and not isinstance(store, Store):
        raise InputError(f"store must be a sparsegen.Store, got {type(store).__name__}")


def _check_effort(budget_s: Any, jobs: Any) -> None:
    if isinstance(budget_s, bool) or not isinstance(budget_s, (int, float)) or not budget_s >= 1:
        raise InputError(f"budget_s must be seconds, 1 or more, got {budget_s!r}")
    if jobs is not None and (type(jobs) is not int or jobs < 1):
        raise InputError(f"jobs must be a number of processes, 1 or more, got {jobs!r}")


def _with_workspace(kernel: BackwardKernel, workspace: int | None) -> BackwardKernel:
    kernel.workspace = workspace
    return kernel


def _logged(name: str, level: str) -> artifacts.Progress | None:
    """Progress of a tuning and its build as log records, of a build alone nothing.

    The first is a warning: nobody should wait two minutes without a word.
    """
    if level == "off":
        return None
    levels = itertools.chain([logging.WARNING], itertools.repeat(logging.INFO))

    def tell(done: int, total: int, message: str) -> None:
        note = "; tune='off' takes the configuration on record" if not done else ""
        log.log(next(levels), "building %s: %d of %d, %s%s", name, done, total, message, note)

    return tell


def _pattern(pattern: Any) -> Pattern:
    return pattern if isinstance(pattern, Pattern) else Pattern.from_yaml(pattern)
