"""Query tilings and key cuts that a formula suggests, and their names."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from sparsegen.schedule.cost import Call
from sparsegen.schedule.forms import Floor, Generator, Lin, inside, var, variables
from sparsegen.schedule.formula import Cube
from sparsegen.schedule.tree import IDENTITY, Tiling

MOST_BOX = 32  # product of a query tile's lower extents, see ``tree.Tiling``
MOST_MODULI = 6
MORE_TILES = 4.0  # a tiling with so many times the query tiles of runs has mostly dead rows


def query_tilings(cubes: Sequence[Cube], call: Call, block_m: int) -> list[Tiling]:
    """Query tilings worth trying for a formula and a call: runs, residue classes and packs of them, boxes of grids."""
    out = [IDENTITY]
    most = MORE_TILES * -(-call[1] // block_m)
    _, grids = moduli(cubes, "q")
    for cuts in cut_chains(cubes, "q")[1:]:
        every = extents(cuts)
        if len(cuts) == 1 and cuts[0] not in grids and call[1] >= 2 * block_m * cuts[0]:
            every = [(1,)]  # a class alone fills its tiles: no need to pack several
        shapes = (Tiling(cuts, extent) for extent in every)
        out += [s for s in shapes if query_tile_count(s, call, block_m) <= most]
    return out


def cut_chains(cubes: Iterable[Cube], of: str) -> list[tuple[int, ...]]:
    """Chains of at most two moduli to cut the positions ``of`` ("q" or "k") at; () first.

    A modulus counts where a remainder is taken by it: ``q // m`` alone is a range of neighbours already.  Two cuts at
    a time are grids, whose digits are taken of q and of k apart.
    """
    single, apart = moduli(cubes, of)
    pairs = [(a, b) for a, b in itertools.combinations(sorted(apart), 2) if b % a == 0]
    return [(), *((m,) for m in sorted(single)[:MOST_MODULI]), *pairs[:MOST_MODULI]]


def moduli(cubes: Iterable[Cube], of: str) -> tuple[set[int], set[int]]:
    """(all moduli of remainders, those taken of this one position alone)."""
    single: set[int] = set()
    apart: set[int] = set()
    for lin in {r.lin for c in cubes for r in c}:
        others = [g for g, _ in lin.terms if of in inside(g)]
        for floor in _floors(lin, of):
            together = {"q", "k"} <= variables(floor.arg)
            if together and (line := _line_length(floor.arg, of)):
                single.add(
                    line * floor.m
                )  # (q // w - k // w) % m: digits of a grid with lines of w
                apart |= {line, line * floor.m}
            elif together or len(others) > 1:
                single.add(floor.m)
            if len(others) > 1 and variables(floor.arg) == {of}:
                apart.add(floor.m)
    return single, apart


def _line_length(arg: Lin, of: str) -> int:
    """w where a form depends on a position only through position // w; else 0."""
    found = {g for g, _ in arg.terms if of in inside(g)}
    floors = {g.m for g in found if isinstance(g, Floor) and g.arg == var(of)}
    return floors.pop() if len(found) == len(floors) == 1 else 0


def _floors(lin: Lin, of: str) -> Iterator[Floor]:
    for g, _ in lin.terms:
        yield from _floors_in(g, of)


def _floors_in(g: Generator, of: str) -> Iterator[Floor]:
    if isinstance(g, Floor) and of in inside(g):
        yield g
        yield from _floors(g.arg, of)


def extents(cuts: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Sizes of a query tile on the lower axes: powers of two, no more than the axis needs."""
    steps = (1, *cuts)
    radixes = [b // a for a, b in itertools.pairwise(steps)]
    sizes = [[2**i for i in range(5) if 2**i < 2 * r] for r in radixes]
    return [e for e in itertools.product(*sizes) if math.prod(e) <= MOST_BOX]


def query_tile_count(shape: Tiling, call: Call, block_m: int) -> int:
    """Query tiles of a call, with those that are all dead."""
    start, q_len, _, _ = call
    steps = (1, *shape.q_cuts)
    top = (start + q_len - 1) // steps[-1] - start // steps[-1] + 1
    lower = [-(-(b // a) // e) for (a, b), e in zip(itertools.pairwise(steps), shape.extent)]
    return math.prod(lower) * -(-top // (block_m // math.prod(shape.extent)))


def shape_name(shape: Tiling) -> str:
    """A query tiling in two words."""
    if not shape.q_cuts:
        return "runs"
    if set(shape.extent) == {1}:
        return f"mod {by(shape.q_cuts)}"
    return f"box {by(shape.extent[::-1])} of {by(shape.q_cuts[::-1])}"


def placed(shape: Tiling) -> tuple[tuple[int, ...], str]:
    """Its name, and before it what names are sorted by: runs, then residue classes, then boxes."""
    place = 0 if not shape.q_cuts else 1 if set(shape.extent) == {1} else 2
    return (place, *shape.q_cuts, *shape.extent), shape_name(shape)


def by(numbers: Iterable[int]) -> str:
    """``4 x 8``."""
    return " x ".join(map(str, numbers))
