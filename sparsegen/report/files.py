"""Files that a command is asked to write: what is wrong with one is said before the work, and it appears whole."""

from __future__ import annotations

import os
from pathlib import Path

from sparsegen.errors import InputError
from sparsegen.paths import write_whole


def check_writable(path: Path) -> None:
    """InputError where no file can be written at ``path``: in time, before seconds or hours of work for it."""
    folder = path.absolute().parent
    if path.is_dir():
        raise InputError(f"{path}: cannot be written: it is a folder")
    if not folder.is_dir():
        raise InputError(f"{path}: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise InputError(f"{path}: cannot be written: {folder} is no writable folder")


def check_kept(folder: Path) -> None:
    """InputError where ``--keep`` cannot write to ``folder``, which is ``tuned/``: before anything is measured."""
    if not os.access(folder, os.W_OK):
        raise InputError(
            f"--keep writes to {folder}, which cannot be written: leave it out, or use a checkout (pip install -e)"
        )


def write(path: Path, content: bytes) -> None:
    """A file of this content, whole, or the one that was there; InputError where that cannot be.

    A pipe or a device is written as it is.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(content)
        else:
            write_whole(Path(os.path.realpath(path)), content)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error
