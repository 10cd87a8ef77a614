"""The schedule: frozen records of what a kernel does for any call of a pattern.

    Schedule   → HeadClass per set of heads with equal masks
    HeadClass  → Sweep per query tiling (one kernel loop nest; softmax state stays in registers inside a sweep)
    Sweep      → Segment per disjoint branch: a box of keys in closed form for any query tile
    Segment    → Span per kind of key tile: head | full | tail | whole

Positions are written in mixed-radix digits.  With cuts (c1, c2), c1 | c2, the steps are (1, c1, c2) and

    q = x0 + c1*x1 + c2*x2,  0 <= x0 < c1,  0 <= x1 < c2/c1,  x2 any integer (the top axis)

No cuts: one axis, and it keeps the plain name, ``q`` for queries and ``k`` for keys; with cuts the axes are
``x0, x1, ...`` and ``y0, y1, ...``.  A query tile is a box of digits: ``extent[t]`` values on the lower axis t, and
BLOCK_M / prod(extent) on the top axis.  (c, extent 1): the tile is one residue class.  (w, extent 8) on a grid of
rows of w: a box 8 wide.  The top axis starts at floor(first query / top step), lower axes at 0; a tile holds dead rows
where a lower axis, or the call, ends inside it.

All ranges are forms (``forms.Lin``), not numbers, so one schedule serves every length and every tile size:

    q_first, q_last     first and last row of the query tile (clipped to the last query), where there are no query cuts
    x0                  digit of all rows of the tile, on an axis of extent 1
    x1_first, x1_last   first and last digit of the tile on any other axis (clipped to the axis, or the last query)
    k_first, k_last     absolute positions of the first and the last key of the call (of the batch entry)
    q or x0, x1, ...    of one row; k or y0, y1, ... of one key (row forms and tests only; a test may use q and k as well)
    q_len, kv_len       lengths of the call

A segment's keys are a box of key digits: the top axis from ``tile_lo`` to ``tile_hi``, the lower axis t from
``inner[t]``'s first to its second form.  Its entries are numbered e = 0, 1, ... with axis 0 fastest; w is the product of
the lower sizes (1 without key cuts), n = (tile_hi - tile_lo + 1) * w entries in all.  A key tile is BLOCK_N
consecutive entries; entries from n on are computed and masked.  Without key cuts entry e is key tile_lo + e.
With a full part (``full_lo`` <= ``full_hi`` on the top axis, and every guard holds), writing N = BLOCK_N:

    head = ceil((full_lo - tile_lo) * w / N) key tiles
    body = max(((full_hi + 1 - tile_lo) * w) // N - head, 0) key tiles   (0 where a guard fails)
    body > 0:   head tiles are "head", the next body tiles "full", the rest to the end of the box "tail"
    body == 0:  all tiles are "whole"

With ``k_extent`` W a key tile is a box instead of consecutive entries: W digits on axis 0, N / W on axis 1, one on axis 2
where there is one.  So a box of n0 x n1 (x n2) digits has ceil(n0 / W) * ceil(n1 * W / N) (* n2) key tiles, axis 0 again
fastest; digits beyond the last of an axis are computed and masked.  Such a segment has no full part.

Spans that would say the same are left out, so a segment has one of these lists:

    (whole,)                    no full part (``full_lo`` is None): body = 0 on every tile
    (full, tail)                full_lo = tile_lo on every tile, so the head is empty;
                                where body == 0 the tail covers the whole box, its tests suffice
    (full, tail, whole)         the same, but tiles without a full part test more (conditions on rows)
    (head, full, tail)          several alternatives: head and tail carry all tests; body == 0: the tail covers the box
    (head, full, tail, whole)   as above

Why head tests only lower limits and tail only upper ones: when the body is not empty every key of the head is below
``full_hi``, so below every row's upper limit (and a key of the call), and every key of the tail is above ``full_lo``.
Conditions on rows alone are guards, so they hold for all rows wherever there is a body.  No length, no tile size.
What neither the box nor a row limit says is in ``tests`` of head, tail and whole alike.  Without key cuts keys lie in
[k_first, k_last] by the box; with them ``tests`` say so wherever the box does not.

A segment with a ``table`` has one span (whole,): its key tiles come from the table, not from tile_lo..tile_hi.

Sweeps of a class run in order.  The first starts from an empty softmax state and writes OUT and LSE of every row; each
later one takes the state up from there (acc = OUT, sum = 1, maximum = LSE), for the rows that it sees keys for.
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
    ``extent``: the query tile's size on every lower axis, as many as there are query cuts, powers of two with a product
    of 32 at most, so that any BLOCK_M holds them; the top axis gets the rest of BLOCK_M.
    ``k_extent``: a key tile's size on the lowest key axis, a power of two of 16 at most; 0: its keys are entries one after
    the other.
    Segments of one sweep have equal ``q_cuts`` and ``extent``; each has ``k_cuts`` and ``k_extent`` of its own.
    """

    q_cuts: tuple[int, ...] = ()
    extent: tuple[int, ...] = ()
    k_cuts: tuple[int, ...] = ()
    k_extent: int = 0


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
    """Key tiles of a segment that need the same tests.  A kernel may test more: head, tail and whole together.

    ``lower``: test top key axis >= row_lo.  ``upper``: test it <= row_hi.  ``tests``: what no row limit can say.
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
    row_lo: Lin  # form in a row's axes, k_first, k_last: first value of the top key axis that the row may see
    row_hi: Lin  # last one.  Without key cuts they are keys of the call: never below k_first, never above k_last
    tile_lo: Lin  # form in the tile's symbols, k_first, k_last: first value of the top key axis
    tile_hi: Lin  # last one; the box is empty where tile_lo > tile_hi
    live: tuple[
        Lin, ...
    ]  # the segment is empty for a tile where any of these is negative (conditions on rows alone)
    full_lo: Lin | None  # None: no full part on any tile
    full_hi: Lin | None
    guards: tuple[
        tuple[Lin, ...], ...
    ]  # full part exists only where in every tuple some form is >= 0
    spans: tuple[Span, ...]
    inner: tuple[
        tuple[Lin, Lin], ...
    ] = ()  # first and last digit on every lower key axis, one pair a key cut;
    # the box is empty where a first exceeds its last
    width: int | None = (
        None  # most keys that tile_lo..tile_hi can hold on any tile, where that is a constant
    )
    table: TableWalk | None = None


@dataclass(frozen=True)
class Sweep:
    """One kernel loop nest: all segments share the query tiling and the softmax state.

    ``tiling.k_cuts`` is () here: segments have their own.  ``rows``: only query positions first..last (inclusive) are
    swept; the segments show nothing elsewhere; query tiles start at the first of them (no query cuts).
    ``split``: few rows with many keys: the entries of every segment are cut into chunks, one program each, and the
    partial states are joined afterwards.  Never the first sweep of a class, and never with query cuts or a table.
    """

    tiling: Tiling
    segments: tuple[Segment, ...]
    rows: tuple[int, int] | None = None
    split: bool = False


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
    label: str = "runs"  # which of the pattern's candidate schedules this is; unique among them, stable between runs
