"""stdout and stderr as a shell may leave them: closed, full, without our characters, or with a reader that went away."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

MOST_LINES = 20  # of an error; a file of thousands of mistakes is mended from its first ones


@contextmanager
def steady() -> Iterator[None]:
    """A command within: what it prints is written at the end, and where that fails no traceback follows.

    A closed stream takes everything and keeps nothing (``print`` would put messages for stderr into stdout); a character that
    stdout does not have is written as its escape.  Exit code 1: quietly where the reader went away (``| head``), with one
    sentence where nothing more can be written.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            setattr(sys, name, os.fdopen(nowhere, "w", encoding="utf-8"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # now, while it can still be said
    except OSError as error:
        if error.errno == errno.ENOSPC and error.filename is None:
            print(f"the output cannot be written: {error.strerror}", file=sys.stderr)
        elif error.errno != errno.EPIPE:
            raise
        _forget_stdout()
        sys.exit(1)


def shortened(text: str) -> str:
    """``text``, or its first lines and how many more there are."""
    lines = text.splitlines()
    if len(lines) <= MOST_LINES:
        return text
    return "\n".join([*lines[:MOST_LINES], f"… and {len(lines) - MOST_LINES} more"])


def _forget_stdout() -> None:
    """What is still in its buffer would be written, and fail, once more when Python ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
