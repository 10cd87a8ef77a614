"""What is wrong with rows of ``tuned/`` today: the pattern, the template or the schedules have changed since."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.errors import ArtifactError, TuneError
from sparsegen.tune import untuned
from sparsegen.tune.rows import Row, read_file
from sparsegen.tune.schedules import SCHEDULE, split


def mismatches(row: Row, pattern_digest: str, template_digest: str) -> list[str]:
    """What has changed since the row was measured, in words."""
    found = []
    if row.pattern_digest != pattern_digest:
        found.append(
            f"pattern {row.pattern} was {row.pattern_digest[:12]} when measured, "
            f"now it is {pattern_digest[:12]}"
        )
    if row.template_digest != template_digest:
        found.append(
            f"template {row.template} was {row.template_digest[:12]} when measured, "
            f"now it is {template_digest[:12]}"
        )
    return found


def errors(
    root: Path,
    gpu: str,
    patterns: Mapping[str, str],
    templates: Mapping[str, str],
    labels: Callable[[Row], Sequence[str]],
    taken: Callable[[Row], bool] = lambda row: True,
) -> list[str]:
    """Everything wrong with the rows of one GPU: the list that ``sparsegen check`` reports.

    Args:
        patterns: digest of each pattern by name; a row of a pattern that is not here is an error.
        templates: digest of each template by name.
        labels: the candidate schedules of a row's pattern and problem; asked for rows that name a schedule only, since
            it takes an analysis.
        taken: which rows are looked at.
    """
    found = untuned.errors(root, gpu, templates)
    for path in sorted((root / gpu).glob("*.json")):
        try:
            rows = read_file(path)[1]
        except ArtifactError as error:
            found.append(str(error))
            continue
        for row in filter(taken, rows):
            if row.pattern not in patterns:
                found.append(f"{path}: there is no pattern named {row.pattern}")
            elif row.template not in templates:
                found.append(f"{path}: there is no template named {row.template}")
            else:
                now = patterns[row.pattern], templates[row.template]
                found += [f"{path}: {mismatch}" for mismatch in mismatches(row, *now)]
                if SCHEDULE in row.config:
                    found += [f"{path}: {wrong}" for wrong in wrong_schedule(row, labels(row))]
    return found


def wrong_schedule(row: Row, labels: Sequence[str]) -> list[str]:
    """One sentence where the schedule of a row is none of ``labels``."""
    try:
        split(LaunchConfig.of(row.config), labels)
    except TuneError as error:
        return [f"the row of {row.pattern} at {lengths_of(row)}: {error}"]
    return []


def lengths_of(row: Row) -> str:
    """Of queries and keys, as it was measured."""
    return f"{row.problem.q_len}x{row.problem.kv_len}"
