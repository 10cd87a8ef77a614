"""Other readings of digit segments: counts, loads, position limits, dumps, names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparsegen.schedule.count import block_entries, cells, computed_cells, load
from sparsegen.schedule.dump import dump
from sparsegen.schedule.forms import Lin, var
from sparsegen.schedule.graph import graph
from sparsegen.schedule.naming import shape
from sparsegen.schedule.reach import position_limit
from sparsegen.schedule.tree import (
    Schedule,
    Tiling,
)
from tests.schedule.formulas import (
    branches_of,
    class_on,
    closed,
)
from tests.schedule.tilings import (
    BLOCK,
    DILATED,
    FIXED,
    FRAMES,
    GRID,
    PACKED,
    RUNS,
    STRIDED,
    on,
)


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
