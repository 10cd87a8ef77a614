"""Configurations on record that the compiler of this machine refuses: passed over, named, and kept with the artifact.

A row of ``tuned/`` may come from another version of the compiler.  Where the one here refuses it, a build that tunes nothing
goes on to the next step of the look-up.  What was refused stands in the artifact, so that a reader who looks
up again comes to the same decision without compiling.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sparsegen.artifact.entry import Artifact
from sparsegen.artifact.manifest import Decision
from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.errors import ArtifactError, ToolchainError

REFUSED = "refused.json"  # of an entry; there only where something was refused
# part of an artifact -> (schedule, the template's configuration) -> why the compiler refuses it
Refused = Mapping[str, Mapping[tuple[str, LaunchConfig], str]]


@dataclass(frozen=True)
class OnRecord:
    """A schedule and configuration that the look-up gave a kernel, of the part of an artifact that it was looked up for.

    ``spill_bytes``: how many bytes a thread it may spill, as while tuning; None for a kernel that no tuning measures.
    """

    part: str
    label: str
    config: LaunchConfig
    spill_bytes: int | None = None


class RefusedError(ToolchainError):
    """The compiler refuses what is on record; the message says why, in one sentence."""

    def __init__(self, given: OnRecord, why: str):
        super().__init__(why)
        self.given = given


def build_past(attempt: Callable[[Refused], Decision], directory: Path) -> Decision:
    """What ``attempt`` builds into ``directory``, knowing what the compiler has refused so far.

    Every refusal is one more attempt, in an empty folder; the last one has the template's default, whose errors are the build's.
    """
    refused: dict[str, dict[tuple[str, LaunchConfig], str]] = {}
    while True:
        try:
            decision = attempt(refused)
        except RefusedError as error:
            given, of_part = error.given, refused.setdefault(error.given.part, {})
            if (given.label, given.config) in of_part:  # the look-up gave it again
                raise
            of_part[given.label, given.config] = str(error)
            _empty(directory)
            continue
        if refused:
            (directory / REFUSED).write_text(_text(refused), encoding="utf-8")
        return decision


def refused_by(artifact: Artifact) -> Refused:
    """What was refused when ``artifact`` was built.  ArtifactError where its record cannot be read."""
    if REFUSED not in artifact.manifest.files:
        return {}
    out: dict[str, dict[tuple[str, LaunchConfig], str]] = {}
    try:
        for one in json.loads(artifact.read(REFUSED)):
            found = one["label"], LaunchConfig.of(one["config"])
            out.setdefault(one["part"], {})[found] = one["why"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"{artifact.path}: {REFUSED} is damaged ({error}); build it again"
        ) from error
    return out


def _text(refused: Refused) -> str:
    listed = [
        {"part": part, "label": label, "config": config.as_dict(), "why": why}
        for part, found in refused.items()
        for (label, config), why in found.items()
    ]
    return json.dumps(listed, sort_keys=True, indent=1) + "\n"


def _empty(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
