"""Room that a backward pass makes beside its inputs and outputs, from sizes alone: what is launched asks here, and ``show``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING

from sparsegen.schedule.chunks import chunks_of

if TYPE_CHECKING:
    from sparsegen.codegen.grids import Grid

MOST_PARTIALS = 64 << 20  # bytes of partial sums of a split launch: fewer and longer chunks beyond
SPLIT_ROWS = 64  # of a program of a split launch, about
AT_ONCE = 256  # programs of split launches: two on every multiprocessor of an H100 or H200, and some more on others
STATS = 4  # float32 a query row: two with the bf16 numbers that add up to LSE, and two with those of delta
WHOLE = MappingProxyType({"chunks": 1, "chunk": 0})  # of a launch that is not split


@dataclass(frozen=True)
class Room:
    """Memory that a pass makes: ``shape``, float32 or the dtype of the inputs, full of zeros or of anything."""

    shape: tuple[int, ...]
    float32: bool = True
    zero: bool = False

    def bytes(self, itemsize: int) -> int:
        """Its size; ``itemsize``: bytes of an element of the inputs."""
        return prod(self.shape) * (4 if self.float32 else itemsize)


def prepared(
    rows: tuple[int, int, int], tiles: int, sinks: bool, null: Sequence[int] = ()
) -> dict[str, Room]:
    """What the launch that prepares fills: statistics of all rows, and what sink logits and null key get from each tile.

    ``rows``: (batch, heads, q_len).  ``null``: columns of the null key and of its value, () where there is none.
    """
    found = {"STATS": Room((*rows, STATS))}
    parts = (*rows[:2], tiles)
    if sinks:
        found["SINK_PARTS"] = Room(parts, zero=True)
    for name, columns in zip(("NULL_K_PARTS", "NULL_V_PARTS"), null):
        found[name] = Room((*parts, columns), zero=True)
    return found


def summed(
    outputs: Mapping[str, int],
    grids: Iterable[Grid],
    rows: tuple[int, int, int],
    other: int,
    float32: bool,
    zero: bool = False,
) -> tuple[dict[str, Room], Mapping[str, int]]:
    """Room for gradients and for the partial sums of split launches; chunks of those, and ``other`` rows in each.

    ``outputs``: columns of each gradient by name.  ``rows``: (batch, heads, rows) that have gradients.  ``float32``: they
    are summed up over several launches.
    """
    found = {name: Room((*rows, n), float32, zero) for name, n in outputs.items()}
    split = [g.rows_of(rows[2]) for g in grids if g.split]
    if not split:
        return found, WHOLE
    heads = rows[0] * rows[1]
    states = heads * max(split)
    tiles = heads * -(-max(split) // SPLIT_ROWS)
    chunks, chunk = bounded_chunks(other, 4 * states * sum(outputs.values()), tiles)
    found |= {f"PARTIAL_{name}": Room((states * chunks * n,)) for name, n in outputs.items()}
    return found, {"chunks": chunks, "chunk": chunk}


def bounded_chunks(entries: int, bytes_each: int, tiles: int) -> tuple[int, int]:
    """Chunks of a split launch of so many ``tiles``, and entries in each.

    Fewer than a forward pass has where all programs would not run at once, for each has its start and its end; and where
    their partial sums would take too much memory.
    """
    chunks, chunk = chunks_of(entries)
    most = max(1, min(MOST_PARTIALS // max(bytes_each, 1), AT_ONCE // max(tiles, 1)))
    return (chunks, chunk) if chunks <= most else (most, -(-entries // (most * 128)) * 128)
