"""Counting by periods of rows, and by blocks of query tiles: the same numbers at any length."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparsegen import InputError, Pattern
from sparsegen.schedule import cost, periods, row_blocks, visible
from sparsegen.schedule.branches import Branch
from sparsegen.schedule.build import candidates
from sparsegen.schedule.count import computed_cells
from sparsegen.schedule.counters import Rows
from sparsegen.schedule.machine import Sizes
from sparsegen.schedule.normalise import to_dnf
from sparsegen.schedule.row_blocks import row_blocks as blocks_of
from sparsegen.schedule.tiles import query_tiles
from sparsegen.schedule.tree import IDENTITY, Tiling
from sparsegen.spec.problem import Problem
from tests.schedule.formulas import mask, random_mask

ROOT = Path(__file__).parents[2]
LONGEST = 1 << 31

FORMULAS = {
    "k <= q": 1,
    "abs(q - k) <= 5": 1,
    "k <= q and (q - k) % 3 == 0": 3,
    "k <= q and k % 8 < 3": 8,
    "q // 8 == k // 8": 8,
    "abs(q // 8 - k // 8) <= 1 and abs(q % 8 - k % 8) <= 1": 8,
    "k <= q and q % 8 >= 6 and (k % 4 == 0 or q - k < 9)": 8,
    "abs(q // 4 % 4 - k // 4 % 4) <= 1 and abs(q % 4 - k % 4) <= 1 and abs(q // 16 - k // 16) <= 2": 16,
    "2 * k <= 3 * q - 7 and q < 200": 2,
    "2 * q - k >= 30 and k % 5 == 2": 5,
    "q // 8 >= k // 4 and (q + k) % 6 < 2": 24,
    "k <= q and (q // 8 * 8 <= k or k % 16 >= 13)": 16,
    "k <= q // 3 and abs(q % 8 - k % 8) <= 1 and k // 8 % 3 <= q % 2": 72,
    "q < 50 and k > 20 or q > 100 and k <= q - 30": 1,
}


def terms_of(expr: Any) -> Any:
    return visible._terms(Branch(tuple(to_dnf(expr)), ()))


def row_by_row(terms: Any, call: tuple[int, int, int, int]) -> int:
    rows = Rows(call, call[0] + np.arange(call[1]))
    return sum(sign * int(c.per_row(rows).sum()) for sign, c in terms)


def random_call(rng: random.Random) -> tuple[int, int, int, int]:
    """Ragged, with rows before position 0, and keys that begin later."""
    q_len, kv_len = rng.randint(1, 900), rng.randint(1, 900)
    start = rng.choice([0, kv_len - q_len, rng.randint(-400, 400)])
    return start, q_len, rng.choice([0, 0, rng.randint(1, 300)]), kv_len


@pytest.mark.parametrize("text", FORMULAS)
def test_periods_count_as_rows_do(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(periods, "WORTH", 3)
    terms, rng = terms_of(mask(text)), random.Random(text)
    assert periods.period_of(terms) == FORMULAS[text]
    for _ in range(12):
        call = random_call(rng)
        assert periods.total(terms, call) == row_by_row(terms, call), call


@pytest.mark.parametrize("seed", range(8))
def test_random_formulas(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(periods, "WORTH", 3)
    rng, met = random.Random(seed), 0
    for _ in range(20):
        terms = terms_of(random_mask(rng, rng.randint(1, 3)))
        if terms:
            call = random_call(rng)
            assert periods.total(terms, call) == row_by_row(terms, call), (terms, call)
            met += periods._periods(terms, call[1])[0] > 0
    assert met > 2


def test_what_has_no_period() -> None:
    assert periods.period_of(terms_of(mask("k <= q * q"))) is None
    drawn = Pattern.from_yaml("bigbird").exprs[0][1]
    assert periods.period_of(terms_of(drawn)) is None
    # a lower digit whose range grows with the row: a product of two lines
    assert periods.period_of(terms_of(mask("k % 8 <= q // 8 and k % 16 // 8 <= q // 64"))) is None


def test_sums_beyond_64_bits_of_intermediates() -> None:
    n = LONGEST
    for text, cells in (
        ("k <= q", n * (n + 1) // 2),
        ("k >= 0", n * n),
        ("k <= q and (q - k) % 128 == 0", 128 * (n // 128) * (n // 128 + 1) // 2),
        ("q // 4096 == k // 4096", n * 4096),
    ):
        assert visible.visible_cells(Branch(tuple(to_dnf(mask(text))), ()), (0, n, 0, n)) == (
            cells,
            True,
        )


def test_drawn_blocks_of_a_long_call_are_estimated_from_rows() -> None:
    """64-key blocks, three drawn of very many: hardly any row has one of them twice or near its window."""
    branch = Branch(tuple(to_dnf(mask("all"))), ())
    assert visible.visible_cells(branch, (0, 1 << 26, 0, 1 << 26)) == (1 << 52, True)
    drawn = Pattern.from_dict(
        {"name": "d", "mask": {"random_blocks": {"block": 64, "per_row": 3, "seed": 1}}}
    ).exprs[0][1]
    cells, exact = visible.visible_cells(Branch(tuple(to_dnf(drawn)), ()), (0, LONGEST, 0, LONGEST))
    assert not exact and cells == pytest.approx(192 * LONGEST, rel=0.01)


def test_what_is_counted_key_by_key_has_a_limit() -> None:
    branch = Branch(tuple(to_dnf(mask("k <= q and (q * k) % 5 < 2"))), ())
    with pytest.raises(InputError, match="key by key, for at most 16,777,216 keys.*33,554,432"):
        visible.visible_cells(branch, (0, 1 << 25, 0, 1 << 25))


TILINGS = [IDENTITY, Tiling((12,), (1,)), Tiling((8,), (4,)), Tiling((4, 24), (2, 3))]


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize("rows", [None, (40, 230)])
def test_blocks_have_the_tiles_of_the_call(
    tiling: Tiling, rows: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_blocks, "TILES_AT_ONCE", 7)
    block = 24
    for start, q_len in ((0, 400), (-37, 391), (5, 1), (13, 1000)):
        whole = query_tiles(start, q_len, block, 0, 999, tiling, rows)
        found = [
            query_tiles(start, q_len, block, 0, 999, tiling, some)
            for some in blocks_of(start, q_len, block, tiling, rows)
        ]
        assert q_len < 300 or rows or len(found) > 1
        for name, value in whole.items():
            parts = [x[name] for x in found]
            if isinstance(value, np.ndarray):
                np.testing.assert_array_equal(np.concatenate(parts), value)
            else:
                assert set(parts) == {value}, name


@pytest.mark.parametrize("name", ["bigbird", "longnet_dilated", "sparse_transformer_strided"])
def test_costs_of_blocks_are_those_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    n, tile = 20_001, (128, 64)
    problem = Problem(lengths=((n, n),))
    found = [c.schedule for c in candidates(Pattern.from_yaml(name), problem, tile)]
    one_head = Sizes(heads=1, kv_heads=1)  # for which the longest program is waited for
    whole = [cost.cost_of(s, n, n, tile, one_head) for s in found]
    monkeypatch.setattr(row_blocks, "TILES_AT_ONCE", 16)
    for schedule, one in zip(found, whole, strict=True):
        again = cost.cost_of(schedule, n, n, tile, one_head)
        assert again.tile_cells == one.tile_cells == computed_cells(schedule, n, n, *tile)
        assert again.state_bytes == one.state_bytes and again.launches == one.launches
        assert again.seconds == pytest.approx(one.seconds, rel=1e-9)
        assert again.waiting_seconds == pytest.approx(one.waiting_seconds, rel=1e-9)
    assert any(one.waiting_seconds > 0 for one in whole)


LONG = """
import resource
from sparsegen.report.show import look
from tests.work import at_most
small = look("causal", (256, 256))
small.text(explain=True)
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with at_most(750_000):
    seen = look("causal", (1 << 31, 1 << 31))
    seen.text(explain=True)
    assert seen.counts.exact
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) >> 10, seen.counts.cells)
"""


def test_the_longest_call_takes_seconds() -> None:
    """By what it calls; a row or a tile at a time would be 2**24 calls and more."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", LONG], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    mebibytes, cells = done.stdout.split()
    assert int(cells) == LONGEST * (LONGEST + 1) // 2
    assert int(mebibytes) < 100, done.stdout


@pytest.mark.parametrize("last", range(9))
def test_a_bend_between_any_two_values(last: int) -> None:
    """min(j, row) for j = 0..last bends where j = row, and min(j, row) + max(j, 4) twice."""
    rows = np.arange(-1, 10)

    def at(rows: np.ndarray, j: int) -> tuple[np.ndarray, list[np.ndarray]]:
        return np.minimum(rows, j) + max(j, 4), [
            np.sign(rows - j),
            np.full_like(rows, np.sign(j - 4)),
        ]

    assert periods._halved(at, rows, 0, last) == sum(
        int(at(rows, j)[0].sum()) for j in range(last + 1)
    )
