"""The schedule: a frozen tree that says which key tiles each query tile visits, and what is still tested there.

    Schedule   → HeadClass per group of heads with the same mask
    HeadClass  → Sweep per query tiling (one kernel loop nest; softmax state stays in registers inside a sweep)
    Sweep      → Segment per disjoint branch: a range of keys in closed form for any query tile
    Segment    → Span per loop over key tiles: head | full | tail | whole

All ranges are forms (``forms.Lin``), not numbers, so one schedule serves every length and every tile size:

    q_first, q_last   absolute positions of the first and the last row of the query tile (clipped to the last query)
    k_first, k_last   absolute positions of the first and the last key of the call (of the batch entry)
    q, k              absolute positions of one row, of one key (row forms and tests only)
    q_len, kv_len     lengths of the call

Key tiles of a segment start at ``tile_lo`` and step by BLOCK_N; entries beyond ``tile_hi`` are computed and masked.
With a full part (``full_lo`` <= ``full_hi`` and every guard holds), writing a = tile_lo and N = BLOCK_N:

    body_lo = a + ceil((full_lo - a) / N) * N
    body    = max((full_hi + 1 - body_lo) // N, 0) key tiles             (0 where a guard fails)
    body > 0:   head = [a, body_lo), full = [body_lo, body_lo + body*N), tail = [body_lo + body*N, tile_hi]
    body == 0:  whole = [a, tile_hi]

Spans that would say the same are left out, so a segment has one of these lists:

    (whole,)                    no full part (``full_lo`` is None): body = 0 on every tile
    (full, tail)                no row starts later than the tile does, so body_lo = a and the head is empty;
                                where body == 0 the tail covers [a, tile_hi], its tests suffice
    (full, tail, whole)         the same, but tiles without a full part test more (conditions on rows)
    (head, full, tail)          several alternatives: head and tail carry all tests; body == 0: tail = [a, tile_hi]
    (head, full, tail, whole)   as above

Why head tests only lower limits and tail only upper ones: when the body is not empty every key of the head is below
``full_hi``, so below every row's upper limit (and a key of the call), and every key of the tail is above ``full_lo``.
Conditions on rows alone are guards, so they hold for all rows wherever there is a body.  No length, no tile size.

A segment with a ``table`` has one span (whole,): its key tiles come from the table, not from tile_lo..tile_hi.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sparsegen.schedule.branches import Branch
from sparsegen.schedule.forms import Lin
from sparsegen.schedule.formula import Cube, Range


@dataclass(frozen=True)
class Tiling:
    """How a query tile and a key tile lie on the positions.

    ``q_cuts`` / ``k_cuts`` split a position into mixed-radix digits, ``()`` means runs of neighbours (the identity).
    ``extent`` gives the tile's size on every query axis; ``()`` = all of BLOCK_M on the only axis.
    """

    q_cuts: tuple[int, ...] = ()
    extent: tuple[int, ...] = ()
    k_cuts: tuple[int, ...] = ()


IDENTITY = Tiling()


@dataclass(frozen=True)
class AnyOf:
    """Test: at least one of the cubes holds (a cube is a conjunction of Ranges)."""

    cubes: tuple[Cube, ...]


@dataclass(frozen=True)
class NoneOf:
    """Test: none of the cubes holds."""

    cubes: tuple[Cube, ...]


Test = Range | AnyOf | NoneOf


@dataclass(frozen=True)
class Span:
    """One loop over key tiles of a segment.

    ``lower``: test k >= row_lo(q).  ``upper``: test k <= row_hi(q).  ``tests``: what no row limit can say.
    """

    kind: str  # "head" | "full" | "tail" | "whole"
    lower: bool
    upper: bool
    tests: tuple[Test, ...] = ()


@dataclass(frozen=True)
class TableWalk:
    """Keys are read from a table row of blocks instead of a range: random_blocks.

    The segment of a query tile visits, for every block row r = q // block of the tile, the ``per_row`` key blocks
    listed in the table (int32 [rows, per_row], row 0 is block row ``q_start // block``, -1 = no block), and
    rows of another block row are masked there.
    """

    term: object  # spec.expr.Term
    block: int
    per_row: int


@dataclass(frozen=True)
class Segment:
    """Visible cells of one disjoint branch, for any query tile."""

    name: str
    branch: Branch
    tiling: Tiling
    row_lo: Lin  # form in q, k_first, k_last: first key row q may see (never below k_first)
    row_hi: Lin  # last key row q may see (never above k_last)
    tile_lo: Lin  # form in q_first, q_last, k_first, k_last: first key of the tile's range
    tile_hi: Lin  # last key; empty where tile_lo > tile_hi
    live: tuple[
        Lin, ...
    ]  # the segment is empty for a tile where any of these is negative (conditions on rows alone)
    full_lo: Lin | None  # None: no full part on any tile
    full_hi: Lin | None
    guards: tuple[
        tuple[Lin, ...], ...
    ]  # full part exists only where in every tuple some form is >= 0
    spans: tuple[Span, ...]
    width: int | None = (
        None  # most keys that tile_lo..tile_hi can hold on any tile, where that is a constant
    )
    table: TableWalk | None = None


@dataclass(frozen=True)
class Sweep:
    """One kernel loop nest: all segments share the query tiling and the softmax state."""

    tiling: Tiling
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class HeadClass:
    """Heads with equal canonical masks.

    ``heads``: inclusive ranges of query heads, ``None`` for the rest (or all).
    """

    heads: tuple[tuple[int, int], ...] | None
    sweeps: tuple[Sweep, ...]
    mask_text: str  # the canonical formula, for people


@dataclass(frozen=True)
class Schedule:
    """What was decided for a pattern; a function of the pattern alone unless ``max_position`` is set."""

    align: str  # "bottom_right" | "top_left"
    classes: tuple[HeadClass, ...]
    position_limit: int  # largest |position| and length for which 32-bit arithmetic is exact in every form and test
    max_position: int | None = (
        None  # proven only for q, k < max_position (lengths up to it); None = for any
    )
    min_position: int | None = (
        None  # proven only for q >= min_position; None = for q >= -max_position, or any
    )
    notes: tuple[str, ...] = field(default=())  # what the passes found, for ``show --explain``
