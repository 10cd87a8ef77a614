"""Grid masks counted as boxes of key digits: exact at any length and offset, in time that grows with the rows."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from sparsegen.schedule import visible
from sparsegen.schedule.build import build, build_from_exprs
from sparsegen.schedule.count import count
from sparsegen.schedule.text import expr_text
from sparsegen.schedule.tree import Schedule
from sparsegen.schedule.verify import Call, mask_of
from sparsegen.spec.expr import And, Bool, Or
from sparsegen.spec.pattern import Pattern
from tests.schedule.formulas import mask, random_blocks
from tests.work import at_most

CALLS: list[Call] = [
    (0, 60, 0, 60),
    (0, 37, 0, 53),  # ends inside a grid row
    (17, 23, 5, 41),  # begins inside one
    (-9, 30, 0, 44),  # rows before position 0
    (50, 9, 31, 1),
    (0, 90, 7, 70),
]


@pytest.fixture
def _closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small calls would be walked cell by cell, which is exact too."""

    def refuse(branch: object, call: Call) -> tuple[int, bool]:
        raise AssertionError(f"not counted in closed form: {branch}")

    monkeypatch.setattr(visible, "_walked", refuse)


def check(e: Bool, call: Call) -> None:
    schedule = build_from_exprs([(None, e)])
    segments = [s for c in schedule.classes for w in c.sweeps for s in w.segments]
    got = [visible.visible_cells(s.branch, call) for s in segments]
    assert all(exact for _, exact in got)
    assert sum(n for n, _ in got) == mask_of(e, call).sum(), (expr_text(e), call)


def shape_of(e: dict[str, object]) -> Bool:
    return Pattern.from_dict({"name": "p", "summary": "p", "mask": e}).exprs[0][1]


@pytest.mark.usefixtures("_closed")
@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.parametrize(
    "text",
    [
        "abs(q // 8 - k // 8) <= 2 and abs(q % 8 - k % 8) <= 1",
        "abs(q // 8 - k // 8) <= 2 and abs(q % 8 - k % 8) <= 1 and k <= q",
        "abs(q // 8 - k // 8) <= 2 and abs(q % 8 - k % 8) <= 3 and 0 <= q - k and q - k < 11",
        "abs(q // 15 - k // 15) <= 1 and abs(q // 5 % 3 - k // 5 % 3) <= 1 and abs(q % 5 - k % 5) <= 1",
        "q % 6 + k % 6 <= 7 and q // 6 != k // 6",
        "abs(q % 2 - k % 2) <= 1 and abs(q // 2 % 3 - k // 2 % 3) <= 1 and abs(q // 6 % 4 - k // 6 % 4) <= 1"
        " and abs(q // 24 - k // 24) <= 1",
        # a remainder and an interval on one axis
        "(q - k) % 2 == 0 and abs(q % 8 - k % 8) <= 4 and abs(q // 8 - k // 8) <= 2",
        # remainders on an axis, of the digit and of a difference
        "(q % 7 - k % 7) % 3 == 0 and k // 7 % 5 % 2 == 1 and q // 7 - k // 7 <= 4",
        # conditions on the row alone, in digits
        "q % 8 >= 3 and q // 8 % 3 != 1 and k % 8 <= q % 8",
        # unions and exclusions
        "abs(q // 8 - k // 8) <= 2 and abs(q % 8 - k % 8) <= 1 or q % 8 == k % 8 or k < 3",
        "abs(q // 8 - k // 8) <= 2 and abs(q % 8 - k % 8) <= 2 and q // 8 != k // 8 and q % 8 != k % 8",
        "k // 4 % 3 == q // 4 % 3 and k % 4 >= 1 and q // 12 != k // 12",
    ],
)
def test_boxes_of_digits(text: str, call: Call) -> None:
    check(mask(text), call)


@pytest.mark.usefixtures("_closed")
@pytest.mark.parametrize("shape", [[6, 8], [3, 5, 7]], ids=str)
def test_every_radius(shape: list[int]) -> None:
    keys = int(np.prod(shape))
    for radius in itertools.product((0, 1), repeat=len(shape)):
        e = shape_of({"neighborhood": {"shape": shape, "radius": list(radius)}})
        check(e, (0, keys - 2, 0, keys - 3))


@pytest.mark.usefixtures("_closed")
@pytest.mark.parametrize("seed", range(40))
def test_random_grids(seed: int) -> None:
    """Of one to three grids, joined or taken out, beside a band and with rows that draw blocks."""
    rng = random.Random(f"grids {seed}")
    width, planes = rng.randint(2, 6), rng.randint(2, 4)
    parts = [_grid(rng, width, planes) for _ in range(rng.randint(1, 3))]
    text = f"({parts[0]})" + "".join(f" {rng.choice(['or', 'and not'])} ({p})" for p in parts[1:])
    e = mask(f"({text}) and k <= q" if rng.random() < 0.3 else text)
    if rng.random() < 0.3:
        e = Or((e, random_blocks(4, 2, seed)))
    for call in rng.sample(CALLS, 3):
        check(e, call)


@pytest.mark.parametrize("call", CALLS[:3], ids=str)
def test_a_test_that_reads_the_key_itself_is_no_box(call: Call) -> None:
    """Of two tables one is walked, the other a test of the key."""
    near = mask("abs(q // 8 - k // 8) <= 2 and abs(q % 8 - k % 8) <= 2")
    check(And((random_blocks(4, 3, 1), random_blocks(4, 5, 2), near)), call)


def _grid(rng: random.Random, width: int, planes: int) -> str:
    near = ["abs({a} - {b}) <= {n}", "{a} - {b} <= {n}", "{a} == {b}", "{b} >= {n}"]
    plane = width * planes
    axes = [f"{{}} % {width}", f"{{}} // {width} % {planes}", f"{{}} // {plane}"]
    return " and ".join(
        rng.choice(near).format(a=f"({x.format('q')})", b=f"({x.format('k')})", n=rng.randint(0, 2))
        for x in rng.sample(axes, rng.randint(1, 3))
    )


def near(n: int, radius: int) -> int:
    """Pairs of coordinates of an axis that lie within a radius."""
    at = np.arange(n)
    return int((np.minimum(at + radius, n - 1) - np.maximum(at - radius, 0) + 1).sum())


def grid(shape: list[int], radius: list[int]) -> Schedule:
    e = shape_of({"neighborhood": {"shape": shape, "radius": radius}})
    return build_from_exprs([(None, e)])


@pytest.mark.parametrize(
    ("shape", "radius"),
    [([128, 256], [8, 8]), ([8, 64, 64], [1, 4, 4]), ([4096, 256], [7, 7])],
    ids=str,
)
def test_long_grids_are_exact_and_fast(shape: list[int], radius: list[int]) -> None:
    schedule, keys = grid(shape, radius), int(np.prod(shape))
    with at_most(75_000):
        got = count(schedule, keys, keys)
    assert got.exact
    assert got.cells == np.prod([near(n, r) for n, r in zip(shape, radius, strict=True)])


def test_the_shipped_grids_are_exact_and_fast() -> None:
    video, image = (build(Pattern.from_yaml(name)) for name in ("video_3d", "axial_image"))
    with at_most(75_000):
        a, b = count(video, 115200, 115200), count(image, 32768, 32768)
    assert a.exact and a.cells == near(30, 9) * near(48, 12) * near(80, 12)
    assert b.exact and b.cells == 32768 * (128 + 256 - 1)
