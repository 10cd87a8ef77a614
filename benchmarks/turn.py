"""Whose turn it is to measure on a GPU, where several benchmarks compile at the same time.

``session.py`` starts the next stage of a plan while one measures, and names a file in ``SPARSEGEN_TURN``.  A benchmark calls
``take`` when what it measures is compiled; from then on no other one measures there until its process ends.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import IO

import beforehand

NAMED_IN = "SPARSEGEN_TURN"
_held: list[IO[str]] = []  # open until the process ends


def is_asked() -> bool:
    """Whether others might measure here: a session says so."""
    return bool(os.environ.get(NAMED_IN))


def take() -> None:
    """Waits until nobody else measures on this GPU; a process takes its turn once.  The end of one that only compiles."""
    beforehand.over()
    if is_asked() and not _held:
        start = time.monotonic()
        _held.append(hold(Path(os.environ[NAMED_IN])))
        print(f"waited {time.monotonic() - start:.0f} s for its turn", flush=True)


def hold(path: Path) -> IO[str]:
    """The turn, once it is free, until what this gives is closed; the file says which process group has it."""
    file = path.open("a")
    fcntl.flock(file, fcntl.LOCK_EX)
    file.truncate(0)
    file.write(str(os.getpgrp()))
    file.flush()
    return file


def holder(path: Path) -> int:
    """The process group that took the turn last; 0: none."""
    return int(path.read_text() or 0) if path.exists() else 0
