"""Decisions by lengths: which pairs of a problem get one of their own, and where its files are in an entry."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sparsegen.artifact.build import Request
from sparsegen.artifact.manifest import Bucket, Decision, Variant
from sparsegen.codegen.knobs import LaunchConfig

if TYPE_CHECKING:
    from sparsegen.launch import Binary


@dataclass(frozen=True)
class Built:
    """Binaries of one decision, and their folder inside the entry."""

    folder: str
    binaries: list[Binary]

    def variants(self) -> tuple[Variant, ...]:
        """For the manifest."""
        from sparsegen.launch.kernel import VARIANT_GUARDS

        inside = f"{self.folder}/" if self.folder else ""
        return tuple(
            Variant(
                name=b.variant,
                guard=VARIANT_GUARDS[b.variant],
                registers=b.registers,
                spill_bytes=b.spill_bytes,
                shared_bytes=b.shared_bytes,
                files=tuple(f"{inside}{b.variant}/{name}" for name in b.files),
            )
            for b in self.binaries
        )


def by_lengths(request: Request) -> list[Request]:
    """The request once for each pair of lengths of its problem, that pair first.

    Lengths at the language's limit say what must be proven and not what is called; they have no decision of their own.
    """
    from sparsegen.spec.fields import LIMIT

    problem = request.problem
    pairs = [p for p in dict.fromkeys(problem.lengths) if max(p) < LIMIT] or problem.lengths[:1]
    if len(pairs) < 2:
        return [request]
    others = {pair: [p for p in problem.lengths if p != pair] for pair in pairs}
    return [
        replace(request, problem=replace(problem, lengths=(pair, *others[pair]))) for pair in pairs
    ]


def decided_for(decision: Decision, lengths: tuple[int, int]) -> tuple[str, LaunchConfig]:
    """Schedule and configuration that a call of these lengths takes."""
    from sparsegen.launch.buckets import nearest

    if not decision.buckets:
        return decision.label, decision.config
    found = {(b.q_len, b.kv_len): (b.label, b.config) for b in decision.buckets}
    return found[nearest(lengths, tuple(found))]


def bucket_of(
    request: Request, label: str, config: LaunchConfig, chosen_by: str, built: Built
) -> Bucket:
    """The bucket of a request's first pair of lengths."""
    return Bucket(
        *request.problem.lengths[0], built.folder, label, config, chosen_by, built.variants()
    )
