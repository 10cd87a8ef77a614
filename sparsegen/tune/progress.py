"""Showing how far a tuning is: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TextIO


@dataclass(frozen=True)
class Progress:
    """``done`` of ``total`` trials; the best time so far against the baseline, in µs, None before there is one."""

    done: int
    total: int
    best_us: float | None
    baseline_us: float | None

    def __str__(self) -> str:
        if self.best_us is None:
            return "nothing measured yet"
        text = f"best {self.best_us:,.1f} µs"
        if self.baseline_us:
            ratio = self.baseline_us / self.best_us
            text += f", baseline {self.baseline_us:,.1f} µs ({ratio:.2f}x)"
        return text


OnProgress = Callable[[Progress], None]


@contextlib.contextmanager
def shown(title: str, stream: TextIO | None = None) -> Iterator[OnProgress]:
    """A callback that shows progress on ``stream`` (default stderr): a bar if it is a terminal, else lines."""
    out = stream or sys.stderr
    with _bar(title, out) if out.isatty() else _lines(title, out) as callback:
        yield callback


@contextlib.contextmanager
def _bar(title: str, out: TextIO) -> Iterator[OnProgress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[best]}"),
    )
    with Bars(*columns, console=Console(file=out)) as bars:
        task = bars.add_task(title, total=None, best="starting")

        def show(progress: Progress) -> None:
            bars.update(task, completed=progress.done, total=progress.total, best=str(progress))

        yield show


@contextlib.contextmanager
def _lines(title: str, out: TextIO, every_s: float = 5.0) -> Iterator[OnProgress]:
    """A line at the first and the last call, at each new best, and otherwise at most every ``every_s``."""
    last: list[Progress] = []
    written = [float("-inf")]

    def write(progress: Progress) -> None:
        print(f"{title}: {progress.done}/{progress.total} trials, {progress}", file=out, flush=True)
        written[0] = time.monotonic()

    def show(progress: Progress) -> None:
        better = not last or progress.best_us != last[-1].best_us
        last[:] = [progress]
        if better or time.monotonic() - written[0] >= every_s or progress.done >= progress.total:
            write(progress)

    yield show
