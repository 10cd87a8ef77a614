"""Ways to write a mask as disjoint branches, and the cheapest of them on runs of queries and keys.

That one is the plain schedule: patterns that no other tiling helps keep it.  It is compared at one fixed length and
tile, so that it hangs on the pattern alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from sparsegen.schedule.branches import Branch, proof_budget
from sparsegen.schedule.cost import load
from sparsegen.schedule.decompose import by_residue, decompositions
from sparsegen.schedule.facts import Domain, Exhausted
from sparsegen.schedule.formula import Dnf
from sparsegen.schedule.machine import H200
from sparsegen.schedule.tiling import close

LENGTH, TILE = 8192, (128, 64)  # what the plain ways are compared at
MOST_SEGMENTS = 12
STEPS = 16_000  # of proofs: a second or so (2 cores of a shared machine, 2026-11)


@dataclass(frozen=True)
class Choice:
    """The plain way, its key tiles and those of one masked branch over everything, and all ways that were found."""

    branches: tuple[Branch, ...]
    cost: float
    masked_cost: float
    exhausted: bool  # the budget of proofs ran out: better ways may exist
    found: tuple[tuple[Branch, ...], ...]

    def __str__(self) -> str:
        found = (
            f"{len(self.branches)} disjoint branches" if len(self.branches) > 1 else "one branch"
        )
        text = f"{found}: {self.cost:.0f} key tiles of {TILE[0]} x {TILE[1]} at {LENGTH} tokens"
        if self.cost < self.masked_cost:
            text += f", {self.masked_cost:.0f} as one masked branch"
        return text + (" (search stopped at its budget)" if self.exhausted else "")


def choose(cubes: Dnf, dom: Domain, k_start: int = 0) -> Choice:
    """Disjoint branches with the least cost on runs; one masked branch where no proof can be afforded.

    ``k_start``: first key of the call that they are compared at.
    """
    masked: tuple[Branch, ...] = (Branch(tuple(cubes), ()),) if cubes else ()
    plain: list[tuple[Branch, ...]] = []
    more: list[tuple[Branch, ...]] = []
    exhausted = False
    try:
        with proof_budget(STEPS):
            for branches in decompositions(cubes, dom):
                if len(branches) <= MOST_SEGMENTS:
                    plain.append(branches)
            if (residues := by_residue(cubes)) is not None:
                more += (b for b in decompositions(residues, dom) if len(b) <= MOST_SEGMENTS)
    except Exhausted:
        exhausted = True
    best, least = masked, _cost(masked, k_start)
    for branches in plain:
        cost = _cost(branches, k_start)
        if cost < least - 1e-9:
            best, least = branches, cost
    found = tuple(dict.fromkeys((best, *plain, *more, masked)))
    return Choice(best, least, _cost(masked, k_start), exhausted, found)


def _cost(branches: tuple[Branch, ...], k_start: int) -> float:
    return sum(branch_cost(b, k_start) + H200.segment for b in branches)


@lru_cache(maxsize=1 << 12)
def branch_cost(branch: Branch, k_start: int = 0) -> float:
    """Key tiles at the fixed length, weighted by what is tested in them."""
    segment = close(branch)
    assert segment is not None, "runs take every branch"
    return float(load(segment, (0, LENGTH, k_start, LENGTH), TILE).weighted.sum())
