"""Rows of ``tuned/`` as the history page shows them: times, configurations in words, and why a row is stale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.errors import ArtifactError, SparsegenError, TuneError
from sparsegen.report.tuning import labels_of_row
from sparsegen.tune import store
from sparsegen.tune.schedules import SCHEDULE, split

if TYPE_CHECKING:
    from sparsegen.codegen import Template
    from sparsegen.spec.pattern import Pattern

CHOSEN = ("KERNEL", SCHEDULE)  # choices of a text; they have columns of their own


@dataclass(frozen=True)
class Winner:
    """One row of ``tuned/<gpu>/``.

    ``time_us`` and ``baseline_us`` are medians of the same rounds; ``stale``: what has changed since, in sentences.
    ``kernel`` and ``schedule`` are empty where the row had nothing to choose.
    """

    gpu: str
    pattern: str
    template: str
    problem: str
    time_us: float
    baseline_us: float
    noise: float
    trials: int
    kernel: str
    schedule: str
    config: str
    versions: str
    date: str
    stale: tuple[str, ...]

    @property
    def speedup(self) -> float:
        """How many times as fast as the template's default."""
        return self.baseline_us / self.time_us


def winners(root: Path, patterns: Mapping[str, Pattern]) -> list[Winner]:
    """All rows below ``root``, by GPU type, pattern, template and problem; none where there is no such folder.

    ``patterns``: the shipped ones by name, to tell which rows are stale.  Raises ``ArtifactError`` for a damaged file.
    """
    templates = _templates()
    found = []
    for folder in sorted(p for p in root.glob("*") if p.is_dir()):
        for path in sorted(folder.glob("*.json")):
            for row in store.read(root, folder.name, path.stem):
                if not (row.time_us > 0 and row.baseline_us > 0):
                    raise ArtifactError(
                        f"{path}: times must be above 0, got {row.time_us} and {row.baseline_us}"
                    )
                found.append(_winner(folder.name, row, patterns, templates))
    return found


def problem_words(p: store.Measured) -> str:
    """``B1 H32:8 D128:128 bfloat16 16384x16384``, as ``history.csv`` writes it."""
    return (
        f"B{p.batch} H{p.heads}:{p.kv_heads} D{p.head_dim}:{p.value_dim} {p.dtype} "
        f"{p.q_len}x{p.kv_len}"
    )


def config_words(config: Mapping[str, Any], template: Template | None) -> str:
    """Knobs as words: ``block m 128, heavy first, no tma``.

    Only the template knows its knobs, so the words come from their names; one whose condition does not hold is left out.
    """
    conditions = {k.name: k.when for k in template.knobs if k.when} if template else {}
    words = []
    for name, value in config.items():
        condition = conditions.get(name)
        if name in CHOSEN or (condition and config.get(condition[0]) != condition[1]):
            continue
        plain = name.removeprefix("num_").replace("_", " ").lower()
        if isinstance(value, bool):
            words.append(plain if value else f"no {plain}" if len(plain) < 4 else f"not {plain}")
        else:
            words.append(f"{plain} {value}")
    return ", ".join(words)


def _winner(
    gpu: str, row: store.Row, patterns: Mapping[str, Pattern], templates: Mapping[str, Template]
) -> Winner:
    return Winner(
        gpu=gpu,
        pattern=row.pattern,
        template=row.template,
        problem=problem_words(row.problem),
        time_us=row.time_us,
        baseline_us=row.baseline_us,
        noise=row.noise,
        trials=row.trials,
        kernel=str(row.config.get("KERNEL", "")),
        schedule=str(row.config.get(SCHEDULE, "")),
        config=config_words(row.config, templates.get(row.template)),
        versions=", ".join(f"{n} {v}" for n, v in sorted(row.versions.items())),
        date=row.date,
        stale=tuple(_stale(row, patterns, templates)),
    )


def _stale(
    row: store.Row, patterns: Mapping[str, Pattern], templates: Mapping[str, Template]
) -> list[str]:
    """Why today's compiler would not choose this row as it was measured."""
    pattern, template = patterns.get(row.pattern), templates.get(row.template)
    if pattern is None:
        return [f"there is no shipped pattern named {row.pattern}"]
    if template is None:
        return [f"there is no template named {row.template}"]
    reasons = store.mismatches(row, pattern.digest(), template.digest)
    if SCHEDULE in row.config:
        try:
            labels = labels_of_row(pattern, row.problem, row.template)
            split(LaunchConfig.of(row.config), labels)
        except TuneError as error:
            reasons.append(str(error))
        except SparsegenError as error:  # the pattern cannot be scheduled at these lengths any more
            reasons.append(f"no schedule for {row.problem.q_len}x{row.problem.kv_len}: {error}")
    return reasons


def _templates() -> dict[str, Template]:
    from sparsegen.codegen.gradient_template import tuned_templates

    return tuned_templates()
