"""Query tiles of digits: every row in one tile, in the order in which programs run."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from sparsegen.schedule.digits import axes_of, radices
from sparsegen.schedule.tiles import one_tile, query_tiles, tile_count, tile_rows
from sparsegen.schedule.tree import (
    Tiling,
)
from tests.schedule.formulas import (
    CUTS,
    branches_of,
    random_tiling,
)


@pytest.mark.parametrize("seed", range(40))
def test_every_row_is_in_one_tile(seed: int) -> None:
    rng = random.Random(f"rows {seed}")
    tiling = random_tiling(rng)
    start, n = rng.randint(-60, 60), rng.randint(0, 90)
    env = query_tiles(start, n, 16, 0, 8, tiling)
    found = np.zeros(n, int)
    for i in range(tile_count(env)):
        rows = tile_rows(one_tile(env, i), start, n, 16, tiling)
        found[rows.q[rows.live] - start] += 1
        steps = (1, *tiling.q_cuts)
        names = ["q"] if len(steps) == 1 else [f"x{t}" for t in range(len(steps))]
        assert np.array_equal(rows.q, sum(c * rows.digits[x] for c, x in zip(steps, names)))
    assert (found == 1).all()


def test_tiles_run_along_the_lowest_axis_first() -> None:
    env = query_tiles(500, 600, 32, 0, 9, Tiling((8, 64), (4, 1)))
    assert env["x0_first"][:4].tolist() == [0, 4, 0, 4] and env["x0_last"][:2].tolist() == [3, 7]
    assert env["x1"][:5].tolist() == [0, 0, 1, 1, 2] and "x1_first" not in env
    assert env["x2_first"].tolist() == [7] * 16 + [15] * 16  # 500 // 64, and 32 / 4 of them a tile
    assert env["x2_last"].tolist() == [14] * 16 + [17] * 16
    rows = tile_rows(one_tile(env, 3), 500, 600, 32, Tiling((8, 64), (4, 1)))
    assert rows.q[:6].tolist() == [7 * 64 + 8 + n for n in (4, 5, 6, 7, 68, 69)]
    assert rows.live[:6].tolist() == [False] * 4 + [True] * 2  # 500 is the first row


def test_sweeps_of_few_rows() -> None:
    env = query_tiles(10, 90, 16, 0, 9, rows=(5, 40))
    assert env["q_first"].tolist() == [10, 26] and env["q_last"].tolist() == [25, 40]
    assert tile_count(query_tiles(50, 9, 16, 0, 9, rows=(5, 40))) == 0


def test_a_tile_must_hold_the_lower_digits() -> None:
    with pytest.raises(ValueError, match="do not hold"):
        query_tiles(0, 9, 8, 0, 9, Tiling((32,), (16,)))


@pytest.mark.parametrize("cuts", CUTS)
def test_lowering_is_exact(cuts: tuple[int, ...]) -> None:
    axes = axes_of(Tiling(cuts, (1,) * len(cuts), cuts))
    q, k = np.arange(-70, 70)[:, None], np.arange(0, 90)[None, :]
    env = {}
    for name, x in (("x", q), ("y", k)):
        for t, radix in enumerate(radices(cuts)):
            env[f"{name}{t}"], x = x % radix, x // radix
        env[f"{name}{len(cuts)}"] = x
    for text in (
        "(q - k) % 24 <= 5",
        "q // 4 - k // 12 >= 1",
        "(q // 6) % 4 + k % 16 >= 9",
        "q * k >= 7",
    ):
        for cube in (c for b in branches_of(text) for c in b.alts):
            for r in cube:
                lowered = axes.conjunct(r)
                for one in (lowered.test(), replace(lowered, plain=None).test()):
                    truth = np.broadcast_to(one.test({**env, "q": q, "k": k}), (140, 90))
                    assert np.array_equal(
                        truth, np.broadcast_to(r.test({"q": q, "k": k}), (140, 90))
                    )
