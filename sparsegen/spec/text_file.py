"""A file of text that a person names: read up to a limit, for it may be any file."""

from __future__ import annotations

from pathlib import Path

from sparsegen.errors import InputError


def read_text(path: str | Path, most_bytes: int) -> str:
    """Its text.  InputError where it cannot be read, is longer than ``most_bytes`` (a device never ends), or is no UTF-8."""
    try:
        with open(path, "rb") as file:
            content = file.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise InputError(f"{path}: is longer than {most_bytes} bytes")
        return content.decode("utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
