"""Counts in O(S): exact where they say so, fast and small at a million tokens; 32-bit limits."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from sparsegen.errors import UnsupportedError
from sparsegen.schedule.build import build_from_exprs
from sparsegen.schedule.count import block_entries, cells, count
from sparsegen.schedule.text import expr_text
from sparsegen.schedule.verify import mask_of
from sparsegen.spec.expr import Or
from tests.schedule.formulas import mask, random_blocks, random_mask, runs
from tests.work import at_most

MILLION = 1 << 20


@pytest.mark.parametrize("seed", range(60))
def test_cells_of_random_masks(seed: int) -> None:
    rng = random.Random(f"count {seed}")
    e = random_mask(rng, rng.randint(1, 3))
    q_len, kv_len = rng.randint(1, 50), rng.randint(1, 50)
    align = rng.choice(["bottom_right", "top_left"])
    got = count(build_from_exprs([(None, e)], align), q_len, kv_len)
    start = kv_len - q_len if align == "bottom_right" else 0
    assert got.exact and got.cells == mask_of(e, (start, q_len, 0, kv_len)).sum(), expr_text(e)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("k <= q", MILLION * (MILLION + 1) // 2),
        ("0 <= q - k and q - k < 4096", 4096 * MILLION - 4096 * 4095 // 2),
        # the window, and 4 more keys once it has passed them
        ("k <= q and (q - k < 4096 or k < 4)", 4290758650),
        ("(q - k) % 64 == 0 and k <= q", 64 * (16384 * 16385 // 2)),
        ("k % 128 >= 120", MILLION * MILLION // 16),
        ("k <= q and q // 8192 == k // 8192", 128 * (8192 * 8193 // 2)),
        ("(q - k) % 4 == 0 and (q - k) % 6 != 0", None),
    ],
)
def test_a_million_tokens_are_counted_exactly_and_fast(text: str, want: int | None) -> None:
    schedule = build_from_exprs([(None, mask(text))])
    with at_most(30_000):
        got = count(schedule, MILLION, MILLION)
    assert got.exact
    if want is None:  # delta = 0 mod 4 and not mod 12: two of three multiples of 4
        assert abs(got.cells / MILLION**2 - 1 / 6) < 1e-5
    else:
        assert got.cells == want


def test_what_is_not_counted_exactly_says_so() -> None:
    """A diamond couples the axes of the grid: no box."""
    grid = "abs(q // 64 - k // 64) + abs(q % 64 - k % 64) <= 3"
    schedule = build_from_exprs([(None, mask(grid))])
    got = count(schedule, 1 << 15, 1 << 15)
    assert not got.exact
    pairs = [[max(n - abs(d), 0) for d in range(-3, 4)] for n in (512, 64)]  # by their difference
    inner = sum(
        pairs[0][a + 3] * pairs[1][b + 3]
        for a in range(-3, 4)
        for b in range(-3, 4)
        if abs(a) + abs(b) <= 3
    )
    assert abs(got.cells / inner - 1) < 0.05


@pytest.mark.parametrize("seed", range(12))
def test_drawn_blocks_are_counted_exactly(seed: int) -> None:
    """Tables beside a band, columns and remainders, as in BigBird; also rows before position 0, which draw nothing."""
    rng = random.Random(f"drawn {seed}")
    block = rng.choice([4, 7, 16])
    parts = [random_blocks(block, rng.randint(1, 4), seed), mask("abs(q // 8 - k // 8) <= 1")]
    e = Or(tuple(parts + [mask(t) for t in rng.sample(["k < 5", "q < 9", "k % 6 == 2"], 2)]))
    q_len, kv_len = rng.randint(1, 90), rng.randint(1, 90)
    got = count(build_from_exprs([(None, e)]), q_len, kv_len)
    assert got.exact and got.cells == mask_of(e, (kv_len - q_len, q_len, 0, kv_len)).sum()


def test_drawn_blocks_stay_exact_beyond_what_is_walked() -> None:
    e = random_blocks(64, 3)
    got = count(build_from_exprs([(None, e)]), MILLION, MILLION)
    assert got.exact and got.cells == MILLION * 3 * 64  # a million is a multiple of the block
    many = count(build_from_exprs([(None, random_blocks(64, 40))]), MILLION, MILLION // 64)
    assert not many.exact  # more blocks than are looked at one by one: estimated, and said to be


@pytest.mark.parametrize("q_len", [6000, 131072])
def test_nested_chunks_with_strides(q_len: int) -> None:
    """LongNet: chunks in chunks, thinned out; the terms of inclusion and exclusion cancel."""
    text = "k <= q and (q // 64 == k // 64 or (q // 256 == k // 256 and (q - k) % 4 == 0)"
    text += " or (q // 1024 == k // 1024 and (q - k) % 6 == 0))"
    got = count(build_from_exprs([(None, mask(text))]), q_len, q_len)
    period = 3072  # lcm of the chunks and of the strides: what follows one period is the same again
    whole = mask_of(mask(text), (0, period, 0, period)).sum()
    rest = mask_of(mask(text), (0, q_len % period, 0, period)).sum() if q_len % period else 0
    assert got.exact and got.cells == q_len // period * whole + rest


@pytest.mark.parametrize(
    "text",
    [
        "k <= q and q - k < 6 and q // 8 == k // 8",
        "(k <= q and q // 8 == k // 8) or (k <= q and q - k < 6)",
        "k <= q + 3 and k // 8 <= q // 8 and k > q - 20 and q // 16 == k // 16",
    ],
)
def test_limits_that_take_turns_both_count(text: str) -> None:
    """Neither the window nor the chunk is always the stricter one."""
    got = count(build_from_exprs([(None, mask(text))]), 100, 100)
    assert got.cells == mask_of(mask(text), (0, 100, 0, 100)).sum()


def test_cells_sum_over_classes() -> None:
    one, other = mask("k <= q"), mask("0 <= q - k and q - k < 4")
    both = build_from_exprs([(((0, 1),), one), (None, other)])
    assert cells(both, 64, 64) == 64 * 65 // 2 + (64 * 4 - 6)


LONG = """
import resource
from sparsegen.schedule import count
from sparsegen.schedule.build import build_from_exprs
from sparsegen.spec.predicate import parse
from tests.work import at_most
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
n, before = 1 << 20, peak()
with at_most(180_000):
    s = build_from_exprs([(None, parse('k <= q and (q - k < 4096 or k < 4)'))])
    count.cells(s, n, n), count.computed_cells(s, n, n, 128, 128), count.block_entries(s, n, n, 128, 128)
print(peak() - before)
"""


def test_a_million_tokens_take_little_memory() -> None:
    """Schedule, cells, computed cells and blocks: what is called is limited, and so are MB beyond the imports."""
    out = subprocess.run([sys.executable, "-c", LONG], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert int(out.stdout) < 64


def test_block_entries_refuse_tables() -> None:
    with pytest.raises(UnsupportedError, match="table"):
        block_entries(build_from_exprs([(None, random_blocks(16, 2))]), 64, 64, 16, 16)


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("k <= q", 2**31 - 1 - 4096),
        ("0 <= q - k and q - k < 1024", 2**31 - 1 - 4096 - 1023),
        ("(q - k) % 7 == 0", 2**30),
        ("q * k >= 7", 46340 - 4096),
        ("q * 100 >= k * 100 + k * k", 46340 - 4096),
    ],
)
def test_position_limit(text: str, limit: int) -> None:
    got = runs(text).position_limit
    assert limit // 3 <= got <= limit  # never above what 32 bits hold, never uselessly low


def test_position_limit_of_a_huge_constant() -> None:
    far = build_from_exprs([(None, mask("q - k >= 3000000000"))])
    assert far.position_limit == 0  # the constant itself needs more than 32 bits
