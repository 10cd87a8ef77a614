"""Where the files that come with the package lie: templates, patterns and measured winners."""

from __future__ import annotations

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
