"""Ways to write a union as disjoint branches: which cubes stand alone, in which order, and which are merged."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from sparsegen.schedule.branches import Branch, simplify, walked_term
from sparsegen.schedule.facts import Domain
from sparsegen.schedule.forms import BIG, K, Lin, Q, variables
from sparsegen.schedule.formula import (
    Cube,
    Dnf,
    Range,
    as_mod,
    conj,
    cube_text,
    negate,
    ranged,
    without,
)

MOST_CUBES = 12  # above: merged groups only
MOST_ORDERED = 4  # all orders and merges are tried up to here
MOST_RESIDUES = 8  # a remainder that may take so many values is also tried as one cube for each
NEAR = 64  # global positions within so many are one group: a key tile holds them all


def disjoint(groups: Sequence[Sequence[Cube]], dom: Domain) -> tuple[Branch, ...]:
    """Branch i is group i without all earlier groups."""
    out: list[Branch] = []
    seen: list[Cube] = []
    for group in groups:
        got = [s for c in group if (s := simplify(c, tuple(seen), dom)) is not None]
        if len(got) == 1:
            out.append(Branch((got[0][0],), got[0][1]))
        elif got:
            # A clause was simplified inside its own cube: only whole cubes may exclude cells of all alternatives.
            alts = tuple(dict.fromkeys(c for c, _ in got))
            out.append(Branch(alts, tuple(seen) if any(cl for _, cl in got) else ()))
        seen += group
    return tuple(out)


def two_sided(branches: tuple[Branch, ...]) -> tuple[Branch, ...]:
    """The variant with one branch per side of a hole (not lo <= L <= hi)."""
    out: list[Branch] = []
    for b in branches:
        holes = [m for m in b.minus if len(m) == 1 and not as_mod(m[0].lin)]
        if len(b.alts) == 1 and holes:
            rest = tuple(m for m in b.minus if m != holes[0])
            sides = (conj([*b.alts[0], *n]) for n in negate(holes[0][0]))
            out += [Branch((c,), rest) for c in sides if c is not None]
        else:
            out.append(b)
    return tuple(out)


def decompositions(cubes: Dnf, dom: Domain) -> Iterator[tuple[Branch, ...]]:
    """Ways to write the union as disjoint branches, without repeats.  Cubes that walk a table always come last."""
    walks = [c for c in cubes if walked_term(c)]
    plain = [c for c in cubes if not walked_term(c)]
    seen = set()
    for groups in _orders(plain):
        branches = disjoint([*groups, *([c] for c in walks)], dom)
        split = branches
        for _ in range(3):
            split = two_sided(split)
        for b in (branches, two_sided(branches), tuple(_simpler(split, dom))):
            if frozenset(b) not in seen:
                seen.add(frozenset(b))
                yield b


def by_residue(cubes: Dnf) -> Dnf | None:
    """The same union with every remainder range of q and k written as one cube per residue; None: nothing to write so.

    One residue of q and k at a time is what a query tile of one residue class turns into a run of keys.
    """
    out: Dnf = []
    for c in cubes:
        wide = [r for r in c if _few_residues(r)]
        rest = [r for r in c if r not in wide]
        values = [[ranged(r.lin, v, v) for v in range(r.lo, r.hi + 1)] for r in wide]
        for some in itertools.product(*values):
            cube = conj([*rest, *(r for r in some if isinstance(r, Range))])
            if cube is not None and all(some):
                out.append(cube)
    out = list(dict.fromkeys(out))
    return out if set(out) != set(cubes) and len(out) <= MOST_CUBES else None


def _few_residues(r: Range) -> bool:
    return (
        as_mod(r.lin) is not None
        and variables(r.lin) == {"q", "k"}
        and 0 < r.hi - r.lo < MOST_RESIDUES
    )


def _simpler(branches: tuple[Branch, ...], dom: Domain) -> Iterator[Branch]:
    """Branches simplified again, with the empty ones gone."""
    for b in branches:
        if len(b.alts) > 1:
            yield b
        elif (s := simplify(b.alts[0], b.minus, dom)) is not None:
            yield Branch((s[0],), s[1])


def _orders(cubes: Dnf) -> Iterator[list[list[Cube]]]:
    if len(cubes) > MOST_CUBES:
        yield [list(cubes)]
        yield from _alike(cubes)
        yield from _near(cubes)
        return
    if len(cubes) <= MOST_ORDERED:
        orders: list[Dnf] = [list(p) for p in itertools.permutations(cubes)]
    else:
        short = sorted(cubes, key=lambda c: (len(c), cube_text(c)))
        # Runs of keys first: what is left of the others keeps its remainders.
        runs = sorted(short, key=lambda c: sum(as_mod(r.lin) is not None for r in c))
        orders = [runs, cubes, cubes[::-1], short, short[::-1]]
    for order in orders:
        yield [[c] for c in order]
    if len(cubes) > 1:
        yield [list(cubes)]
    if 1 < len(cubes) <= MOST_ORDERED:
        for pair in itertools.combinations(cubes, 2):
            rest = [[c] for c in cubes if c not in pair]
            for groups in itertools.permutations([list(pair), *rest]):
                yield list(groups)
    elif len(cubes) > MOST_ORDERED:
        yield from _alike(cubes)
        yield from _near(cubes)


def _alike(cubes: Dnf) -> Iterator[list[list[Cube]]]:
    """Cubes over the same forms in one group each, the largest groups last and first."""
    groups: dict[frozenset[object], list[Cube]] = {}
    for c in cubes:
        groups.setdefault(frozenset(r.lin for r in c), []).append(c)
    order = sorted(groups.values(), key=len)
    if 1 < len(order) <= MOST_CUBES and len(order) < len(cubes):
        yield order
        yield order[::-1]


def _near(cubes: Dnf) -> Iterator[list[list[Cube]]]:
    """Few keys or few rows that lie together (global positions) in one group each, all other cubes alone."""
    groups: list[list[Cube]] = []
    runs: dict[tuple[Lin, Cube], list[tuple[int, int, Cube]]] = {}
    for c in cubes:
        few = [r for r in c if r.lin in (K, Q) and r.lo > -BIG and r.hi < BIG]
        if few:
            runs.setdefault((few[0].lin, without(c, few[0])), []).append((few[0].lo, few[0].hi, c))
        else:
            groups.append([c])
    for run in runs.values():
        start = None
        for lo, hi, c in sorted(run, key=lambda x: x[:2]):
            if start is not None and hi - start < NEAR:
                groups[-1].append(c)
            else:
                groups.append([c])
                start = lo
    if len(groups) <= MOST_CUBES and len(groups) < len(cubes):
        yield groups
        yield groups[::-1]
