"""``sparsegen tune`` and the tuned rows that ``sparsegen check`` looks at."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsegen.errors import ToolchainError
from sparsegen.paths import data_dir

if TYPE_CHECKING:
    from sparsegen.spec.pattern import Pattern
    from sparsegen.tune.store import Measured, Row


def tune_one(
    pattern: str,
    *,
    storage: str | None = None,
    budget_s: float | None = None,
    keep: bool = False,
    jobs: int | None = None,
) -> dict[str, Any]:
    """Tune one pattern (a file or a shipped name) on the GPU here, and report the winner as plain values.

    ``storage``: default the study that ``compile --tune`` reads, so that nothing is measured twice.  ``budget_s``:
    seconds; ``None`` for the quick budget.  ``keep`` writes the winner to ``tuned/``.
    """
    from sparsegen.artifact.rendering import considered
    from sparsegen.report.built import among
    from sparsegen.spec.gpu import current_gpu
    from sparsegen.spec.pattern import Pattern
    from sparsegen.spec.problem import Problem
    from sparsegen.tune import winners
    from sparsegen.tune.progress import shown
    from sparsegen.tune.schedules import candidates_of, split, times_us
    from sparsegen.tune.tuner import QUICK, full

    spec, gpu = Pattern.from_yaml(pattern), current_gpu()
    if gpu is None:
        raise ToolchainError("tuning measures on a GPU and there is none here")
    with shown(f"tune {spec.name}") as progress:
        target, result = winners.tune_pattern(
            spec,
            spec.problem or Problem(),
            gpu,
            budget=QUICK if budget_s is None else full(budget_s),
            storage=_study(gpu.name) if storage is None else storage,
            jobs=jobs,
            progress=progress,
        )
    kept = winners.keep(target, result) if keep else None
    label, config = split(result.config, target.labels)
    measured = times_us(result.trials, target.labels)
    listed, _ = considered(candidates_of(spec, target.problem), measured)
    return {
        "pattern": spec.name,
        "gpu": gpu.name,
        "best_us": result.time_us,
        "default_us": result.baseline_us,
        "measured": result.complete,
        "schedule": among(label, listed),
        "config": str(config),
        "how": result.how,
        "storage": result.storage,
        "kept": None if kept is None else str(kept),
    }


def stale_rows(gpus: Sequence[str]) -> list[str]:
    """Rows of ``tuned/`` that were measured for another version of a pattern or template, in words."""
    from sparsegen.codegen import load_template
    from sparsegen.spec.gpu import find_gpu
    from sparsegen.spec.pattern import Pattern
    from sparsegen.spec.shipped import shipped_patterns
    from sparsegen.tune.store import errors

    shipped = {name: Pattern.from_yaml(p) for name, p in shipped_patterns().items()}
    patterns = {name: pattern.digest() for name, pattern in shipped.items()}
    folders = [p for p in sorted(data_dir("templates").iterdir()) if p.is_dir()]
    templates = {p.name: load_template(p.name).digest for p in folders}
    names = dict.fromkeys(find_gpu(gpu).name for gpu in gpus)
    root = data_dir("tuned")

    def labels(row: Row) -> tuple[str, ...]:
        return labels_of_row(shipped[row.pattern], row.problem)

    return [e for name in names for e in errors(root, name, patterns, templates, labels)]


def labels_of_row(pattern: Pattern, measured: Measured) -> tuple[str, ...]:
    """The candidates that a tuning chose among, best prediction first: of the pattern's problem if it has these lengths."""
    from dataclasses import replace

    from sparsegen.spec.problem import Problem
    from sparsegen.tune.schedules import candidates_of, labels_of

    problem = pattern.problem or Problem()
    at = (measured.q_len, measured.kv_len)
    if at not in problem.lengths:
        problem = replace(problem, lengths=(at,))
    return labels_of(candidates_of(pattern, problem))


def _study(gpu: str) -> Path:
    from sparsegen.artifact.store import default_root

    folder = default_root() / "studies"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder / f"{gpu}.sqlite"
