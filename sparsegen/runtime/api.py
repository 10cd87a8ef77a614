"""``sparsegen.compile`` and ``sparsegen.load``: from a pattern to a callable."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sparsegen.artifact import build as artifacts
from sparsegen.artifact.compiler import Compiler
from sparsegen.artifact.entry import Artifact
from sparsegen.artifact.gradients import (
    BACKWARD,
    GradientCompiler,
    module_of,
    passes_of,
    sources_of,
)
from sparsegen.artifact.rendering import SOURCE, source_of
from sparsegen.artifact.store import Store
from sparsegen.errors import CacheMiss, InputError
from sparsegen.launch.backward_kernel import BackwardKernel
from sparsegen.launch.kernel import Kernel
from sparsegen.launch.signature import variants
from sparsegen.runtime.attend import Attend, ReferenceAttend
from sparsegen.spec.gpu import Gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem

log = logging.getLogger(__name__)
BACKENDS = ("triton", "reference")


def compile(
    pattern: Pattern | str | Path,
    problem: Problem | None = None,
    *,
    tune: str = "quick",
    passes: Iterable[str] | None = None,
    backend: str = "triton",
    budget_s: float = 900.0,
    jobs: int | None = None,
    store: Store | None = None,
) -> Attend | ReferenceAttend:
    """A callable for ``pattern`` on the GPU of this machine, built on first use and cached.

    Args:
        pattern: a ``Pattern``, a file, or the name of a shipped pattern.
        problem: dims, dtype and lengths; default: the pattern's own.
        tune: ``quick`` measures on this GPU for about two minutes a problem, once: what was tuned is kept.  ``off``
            takes the best configuration on record (tuned/ for this GPU, the same architecture, the template's
            default: the artifact says which).  ``full`` measures for ``budget_s`` seconds.
        passes: ``("forward", "backward")`` builds the kernels of gradients at once; default: the passes that ``problem``
            names, else forward alone.  Gradients are not tuned.
        backend: ``triton``, or ``reference`` for the dense float64 reference on any device.
        jobs: parallel compile processes.

    The callable builds once more, without tuning, and logs it, when tensors of other dims, dtype or heads arrive, and
    when an input requires a gradient for the first time where ``passes`` did not name it.
    Raises ``UnsupportedError`` for what no template can do, ``ToolchainError`` where there is no GPU.
    """
    found = _pattern(pattern)
    if backend not in BACKENDS:
        raise InputError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "reference":
        return ReferenceAttend(found)
    builder = Compiler(jobs=jobs, full_budget_s=budget_s)
    if passes is not None:
        passes = passes_of(passes, Problem())  # a wrong name is said before a GPU is looked for
    request = artifacts.ask(found, problem, None, tune)

    def build(wanted: Problem, level: str) -> Kernel:
        artifact = artifacts.ensure(
            found,
            wanted,
            request.gpu,
            tune=level,
            store=store,
            builder=builder,
            progress=_logged(found.name),
        )
        return open_kernel(found, wanted, artifact)

    def rebuild(wanted: Problem) -> Kernel:
        # inside a call of the user's: two minutes of tuning are no answer there
        log.warning("building %s once more, untuned, for %s", found.name, wanted)
        return build(wanted, "off")

    def build_gradients(wanted: Problem) -> BackwardKernel:
        artifact = artifacts.ensure(
            found, wanted, request.gpu, store=store, builder=GradientCompiler(jobs)
        )
        return open_gradients(found, wanted, artifact)

    def first_gradients(wanted: Problem) -> BackwardKernel:
        log.warning("building gradients of %s, untuned, for %s", found.name, wanted)
        return build_gradients(wanted)

    forward = build(request.problem, tune)
    trains = BACKWARD in passes_of(passes, request.problem)
    backward = build_gradients(request.problem) if trains else None
    return Attend(found, request.problem, forward, rebuild, first_gradients, backward)


def load(
    pattern: Pattern | str | Path,
    problem: Problem | None = None,
    *,
    gpu: Gpu | None = None,
    store: Store | None = None,
) -> Attend:
    """The callable of a stored artifact, by exact key.  Never builds, tunes or guesses.

    Raises ``CacheMiss``, which says in which field the nearest stored artifact differs.  Gradients are an artifact of
    their own, opened at the first call that needs them: a ``CacheMiss`` there says how they are built.
    """
    found = _pattern(pattern)
    request = artifacts.ask(found, problem, gpu)
    artifact = artifacts.load(found, request.problem, request.gpu, store=store)

    def gradients(wanted: Problem) -> BackwardKernel:
        try:
            stored = artifacts.load(
                found, wanted, request.gpu, store=store, builder=GradientCompiler()
            )
        except CacheMiss as error:
            raise CacheMiss(
                f"gradients are not built ({error}); `sparsegen compile PATTERN --passes forward,backward` builds "
                "them, as does sparsegen.compile(..., passes=('forward', 'backward'))"
            ) from None
        return open_gradients(found, wanted, stored)

    forward = open_kernel(found, request.problem, artifact)
    return Attend(found, request.problem, forward, gradients=gradients)


def open_kernel(pattern: Pattern, problem: Problem, artifact: Artifact) -> Kernel:
    """The launchable kernel of an artifact; nothing is loaded on the GPU before its first launch."""
    source = source_of(pattern, problem, artifact)
    decision = artifact.manifest.decision
    directories = {v.name: artifact.path / v.name for v in decision.variants}
    return Kernel(source, decision.config, artifact.path / SOURCE, directories)


def open_gradients(pattern: Pattern, problem: Problem, artifact: Artifact) -> BackwardKernel:
    """The same for the kernels of gradients."""
    sources, config = sources_of(pattern, problem, artifact), artifact.manifest.decision.config
    return BackwardKernel(
        sources,
        dict.fromkeys(sources, config),
        {name: artifact.path / module_of(name) for name in sources},
        {
            name: {v: artifact.path / name / v for v in variants(source, config)}
            for name, source in sources.items()
        },
    )


def _logged(name: str) -> artifacts.Progress:
    """Progress of a tuning as log records.  The first is a warning: nobody should wait two minutes without a word."""
    levels = itertools.chain([logging.WARNING], itertools.repeat(logging.INFO))

    def tell(done: int, total: int, message: str) -> None:
        note = "; tune='off' takes the configuration on record" if not done else ""
        log.log(next(levels), "tuning %s: %d of %d, %s%s", name, done, total, message, note)

    return tell


def _pattern(pattern: Any) -> Pattern:
    return pattern if isinstance(pattern, Pattern) else Pattern.from_yaml(pattern)
