"""Chunks of the keys that a split sweep gives to programs of their own: one rule for the cost model and the kernels."""

from __future__ import annotations

MOST_CHUNKS = 64  # a combining program holds one row of each
SMALLEST_CHUNK = 256  # keys


def chunks_of(kv_rows: int) -> tuple[int, int]:
    """(chunks, entries in each) that a split launch cuts every segment into; the last chunk takes what is left."""
    chunks = min(MOST_CHUNKS, max(1, -(-kv_rows // SMALLEST_CHUNK)))
    # a multiple of every key tile, so that no chunk ends inside one
    return chunks, -(-kv_rows // (chunks * 128)) * 128
