"""What a schedule is without because a bound was met: notes for people.  The schedule is right all the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

from sparsegen.schedule.branches import PROOF_STEPS, Branch
from sparsegen.schedule.forms import Opaque, text
from sparsegen.schedule.formula import CAP, Cube
from sparsegen.schedule.limits import LONGEST_FORM, watch_long_forms
from sparsegen.schedule.tiling import close
from sparsegen.schedule.tree import Segment, Tiling
from sparsegen.spec import expr as ex

UNPROVEN = (
    f"the budget of {PROOF_STEPS:,} proof steps ran out while the mask was reduced: "
    "it may be written less plainly than it could be"
)


def of_cubes(cubes: Iterable[Cube]) -> Iterator[str]:
    """Expressions that have no normal form of the size that is allowed, and are tested cell by cell."""
    generators = (g for c in cubes for r in c for g, _ in r.lin.terms)
    found = dict.fromkeys(g for g in generators if isinstance(g, Opaque))
    for g in found:
        if not isinstance(g.expr, ex.Term):
            yield f"tested cell by cell, having no normal form of {CAP} cubes at most: {text(g)}"


def of_segment(segment: Segment) -> Iterator[str]:
    """Closed forms that were given up for their length while the segment was closed."""
    if _long_forms(segment.branch, segment.tiling):
        yield (
            f"{segment.name}: forms of more than {LONGEST_FORM} operations became tests or wider limits"
        )


@lru_cache(maxsize=1 << 12)
def _long_forms(branch: Branch, tiling: Tiling) -> bool:
    with watch_long_forms() as found:
        close.__wrapped__(branch, tiling)  # a remembered segment would tell nothing
    return bool(found)
