"""Gradient kernels of keys, and fused ones, whose preparing kernel is compiled beforehand, for all of them at once.

The first launch of a backward pass is one of the kernel of queries, so the benches of the others need that kernel too
(``GradientBench``), and compiles it when it is made: seconds of a GPU's time for every problem.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from beforehand import compile_many

from sparsegen.codegen.backward_planner import QUERIES
from sparsegen.launch import Job
from sparsegen.tune.gradient_bench import GradientBench
from sparsegen.tune.gradient_target import GradientTarget

VARIANT = "fast"


@dataclass(frozen=True)
class PreparedTarget(GradientTarget):
    """A target of another kernel than that of queries; ``prepared`` is the folder that ``compile_preparing`` has filled."""

    prepared: str = ""

    def bench(self) -> GradientBench:
        """See ``GradientTarget``."""
        return PreparedBench(self)


class PreparedBench(GradientBench):
    """Takes the kernel of queries from the target's folder."""

    def _prepares(self) -> dict[str, Any]:
        target = self.target
        assert isinstance(target, PreparedTarget)
        source, config = preparing(target)
        folder = folder_of(Path(target.prepared), source, config)
        return {
            "source": source,
            "config": config,
            "directories": {VARIANT: folder / VARIANT},
        }


def preparing(target: GradientTarget) -> tuple[Any, Any]:
    """The kernel of queries that a bench launches first, and its configuration."""
    other = GradientTarget.for_part(target.pattern, target.problem, target.gpu, QUERIES)
    return other.parts(other.default)


def folder_of(root: Path, source: Any, config: Any) -> Path:
    """Where its binary lies."""
    text = f"{source.digest} {config}"
    return root / "prepare" / hashlib.sha256(text.encode()).hexdigest()[:20]


def compile_preparing(targets: Iterable[GradientTarget], root: Path) -> None:
    """Compile what the benches of ``targets`` need and is not in ``root`` yet.

    RuntimeError with the compiler's complaint: nothing could be timed without it.
    """
    jobs: dict[Path, Job] = {}
    for target in targets:
        if target.part == QUERIES:
            continue
        source, config = preparing(target)
        place = folder_of(root, source, config) / VARIANT
        if not any(place.rglob("*.cubin")):
            jobs[place] = Job(source, config, VARIANT, target.gpu, place)
    for outcome in compile_many(list(jobs.values())):
        if outcome.binary is None:
            raise RuntimeError(f"{outcome.job.source.name}: {outcome.error}")


def prepared(target: GradientTarget, root: Path) -> GradientTarget:
    """The target with its bench's kernel from ``root``, where it needs one."""
    if target.part == QUERIES:
        return target
    given = {f.name: getattr(target, f.name) for f in fields(GradientTarget)}
    return PreparedTarget(**given, prepared=str(root))
