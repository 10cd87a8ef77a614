"""Key tiles that are boxes of a grid: every cell once, whatever hangs over, and no more key tiles than by hand."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from sparsegen.schedule import verify
from sparsegen.schedule.branches import Branch
from sparsegen.schedule.count import computed_cells
from sparsegen.schedule.key_boxes import WIDTHS, twin
from sparsegen.schedule.normalise import to_dnf
from sparsegen.schedule.search import candidates
from sparsegen.schedule.tiles import entry_keys, query_tiles, visit
from sparsegen.schedule.tiling import close
from sparsegen.schedule.tree import HeadClass, Schedule, Sweep, Tiling
from sparsegen.schedule.verify import execute, mask_of
from tests.schedule.formulas import closed, mask, random_branch, random_tiling
from tests.schedule.test_digits import visible

N = 32_768
IMAGE = "abs(q // 256 - k // 256) <= 8 and abs(q % 256 - k % 256) <= 8"
VIDEO = (
    "abs(q // 4096 - k // 4096) <= 1 and abs(q // 64 % 64 - k // 64 % 64) <= 4"
    " and abs(q % 64 - k % 64) <= 4"
)


def grid_class(text: str, tiling: Tiling) -> HeadClass:
    (cube,) = to_dnf(mask(text))
    sweep = Sweep(Tiling(tiling.q_cuts, tiling.extent), (closed(Branch((cube,), ()), tiling),))
    return HeadClass(None, (sweep,), text)


# ---- every cell once ----
GRIDS = [
    ("abs(q // 12 - k // 12) <= 2 and abs(q % 12 - k % 12) <= 3", (12,), (4,)),
    ("abs(q // 10 - k // 10) <= 1 and abs(q % 10 - k % 10) <= 1", (10,), (8,)),
    ("abs(q // 20 - k // 20) <= 9 and 0 <= q % 20 - k % 20 <= 5 and k <= q", (20,), (2,)),
    ("abs(q // 9 - k // 9) <= 3 and abs(q % 9 - k % 9) <= 20", (9,), (1,)),
    (
        "abs(q // 24 - k // 24) <= 1 and abs(q // 6 % 4 - k // 6 % 4) <= 1 and abs(q % 6 - k % 6) <= 2",
        (6, 24),
        (2, 2),
    ),
    (
        "abs(q // 48 - k // 48) <= 2 and abs(q // 8 % 6 - k // 8 % 6) <= 2 and abs(q % 8 - k % 8) <= 3"
        " and k <= q",
        (8, 48),
        (4, 1),
    ),
]
CALLS = [(0, 100, 0, 100), (30, 70, 0, 100), (0, 100, 0, 37), (-20, 61, 0, 41), (50, 9, 13, 90)]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("text", "cuts", "extent"), GRIDS)
def test_grids(text: str, cuts: tuple[int, ...], extent: tuple[int, ...], width: int) -> None:
    """Ragged ends, rows before position 0, keys that begin late; edges of the grid in both directions."""
    one = grid_class(text, Tiling(cuts, extent, cuts, width))
    assert one.sweeps[0].segments[0].full_lo is None
    for call in CALLS:
        want = mask_of(mask(text), call)
        for blocks in ((16, 16), (32, 64), (8, 24), (16, 5)):
            np.testing.assert_array_equal(execute(one, call, *blocks), want, str((call, blocks)))


@pytest.mark.parametrize("seed", range(150))
def test_random_branches_in_key_boxes(seed: int) -> None:
    rng = random.Random(f"key boxes {seed}")
    branch, tiling = random_branch(rng), random_tiling(rng)
    segment = None if branch is None else close(branch, tiling)
    if segment is None or not tiling.k_cuts or segment.full_lo is not None:
        return
    tiling = replace(tiling, k_extent=rng.choice(WIDTHS))
    sweep = Sweep(Tiling(tiling.q_cuts, tiling.extent), (replace(segment, tiling=tiling),))
    for _ in range(3):
        call = rng.randint(-20, 40), rng.randint(1, 50), rng.randint(0, 20), rng.randint(1, 60)
        got = execute(HeadClass(None, (sweep,), ""), call, rng.choice([16, 32]), 16)
        np.testing.assert_array_equal(got, visible(branch, call), str((branch, tiling, call)))


def test_no_full_part_in_boxes() -> None:
    (cube,) = to_dnf(mask("q // 8 - k // 8 >= 1 and k % 8 >= 6"))
    assert close(Branch((cube,), ()), Tiling((8,), (2,), (8,))).full_lo is not None  # type: ignore[union-attr]
    assert close(Branch((cube,), ()), Tiling((8,), (2,), (8,), 4)) is None


def test_a_tile_too_much_or_too_little_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: without the mask of what hangs over, cells are computed twice."""
    text, cuts, extent = GRIDS[1]
    one = grid_class(text, Tiling(cuts, extent, cuts, 8))
    monkeypatch.setattr(verify, "within", lambda got, keys: np.array([True]))
    with pytest.raises(verify.ScheduleError, match="outside|times"):
        for call in CALLS:
            verify._compare(one, call, (16, 16), execute(one, call, 16, 16), mask_of(mask(text), call))  # fmt: skip


