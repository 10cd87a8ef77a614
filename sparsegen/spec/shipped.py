"""The shipped pattern files by name, and reading one file or shipped pattern as text."""

from __future__ import annotations

import os
from pathlib import Path

from sparsegen.errors import InputError, Mistake, SpecError
from sparsegen.paths import data_dir
from sparsegen.spec.fields import did_you_mean

MOST_BYTES = 1024 * 1024  # of a file; the reader's own limit in characters is below it


def shipped_patterns() -> dict[str, Path]:
    """Name → file of every shipped pattern, sorted."""
    return {path.stem: path for path in sorted(data_dir("patterns").glob("*.yaml"))}


def read_file(path_or_name: str | Path) -> tuple[str, str]:
    """(text, stem of the file's name) of a file, or of a shipped pattern by its name.  SpecError if it cannot be read."""
    if not isinstance(path_or_name, (str, os.PathLike)):
        raise InputError(
            "a pattern must be a sparsegen.Pattern, a file or the name of a shipped one "
            f"(Pattern.from_dict takes a dict), got {type(path_or_name).__name__}"
        )
    path, shipped, file = Path(path_or_name), shipped_patterns(), str(path_or_name)
    if not file or "\n" in file:
        got = "a text of several lines (from_yaml_text reads those)" if file else "an empty name"
        message = f"a file or the name of a shipped pattern is needed, got {got}"
        raise SpecError([Mistake("<pattern>", 0, 0, "", message)])
    if file in shipped and not path.is_file():
        path = shipped[file]
    try:
        with path.open("rb") as opened:
            content = opened.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        near = did_you_mean(path.stem, shipped)
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        message = f"cannot be read: {reason}{near}; shipped patterns: {', '.join(shipped)}"
        raise SpecError([Mistake(file, 0, 0, "", message)]) from None
    if len(content) > MOST_BYTES:
        raise SpecError([Mistake(file, 0, 0, "", f"is longer than {MOST_BYTES} bytes")])
    try:
        return content.decode("utf-8-sig"), path.stem
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        column = error.start - content.rfind(b"\n", 0, error.start)
        message = f"is not UTF-8: byte 0x{content[error.start]:02x}"
        raise SpecError([Mistake(file, line, column, "", message)]) from None
