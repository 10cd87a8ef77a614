"""Branches on digit tilings: every cell once at any length and offset, and not a key tile more than by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from sparsegen.schedule.branches import Branch
from sparsegen.schedule.count import block_entries, cells, computed_cells, load
from sparsegen.schedule.digits import axes_of, radices
from sparsegen.schedule.dump import dump
from sparsegen.schedule.forms import Lin, var
from sparsegen.schedule.graph import graph
from sparsegen.schedule.naming import shape
from sparsegen.schedule.normalise import to_dnf
from sparsegen.schedule.reach import position_limit
from sparsegen.schedule.tiles import one_tile, query_tiles, tile_count, tile_rows, visit
from sparsegen.schedule.tiling import close
from sparsegen.schedule.tree import (
    HeadClass,
    Schedule,
    Segment,
    Span,
    Sweep,
    Tiling,
)
from sparsegen.schedule.verify import Call, ScheduleError, environment, execute, mask_of
from sparsegen.schedule.visible import _holds
from tests.schedule.formulas import (
    CUTS,
    branches_of,
    class_on,
    closed,
    mask,
    random_blocks,
    random_branch,
    random_tiling,
)

RUNS = Tiling()
STRIDED = "k <= q and (q - k < 128 or (q - k) % 128 == 0)"
FIXED = "k <= q and (q // 128 == k // 128 or k % 128 >= 120)"
AXIAL = "q // 64 == k // 64 or q % 64 == k % 64"
DILATED = "(q - k) % 8 == 0 and k <= q and q - k <= 1016"
GRID = "abs(q // 64 - k // 64) <= 8 and abs(q % 64 - k % 64) <= 8"
BLOCK = (
    "abs(q // 256 - k // 256) <= 1 and abs(q // 16 % 16 - k // 16 % 16) <= 4"
    " and abs(q % 16 - k % 16) <= 4"
)
FRAMES = "(k // 256) % 16 == 0"
NEAR = "k <= q and q - k <= "
MOD_4 = f"(q - k) % 4 == 0 and {NEAR} 1020 or (q - k) % 2 == 0 and {NEAR} 510 or {NEAR} 255"
PACKED = "(q - k) % 1024 == 0 and q - k >= 1024"


def on(cuts: tuple[int, ...], extent: tuple[int, ...], k_cuts: tuple[int, ...] = ()) -> Tiling:
    return Tiling(cuts, extent, k_cuts or cuts)


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


# ---- query tiles ----


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


# ---- verify sees faults ----


def _fewer(s: Segment) -> Segment:
    return replace(s, inner=tuple((lo, hi - 1) for lo, hi in s.inner))


def _shifted(s: Segment) -> Segment:
    return replace(s, inner=tuple((lo + 1, hi + 1) for lo, hi in s.inner))


def _untested(s: Segment) -> Segment:
    return replace(s, spans=tuple(replace(x, tests=()) for x in s.spans))


def _too_full(s: Segment) -> Segment:
    return replace(s, full_hi=None if s.full_hi is None else s.full_hi + 1)


def _shorter(s: Segment) -> Segment:
    return replace(s, tile_hi=s.tile_hi - 1)


def _unguarded(s: Segment) -> Segment:
    return replace(s, guards=())


@pytest.mark.parametrize(
    ("text", "tiling", "change", "call"),
    [
        ("k % 8 >= 5", Tiling((), (), (8,)), _fewer, (0, 16, 0, 64)),
        ("(q - k) % 8 == 0 and k <= q", on((8,), (1,)), _shifted, (0, 64, 0, 64)),
        ("abs(q % 8 - k % 8) <= 1", on((8,), (4,)), _untested, (0, 64, 0, 64)),
        ("(q - k) % 8 == 0 and k <= q", on((8,), (1,)), _too_full, (0, 64, 0, 64)),
        ("(q - k) % 8 == 0 and k <= q", on((8,), (1,)), _shorter, (0, 64, 0, 64)),
        ("k % 8 >= 5", Tiling((), (), (8,)), _unguarded, (0, 16, 6, 64)),
        ("k % 8 >= 5", Tiling((), (), (8,)), _untested, (0, 16, 0, 63)),  # the last key
    ],
)
def test_verify_finds_a_fault(text: str, tiling: Tiling, change: object, call: Call) -> None:
    one = class_on(text, tiling)
    assert np.array_equal(execute(one, call, 4, 1), mask_of(mask(text), call))
    (sweep,) = one.sweeps
    broken = replace(sweep, segments=tuple(map(change, sweep.segments)))  # type: ignore[arg-type]
    try:
        got = execute(replace(one, sweeps=(broken,)), call, 4, 1)
    except ScheduleError:  # a cell outside the keys
        return
    assert not np.array_equal(got, mask_of(mask(text), call))


@pytest.mark.parametrize(
    "change",
    [
        lambda s: (replace(s[0], rows=(0, 9)), *s[1:]),
        lambda s: (replace(s[0], split=True), *s[1:]),
        lambda s: (s[0], replace(s[1], tiling=Tiling((128,), (2,)))),
        lambda s: (s[0], replace(s[1], tiling=Tiling((128,), (1,), (128,)))),
        lambda s: (s[0], replace(s[1], split=True)),
    ],
)
def test_sweeps_that_no_kernel_runs(change: object) -> None:
    one = class_on(STRIDED, RUNS, on((128,), (1,)))
    execute(one, (0, 9, 0, 9), 16, 16)
    with pytest.raises(ScheduleError):
        execute(replace(one, sweeps=change(one.sweeps)), (0, 9, 0, 9), 16, 16)  # type: ignore[operator]


# ---- the rest of the room ----


def schedule_on(text: str, *tilings: Tiling) -> Schedule:
    one = class_on(text, *tilings)
    named = [
        replace(w, segments=tuple(replace(s, name=shape(s)) for s in w.segments))
        for w in one.sweeps
    ]
    limit = position_limit(s for w in named for s in w.segments)
    return Schedule("bottom_right", (replace(one, sweeps=tuple(named)),), limit, label="by hand")


def test_counts_go_over_all_sweeps() -> None:
    schedule = schedule_on(FIXED, RUNS, Tiling((), (), (128,)))
    n = 4096
    assert cells(schedule, n, n) == 32 * (128 * 129 // 2) + 8 * 128 * (31 * 32 // 2)
    assert computed_cells(schedule, n, n, 128, 128) == (32 + 46) * 128 * 128
    got = load(schedule, n, n, 128, 128)
    assert (got.heaviest, got.total) == (2, 32 + 46) and got.mean == (32 + 46) / 64
    # blocks of runs: all up to the diagonal
    assert block_entries(schedule, n, n, 128, 128).tolist() == [p + 1 for p in range(32)]


def test_a_split_sweep_is_never_the_heaviest() -> None:
    schedule = schedule_on("k <= q or k > q + 9", RUNS, RUNS)
    (one,) = schedule.classes
    split = replace(one, sweeps=(one.sweeps[0], replace(one.sweeps[1], split=True, rows=(0, 63))))
    got = load(replace(schedule, classes=(split,)), 4096, 4096, 64, 64)
    assert got.heaviest == 64 and got.total == 64 * 65 // 2 + 64


@pytest.mark.parametrize(
    ("text", "tiling"),
    [
        (DILATED, on((8,), (1,))),
        (BLOCK, on((16, 256), (8, 2))),
        (FRAMES, Tiling((), (), (256, 4096))),
    ],
)
def test_positions_from_digits_fit_32_bits(text: str, tiling: Tiling) -> None:
    """Up to about 2^30, where k - k_first may overflow: a lower digit is not as large as a position.

    Tiles go on beyond the last one.
    """
    (branch,) = branches_of(text)
    segment = closed(branch, tiling)
    limit = position_limit([segment])
    step = max(*tiling.q_cuts, *tiling.k_cuts)
    assert 2**30 - 3 * 4096 * step <= limit <= 2**31 - 1 - 4096 * step
    if tiling.q_cuts:
        top = var(f"x{len(tiling.q_cuts)}_last")
        more = replace(segment, inner=((top * (4 * step), Lin()),))
        assert position_limit([more]) <= limit // 2


def test_a_dump_and_a_graph_name_the_digits() -> None:
    import networkx as nx

    schedule = schedule_on(STRIDED, RUNS, on((128,), (1,)))
    text = dump(schedule)
    for line in (
        "schedule by hand",
        "  sweep queries cut at 128, tile 1",
        "    segment strided (keys cut at 128): ",
        "      y0    x0 .. x0",
        "      tail  y1 <= row_hi",
    ):
        assert f"\n{line}" in f"\n{text}", text
    (one,) = schedule.classes
    split = replace(one.sweeps[0], rows=(0, 63), split=True)
    text = dump(replace(schedule, classes=(replace(one, sweeps=(one.sweeps[1], split)),)))
    assert "\n  sweep runs of queries from 0 to 63, keys split\n" in text
    g = graph(schedule)
    assert nx.shortest_path(g, "load0.0", "combine0") == [
        "load0.0",
        "segment0.0.band",
        "load0.1",
        "segment0.1.strided",
        "combine0",
    ]


def test_names() -> None:
    for text, tiling, name in (
        (DILATED, on((8,), (1,)), "strided"),
        (GRID, on((64,), (16,)), "box"),
        (FRAMES, Tiling((), (), (256, 4096)), "stripes"),
        (PACKED, on((1024,), (4,)), "box"),
    ):
        (branch,) = branches_of(text)
        assert shape(closed(branch, tiling)) == name, text
