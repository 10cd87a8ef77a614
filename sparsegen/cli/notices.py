"""Warnings of a command: one line ``warning: …`` each on stderr, and kept for the JSON object of ``--json``."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

_SAID: list[str] = []


def said() -> list[str]:
    """What was warned of since the command began, each sentence once."""
    return list(_SAID)


@contextmanager
def shown() -> Iterator[None]:
    """Python's warnings and those of the log reach a person as sentences: no class, no path, no line of ours."""
    before, log, handler = warnings.showwarning, logging.getLogger("sparsegen"), _Handler()
    handler.setLevel(logging.WARNING)
    warnings.showwarning = _show
    log.addHandler(handler)
    _SAID.clear()
    try:
        yield
    finally:
        warnings.showwarning = before
        log.removeHandler(handler)


def _say(text: str) -> None:
    sentence = " ".join(text.split())
    if sentence not in _SAID:
        _SAID.append(sentence)
        print(f"warning: {sentence}", file=sys.stderr, flush=True)


def _show(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    _say(str(message))


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _say(record.getMessage())
