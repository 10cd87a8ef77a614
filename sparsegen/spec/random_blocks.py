"""The table behind ``random_blocks``: which key blocks each query block draws.  numpy, vectorised."""

from __future__ import annotations

from typing import Any

_DRAWS_AT_ONCE = 2**21  # 64-bit draws held at a time, about 50 MB with their sorting order


def random_block_table(
    block: int, per_row: int, seed: int, first_row: int, rows: int, blocks: int
) -> Any:
    """Key blocks drawn by query blocks first_row .. first_row + rows - 1, in the order drawn.

    Row r takes the first ``per_row`` distinct values of ``splitmix64((seed << 40) ^ (r << 20) ^ t) % blocks`` for
    t = 0, 1, …; with ``per_row >= blocks`` it takes all blocks, 0, 1, … .  A negative r takes none.  ``block`` (keys a
    block) is part of the pattern's identity and does not enter the draw.  Returns numpy int32 [rows, per_row]; unused
    places are -1.  Time and memory are O(rows * per_row).
    """
    import numpy as np

    if block < 1:
        raise ValueError(f"block must be at least 1, got {block}")
    table = np.full((rows, per_row), -1, np.int32)
    skip = min(max(0, -first_row), rows)  # negative query blocks see nothing
    if per_row >= blocks:
        table[skip:, : max(blocks, 0)] = np.arange(max(blocks, 0), dtype=np.int32)
        return table
    draws = 2 * per_row + 8
    todo = np.arange(skip, rows)
    while len(todo):
        unfinished = []
        step = max(_DRAWS_AT_ONCE // draws, 1)
        for start in range(0, len(todo), step):
            part = todo[start : start + step]
            complete = _draw(table, part, seed, first_row, draws, blocks)
            unfinished.append(part[~complete])
        # Repeats are common when per_row is near the number of blocks: those rows draw again, from t = 0, for longer.
        todo, draws = np.concatenate(unfinished), 2 * draws
    return table


def _draw(table: Any, part: Any, seed: int, first_row: int, draws: int, blocks: int) -> Any:
    """Fill the rows ``part`` of the table from ``draws`` draws each; returns which of them are complete."""
    import numpy as np

    per_row = table.shape[1]
    row = (part + first_row).astype(np.uint64)[:, None] << np.uint64(20)
    key = np.uint64(seed << 40) ^ row ^ np.arange(draws, dtype=np.uint64)[None, :]
    drawn = (_splitmix64(key) % np.uint64(blocks)).astype(np.int32)
    order = np.argsort(drawn, axis=1, kind="stable")
    ranked = np.take_along_axis(drawn, order, axis=1)
    new_ranked = np.ones_like(ranked, bool)
    new_ranked[:, 1:] = ranked[:, 1:] != ranked[:, :-1]
    new = np.empty_like(new_ranked)
    np.put_along_axis(new, order, new_ranked, axis=1)
    place = np.cumsum(new, axis=1) - 1
    kept = new & (place < per_row)
    complete = place[:, -1] >= per_row - 1
    kept &= complete[:, None]
    line, draw = np.nonzero(kept)
    table[part[line], place[line, draw]] = drawn[line, draw]
    return complete


def _splitmix64(x: Any) -> Any:
    """One step of splitmix64 from state x (uint64 array): add the gamma, then mix; wraps modulo 2^64."""
    import numpy as np

    z = x + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
