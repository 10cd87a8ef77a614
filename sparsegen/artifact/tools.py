"""The vendor tools that Triton ships: where they are and which version they have.  Nothing here imports Triton."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from importlib.util import find_spec
from pathlib import Path


def find_tool(name: str) -> Path | None:
    """``ptxas`` or ``cuobjdump``: Triton's own, else the one on PATH, else ``None``."""
    spec = find_spec("triton")
    for place in (spec.submodule_search_locations or []) if spec else []:
        shipped = Path(place) / "backends" / "nvidia" / "bin" / name
        if shipped.is_file():
            return shipped
    on_path = shutil.which(name)
    return Path(on_path) if on_path else None


@cache
def tool_version(name: str) -> str | None:
    """Version that the tool prints, e.g. ``12.8.93``; ``None`` where it is absent or does not run."""
    tool = find_tool(name)
    if tool is None:
        return None
    try:
        run = subprocess.run(
            [tool, "--version"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"V(\d+(?:\.\d+)+)", run.stdout)
    return found[1] if found else None
