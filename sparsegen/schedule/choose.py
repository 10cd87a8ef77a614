"""Which decomposition: the cheapest in key tiles at a representative length.

A rough model is enough here: it has to see a narrow column stand alone, a hole split in two, and a merge that walks
every key.  Tile sizes and the rest belong to the tuner.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from sparsegen.schedule.branches import Branch, proof_budget
from sparsegen.schedule.decompose import decompositions
from sparsegen.schedule.facts import Domain, Exhausted
from sparsegen.schedule.forms import Floor, Lin, Opaque, Prod
from sparsegen.schedule.formula import Dnf, Range
from sparsegen.schedule.tiles import query_tiles, visit
from sparsegen.schedule.tiling import close
from sparsegen.schedule.tree import AnyOf, NoneOf, Segment, Test

LENGTH, BLOCK_M, BLOCK_N = 8192, 128, 64  # what the costs are compared at
START = 0.35  # a segment that a query tile enters, in key tiles (estimate)
PARTIAL = 1.15  # a tile with limits to test, against a full one (estimate)
REMAINDER = 1.35  # a tile that tests // or % (estimate)
CONJUNCT = 0.05  # each conjunct tested beside the row limits (estimate)
CODE = 2.0  # one more segment to compile and to enter, even if it is empty on most calls (estimate)
MOST_SEGMENTS = 12


@dataclass(frozen=True)
class Choice:
    """The branches taken, what they cost, and what one masked branch over everything would cost, in key tiles."""

    branches: tuple[Branch, ...]
    cost: float
    masked_cost: float
    exhausted: bool  # the budget of proofs ran out: better ways may exist

    def __str__(self) -> str:
        found = (
            f"{len(self.branches)} disjoint branches" if len(self.branches) > 1 else "one branch"
        )
        text = f"{found}: {self.cost:.0f} key tiles of {BLOCK_M} x {BLOCK_N} at {LENGTH} tokens"
        if self.cost < self.masked_cost:
            text += f", {self.masked_cost:.0f} as one masked branch"
        return text + (" (search stopped at its budget)" if self.exhausted else "")


def choose(cubes: Dnf, dom: Domain) -> Choice:
    """Disjoint branches with the least cost; one masked branch where no proof can be afforded."""
    masked: tuple[Branch, ...] = (Branch(tuple(cubes), ()),) if cubes else ()
    best, least, exhausted = masked, _cost(masked), False
    try:
        with proof_budget():
            for branches in decompositions(cubes, dom):
                if len(branches) > MOST_SEGMENTS:
                    continue
                cost = _cost(branches)
                if cost < least - 1e-9:
                    best, least = branches, cost
    except Exhausted:
        exhausted = True
    return Choice(best, least, _cost(masked), exhausted)


def _cost(branches: tuple[Branch, ...]) -> float:
    return sum(branch_cost(b) + CODE for b in branches)


@lru_cache(maxsize=1 << 12)
def branch_cost(branch: Branch) -> float:
    """Key tiles at the representative length, weighted by what is tested in them."""
    segment = close(branch)
    env = query_tiles(0, LENGTH, BLOCK_M, 0, LENGTH)
    if segment.table is not None:
        rows = BLOCK_M // segment.table.block + 1
        return float(len(env["q_first"]) * rows * segment.table.per_row)
    counts = visit(segment, env, BLOCK_N).tiles(BLOCK_N)
    entered = sum(counts.values()) > 0
    return float(START * np.count_nonzero(entered) + _weighted(segment, counts))


def _weighted(segment: Segment, counts: dict[str, np.ndarray]) -> float:
    weight = {"full": 1.0}
    for span in segment.spans:
        if span.kind != "full":
            base = REMAINDER if any(map(_slow, span.tests)) else PARTIAL
            weight[span.kind] = base + CONJUNCT * sum(map(_conjuncts, span.tests))
    weight.setdefault("whole", weight.get("tail", PARTIAL))
    return sum(float(n.sum()) * weight.get(kind, PARTIAL) for kind, n in counts.items())


def _conjuncts(test: Test) -> int:
    return sum(map(len, test.cubes)) if isinstance(test, (AnyOf, NoneOf)) else 1


def _slow(test: Test) -> bool:
    if isinstance(test, (AnyOf, NoneOf)):
        return any(_slow(r) for c in test.cubes for r in c)
    return isinstance(test, Range) and _divides(test.lin)


def _divides(lin: Lin) -> bool:
    return any(
        isinstance(g, (Prod, Opaque)) or (isinstance(g, Floor) and g.m & (g.m - 1) != 0)
        for g, _ in lin.terms
    )
