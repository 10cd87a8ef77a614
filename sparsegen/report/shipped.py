"""The patterns that come with the package."""

from __future__ import annotations

from sparsegen.paths import data_dir
from sparsegen.spec.pattern import Pattern


def shipped() -> list[dict[str, str]]:
    """Name, summary and file of every shipped pattern, by name."""
    found = []
    for path in sorted(data_dir("patterns").glob("*.yaml")):
        pattern = Pattern.from_yaml(path)
        found.append({"name": path.stem, "summary": pattern.summary or "", "file": str(path)})
    return found
