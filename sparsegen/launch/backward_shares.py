"""Which heads have their dS in a workspace at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparsegen.errors import InputError
from sparsegen.launch.sizes import Sizes

ELEMENT = 2  # bytes of dS, which is bf16 or fp16
BOX = 64  # keys of a box that is stored, as the template has it


@dataclass(frozen=True)
class Share:
    """Batch entries from ``entry`` on, and of these the key heads from ``first`` to ``last`` - 1, with their query heads."""

    entry: int
    entries: int
    first: int
    last: int

    def heads(self, s: Sizes) -> int:
        """Query heads of each entry."""
        return (self.last - self.first) * (s.heads // s.kv_heads)

    def parts(self, s: Sizes) -> dict[str, tuple[Any, ...]]:
        """Its part of each tensor of a pass, as an index."""
        group = s.heads // s.kv_heads
        entries = slice(self.entry, self.entry + self.entries)
        of_queries = entries, slice(self.first * group, self.last * group)
        of_keys = entries, slice(self.first, self.last)
        room = slice(0, self.entries), slice(0, self.heads(s))
        return {
            **dict.fromkeys(("Q", "DO", "STATS", "DQ"), of_queries),
            **dict.fromkeys(("K", "V", "DK", "DV"), of_keys),
            "DS": room,
        }


def row_elements(kv_rows: int) -> int:
    """Elements of a row of DS [B, H, queries, keys], with those behind the last key: whole boxes of the kernel of keys."""
    return -(-kv_rows // BOX) * BOX


def head_bytes(s: Sizes) -> int:
    """Bytes of dS of one key head: of all its query heads."""
    return s.heads // s.kv_heads * s.q_rows * row_elements(s.kv_rows) * ELEMENT


def shares(s: Sizes, workspace: int) -> list[Share]:
    """All heads, as few times as a workspace of so many bytes allows, in parts as even as they can be.

    InputError where it does not hold one key head.
    """
    most = workspace // head_bytes(s)
    if most < 1:
        raise InputError(
            f"workspace={workspace} holds dS of no head: {s.q_rows} queries and {s.kv_rows} keys take "
            f"{head_bytes(s)} bytes a key head; give so much, or leave workspace out"
        )
    if most >= s.kv_heads:
        step = _even(s.batch, most // s.kv_heads)
        starts = range(0, s.batch, step)
        return [Share(b, min(step, s.batch - b), 0, s.kv_heads) for b in starts]
    step = _even(s.kv_heads, most)
    heads = [(h, min(h + step, s.kv_heads)) for h in range(0, s.kv_heads, step)]
    return [Share(b, 1, first, last) for b in range(s.batch) for first, last in heads]


def _even(count: int, most: int) -> int:
    """The size of parts that are as few as can be with ``most`` in each."""
    parts = -(-count // most)
    return -(-count // parts)
