"""Masks for the tests: from text, and random ones over every node that positions alone decide."""

from __future__ import annotations

import random

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