# ---- key tiles ----
def test_key_tiles_by_hand() -> None:
    """Query tiles of 8 columns and 16 lines see 24 columns and 32 lines: 3 x 4 boxes of 8 x 8 keys, fewer at edges."""
    segment = grid_class(IMAGE, Tiling((256,), (8,), (256,), 8)).sweeps[0].segments[0]
    env = query_tiles(0, N, 128, 0, N, Tiling((256,), (8,)))
    tiles = visit(segment, env, 64).tiles(64)["whole"].reshape(8, 32)
    assert (
        tiles[3, 7] == 12 and tiles[0, 7] == tiles[7, 7] == 9 and tiles[3, 0] == tiles[3, 31] == 8
    )
    assert visit(segment, env, 128).tiles(128)["whole"].reshape(8, 32)[3, 7] == 6
    box = entry_keys(10, ((24, 20),), np.arange(64, 128), segment.tiling, 64)
    assert box["y0"].tolist() == [32 + i % 8 for i in range(64)]
    assert box["y1"].tolist() == [10 + i // 8 for i in range(64)]
    third = entry_keys(10, ((24, 20),), np.arange(3 * 64, 4 * 64), segment.tiling, 64)
    assert (int(third["k"][0]), int(third["k"][-1])) == (256 * 18 + 24, 256 * 25 + 31)
    with pytest.raises(ValueError, match="no boxes 8 digits wide"):
        visit(segment, env, 20)


def test_boxes_of_a_video_by_hand() -> None:
    """8 x 4 columns and lines: 16 columns, 12 lines in steps of 4, and frame after frame."""
    tiling = Tiling((64, 4096), (8, 4), (64, 4096), 16)
    at = [entry_keys(2, ((4, 16), (8, 12)), np.arange(64) + 64 * i, tiling, 64) for i in range(6)]
    firsts = [tuple(int(x[y][0]) for y in ("y0", "y1", "y2")) for x in at]
    assert firsts == [(4, 8 + 4 * line, frame) for frame, line in itertools.product((2, 3), range(3))]  # fmt: skip
    assert all(len(set(x["y2"].tolist())) == 1 for x in at)


# ---- candidates ----
def test_twins_compute_as_many_cells_where_boxes_fit() -> None:
    found = {c.schedule.label: c for c in candidates([(None, mask(IMAGE))], lengths=[(N, N)])}
    assert list(found)[:2] == ["box 8 of 256", "box 8 of 256 + key boxes 8 wide"]
    for label in ("box 8 of 256", "box 8 of 256 + key boxes 8 wide"):
        schedule = found[label].schedule
        seen = 4280 * 2104  # pairs of columns, of lines
        assert seen / computed_cells(schedule, N, N, 128, 64) >= 0.389
        assert seen / computed_cells(schedule, N, N, 64, 64) >= 0.508


def test_a_twin_is_measured_and_never_first() -> None:
    """Nobody has measured one against what it is made of, and the model gives both the same weights."""
    for text, least in ((IMAGE, 2), (VIDEO, 1)):
        found = candidates([(None, mask(text))], lengths=[(N, N)])
        twins = [c for c in found if "key boxes" in c.schedule.label]
        assert len(twins) >= least and all(c.to_measure for c in twins)
        labels = [c.schedule.label for c in found]
        for c in twins:
            made_of = c.schedule.label.split(" + key boxes")[0]
            assert labels.index(made_of) < labels.index(c.schedule.label)


def test_no_twin_where_key_tiles_are_boxes_already() -> None:
    for text in (
        "k <= q",
        "k <= q and (q - k < 128 or (q - k) % 128 == 0)",
        "k <= q and (q // 128 == k // 128 or k % 128 >= 120)",
        "q // 256 == k // 256 or q % 256 == k % 256",
    ):
        for c in candidates([(None, mask(text))], lengths=[(N, N)]):
            assert twin(c.schedule, (0, N, 0, N)) is None and "key boxes" not in c.schedule.label


@pytest.mark.parametrize("text", [IMAGE, VIDEO, f"{IMAGE} or k < 64 or 0 <= q and q < 64"])
def test_twins_of_the_search_are_exact(text: str) -> None:
    found = candidates([(None, mask(text))], lengths=[(N, N)])
    twins = [c.schedule for c in found if "key boxes" in c.schedule.label]
    assert twins
    for schedule in twins:
        assert isinstance(schedule, Schedule)
        lengths = ((700, 700), (300, 1100), (520, 260))
        verify.verify_exprs(schedule, [(None, mask(text))], lengths, ((128, 64), (64, 16)))
