"""Measured winners: ``tuned/<gpu>/<pattern>.json``, written only by the tuner and looked up by everybody.

A file is one object: the GPU, its architecture, and ``rows``, one problem a line, keys sorted, so that a change of
one winner is a change of one line.
"""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsegen.codegen.knobs import LaunchConfig, Value
from sparsegen.errors import ArtifactError, TuneError
from sparsegen.paths import data_dir
from sparsegen.tune import untuned
from sparsegen.tune.schedules import SCHEDULE, joined, split
from sparsegen.tune.space import Space

if TYPE_CHECKING:
    from sparsegen.codegen import Template
    from sparsegen.spec.gpu import Gpu
    from sparsegen.spec.pattern import Pattern
    from sparsegen.spec.problem import Problem

_LOG = logging.getLogger("sparsegen.tune")
_SAID: set[str] = set()  # look-up steps and mismatches are told once a process


class StaleTuningWarning(UserWarning):
    """A stored winner was measured with another pattern or template than the one at hand."""


@dataclass(frozen=True)
class Measured:
    """The problem that was measured: one pair of lengths."""

    head_dim: int
    value_dim: int
    heads: int
    kv_heads: int
    batch: int
    dtype: str
    q_len: int
    kv_len: int

    @classmethod
    def of(cls, problem: Problem, q_len: int, kv_len: int) -> Measured:
        """The fields of ``problem`` with one pair of its lengths."""
        return cls(
            problem.head_dim,
            problem.value_dim or problem.head_dim,
            problem.heads,
            problem.kv_heads or problem.heads,
            problem.batch,
            str(problem.dtype),
            q_len,
            kv_len,
        )


@dataclass(frozen=True)
class Row:
    """One measured winner.

    ``time_us`` and ``baseline_us`` (the template's default) are medians of the same rounds; ``noise`` is how
    far their ratio strayed from round to round (``measure.Measurement``); ``trials`` counts measured configurations; ``versions`` are of torch, triton and the
    driver; ``date`` is ISO 8601.
    """

    pattern: str
    pattern_digest: str
    template: str
    template_digest: str
    problem: Measured
    config: Mapping[str, Value]
    time_us: float
    baseline_us: float
    noise: float
    trials: int
    versions: Mapping[str, str]
    date: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Row:
        """From JSON.

        Raises:
            TypeError, KeyError: a field is missing or unknown.
        """
        names = {field.name for field in fields(cls)}
        if set(values) != names:
            odd = sorted(names ^ set(values))
            raise KeyError(f"fields {', '.join(odd)} are missing or unknown")
        return cls(**{**values, "problem": Measured(**values["problem"])})


def read(root: Path, gpu: str, pattern: str) -> list[Row]:
    """The rows of one file; none if there is no file.

    Raises:
        ArtifactError: the file is damaged.
    """
    return _read(root / gpu / f"{pattern}.json")[1]


def write(root: Path, gpu: Gpu, row: Row) -> Path:
    """Put ``row`` in its file, in place of an older one for the same problem and template.

    Several processes may write at once; a reader sees the old file or the new one, nothing between.
    """
    import filelock

    path = root / gpu.name / f"{row.pattern}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(path.parent / ".lock", timeout=60):
        kept = [
            old
            for old in _read(path)[1]
            if (old.problem, old.template) != (row.problem, row.template)
        ]
        rows = sorted([*kept, row], key=lambda r: (r.template, _order(r.problem)))
        header = {"arch": gpu.arch, "backend": gpu.backend, "gpu": gpu.name}
        _replace(path, _text(header, rows))
    return path


