"""The normal form says what the expression says, and spells equal conjuncts alike."""

from __future__ import annotations

import random

import numpy as np
import pytest

from sparsegen.errors import UnsupportedError
from sparsegen.schedule.branches import expand, plainer, proof_budget
from sparsegen.schedule.decompose import decompositions
from sparsegen.schedule.facts import ANY_LENGTH, Exhausted
from sparsegen.schedule.formula import BIG, Dnf, Range, conj, dnf_text
from sparsegen.schedule.normalise import to_dnf
from sparsegen.schedule.text import expr_text
from sparsegen.schedule.tree import AnyOf, NoneOf
from sparsegen.schedule.verify import environment, holds, mask_of
from sparsegen.spec.expr import And, Compare, Const, FloorDiv, K, Mod, Mul, Name, Or, Q, Term
from tests.schedule.formulas import mask, random_mask

CALL = (-6, 31, 0, 33)


def points(call: tuple[int, int, int, int] = CALL) -> dict:
    q = (call[0] + np.arange(call[1]))[:, None]
    k = (call[2] + np.arange(call[3]))[None, :]
    return environment(call, q, k)


def truth(cubes: Dnf) -> np.ndarray:
    shape = (CALL[1], CALL[3])
    if not cubes:
        return np.zeros(shape, bool)
    return np.broadcast_to(holds(AnyOf(tuple(cubes)), points()), shape)


@pytest.mark.parametrize("seed", range(120))
def test_the_normal_form_is_the_mask(seed: int) -> None:
    rng = random.Random(f"dnf {seed}")
    e = random_mask(rng, rng.randint(0, 4))
    assert np.array_equal(truth(to_dnf(e)), mask_of(e, CALL)), expr_text(e)
    assert np.array_equal(truth(to_dnf(e, positive=False)), 1 - mask_of(e, CALL)), expr_text(e)


@pytest.mark.parametrize("seed", range(30))
def test_every_decomposition_is_disjoint_and_whole(seed: int) -> None:
    rng = random.Random(f"branches {seed}")
    e = random_mask(rng, rng.randint(1, 3))
    want = mask_of(e, CALL)
    try:
        with proof_budget(4000):
            cubes = expand(plainer(to_dnf(e), ANY_LENGTH), ANY_LENGTH)
            assert np.array_equal(truth(cubes), want), expr_text(e)
            for branches in decompositions(cubes, ANY_LENGTH):
                total = np.zeros(want.shape, np.int32)
                for b in branches:
                    seen = truth(list(b.alts))
                    for m in b.minus:
                        seen = seen & np.broadcast_to(holds(NoneOf((m,)), points()), seen.shape)
                    total += seen
                assert np.array_equal(total, want), (expr_text(e), [str(b) for b in branches])
    except Exhausted:
        pass  # what was proven until then was right


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("q // 128 * 128 <= k and k < q // 128 * 128 + 128", "q // 128 == k // 128"),
        ("q % 5 == k % 5", "(q - k) % 5 == 0"),
        ("(k - q + 3) % 7 == 0", "(q - k) % 7 == 3"),
        ("(k - q) % 8 >= 5", "1 <= (q - k) % 8 and (q - k) % 8 <= 3"),
        ("3 * q % 2 == 1", "q % 2 == 1"),
        ("2 * q - 2 * k <= 9", "q - k < 5"),
        ("min(q, k) < 64", "q < 64 or k < 64"),
        ("max(q, k) < 64", "q < 64 and k < 64"),
        ("abs(q - k) <= 3", "-3 <= q - k and q - k <= 3"),
        ("not (k > q)", "k <= q"),
        ("k >= 0 and k < 8", "k < 8"),
        ("(q // 3) // 4 == 2", "q // 12 == 2"),
    ],
)
def test_spellings_meet_in_the_normal_form(one: str, other: str) -> None:
    def read(text: str) -> set:
        return {frozenset(c) for c in to_dnf(mask(text))}

    assert read(one) == read(other)


def test_one_range_per_form() -> None:
    cube = conj([Range(Q_K, -BIG, 5), Range(Q_K, 2, BIG)])
    assert cube == (Range(Q_K, 2, 5),)
    assert conj([Range(Q_K, -BIG, 1), Range(Q_K, 2, BIG)]) is None


Q_K = to_dnf(mask("q - k <= 0"))[0][0].lin


@pytest.mark.parametrize(
    "e",
    [
        Compare("==", Mod(K, Q), Const(0)),  # a divisor that is not a constant
        Compare("<", FloorDiv(Q, Mul(K, K)), Const(1)),
        Or(tuple(Compare("==", Mul(Q, K), Const(7 * i)) for i in range(120))),  # past the cap
    ],
)
def test_what_does_not_fit_stays_opaque(e: object) -> None:
    assert "[" in dnf_text(to_dnf(e))


def test_a_blowup_takes_only_its_own_part() -> None:
    many = Or(tuple(Compare("==", K, Const(2 * i)) for i in range(200)))
    (cube,) = to_dnf(And((mask("k <= q"), many)))
    assert len(cube) == 2  # causality is still seen


@pytest.mark.parametrize("kind", ["documents", "block_mask", "key_padding"])
def test_run_time_terms_are_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedError, match=kind):
        to_dnf(And((mask("k <= q"), Term(kind))))


def test_run_time_lengths_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="prefix_length"):
        to_dnf(Compare("<", K, Name("prefix_length")))


def test_expression_text_reads_back() -> None:
    read = 0
    for seed in range(80):
        e = random_mask(random.Random(f"text {seed}"), 2)
        text = expr_text(e)
        # The grammar has no terms and no constants of truth, and refuses products past 64 bits.
        if any(word in text for word in ("random_blocks", "True", "False")) or _has_product(e):
            continue
        assert np.array_equal(mask_of(mask(text), CALL), mask_of(e, CALL)), text
        read += 1
    assert read > 20


def _has_product(e: object) -> bool:
    if isinstance(e, Mul) and not any(isinstance(x, Const) for x in (e.a, e.b)):
        return True
    parts = [getattr(e, f) for f in getattr(e, "__dataclass_fields__", ())]
    return any(_has_product(x) for p in parts for x in (p if isinstance(p, tuple) else (p,)))
