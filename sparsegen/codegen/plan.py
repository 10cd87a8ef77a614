"""What a template is given: names, numbers and Triton text in frozen records.

Jinja places these; it computes nothing.  ``planner`` fills them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sparsegen.spec.expr import Term


@dataclass(frozen=True)
class Chunk:
    """Columns of a head that one dot product takes: ``width`` is a power of two, ``cols`` of them exist."""

    index: int
    first: int
    cols: int
    width: int


@dataclass(frozen=True)
class Table:
    """A random_blocks table: int32 [block rows, per_row], an argument of the kernel."""

    index: int
    term: Term
    block: int
    per_row: int
    row_of_q: str
    block_of_k: str


@dataclass(frozen=True)
class Limit:
    """One border of the keys that a row sees, where the columns of a tile are neighbours on the top axis of the keys."""

    name: str  # "row_lo", the first one, or "row_hi", the last one
    first: str  # what the tile's first column is on that axis
    where: str  # tiles in which a row has this border; "" where all may
    inside: str  # sets what ``where`` asks: the first key that all rows see, or the end of those; "" where it is ""


@dataclass(frozen=True)
class Loop:
    """The loop over the key tiles of a segment, as Triton text."""

    start: str
    stop: str
    comment: str
    mask: str  # cells that are visible
    edge: str  # which tiles test them; "" where all do
    there: str  # entries of a box that are keys of the call
    keys: tuple[str, ...]  # set the keys of a tile of entries of a box
    limits: tuple[
        Limit, ...
    ] = ()  # the same tests border by border; () where there are others, too


@dataclass(frozen=True)
class WalkPlan:
    """How a segment walks the drawn blocks of a ``random_blocks`` table."""

    pointer: str
    first_row: str
    block: int
    per_row: int
    first_row_of_tile: str
    last_row_of_tile: str


@dataclass(frozen=True)
class SegmentPlan:
    """One segment: its key ranges for a row and for a tile of rows, and its loops, as Triton text.

    The loop runs from ``lo`` to ``end``: over keys, or over the entries of a ``box`` of key digits.
    """

    name: str
    comment: str
    row_lo: str
    row_hi: str
    lo: str  # "" for a box, whose entries are counted from 0
    end: str
    some: str  # whether it holds any key of the tile
    body_lo: str  # "" where no tile has a full part
    body_end: str
    body_holds: str
    block: str
    tma: str
    descriptor: (
        str  # name of what loads its keys, without the tensor's letter; "" where they are gathered
    )
    corner: tuple[
        str, ...
    ]  # a box that a descriptor loads: top and low digit that a key tile starts at
    box_shape: str  # what a descriptor loads, between batch, head and columns: "BLOCK_N", or periods and their group
    loop: Loop
    loop_of_lines: (
        Loop | None
    )  # the same where the keys of the call are whole lines of a grid, if that tests less
    box_lines: tuple[str, ...]  # set the first digits and the sizes of a box; () for a run of keys
    box_vectors: tuple[str, ...]  # set where the keys of any tile lie, where that never changes
    table: WalkPlan | None


@dataclass(frozen=True)
class ClassPlan:
    """Heads with one mask: the condition that picks them, and their segments."""

    keyword: str  # "if h == 1", "elif …", "else"; "" where they are all heads of the launch
    comment: str
    segments: tuple[SegmentPlan, ...]
    adds: str  # whether any segment holds a key of the tile; "" where that is not asked


@dataclass(frozen=True)
class RowsPlan:
    """Rows of a query tile as Triton text."""

    scalars: tuple[str, ...]  # set live_rows > 0 where some row is a query, and the tile's symbols
    vectors: tuple[str, ...]  # set q_pos and rows, and what differs between the rows
    gathered: bool  # rows lie anywhere in memory, at ``rows``; else one after the other, at ``row + rows``
    valid: str  # rows that are queries of the call
    stored: str  # rows of the outputs that this tile writes


@dataclass(frozen=True)
class SplitPlan:
    """Query positions whose keys are cut into chunks."""

    start: str  # position of row 0 of the partial results
    rows: str  # how many rows they have
    last: str  # last position; "" where it is the call's


@dataclass(frozen=True)
class LaunchPlan:
    """One launch: a function of the module."""

    function: str
    summary: str
    chained: bool
    heads: tuple[
        str, ...
    ]  # lines: number of heads and head of the program, where not all take part
    rows: RowsPlan
    classes: tuple[ClassPlan, ...]
    runs: bool  # some segment's keys are one run
    split: SplitPlan | None
    combine: bool


@dataclass(frozen=True)
class QueryBox:
    """How a descriptor loads 64 queries of a tile, as text."""

    descriptor: str  # its name, without the chunk's number
    corner: str  # where the box of consumer ``i`` starts, between head and column
    shape: str  # between head and columns


@dataclass(frozen=True)
class Step:
    """A segment, and the narrow one before it whose only key tile is taken along with its first: ``guest``."""

    segment: SegmentPlan
    guest: SegmentPlan | None = None


@dataclass(frozen=True)
class HopperLaunch:
    """What the warp-specialised kernel knows of a launch besides the ``LaunchPlan``."""

    number: int
    queries: QueryBox | None  # None: consumers gather their queries
    row_names: tuple[str, ...]  # what differs between the rows of a tile
    segment_names: tuple[str, ...]  # and what is a segment's own
    narrow: tuple[str, ...]  # key tiles of segments with a size of their own
    steps: tuple[tuple[Step, ...], ...]  # of every class of heads


@dataclass(frozen=True)
class HopperPlan:
    """What ``templates/forward/hopper.py.jinja`` reads besides the ``ForwardPlan``."""

    entry: str
    dtype: str  # of keys and values, by Gluon's name
    parameters: tuple[str, ...]
    types: tuple[str, ...]
    constexprs: tuple[str, ...]
    parameter_lines: tuple[str, ...]  # of the kernel
    inner_parameter_lines: tuple[
        str, ...
    ]  # of its partitions: shared memory, then the kernel's own
    inner_argument_lines: tuple[str, ...]
    launches: Mapping[str, HopperLaunch]  # by function: those that it does
    widths: tuple[int, ...]  # of the column chunks
    accs: str  # the accumulators, as the inside of a tuple
    staging: tuple[int | None, ...]  # by output chunk: the query chunk of the same width, if any
    limits: frozenset[str]  # names of the limits that some segment tests apart
    queries_in_registers: bool  # as an operand of the product with keys


@dataclass(frozen=True)
class ForwardPlan:
    """All that ``templates/forward`` reads; ``StrictUndefined`` makes a name that is not here an error."""

    title: str
    template: str
    entry: str
    mask_lines: tuple[str, ...]
    head_dim: int
    value_dim: int
    qk_chunks: tuple[Chunk, ...]
    v_chunks: tuple[Chunk, ...]
    softcap: float | None
    alibi: bool
    sink_logits: bool
    null_key: bool
    prescaled: bool  # scores are scaled before the mask and not inside the softmax
    softmax_scale: str
    tables: tuple[Table, ...]
    launches: tuple[LaunchPlan, ...]
    gathers: bool  # some rows of queries or keys are gathered
    most_chunks: int  # of a split launch
    parameters: tuple[str, ...]
    types: tuple[
        str, ...
    ]  # of the parameters: dtype pointers, "stride", i32, i64, fp32, "desc:128:8:64"
    constexprs: tuple[str, ...]  # of the kernel, after the parameters
    parameter_lines: tuple[
        str, ...
    ]  # the same names as the lines of a parameter list, of an argument list
    argument_lines: tuple[str, ...]