def lookup(
    pattern: Pattern,
    problem: Problem,
    gpu: Gpu,
    template: Template,
    labels: Sequence[str],
    *,
    lengths: tuple[int, int] | None = None,
    root: Path | None = None,
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
    """
    q_len, kv_len = lengths or next(iter(problem.lengths), (0, 0))
    wanted = Measured.of(problem, q_len, kv_len)
    place = f"{pattern.name} on {gpu.name}"
    root = root or data_dir("tuned")
    by_rule = _by_rule(root, pattern, problem, wanted, gpu, template, labels)
    for step, row in _steps(root, pattern, wanted, gpu, template.name):
        if row.problem != wanted and (found := next(by_rule, None)):
            return found
        config = _usable(row, problem, gpu, template, labels, place)
        if config is not None:
            for mismatch in mismatches(row, pattern.digest(), template.digest):
                _warn_once(
                    f"tuned row of {place}: {mismatch}; its configuration is used all the same"
                )
            _log_once(f"{place}: configuration by {step}")
            return config, step
    if found := next(by_rule, None):
        return found
    _log_once(f"{place}: configuration by template default")
    default = template.default(problem, gpu)
    config = Space(tuple(template.knobs)).canonical(default.as_dict())
    return joined(config, labels[0], labels), "template default"


def _by_rule(
    root: Path,
    pattern: Pattern,
    problem: Problem,
    wanted: Measured,
    gpu: Gpu,
    template: Template,
    labels: Sequence[str],
) -> Iterator[tuple[LaunchConfig, str]]:
    """What the rule of this GPU says, once, and when it is asked for: features take an analysis."""
    answer = untuned.configuration(root, pattern, problem, wanted, gpu, template)
    place = f"{pattern.name} on {gpu.name}"
    if answer.warning:
        _warn_once(answer.warning)
    if answer.config is None:
        if answer.why:
            _log_once(f"{place}: the rule is not used: {answer.why}")
        return
    step = f"rule of the GPU ({answer.name})"
    _log_once(f"{place}: configuration by {step}")
    yield joined(answer.config, labels[0], labels), step


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
            rows = _read(path)[1]
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
                    found += [f"{path}: {wrong}" for wrong in _wrong_schedule(row, labels(row))]
    return found


def _wrong_schedule(row: Row, labels: Sequence[str]) -> list[str]:
    try:
        split(LaunchConfig.of(row.config), labels)
    except TuneError as error:
        lengths = f"{row.problem.q_len}x{row.problem.kv_len}"
        return [f"the row of {row.pattern} at {lengths}: {error}"]
    return []


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
        header, here = _read(path)
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
        *_order(measured),
    )


def _order(problem: Measured) -> tuple[Any, ...]:
    return tuple(asdict(problem).values())


def _words(measured: Measured, wanted: Measured) -> str:
    """What differs, as it was measured."""
    ours, theirs = asdict(wanted), asdict(measured)
    return (
        ", ".join(f"{name} {theirs[name]}" for name in ours if ours[name] != theirs[name])
        or "same problem"
    )


def _usable(
    row: Row, problem: Problem, gpu: Gpu, template: Template, labels: Sequence[str], place: str
) -> LaunchConfig | None:
    for wrong in _wrong_schedule(row, labels):
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
    return joined(config, label, labels)


def _read(path: Path) -> tuple[dict[str, Any], list[Row]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = [Row.of(values) for values in content.pop("rows")]
    except FileNotFoundError:
        return {}, []
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"{path} is damaged ({error}); it is written by sparsegen tune only: restore or delete it"
        ) from error
    return content, rows


def _text(header: Mapping[str, Any], rows: list[Row]) -> str:
    lines = [f"{json.dumps(name)}: {json.dumps(header[name])}," for name in sorted(header)]
    listed = ",\n".join(json.dumps(row.as_dict(), sort_keys=True) for row in rows)
    return "{\n" + "\n".join(lines) + '\n"rows": [\n' + listed + "\n]\n}\n"


def _replace(path: Path, text: str) -> None:
    """Write beside, then rename: atomic on one file system."""
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(beside, 0o644)
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise


def _log_once(text: str) -> None:
    if text not in _SAID:
        _SAID.add(text)
        _LOG.info("%s", text)


def _warn_once(text: str) -> None:
    if text not in _SAID:
        _SAID.add(text)
        warnings.warn(text, StaleTuningWarning, stacklevel=3)
