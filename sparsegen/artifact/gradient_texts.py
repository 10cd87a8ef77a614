"""The texts of gradients: their schedules, what is rendered from them, and what a stored artifact must hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from sparsegen.artifact.entry import Artifact
from sparsegen.artifact.rendering import PATTERN, SCHEDULE, check_masks, check_texts, recorded
from sparsegen.codegen.backward_planner import FUSED, KEYS, OUTPUTS, QUERIES
from sparsegen.errors import ArtifactError, UnsupportedError
from sparsegen.tune import gradient_designs as designs
from sparsegen.tune.gradient_designs import STORES
from sparsegen.tune.gradient_target import part_candidates, transposed_of
from sparsegen.tune.schedules import candidates_of

if TYPE_CHECKING:
    from sparsegen.codegen.backward import BackwardSource
    from sparsegen.codegen.plan import Table
    from sparsegen.schedule.search import Candidate
    from sparsegen.spec.pattern import Pattern
    from sparsegen.spec.problem import Problem

# the schedules of keys and of the fused kernel; that of queries is SCHEDULE
TRANSPOSED, FUSED_SCHEDULE = "transposed.txt", "fused.txt"
KERNELS = {  # part and gradients of each kernel, by name
    QUERIES: (QUERIES, OUTPUTS[QUERIES]),
    KEYS: (KEYS, OUTPUTS[KEYS]),
    **{f"{KEYS}-{x}": (KEYS, (x,)) for x in OUTPUTS[KEYS]},
}


@dataclass(frozen=True)
class Both:
    """The two schedules of a pattern's gradients; ``shift`` as in ``schedule.transpose``.

    ``fused``: that of the fused kernel, a transposed one, where there is one.  ``stored``: of queries and of keys, those of
    the kernels with stored dS, where there are.
    """

    queries: Candidate
    keys: Candidate
    shift: int
    fused: Candidate | None = None
    stored: tuple[Candidate, Candidate] | None = None

    @property
    def label(self) -> str:
        """All schedules by name."""
        split = f"dQ {self.queries.schedule.label}; dK, dV {self.keys.schedule.label}"
        if self.stored is not None:
            queries, keys = (c.schedule.label for c in self.stored)
            return f"{split}; stored dQ {queries}; dK, dV {keys}"
        return split if self.fused is None else f"{split}; fused {self.fused.schedule.label}"


def schedules_of(pattern: Pattern, problem: Problem) -> Both:
    """The best prediction for each of the two."""
    found = transposed_of(pattern, problem)
    return Both(candidates_of(pattern, problem)[0], found.candidates[0], found.shift)


def both_of(
    pattern: Pattern,
    problem: Problem,
    queries: str,
    keys: str,
    fused: str | None = None,
    *,
    stored: bool = False,
) -> Both:
    """The candidates of these labels; ``stored``: with those for stored dS.  ArtifactError where this version finds none."""
    asked = {QUERIES: queries, KEYS: keys} | ({} if fused is None else {FUSED: fused})
    found: list[Candidate] = []
    for part, label in asked.items():
        known = {c.schedule.label: c for c in part_candidates(pattern, problem, part)}
        if label not in known:
            raise ArtifactError(f"{pattern.name} has no candidate schedule {label!r} of {part}")
        found.append(known[label])
    third = found[2] if fused is not None else None
    pair = designs.stored_candidates(pattern, problem) if stored else None
    return Both(found[0], found[1], transposed_of(pattern, problem).shift, third, pair)


def labelled(
    pattern: Pattern, problem: Problem, label: str, fused: bool, stored: bool = False
) -> Both:
    """The candidates of a label; ``fused``, ``stored``: with those.  ArtifactError where this version finds none."""
    found = transposed_of(pattern, problem)
    third = part_candidates(pattern, problem, FUSED) if fused else (None,)
    pair = designs.stored_candidates(pattern, problem) if stored else None
    for queries, keys, one in product(candidates_of(pattern, problem), found.candidates, third):
        both = Both(queries, keys, found.shift, one, pair)
        if both.label == label:
            return both
    raise ArtifactError(f"{pattern.name} has no candidate schedules {label!r} in this version")


@lru_cache(maxsize=64)
def _rendered(
    pattern: Pattern, both: Both, problem: Problem
) -> tuple[tuple[str, BackwardSource], ...]:
    from sparsegen.codegen.backward import render_backward
    from sparsegen.codegen.backward_fused import render_fused
    from sparsegen.codegen.backward_stored import render_stored

    made = [render_backward(pattern, both.queries.schedule, problem)]
    for outputs in (o for part, o in KERNELS.values() if part == KEYS):
        one = render_backward(pattern, both.keys.schedule, problem, KEYS, both.shift, outputs)
        made.append(one)
    if both.fused is not None:
        made.append(render_fused(pattern, both.fused.schedule, problem, both.shift))
    if both.stored is not None:
        queries, keys = (c.schedule for c in both.stored)
        made.append(render_stored(pattern, keys, problem, KEYS, both.shift))
        made.append(render_stored(pattern, queries, problem, QUERIES))
    check_draws(pattern, (source.tables for source in made))
    return tuple((source.name, source) for source in made)


def check_draws(pattern: Pattern, tables: Iterable[tuple[Table, ...]]) -> None:
    """UnsupportedError where kernels draw other random_blocks: a call has one list of tables for all of them."""
    if len({tuple((t.block, t.per_row) for t in one) for one in tables}) > 1:
        raise UnsupportedError(
            f"{pattern.name}: gradients of queries and of keys draw other random_blocks"
        )


def rendered(pattern: Pattern, both: Both, problem: Problem) -> dict[str, BackwardSource]:
    """The kernels by name: of queries, of keys and values, of either alone, of all.  Kept, as those of the forward pass."""
    return dict(_rendered(pattern, both, problem))


def sources_of(pattern: Pattern, problem: Problem, artifact: Artifact) -> dict[str, BackwardSource]:
    """The kernels that ``artifact`` must hold, see ``rendering.outline_of``.

    Raises:
        ArtifactError: this version finds no such schedules, renders other texts, has other variants, or the record is
            not of this key.
    """
    from sparsegen.launch import variants

    decision = artifact.manifest.decision
    extra = FUSED in decision.kernels, STORES[0] in decision.kernels
    try:
        both = labelled(*recorded(artifact, problem), decision.label, *extra)
    except ArtifactError as error:
        raise ArtifactError(f"{artifact.path}: {error}; build it again") from None
    check_masks(artifact, both.queries.schedule)
    sources = rendered(pattern, both, problem)
    check_texts(artifact, texts_of(sources))
    if set(decision.kernels) != set(sources):
        raise ArtifactError(
            f"{artifact.path}: its kernels are not those of this version; build it again"
        )
    kernels = decision.kernels
    wanted = [f"{n}/{v}" for n, s in sources.items() for v in variants(s, kernels[n])]
    if sorted(wanted) != sorted(v.name for v in decision.variants):
        raise ArtifactError(
            f"{artifact.path}: its variants are not those of this version; build it again"
        )
    return sources


def module_of(name: str) -> str:
    """The file that holds the text of a kernel."""
    return f"{name}.py"


def texts_of(sources: Mapping[str, BackwardSource]) -> dict[str, str]:
    """All texts by the names of their files: the portable one of a kernel, and the warp-specialised one where there is one."""
    texts = {module_of(name): source.text for name, source in sources.items()}
    special = {n: s.hopper.text for n, s in sources.items() if s.hopper is not None}
    return texts | {module_of(f"{name}.hopper"): text for name, text in special.items()}


def write_texts(
    pattern: Pattern, both: Both, sources: Mapping[str, BackwardSource], directory: Path
) -> None:
    """Texts, schedules and the pattern into an artifact's folder."""
    from sparsegen.schedule.dump import dump

    texts = texts_of(sources) | {
        SCHEDULE: dump(both.queries.schedule),
        TRANSPOSED: dump(both.keys.schedule),
        PATTERN: pattern.to_yaml(),
    }
    if both.fused is not None:
        texts[FUSED_SCHEDULE] = dump(both.fused.schedule)
    for name, text in texts.items():
        (directory / name).write_text(text, encoding="utf-8")
