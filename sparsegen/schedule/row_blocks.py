"""The rows of a sweep in blocks of query tiles: what is worked out tile by tile needs the memory of one block."""

from __future__ import annotations

import math
from collections.abc import Iterator

from sparsegen.schedule.digits import radices
from sparsegen.schedule.tiles import top_size
from sparsegen.schedule.tree import Tiling

TILES_AT_ONCE = 1 << 14  # an array over them is 128 KiB


def row_blocks(
    q_start: int, q_len: int, block_m: int, tiling: Tiling, rows: tuple[int, int] | None = None
) -> Iterator[tuple[int, int] | None]:
    """First and last row of each block, to be given to ``query_tiles``: together they have the tiles of ``rows``.

    ``rows`` itself where one block holds them all.
    """
    first, last = q_start, q_start + q_len - 1
    if rows is not None:
        first, last = max(first, rows[0]), min(last, rows[1])
    # Tiles at one place of the top axis are neighbours, and no block parts them.
    lower = math.prod(
        -(-r // n) for r, n in zip(radices(tiling.q_cuts), tiling.extent, strict=True)
    )
    step = (1, *tiling.q_cuts)[-1] * (top_size(tiling, block_m) if tiling.q_cuts else block_m)
    begin = first // tiling.q_cuts[-1] * tiling.q_cuts[-1] if tiling.q_cuts else first
    many = max(TILES_AT_ONCE // lower, 1) * step
    if last - begin < many:
        yield rows
        return
    for low in range(begin, last + 1, many):
        yield max(low, first), min(low + many - 1, last)
