"""Masks for the tests: from text, and random ones over every node that positions alone decide; random digit tilings."""

from __future__ import annotations

import random

from sparsegen.schedule import naming
from sparsegen.schedule.branches import Branch, proof_budget, simplify
from sparsegen.schedule.canonical import reduced
from sparsegen.schedule.choose import choose
from sparsegen.schedule.facts import ANY_LENGTH, Exhausted
from sparsegen.schedule.formula import dnf_text
from sparsegen.schedule.normalise import to_dnf
from sparsegen.schedule.reach import position_limit
from sparsegen.schedule.tiling import close
from sparsegen.schedule.tree import IDENTITY, HeadClass, Schedule, Segment, Sweep, Tiling
from sparsegen.spec.expr import (
    FALSE,
    KV_LEN,
    Q_LEN,
    TRUE,
    Abs,
    Add,
    And,
    Bool,
    Compare,
    Const,
    FloorDiv,
    Int,
    K,
    Max,
    Min,
    Mod,
    Mul,
    Neg,
    Not,
    Or,
    Q,
    Sub,
    Term,
)
from sparsegen.spec.predicate import parse

DISTANCE = Sub(Q, K)


def mask(text: str) -> Bool:
    """A mask written as a predicate; also "all" and "none"."""
    return {"all": TRUE, "none": FALSE}.get(text) or parse(text)


def random_blocks(block: int, per_row: int, seed: int = 7) -> Term:
    return Term("random_blocks", (("block", block), ("per_row", per_row), ("seed", seed)))


def random_mask(rng: random.Random, depth: int) -> Bool:
    """A random mask of at most this depth; moduli and offsets are small, so that small calls meet them all."""
    if depth == 0:
        return _atom(rng)
    a = random_mask(rng, rng.randint(0, depth - 1))
    b = random_mask(rng, rng.randint(0, depth - 1))
    kind = rng.choice(["and", "and", "and not", "or", "or", "not"])
    if kind == "not":
        return Not(a)
    if kind == "or":
        return Or((a, b))
    return And((a, Not(b) if kind == "and not" else b))


def _atom(rng: random.Random) -> Bool:
    m = Const(rng.choice([2, 3, 4, 5, 6, 8, 12, 16, 24]))
    c = Const(rng.choice([0, 0, 1, 2, 3, 5, 7, 8, 12, 20, 30]))
    op = rng.choice(["<", "<=", ">", ">=", "==", "!="])
    roll = rng.randrange(16)
    if roll < 5:
        return Compare(op, _integer(rng, rng.choice([0, 0, 1, 1, 2])), c)
    if roll == 5:
        return And((Compare("<=", Neg(c), a := _integer(rng, 1)), Compare("<", a, c)))
    if roll == 6:
        return random_blocks(rng.choice([4, 5, 8]), rng.randint(0, 4), rng.randint(0, 9))
    return [
        Compare("<=", K, Q),
        Compare("<", DISTANCE, c),
        Compare("==", FloorDiv(Q, m), FloorDiv(K, m)),
        Compare("==", Mod(Q, m), Mod(K, m)),
        Compare(rng.choice(["==", "!="]), Mod(DISTANCE, m), c),
        Compare(">=", Mod(K, m), c),
        Compare("<=", Abs(Sub(FloorDiv(Q, m), FloorDiv(K, m))), Const(rng.randint(0, 2))),
        Compare("<=", Abs(Sub(Mod(Q, m), Mod(K, m))), Const(rng.randint(0, 3))),
        rng.choice([TRUE, FALSE, Compare(op, Q, c), Compare(op, K, c)]),
    ][roll - 7]


