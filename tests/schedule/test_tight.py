"""No key tile too many: numbers worked out by hand, so that "everything partial" or "everything in range" fails."""

from __future__ import annotations

import numpy as np
import pytest

from sparsegen.schedule.build import build_from_exprs
from sparsegen.schedule.count import block_entries, computed_cells, load
from sparsegen.schedule.tiles import query_tiles, visit
from sparsegen.schedule.tree import Schedule
from tests.schedule.formulas import mask, random_blocks


def schedule_of(text: str) -> Schedule:
    return build_from_exprs([(None, mask(text))])


def tiles(
    schedule: Schedule, length: int, block_m: int, block_n: int
) -> dict[str, tuple[int, int]]:
    """Segment → (full, partial) key tiles of a square call."""
    out = {}
    for sweep in schedule.classes[0].sweeps:
        env = query_tiles(0, length, block_m, 0, length, sweep.tiling, sweep.rows)
        for s in sweep.segments:
            counts = {
                kind: int(n.sum()) for kind, n in visit(s, env, block_n).tiles(block_n).items()
            }
            out[s.name] = counts["full"], counts["head"] + counts["tail"] + counts["whole"]
    return out


@pytest.mark.parametrize(
    ("text", "want"),
    [
        # 64 query tiles; tile p has p full tiles and the diagonal
        ("k <= q", {"causal": (2016, 64)}),
        ("k <= q or k > q", {"full": (4096, 0)}),
        # tile p < 16: p full tiles, one edge; later 1087 keys from its own start: 1 + 15 + 1
        ("0 <= q - k and q - k < 1024", {"band": (120 + 48 * 15, 16 + 48 * 2)}),
        # the sinks are apart once the window has left them: tiles 16..63
        ("k <= q and (q - k < 1024 or k < 4)", {"columns": (0, 48), "band": (840, 112)}),
        # chunks of 8 tiles: 0..7 full tiles and the diagonal
        ("k <= q and q // 512 == k // 512", {"chunks": (8 * 28, 64)}),
        # band: 4 5 6 7 8 tiles, 55 times 9, 8 7 6 5; full 3 4 5 6 7, 55 times 7, 7 6 5 4.
        # rows: keys 257..4095 in 60 tiles, the first before all rows have passed the band, the last beyond the keys
        (
            "abs(q - k) <= 256 or k < 64 or (0 <= q and q < 64)",
            {"columns": (64, 0), "band": (432, 119), "rows": (58, 2)},
        ),
        # all but the nearest 128 keys: tile p has p - 2 full tiles and an edge of two tiles
        ("k <= q and not (q - k < 128)", {"left": (1891, 62)}),
        # prefix 512: one range up to max(q, 511)
        ("k <= q or k < 512", {"left": (8 * 8 + sum(range(8, 64)), 56)}),
        # the union of a chunk and a window is one range: the first tile of a chunk has two edges, but for tile 0
        ("k <= q and (q // 512 == k // 512 or q - k < 64)", {"band": (8 * 28, 1 + 7 * 2 + 56)}),
    ],
)
def test_tiles_at_4096(text: str, want: dict[str, tuple[int, int]]) -> None:
    assert tiles(schedule_of(text), 4096, 64, 64) == want


def test_causal_computes_nothing_beyond_the_diagonal() -> None:
    env = query_tiles(0, 4096, 64, 0, 4096)
    (s,) = schedule_of("k <= q").classes[0].sweeps[0].segments
    got = visit(s, env, 64)
    assert np.array_equal(
        got.last, env["q_last"]
    )  # no tile starts after the last key that its last row sees
    assert np.array_equal(got.body, np.arange(64))


def test_ragged_calls_have_no_spare_tile() -> None:
    # 100 rows at positions 900..999 of 1000 keys: 64 rows see up to 964, the other 36 up to 1000.
    env = query_tiles(900, 100, 64, 0, 1000)
    (s,) = schedule_of("k <= q").classes[0].sweeps[0].segments
    counts = visit(s, env, 128).tiles(128)
    assert sum(counts.values()).tolist() == [8, 8]
    assert counts["full"].tolist() == [7, 7]


def test_rows_alone_skip_their_other_tiles() -> None:
    assert tiles(schedule_of("128 <= q and q < 192"), 4096, 64, 64) == {"rows": (64, 0)}
    # not heavy enough for a sweep of their own
    assert tiles(schedule_of("128 <= q and q < 3072"), 4096, 64, 64) == {"rows": (46 * 64, 0)}


def test_a_window_narrower_than_a_tile_has_one_span() -> None:
    (s,) = schedule_of("0 <= q - k and q - k < 8").classes[0].sweeps[0].segments
    assert [x.kind for x in s.spans] == ["whole"]


def test_a_million_tokens_by_blocks() -> None:
    """Window 4096 and 4 sinks in blocks of 128: 277,967 blocks, at most 34 a row.

    The kernel's own tiles start where a window starts, so on one query tile (window from key 1 on, sinks: key 0) it
    reads one tile more than there are aligned blocks.
    """
    schedule = schedule_of("k <= q and (q - k < 4096 or k < 4)")
    n = 1 << 20
    entries = block_entries(schedule, n, n, 128, 128)
    assert len(entries) == 8192 and entries.max() == 34 and entries.sum() == 277_967
    got = load(schedule, n, n, 128, 128)
    assert got.total == 277_968 and got.heaviest == 34
    assert computed_cells(schedule, n, n, 128, 128) == 277_968 * 128 * 128


def test_narrow_segments_may_use_a_smaller_key_tile() -> None:
    schedule = schedule_of("k <= q and (q - k < 1024 or k < 4)")
    wide = computed_cells(schedule, 4096, 4096, 64, 64)
    assert wide - computed_cells(schedule, 4096, 4096, 64, 64, narrow_block=64) == 48 * 64 * 48


def test_blocks_of_a_table_are_walked_and_not_scanned() -> None:
    from sparsegen.spec.expr import And

    schedule = build_from_exprs([(None, And((mask("k <= q"), random_blocks(64, 3))))])
    (s,) = schedule.classes[0].sweeps[0].segments
    assert s.table is not None and (s.table.block, s.table.per_row) == (64, 3)
    assert computed_cells(schedule, 4096, 4096, 64, 64) == 64 * 3 * 64 * 64
