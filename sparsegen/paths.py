"""Where the files that come with the package lie: templates, patterns and measured winners.  And files written whole."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Literal

from sparsegen.errors import ToolchainError

DataName = Literal["templates", "patterns", "tuned"]


def data_dir(name: DataName) -> Path:
    """The folder ``name``: inside the package first (a wheel), else beside it (a checkout, an editable install).

    Only ``__file__`` decides: an editable install leaves a copy of the data in site-packages that must not be found.

    Raises:
        ToolchainError: neither place has the folder, so the installation is incomplete.
    """
    package = Path(__file__).resolve().parent
    places = (package / "_data" / name, package.parent / name)
    for place in places:
        if place.is_dir():
            return place
    raise ToolchainError(
        f"the folder {name}/ that comes with sparsegen is missing; looked in "
        + " and ".join(map(str, places))
        + "; install sparsegen again"
    )


def write_whole(path: Path, content: bytes) -> None:
    """Write beside, then rename: who stops in between, or fills the disk, leaves the file that was there and no half of one.

    A new file has the permissions that the umask says, another keeps its own.  OSError where it cannot be written.
    """
    beside = path.with_name(f".{path.name[:20]}.{os.getpid()}-{threading.get_ident()}")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
