"""The best known configuration: rows of ``tuned/`` (``rows``) and the rule of a GPU (``rule``), in documented steps.

What the compiler of this machine refuses of them is passed over, and named.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.errors import TuneError
from sparsegen.paths import data_dir
from sparsegen.tune import untuned
from sparsegen.tune.row_errors import errors, lengths_of, mismatches, wrong_schedule
from sparsegen.tune.rows import Measured, Row, order_of, read, read_file, write
from sparsegen.tune.schedules import joined, split
from sparsegen.tune.space import Space

if TYPE_CHECKING:
    from sparsegen.codegen import Template
    from sparsegen.spec.gpu import Gpu
    from sparsegen.spec.pattern import Pattern
    from sparsegen.spec.problem import Problem

__all__ = [
    "DEFAULT_STEP",
    "Measured",
    "RefusedTuningWarning",
    "Row",
    "StaleTuningWarning",
    "errors",
    "lookup",
    "mismatches",
    "read",
    "write",
]

_LOG = logging.getLogger("sparsegen.tune")
_SAID: set[str] = set()  # look-up steps and mismatches are told once a process
DEFAULT_STEP = "template default"  # the last one
Answer = tuple[str, str, LaunchConfig, Row | None]  # step, schedule, the template's configuration


class StaleTuningWarning(UserWarning):
    """A stored winner was measured with another pattern or template than the one at hand."""


class RefusedTuningWarning(UserWarning):
    """A stored winner is not used, since the compiler of this machine refuses it."""


def lookup(
    pattern: Pattern,
    problem: Problem,
    gpu: Gpu,
    template: Template,
    labels: Sequence[str],
    *,
    lengths: tuple[int, int] | None = None,
    root: Path | None = None,
    refused: Mapping[tuple[str, LaunchConfig], str] | None = None,
) -> tuple[LaunchConfig, str]:
    """The best known configuration, with the schedule where there is a choice, and the step that found it.

    Steps: "exact GPU" (this problem was measured), "rule of the GPU (...)" (the rule file, where it knows of such
    problems), "exact GPU, nearest problem (...)", "same architecture (...)", "template default".  A row of another head_dim, value_dim or dtype is never used, nor one that the template
    calls invalid here, nor, with a warning, one whose schedule is no candidate.  A row without a schedule, measured when
    there was nothing to choose, is used for the best prediction.  A row made for another version of the pattern or
    the template is used with a warning.  The step is logged once.

    Args:
        labels: of the candidate schedules for this problem, best prediction first.
        lengths: (q_len, kv_len); default the problem's first, if it has any.
        root: the folder ``tuned/``; default the one that comes with the package.
        refused: by (schedule, configuration), why the compiler here refuses a kernel.  A step that gives one of these is
            passed over with a warning, and the one that is returned names it; the template's default is not passed over.
    """
    q_len, kv_len = lengths or next(iter(problem.lengths), (0, 0))
    wanted = Measured.of(problem, q_len, kv_len)
    place = f"{pattern.name} on {gpu.name}"
    passed: list[str] = []
    answers = _answers(
        root or data_dir("tuned"), pattern, problem, wanted, gpu, template, labels, place
    )
    for step, label, config, row in answers:
        why = (refused or {}).get((label, config))
        if why is not None and step != DEFAULT_STEP:
            which = step if row is None else f"{step}, row of {row.pattern} at {lengths_of(row)}"
            passed.append(f"; passed over: {which}: {why}")
            what = "rule" if row is None else "tuned row"
            said = f"{what} of {place} is not used ({which}): {why}"
            _warn_once(said, category=RefusedTuningWarning)
            continue
        if row is not None:
            for mismatch in mismatches(row, pattern.digest(), template.digest):
                _warn_once(
                    f"tuned row of {place}: {mismatch}; its configuration is used all the same"
                )
        _log_once(f"{place}: configuration by {step}")
        return joined(config, label, labels), "".join([step, *passed])
    raise AssertionError("the template's default is an answer")


def _answers(
    root: Path,
    pattern: Pattern,
    problem: Problem,
    wanted: Measured,
    gpu: Gpu,
    template: Template,
    labels: Sequence[str],
    place: str,
) -> Iterator[Answer]:
    """What can be taken, in the order of the documented steps; the template's default comes last."""
    by_rule = _by_rule(root, pattern, problem, wanted, gpu, template, labels)
    for step, row in _steps(root, pattern, wanted, gpu, template.name):
        if row.problem != wanted:
            yield from by_rule
        found = _usable(row, problem, gpu, template, labels, place)
        if found is not None:
            yield (step, *found, row)
    yield from by_rule
    default = template.default(problem, gpu)
    config = Space(tuple(template.knobs)).canonical(default.as_dict())
    yield DEFAULT_STEP, labels[0], config, None


