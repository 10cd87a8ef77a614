"""``tuned/history.csv``: every figure ever measured, so that a slow-down can be dated.  It only grows."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from sparsegen.errors import ArtifactError


@dataclass(frozen=True)
class Entry:
    """One line: µs are medians, ``spread_us`` is slowest minus fastest round; ``commit`` may be a package version."""

    date: str
    commit: str
    gpu: str
    driver: str
    torch: str
    triton: str
    pattern: str
    problem: str
    config: str
    median_us: float
    spread_us: float
    baseline: str
    baseline_us: float


COLUMNS = tuple(field.name for field in fields(Entry))
_NUMBERS = ("median_us", "spread_us", "baseline_us")


def append(path: Path, entries: Sequence[Entry]) -> None:
    """Add lines at the end; several processes may do so at once.

    Raises:
        ArtifactError: the file has other columns, or its last line is cut off.
    """
    import filelock

    path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(path.parent / f".{path.name}.lock", timeout=60):
        new = not path.exists() or path.stat().st_size == 0
        if not new:
            _check_header(path)
            _check_end(path)
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            if new:
                writer.writerow(COLUMNS)
            writer.writerows(astuple(entry) for entry in entries)
            file.flush()
            os.fsync(file.fileno())


def read(path: Path) -> list[Entry]:
    """All lines, oldest first; none if there is no file.

    Raises:
        ArtifactError: other columns, or a line that does not fit them; the message has its number.
    """
    if not path.exists() or path.stat().st_size == 0:
        return []
    _check_header(path)
    found = []
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.reader(file)
        try:
            next(reader)
            for line in reader:
                found.append(_entry(line, f"{path}:{reader.line_num}"))
        except (csv.Error, UnicodeDecodeError) as error:
            place = f"{path}: after line {reader.line_num}"
            raise ArtifactError(f"{place}: not readable as CSV in UTF-8: {error}") from error
    _check_end(path)
    return found


def _entry(line: Sequence[str], place: str) -> Entry:
    if len(line) != len(COLUMNS):
        raise ArtifactError(f"{place}: the line has {len(line)} fields; expected {len(COLUMNS)}")
    named = dict(zip(COLUMNS, line))
    numbers = {}
    for name in _NUMBERS:
        text = named.pop(name)
        try:
            numbers[name] = float(text)
        except ValueError:
            raise ArtifactError(f"{place}: {name} must be a number, got {text[:60]!r}") from None
    return Entry(**named, **numbers)  # type: ignore[arg-type]


def _check_header(path: Path) -> None:
    with path.open(newline="", encoding="utf-8") as file:
        try:
            header = tuple(next(csv.reader(file), ()))
        except (csv.Error, UnicodeDecodeError) as error:
            raise ArtifactError(f"{path}: not readable as CSV in UTF-8: {error}") from error
    if header != COLUMNS:
        raise ArtifactError(
            f"{path} has the columns {', '.join(header)}; expected {', '.join(COLUMNS)}"
        )


def _check_end(path: Path) -> None:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            raise ArtifactError(f"{path}: the last line is cut off; complete or delete it")