def _integer(rng: random.Random, depth: int) -> Int:
    c = Const(rng.choice([1, 2, 3, 4, 5, 6, 8, 10, 12, 16]))
    if depth == 0:
        return rng.choice(
            [
                Q,
                K,
                DISTANCE,
                DISTANCE,
                Sub(K, Q),
                Add(Q, c),
                Add(Q, K),
                Q_LEN,
                Sub(KV_LEN, K),
                Sub(Mul(c, Q), Mul(c, K)),
            ]
        )
    a, b = _integer(rng, depth - 1), _integer(rng, 0)
    return rng.choice(
        [
            Mod(a, c),
            FloorDiv(a, c),
            Abs(a),
            Add(a, b),
            Sub(a, b),
            Min((a, b)),
            Max((a, c, b)),
            Mul(a, c),
            Mod(FloorDiv(a, c), Const(3)),
            Mul(a, b),
            FloorDiv(a, rng.choice([c, Q_LEN])),
            a,
        ]
    )


# ---- schedules on a given tiling, whatever the search would choose ----


def runs(text: str) -> Schedule:
    """The schedule on runs of queries and keys."""
    cubes = reduced(tuple(to_dnf(mask(text)))).cubes
    branches = choose(list(cubes), ANY_LENGTH).branches
    segments = naming.ordered(tuple(s for b in branches if (s := close(b)) is not None))
    one = HeadClass(None, (Sweep(IDENTITY, segments),), dnf_text(cubes))
    return Schedule("bottom_right", (one,), position_limit(segments))


def branches_of(text: str) -> list[Branch]:
    """The cubes of a mask as disjoint branches, in the order of its normal form."""
    cubes = to_dnf(mask(text))
    simple = (simplify(c, tuple(cubes[:i]), ANY_LENGTH) for i, c in enumerate(cubes))
    return [Branch((s[0],), s[1]) for s in simple if s is not None]


def closed(branch: Branch, tiling: Tiling) -> Segment:
    """The segment of a branch that the tiling must serve."""
    found = close(branch, tiling)
    assert found is not None
    return found


def class_on(text: str, *tilings: Tiling) -> HeadClass:
    """Every branch of a mask on a tiling of its own, a sweep each."""
    branches = branches_of(text)
    assert len(branches) == len(tilings), [str(b) for b in branches]
    sweeps = [Sweep(Tiling(t.q_cuts, t.extent), (closed(b, t),)) for b, t in zip(branches, tilings)]
    return HeadClass(None, tuple(sweeps), text)


CUTS = [
    *((m,) for m in (2, 3, 4, 5, 6, 8, 12, 16, 24)),
    *((2, 4), (2, 8), (4, 8), (4, 16), (3, 6), (3, 12), (6, 12), (6, 24), (8, 24), (5, 10)),
    *((2, 4, 8), (2, 6, 12), (3, 6, 24)),
]


def random_tiling(rng: random.Random) -> Tiling:
    """Divisor chains with the moduli of ``random_mask``; the same cuts for queries and keys half of the time."""
    q_cuts = rng.choice([(), *CUTS])
    k_cuts = rng.choice([(), *CUTS]) if rng.random() < 0.5 else q_cuts
    extent: list[int] = []
    left = 16
    for _ in q_cuts:
        extent.append(rng.choice([n for n in (1, 1, 2, 4, 8, 16) if n <= left]))
        left //= extent[-1]
    return Tiling(q_cuts, tuple(extent), k_cuts)


def random_branch(rng: random.Random) -> Branch | None:
    """A few cubes of a random mask: one of them or several, with exclusions, simplified or as they are."""
    cubes = to_dnf(random_mask(rng, rng.randint(0, 3)))
    rng.shuffle(cubes)
    cubes = cubes[:5]
    kind = rng.random()
    if not cubes:
        return None
    if kind < 0.3 and len(cubes) > 1:
        return Branch(tuple(cubes[:3]), tuple(cubes[3:]))
    n = rng.randint(0, min(2, len(cubes) - 1))
    if kind > 0.7:
        return Branch((cubes[n],), tuple(cubes[:n]))
    try:
        with proof_budget(3000):
            simple = simplify(cubes[n], tuple(cubes[:n]), ANY_LENGTH)
    except Exhausted:
        return None
    return None if simple is None else Branch((simple[0],), simple[1])