def _by_rule(
    root: Path,
    pattern: Pattern,
    problem: Problem,
    wanted: Measured,
    gpu: Gpu,
    template: Template,
    labels: Sequence[str],
) -> Iterator[Answer]:
    """What the rule of this GPU says, once, and when it is asked for: features take an analysis."""
    answer = untuned.configuration(root, pattern, problem, wanted, gpu, template)
    if answer.warning:
        _warn_once(answer.warning)
    if answer.config is not None:
        yield f"rule of the GPU ({answer.name})", labels[0], answer.config, None
    elif answer.why:
        _log_once(f"{pattern.name} on {gpu.name}: the rule is not used: {answer.why}")


def _steps(
    root: Path, pattern: Pattern, wanted: Measured, gpu: Gpu, template: str
) -> Iterator[tuple[str, Row]]:
    """Candidates in the order of the documented steps."""
    own = _matching(root / gpu.name, pattern, wanted, template)
    for row in own:
        near = f"nearest problem ({_words(row.problem, wanted)})"
        yield ("exact GPU" if row.problem == wanted else f"exact GPU, {near}"), row
    for folder in sorted(path for path in root.glob("*") if path.is_dir()):
        if folder.name == gpu.name:
            continue
        for row in _matching(folder, pattern, wanted, template, (gpu.backend, gpu.arch)):
            yield f"same architecture ({folder.name}: {_words(row.problem, wanted)})", row


def _matching(
    folder: Path,
    pattern: Pattern,
    wanted: Measured,
    template: str,
    architecture: tuple[str, Any] | None = None,
) -> list[Row]:
    """Rows for this pattern (by digest, then by name) that may serve ``wanted``, nearest first."""
    rows = []
    digest = pattern.digest()
    for path in sorted(folder.glob("*.json")):
        header, here = read_file(path)
        if architecture and (header.get("backend"), header.get("arch")) != architecture:
            continue
        rows += [r for r in here if r.pattern_digest == digest or r.pattern == pattern.name]
    same = [
        row
        for row in rows
        if row.template == template
        and (row.problem.head_dim, row.problem.value_dim, row.problem.dtype)
        == (wanted.head_dim, wanted.value_dim, wanted.dtype)
    ]
    return sorted(same, key=lambda r: (r.pattern_digest != digest, *_distance(r.problem, wanted)))


def _distance(measured: Measured, wanted: Measured) -> tuple[float, ...]:
    """Lengths first, in powers of two; then the number of heads that share a key head; then the number of tiles."""

    def apart(a: float, b: float) -> float:
        return abs(math.log2(max(a, 1) / max(b, 1)))

    return (
        apart(measured.kv_len, wanted.kv_len) + apart(measured.q_len, wanted.q_len),
        apart(measured.heads / measured.kv_heads, wanted.heads / wanted.kv_heads),
        apart(measured.batch * measured.heads, wanted.batch * wanted.heads),
        *order_of(measured),
    )


def _words(measured: Measured, wanted: Measured) -> str:
    """What differs, as it was measured."""
    ours, theirs = asdict(wanted), asdict(measured)
    return (
        ", ".join(f"{name} {theirs[name]}" for name in ours if ours[name] != theirs[name])
        or "same problem"
    )


def _usable(
    row: Row, problem: Problem, gpu: Gpu, template: Template, labels: Sequence[str], place: str
) -> tuple[str, LaunchConfig] | None:
    """Schedule and configuration of a row, or None where they cannot be here."""
    for wrong in wrong_schedule(row, labels):
        _warn_once(f"tuned row of {place} is not used: {wrong}")
        return None
    label, plain = split(LaunchConfig.of(row.config), labels)
    try:
        config = Space(tuple(template.knobs)).canonical(plain.as_dict())
    except TuneError as error:
        _warn_once(
            f"tuned row of {place} does not fit the template {template.name}: {error}; it is not used"
        )
        return None
    reason = template.invalid(config, problem, gpu)
    if reason is not None:
        _log_once(f"{place}: the row for {row.problem} is not used here: {reason}")
        return None
    return label, config


def _log_once(text: str) -> None:
    if text not in _SAID:
        _SAID.add(text)
        _LOG.info("%s", text)


def _warn_once(text: str, category: type[Warning] = StaleTuningWarning) -> None:
    if text not in _SAID:
        _SAID.add(text)
        warnings.warn(text, category, stacklevel=3)
