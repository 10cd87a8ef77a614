"""Branches on digit tilings: every cell once at any length and offset, and not a key tile more than by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from sparsegen.schedule.branches import Branch
from sparsegen.schedule.normalise import to_dnf
from sparsegen.schedule.tiles import query_tiles, visit
from sparsegen.schedule.tiling import close
from sparsegen.schedule.tree import (
    HeadClass,
    Segment,
    Span,
    Sweep,
    Tiling,
)
from sparsegen.schedule.verify import Call, environment, execute, mask_of
from sparsegen.schedule.visible import _holds
from tests.schedule.formulas import (
    branches_of,
    class_on,
    closed,
    mask,
    random_blocks,
    random_branch,
    random_tiling,
)
from tests.schedule.tilings import (
    AXIAL,
    BLOCK,
    DILATED,
    FIXED,
    FRAMES,
    GRID,
    MOD_4,
    NEAR,
    PACKED,
    RUNS,
    STRIDED,
    on,
)


def visible(branch: object, call: Call) -> np.ndarray:
    q = (call[0] + np.arange(call[1]))[:, None]
    k = (call[2] + np.arange(call[3]))[None, :]
    found = np.asarray(_holds(branch, environment(call, q, k)))  # type: ignore[arg-type]
    return np.broadcast_to(found, (call[1], call[3])).astype(np.int32)


# ---- every cell once ----


@pytest.mark.parametrize("seed", range(300))
def test_random_branches_on_random_tilings(seed: int) -> None:
    rng = random.Random(f"digits {seed}")
    branch, tiling = random_branch(rng), random_tiling(rng)
    segment = None if branch is None else close(branch, tiling)
    if segment is None or branch is None:
        return
    one = HeadClass(None, (Sweep(replace(tiling, k_cuts=()), (segment,)),), str(branch))
    for _ in range(2):
        call = (
            rng.choice([0, 0, rng.randint(-40, 60)]),
            rng.randint(1, 60),
            rng.choice([0, 0, rng.randint(0, 50)]),
            rng.randint(1, 70),
        )
        blocks = rng.choice([(16, 16), (8, 4), (16, 5), (4, 4), (32, 8), (16, 3), (16, 1)])
        got = execute(one, call, *blocks)
        assert np.array_equal(got, visible(branch, call)), (str(branch), tiling, call, blocks)


@pytest.mark.parametrize(
    ("text", "tilings"),
    [
        (STRIDED, [RUNS, on((128,), (1,))]),
        (STRIDED, [on((128,), (4,)), on((128,), (4,))]),
        (FIXED, [RUNS, Tiling((), (), (128,))]),
        (FIXED, [RUNS, Tiling((), (), (8, 128))]),
        (AXIAL, [RUNS, on((64,), (1,))]),
        (AXIAL, [on((64,), (1,), (64,)), on((64,), (8,))]),
        (DILATED, [on((8,), (1,))]),
        (GRID, [on((64,), (16,))]),
        (GRID, [on((64,), (1,))]),
        (GRID + " and k <= q", [on((64,), (8,))]),
        (BLOCK, [on((16, 256), (8, 2))]),
        (BLOCK, [on((16, 256), (4, 1))]),
        (FRAMES, [Tiling((), (), (256, 4096))]),
        (FRAMES + " and q // 256 != k // 256", [Tiling((), (), (256, 4096))] * 2),
        (MOD_4, [on((4,), (1,)), on((4,), (1,)), on((4,), (1,), (2,))]),
        (f"{NEAR} 255", [Tiling((4,), (1,), ())]),
        (PACKED, [on((1024,), (4,))]),
        ("k <= q and (q - k) % 24 == 5", [on((24,), (1,))]),
        ("q % 8 - k % 8 == 3", [on((8,), (1,))]),  # rows with a digit below 3 see nothing
        ("q % 8 - k % 8 == 3", [on((8,), (4,))]),
        ("(q - k % 4) % 8 == 0", [on((8,), (1,), (4,))]),
        ("(q - k % 4) % 8 == 0", [on((8,), (4,), (4,))]),
        ("abs(q - k) <= 50 and not abs(q - k) <= 10 and (q - k) % 3 != 0", [on((3,), (1,))] * 2),
    ],
)
def test_known_patterns(text: str, tilings: list[Tiling]) -> None:
    """At lengths beyond their periods: chunks of a long call, rows before position 0, few keys, other first keys."""
    one = class_on(text, *tilings)
    calls = [
        (0, 37, 0, 37),
        (-20, 60, 5, 70),
        (300, 140, 0, 440),
        (7, 1, 0, 8),
        (4000, 70, 3500, 640),
    ]
    for i, call in enumerate(calls):
        got = execute(one, call, *[(16, 16), (32, 8), (16, 5)][i % 3])
        assert np.array_equal(got, mask_of(mask(text), call)), call


@pytest.mark.parametrize("tiling", [RUNS, on((8,), (1,)), Tiling((8,), (2,)), Tiling((), (), (8,))])
@pytest.mark.parametrize(
    "text",
    [
        "k % 8 <= 3 and k <= q or k % 8 == 6 and k <= q + 9",  # digits of one, but not of the other
        "(q - k) % 8 == 0 and (k <= q - 5 or k >= q + 11)",  # one residue in all
        "(q - k) % 8 == 0 and k <= q or (q - k) % 8 == 3",
        "k <= q - 9 or k >= q + 11",
    ],
)
def test_several_alternatives_in_one_box(text: str, tiling: Tiling) -> None:
    branch = Branch(tuple(to_dnf(mask(text))), ())
    assert len(branch.alts) > 1
    sweep = Sweep(replace(tiling, k_cuts=()), (closed(branch, tiling),))
    for call in [(0, 64, 0, 61), (-9, 40, 3, 50), (70, 33, 0, 130)]:
        got = execute(HeadClass(None, (sweep,), text), call, 4, 3)
        assert np.array_equal(got, mask_of(mask(text), call)), call


def test_one_alternative_may_have_a_full_part() -> None:
    text = "(q - k) % 8 == 0 and (k <= q - 80 or k >= q + 11)"
    (s,) = (closed(Branch(tuple(to_dnf(mask(text))), ()), on((8,), (1,))),)
    assert "x0" in str(s.inner) and s.full_lo is not None


def test_a_table_has_no_digits() -> None:
    (cube,) = to_dnf(random_blocks(16, 2))
    assert close(Branch((cube,), ())) is not None
    assert close(Branch((cube,), ()), on((16,), (1,))) is None


# ---- the forms ----


def text_of(s: Segment) -> str:
    inner = "".join(f"y{t} {lo} .. {hi}; " for t, (lo, hi) in enumerate(s.inner))
    tests = ", ".join(f"{x.kind} {[str(t) for t in x.tests]}" for x in s.spans if x.tests)
    return f"{inner}{s.tile_lo} .. {s.tile_hi}" + (f"; {tests}" if tests else "")


@pytest.mark.parametrize(
    ("text", "tiling", "want"),
    [
        (
            "(q - k) % 128 == 0 and q - k >= 128",
            on((128,), (1,)),
            "y0 x0 .. x0; ((k_first - x0 + 127) // 128) .. min(((k_last - x0) // 128), x1_last - 1)",
        ),
        (
            "(q - k) % 2 == 0 and k <= q",  # residues of a finer modulus than the query's
            on((4,), (1,), (2,)),
            "y0 x0 - 2*(x0 // 2) .. x0 - 2*(x0 // 2); ((k_first - x0 + 1) // 2) + (x0 // 2) .. "
            "min(((k_last - x0) // 2) + (x0 // 2), (x0 // 2) + 2*x1_last)",
        ),
        (
            "k % 128 >= 120 and q // 128 > k // 128",
            Tiling((), (), (128,)),
            "y0 120 .. 127; (k_first // 128) .. min(((k_last + 8) // 128) - 1, (q_last // 128) - 1); "
            "tail ['k_last - k >= 0'], whole ['k - k_first >= 0', 'k_last - k >= 0']",
        ),
        (
            GRID,
            on((64,), (16,)),
            "y0 max(0, x0_first - 8) .. min(63, x0_last + 8); "
            "max((k_first // 64), x1_first - 8) .. min((k_last // 64), x1_last + 8); "
            "whole ['-8 <= x0 - y0 <= 8', 'k - k_first >= 0', 'k_last - k >= 0']",
        ),
        (
            GRID,  # one column of the grid: the box is exact
            on((64,), (1,)),
            "y0 max(0, x0 - 8) .. min(63, x0 + 8); "
            "max((k_first // 64), x1_first - 8) .. min((k_last // 64), x1_last + 8); "
            "head ['k - k_first >= 0'], tail ['k_last - k >= 0'], "
            "whole ['k - k_first >= 0', 'k_last - k >= 0']",
        ),
        (
            PACKED,
            on((1024,), (4,)),
            "y0 x0_first .. x0_last; ((k_first - x0_last + 1023) // 1024) .. "
            "min(((k_last - x0_first) // 1024), x1_last - 1); whole ['x0 - y0 == 0']",
        ),
        (
            "0 <= q - k and q - k <= 255",
            Tiling((4,), (1,), ()),
            "max(k_first, x0 + 4*x1_first - 255) .. min(k_last, x0 + 4*x1_last)",
        ),
    ],
)
def test_closed_forms(text: str, tiling: Tiling, want: str) -> None:
    (branch,) = branches_of(text)
    assert text_of(closed(branch, tiling)) == want


def test_the_full_part_of_a_residue_class() -> None:
    (branch,) = branches_of("(q - k) % 128 == 0 and q - k >= 128")
    s = closed(branch, on((128,), (1,)))
    assert str(s.full_hi) == "min(((k_last - x0) // 128), x1_first - 1)" and s.full_lo == s.tile_lo
    assert s.spans == (Span("full", False, False), Span("tail", False, True)) and not s.guards


def test_calls_that_begin_inside_a_box_have_no_full_part() -> None:
    """Rather than a loop of its own for the first keys of a shard."""
    (branch,) = branches_of("k % 128 >= 120")
    s = closed(branch, Tiling((), (), (128,)))
    assert [x.kind for x in s.spans] == ["full", "tail", "whole"] and len(s.guards) == 1
    for k_start, full in ((0, True), (128, True), (120, True), (121, False), (127, False)):
        env = query_tiles(4096, 16, 16, k_start, 4096)
        assert (visit(s, env, 16).body[0] > 0) == full, k_start


# ---- key tiles by hand ----


def counted(segment: Segment, length: int, block_m: int, block_n: int) -> dict[str, int]:
    env = query_tiles(0, length, block_m, 0, length, segment.tiling)
    return {kind: int(n.sum()) for kind, n in visit(segment, env, block_n).tiles(block_n).items()}


@pytest.mark.parametrize(
    ("text", "tiling", "call", "want"),
    [
        # 32 rows a class: 16 of them see up to 15 keys; the next 16 all see 16 keys, and up to 15 more
        (
            "(q - k) % 128 == 0 and q - k >= 128",
            on((128,), (1,)),
            (4096, 16, 16),
            {"head": 0, "full": 128, "tail": 128, "whole": 128},
        ),
        # 8 classes of 8 tiles: 128 keys, then 7 times 255; no key of 64 in a row is seen by all 128 rows
        (DILATED, on((8,), (1,)), (8192, 128, 64), {"head": 0, "full": 0, "tail": 0, "whole": 240}),
        # tile p: 8 p keys, of 32 tiles; 128 of them fill a tile from p = 16 on, exactly at 16
        (
            "k % 128 >= 120 and q // 128 > k // 128",
            Tiling((), (), (128,)),
            (4096, 128, 128),
            {"head": 0, "full": 16, "tail": 15, "whole": 15},
        ),
        # 64 columns of 64 rows, all of them visible
        (
            "q % 64 == k % 64",
            on((64,), (1,)),
            (4096, 64, 64),
            {"head": 0, "full": 64, "tail": 0, "whole": 0},
        ),
        # columns of 24, 32, 32, 24 keys by 16, 6 times 24, 16 rows: 3 4 4 3, 5 6 6 5 tiles of 128
        (GRID, on((64,), (16,)), (4096, 128, 128), {"head": 0, "full": 0, "tail": 0, "whole": 160}),
        # two whole frames of 256 keys for each of 64 tiles
        (
            FRAMES,
            Tiling((), (), (256, 4096)),
            (8192, 128, 128),
            {"head": 0, "full": 256, "tail": 0, "whole": 0},
        ),
        # 256 tiles of 4 classes, 4 rows each; 3 key rows of 4 classes fit one key tile
        (
            PACKED,
            on((1024,), (4,)),
            (4096, 64, 16),
            {"head": 0, "full": 0, "tail": 0, "whole": 256},
        ),
    ],
)
def test_key_tiles(
    text: str, tiling: Tiling, call: tuple[int, int, int], want: dict[str, int]
) -> None:
    (branch,) = branches_of(text)
    assert counted(closed(branch, tiling), *call) == want


def test_three_windows_in_one_query_tiling() -> None:
    """64 rows 4 apart see 319, 191 and 255 keys of their classes: 5, 3 and 4 tiles of 64 for 512 visible keys."""
    one = class_on(MOD_4, on((4,), (1,)), on((4,), (1,)), on((4,), (1,), (2,)))
    n, total = 4096, []
    for sweep in one.sweeps:
        (s,) = sweep.segments
        env = query_tiles(n - 1024, 1024, 64, 0, n, s.tiling)  # far from the first key
        total.append(sum(visit(s, env, 64).tiles(64).values()))
    assert [set(t.tolist()) for t in total] == [{5}, {3}, {4}]
