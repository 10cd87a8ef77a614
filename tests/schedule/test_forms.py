"""Forms: normal shape, values, and intervals that are sound and tight."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest

from sparsegen.schedule.forms import K, Lin, Q, floor_, mod_, value, var, variables
from sparsegen.schedule.intervals import at_least, bounds, pick
from sparsegen.schedule.limits import invert
from sparsegen.schedule.normalise import to_dnf
from tests.schedule.formulas import mask

Q_FIRST, Q_LAST, K_FIRST, K_LAST = map(var, ("q_first", "q_last", "k_first", "k_last"))


def test_equal_forms_are_equal_objects() -> None:
    assert Q - K == -(K - Q)
    assert floor_(floor_(Q, 4), 3) == floor_(Q, 12)
    assert floor_(Q * 6 + 8, 4) == Q + floor_(Q, 2) + 2
    assert mod_(Q + 24, 8) == mod_(Q, 8)
    assert str(Q - K) == "q - k" and str(mod_(K, 8)) == "k - 8*(k // 8)"
    assert variables(floor_(Q - K, 3)) == {"q", "k"}


def test_a_form_survives_pickling() -> None:
    form = pick("max", [K_FIRST, floor_(Q_FIRST, 48) * 48])
    assert pickle.loads(pickle.dumps(form)) == form


def random_form(rng: random.Random, depth: int) -> Lin:
    if depth == 0:
        return rng.choice([Q, K, Q - K, Q * 3 - K * 2])
    a, b = random_form(rng, depth - 1), random_form(rng, 0)
    m = rng.choice([2, 3, 4, 8, 12])
    return rng.choice([floor_(a, m), mod_(a, m), a + b, a - b, a * m + 1, mod_(floor_(a, m), 3)])


@pytest.mark.parametrize("seed", range(40))
def test_bounds_hold_every_value(seed: int) -> None:
    rng = random.Random(seed)
    form = random_form(rng, rng.randint(1, 3))
    q0, k0 = rng.randint(-30, 30), rng.randint(0, 30)
    q1, k1 = q0 + rng.randint(0, 20), k0 + rng.randint(0, 20)
    q, k = np.arange(q0, q1 + 1)[:, None], np.arange(k0, k1 + 1)[None, :]
    got = np.broadcast_to(value(form, {"q": q, "k": k}), (q.size, k.size))
    lo, hi = bounds(form, {"q": (q0, q1), "k": (k0, k1)})
    assert lo <= got.min() and got.max() <= hi


@pytest.mark.parametrize(
    ("form", "interval"),
    [
        (Q - K, (-20, 30)),
        (mod_(Q, 8), (0, 7)),
        (floor_(Q, 8) * 8 - Q, (-7, 0)),
        (mod_(Q, 64), (10, 30)),  # inside one period a remainder is exact
        (floor_(Q, 4) - floor_(K, 4), (-5, 7)),
    ],
)
def test_bounds_are_tight(form: Lin, interval: tuple[int, int]) -> None:
    assert (
        bounds(
            form, {"q": (10, 30), "k": (0, 30) if form != floor_(Q, 4) - floor_(K, 4) else (0, 31)}
        )
        == interval
    )


def test_pick_drops_what_never_decides() -> None:
    assert pick("max", [K_FIRST, Lin((), 0)]) == K_FIRST
    assert pick("min", [K_LAST, Lin((), 0)]) == Lin((), 0)
    assert pick("max", [Q_FIRST - 5, Q_LAST]) == Q_LAST
    assert pick("min", [K_FIRST, pick("max", [K_FIRST, Q_FIRST])]) == K_FIRST
    assert pick("max", [Q_FIRST, K_FIRST]) != Q_FIRST  # nothing is known of these two
    assert at_least(Q_LAST + 1, Q_FIRST) and not at_least(Q_FIRST, Q_LAST)


@pytest.mark.parametrize(
    "text",
    [
        "3 <= q - 2 * k",
        "q // 8 - k // 8 <= 2 and q // 8 - k // 8 >= -1",
        "(q - 3 * k + 5) // 4 <= 2 and (q - 3 * k + 5) // 4 >= -6",
        "2 * q - 6 * (k // 5) <= 9",
    ],
)
def test_interval_conjuncts_are_solved_exactly(text: str) -> None:
    (cube,) = to_dnf(mask(text))
    (conjunct,) = cube
    lo = None if abs(conjunct.lo) > 1 << 80 else Lin((), conjunct.lo)
    hi = None if abs(conjunct.hi) > 1 << 80 else Lin((), conjunct.hi)
    solved = invert(conjunct.lin, lo, hi)
    assert solved is not None
    k = np.arange(-200, 200)
    for q in range(-20, 21):
        got = np.ones(k.shape, bool)
        if solved[0] is not None:
            got &= k >= value(solved[0], {"q": q})
        if solved[1] is not None:
            got &= k <= value(solved[1], {"q": q})
        assert np.array_equal(got, conjunct.test({"q": q, "k": k})), q


def test_two_keys_in_one_conjunct_are_not_solved() -> None:
    (cube,) = to_dnf(mask("k % 20 >= 7"))
    assert invert(cube[0].lin, Lin((), 7), None) is None
