"""Every error that sparsegen raises on purpose.

    SparsegenError                 base: one readable message, no traceback on the command line (exit code 1)
    ├── SpecError                  a pattern file or dict has mistakes; all of them, each with its place
    ├── UnsupportedError           valid, but the backend asked for cannot do it; never a silent fallback
    ├── InputError (ValueError)    tensors or run-time data at a call do not fit the pattern or the kernel
    ├── ToolchainError             a compiler, driver, GPU or package that this step needs is not here
    ├── CacheMiss                  no artifact under this key; says which field differs from the nearest one
    ├── ArtifactError              an artifact, store or tuned file is damaged or refuses to load
    └── TuneError                  tuning could not finish (no valid configuration, storage unreachable)

A missing or unknown keyword of a compiled pattern is a plain ``TypeError``, as for any Python function.
"""

from __future__ import annotations

from dataclasses import dataclass


class SparsegenError(Exception):
    """Base of all errors raised on purpose; ``str(error)`` is one message for a person."""


@dataclass(frozen=True)
class Mistake:
    """One mistake in a pattern: where it is, what stands there, what is allowed.

    ``line`` and ``column`` count from 1; both are 0 when the pattern did not come from a file.
    """

    file: str
    line: int
    column: int
    path: str  # e.g. mask.any_of[1].window.size
    message: str  # what is allowed and what was found

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}: " if self.line else f"{self.file}: "
        return place + (f"{self.path}: " if self.path else "") + self.message


class SpecError(SparsegenError):
    """A pattern has mistakes.  ``mistakes`` holds every one of them, in file order."""

    def __init__(self, mistakes: list[Mistake]):
        self.mistakes = tuple(sorted(mistakes, key=lambda m: (m.line, m.column, m.path)))
        super().__init__("\n".join(map(str, self.mistakes)))


class UnsupportedError(SparsegenError):
    """The pattern is valid but this backend cannot run it; the message names the line of the spec."""


class InputError(SparsegenError, ValueError):
    """Tensors or run-time data given to a call do not fit."""


class ToolchainError(SparsegenError):
    """Something this step needs is missing on this machine; the message says what to install or set."""


class CacheMiss(SparsegenError):
    """No artifact is stored under the key asked for."""


class ArtifactError(SparsegenError):
    """A stored artifact or tuned file is damaged, or made for something else."""


class TuneError(SparsegenError):
    """Tuning could not finish."""
