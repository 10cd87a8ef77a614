"""The tuning of one gradient kernel, from the winner on record on; ``winners.keep`` writes its row, as of any target."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsegen.tune import store
from sparsegen.tune.gradient_target import GradientTarget
from sparsegen.tune.tuner import QUICK, Budget, TuneResult, tune

if TYPE_CHECKING:
    from sparsegen.spec.gpu import Gpu
    from sparsegen.spec.pattern import Pattern
    from sparsegen.spec.problem import Problem


def tune_gradients(
    pattern: Pattern,
    problem: Problem,
    gpu: Gpu,
    part: str,
    *,
    lengths: tuple[int, int] | None = None,
    budget: Budget = QUICK,
    storage: str | Path | None = None,
    tuned: Path | None = None,
    **options: Any,
) -> tuple[GradientTarget, TuneResult]:
    """Tune the gradients of ``part``, "queries", "keys" or "fused", on the GPU here; arguments and errors as ``winners.tune_pattern``."""
    target = GradientTarget.for_part(pattern, problem, gpu, part, lengths=lengths)
    known, _ = store.lookup(
        pattern,
        problem,
        gpu,
        target.template,
        target.labels,
        lengths=(target.q_len, target.kv_len),
        root=tuned,
    )
    seeds = [known, *target.starts]
    return target, tune(target, budget=budget, storage=storage, seeds=seeds, **options)
