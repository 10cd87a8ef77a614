"""Schedule and kernel text, when an artifact is built and when it is opened again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from sparsegen.artifact.entry import Artifact
from sparsegen.artifact.key import heads_and_masks
from sparsegen.artifact.manifest import Bucket, Considered
from sparsegen.errors import ArtifactError
from sparsegen.tune.schedules import candidates_of

if TYPE_CHECKING:
    from sparsegen.codegen import KernelSource
    from sparsegen.schedule.search import Candidate
    from sparsegen.schedule.tree import Schedule
    from sparsegen.spec.pattern import Pattern
    from sparsegen.spec.problem import Problem

SCHEDULE, PATTERN = "schedule.txt", "pattern.yaml"
SOURCE, HOPPER = "kernel.py", "hopper.py"  # as ``launch.module`` names them


def schedule_of(pattern: Pattern, problem: Problem, label: str) -> Schedule:
    """The candidate of that label.  Raises ArtifactError where this version finds no such candidate."""
    found = {c.schedule.label: c.schedule for c in candidates_of(pattern, problem)}
    if label not in found:
        known = ", ".join(map(repr, found))
        raise ArtifactError(
            f"{pattern.name} has no candidate schedule {label!r} in this version; it has {known}"
        )
    return found[label]


@lru_cache(maxsize=64)
def rendered(pattern: Pattern, schedule: Schedule, problem: Problem, template: str) -> KernelSource:
    """Kernel text; kept, since the key and the build ask for the same ones."""
    from sparsegen.codegen import render

    return render(pattern, schedule, problem, template)


def outline_of(
    pattern: Pattern, problem: Problem, artifact: Artifact, bucket: Bucket | None = None
) -> KernelSource:
    """The kernel that ``artifact`` must hold, over the schedule that was chosen for it.

    Its texts are the artifact's own, and nothing is rendered: a driver launches the binary.  Which candidates there are
    depends on the lengths and on how a mask was spelled, which are not in the key.  So the schedule is found from the
    pattern and the lengths that the artifact records, and must show the masks of its key.
    ``bucket``: the kernel of one of its buckets of lengths.

    Raises:
        ArtifactError: this version finds no such schedule, or another one under its label, or the record is not of this key.
    """
    from sparsegen.codegen.source import outline
    from sparsegen.schedule.dump import dump

    schedule = _chosen(artifact, problem, bucket)
    check_texts(artifact, {inside(bucket, SCHEDULE): dump(schedule)})
    source = outline(pattern, schedule, problem, artifact.key.template)
    source = replace(source, text=_text(artifact, inside(bucket, SOURCE)))
    if source.hopper is None:
        return source
    text = _text(artifact, inside(bucket, HOPPER))
    return replace(source, hopper=replace(source.hopper, text=text))


def inside(bucket: Bucket | None, name: str) -> str:
    """A file's name inside an entry, by its name inside the folder of a bucket."""
    return f"{bucket.folder}/{name}" if bucket is not None and bucket.folder else name


def _chosen(artifact: Artifact, problem: Problem, bucket: Bucket | None) -> Schedule:
    label = (artifact.manifest.decision if bucket is None else bucket).label
    try:
        schedule = schedule_of(*recorded(artifact, problem), label)
    except ArtifactError as error:
        raise ArtifactError(f"{artifact.path}: {error}; build it again") from None
    check_masks(artifact, schedule)
    return schedule


def _text(artifact: Artifact, name: str) -> str:
    if name not in artifact.manifest.files:
        raise ArtifactError(f"{artifact.path}: {name} is missing; build it again")
    return artifact.read(name).decode()


def recorded(artifact: Artifact, problem: Problem) -> tuple[Pattern, Problem]:
    """The pattern that an artifact was built from, and ``problem`` with the lengths it was built for."""
    from sparsegen.spec.pattern import Pattern

    text = artifact.read(PATTERN).decode()
    pattern = Pattern.from_yaml_text(text, f"{artifact.path}/{PATTERN}")
    lengths = artifact.manifest.decision.problem.get("lengths", problem.lengths)
    return pattern, replace(problem, lengths=lengths)


def check_masks(artifact: Artifact, schedule: Schedule) -> None:
    """ArtifactError unless the schedule shows the masks of the artifact's key."""
    key = artifact.key
    if heads_and_masks(schedule) != (key.mask, key.head_rules, key.max_position, key.min_position):
        raise ArtifactError(f"{artifact.path}: {PATTERN} is not of the masks of its key")


def check_texts(artifact: Artifact, texts: Mapping[str, str]) -> None:
    """ArtifactError unless the artifact's files hold exactly these texts, by name."""
    for name, text in texts.items():
        if name not in artifact.manifest.files or artifact.read(name) != text.encode():
            raise ArtifactError(
                f"{artifact.path}: {name} is not what this version renders for the pattern; build it again"
            )


def considered(
    candidates: tuple[Candidate, ...], measured: Mapping[str, float]
) -> tuple[tuple[Considered, ...], str]:
    """The candidates for the manifest, and the call that their predictions are for; ``measured``: µs by label."""
    cost = candidates[0].cost
    listed = tuple(
        Considered(
            c.schedule.label,
            round(1e3 * c.cost.seconds, 4),
            _rounded(measured.get(c.schedule.label)),
        )
        for c in candidates
    )
    m, n = cost.tile
    return listed, f"{cost.q_len} queries, {cost.kv_len} keys, {cost.sizes}, tiles {m}x{n}"


def _rounded(time_us: float | None) -> float | None:
    return None if time_us is None else round(time_us, 3)
