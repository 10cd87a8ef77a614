"""What the commands print: tables and JSON on stdout, messages and progress on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from sparsegen.cli.notices import said


class Report(Protocol):
    """Receives progress of long work: ``done`` of ``total`` steps, and one line about the newest."""

    def __call__(self, done: int, total: int, message: str) -> None: ...


def emit(value: Any, as_json: bool, text: str) -> None:
    """Print ``value`` as one JSON value for machines, or ``text`` for a person.

    An object also says what was warned of; people, and readers of lists, have that on stderr.
    """
    if as_json and isinstance(value, dict):
        value = {**value, "warnings": said()}
    print(json.dumps(value, indent=2, sort_keys=False) if as_json else text)


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Aligned columns; numbers to the right, text to the left, no trailing blanks."""
    cells = [[str(c) for c in row] for row in rows]
    if not cells:
        return "  ".join(header) + "\n(none)"
    widths = [max(len(r[i]) for r in [list(header), *cells]) for i in range(len(header))]
    right = [all(_is_number(r[i]) for r in cells) for i in range(len(header))]
    lines = []
    for row in [list(header), *cells]:
        parts = [
            c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)
        ]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


def artifacts(count: int) -> str:
    """So many of them, for a person."""
    return f"{count} artifact{'s' * (count != 1)}"


def size(count: int) -> str:
    """Bytes for a person, in binary units."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def age(seconds: float) -> str:
    """How long ago, for a person."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


@contextmanager
def progress(what: str) -> Iterator[Report]:
    """A bar on a terminal, plain lines in a log; both on stderr, so that stdout stays for results."""
    if not sys.stderr.isatty():
        yield lambda done, total, message: print(
            f"{what} {done}/{total}: {message}", file=sys.stderr, flush=True
        )
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, message: bar.update(
            task, completed=done, total=total, description=message
        )


def lengths(text: str, kv_length: int | None) -> tuple[int, int]:
    """(q_len, kv_len) of ``--length N[,M]`` and ``--kv-length M``; a usage error for anything else."""
    import typer

    from sparsegen.spec.fields import LIMIT

    def is_length(part: str) -> bool:
        return part.isascii() and part.isdigit() and len(part) < 20 and 0 < int(part) <= LIMIT

    parts = text.replace("_", "").split(",")
    if len(parts) > 2 or not all(map(is_length, parts)):
        wanted = f"--length must be N or N,M with numbers from 1 to {LIMIT}"
        raise typer.BadParameter(f"{wanted}, got {text!r}")
    if kv_length is not None and len(parts) == 2:
        raise typer.BadParameter("give the number of keys once: --length N,M or --kv-length M")
    if kv_length is not None and kv_length > LIMIT:
        raise typer.BadParameter(f"--kv-length must be from 1 to {LIMIT}, got {kv_length}")
    return int(parts[0]), kv_length or int(parts[-1])


def as_tile(text: str) -> tuple[int, int]:
    """(block_m, block_n) of ``--tile MxN``; a usage error unless both are powers of two from 16 to 256."""
    import typer

    parts = text.lower().split("x")
    allowed = [str(2**n) for n in range(4, 9)]
    if len(parts) != 2 or not all(p in allowed for p in parts):
        raise typer.BadParameter(f"--tile must be MxN, each of {', '.join(allowed)}; got {text!r}")
    return int(parts[0]), int(parts[1])


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).replace(",", "").replace("%", "", 1).lstrip("-").isdigit()
