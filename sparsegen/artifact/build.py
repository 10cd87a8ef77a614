"""The pipeline read aloud: a pattern, a problem and a GPU type become an artifact."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from sparsegen.artifact.entry import Artifact
from sparsegen.artifact.key import ArtifactKey
from sparsegen.artifact.manifest import LEVELS, Decision
from sparsegen.artifact.store import Store
from sparsegen.errors import InputError, ToolchainError

if TYPE_CHECKING:
    from sparsegen.spec.gpu import Gpu
    from sparsegen.spec.pattern import Pattern
    from sparsegen.spec.problem import Problem

Progress = Callable[[int, int, str], None]  # steps done, steps in all, one line about the newest


@dataclass(frozen=True)
class Request:
    """What is asked of a builder; ``tune`` is one of ``off``, ``quick``, ``full``."""

    pattern: Pattern
    problem: Problem
    gpu: Gpu
    tune: str = "off"


class Builder(Protocol):
    """Turns a request into files.  ``Compiler`` is the real one; tests bring stand-ins."""

    def key(self, request: Request) -> ArtifactKey:
        """The key of what is asked; UnsupportedError where this version cannot compile it."""

    def versions(self) -> Mapping[str, str]:
        """Versions of python, sparsegen, triton, torch and ptxas, for the manifest."""

    def is_current(self, request: Request, artifact: Artifact) -> bool:
        """Whether a stored artifact is what this request would decide now."""

    def build(self, request: Request, directory: Path, progress: Progress | None) -> Decision:
        """Fill the empty ``directory`` and say what was decided."""


def ensure(
    pattern: Pattern,
    problem: Problem | None = None,
    gpu: Gpu | str | None = None,
    *,
    tune: str = "off",
    store: Store | None = None,
    builder: Builder | None = None,
    progress: Progress | None = None,
) -> Artifact:
    """The artifact of ``pattern`` for ``problem`` on ``gpu``: loaded if stored, else built and published.

    Args:
        problem: default: the pattern's own, else ``Problem()``.
        gpu: a type or its name; default: the GPU of this machine, ToolchainError where there is none.
        tune: ``off`` takes the best configuration on record, ``quick`` and ``full`` measure on this GPU.  A stored
            artifact that was tuned at a lower level is replaced; its readers keep the old files.
    """
    request = ask(pattern, problem, gpu, tune)
    store = Store() if store is None else store
    builder = _default_builder() if builder is None else builder
    key = builder.key(request)

    def is_current(artifact: Artifact) -> bool:
        return builder.is_current(request, artifact)

    return store.build_once(
        key,
        pattern.name,
        lambda directory: builder.build(request, directory, progress),
        builder.versions(),
        accept=is_current,
    )


def load(
    pattern: Pattern,
    problem: Problem | None = None,
    gpu: Gpu | str | None = None,
    *,
    store: Store | None = None,
    builder: Builder | None = None,
) -> Artifact:
    """The stored artifact by exact key; builds and tunes nothing.  Arguments as for ``ensure``.

    CacheMiss says in which fields the nearest entry differs, ArtifactError what is damaged.
    """
    request = ask(pattern, problem, gpu)
    builder = _default_builder() if builder is None else builder
    artifact = (Store() if store is None else store).load(builder.key(request), pattern.name)
    artifact.require(request.gpu.backend, request.gpu.arch)
    return artifact


def ask(
    pattern: Pattern, problem: Problem | None, gpu: Gpu | str | None, tune: str = "off"
) -> Request:
    """A request with its defaults filled in; InputError for an argument that is none of its kind."""
    from sparsegen.spec.gpu import as_gpu
    from sparsegen.spec.problem import Problem

    if tune not in LEVELS:
        raise InputError(f"tune must be one of {', '.join(LEVELS)}, got {tune!r}")
    if problem is None:
        problem = pattern.problem or Problem()
    if not isinstance(problem, Problem):
        raise InputError(f"problem must be a sparsegen.Problem, got {type(problem).__name__}")
    return Request(pattern, problem, _gpu_here() if gpu is None else as_gpu(gpu), tune)


def check_measurable(gpu: Gpu, tune: str, here: Gpu | None) -> None:
    """InputError where ``tune`` measures and ``gpu`` is not the one ``here``: before a study, or a folder for one, is made."""
    if tune != "off" and (here is None or here.name != gpu.name):
        there = "there is none" if here is None else f"that is {here.name}"
        raise InputError(
            f"tune={tune!r} measures on the GPU here and {there}: for {gpu.name} say tune='off' (--tune off), which takes "
            "the configuration on record"
        )


def _default_builder() -> Builder:
    from sparsegen.artifact.compiler import Compiler

    return Compiler()


def _gpu_here() -> Gpu:
    from sparsegen.spec.gpu import all_gpus, current_gpu

    gpu = current_gpu()
    if gpu is None:
        known = ", ".join(g.name for g in all_gpus())
        raise ToolchainError(
            f"no GPU here: name the GPU type to build for (--gpu), one of {known}; "
            "sparsegen.compile(pattern, backend='reference') runs without one"
        )
    return gpu
