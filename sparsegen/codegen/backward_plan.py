"""What ``templates/backward`` is given: names, numbers and Triton text in frozen records.

Two kernels are rendered from it, each with its own plan: ``queries`` (dQ, and what both need of the outputs) over the
pattern's schedule, ``keys`` (dK and dV) over the transposed one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sparsegen.codegen.plan import Chunk, QueryBox, RowsPlan, SegmentPlan, SplitPlan, Table


@dataclass(frozen=True)
class HeadsPlan:
    """Heads with one mask: the condition that picks them, and their segments."""

    condition: str  # "" where they are all heads of the launch
    comment: str
    segments: tuple[SegmentPlan, ...]


@dataclass(frozen=True)
class GradientLaunch:
    """One launch: a function of the module."""

    kind: str  # "prepare" | "sweep" | "combine" | "finish"
    function: str
    summary: str
    chained: bool  # adds to what the launches before it wrote
    heads: tuple[
        str, ...
    ]  # lines: number of heads and head of the program, where not all take part
    rows: RowsPlan | None  # of a query tile, or of a key tile; None in all but sweeps
    classes: tuple[HeadsPlan, ...]
    some: str  # whether any segment holds anything for the tile
    split: SplitPlan | None
    cut: bool  # this launch is the one whose segments are cut into chunks


@dataclass(frozen=True)
class BackwardPlan:
    """All that ``templates/backward`` reads."""

    part: str  # "queries" | "keys"
    outputs: tuple[str, ...]  # "DQ"; or "DK", "DV" or both
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
    tables: tuple[Table, ...]
    walks: bool  # some segment walks the drawn blocks of a table
    shift: int  # added to the positions of queries
    launches: tuple[GradientLaunch, ...]
    gathers: bool  # some rows of queries or keys are gathered
    most_chunks: int  # of a split launch
    parameters: tuple[str, ...]
    types: tuple[str, ...]
    constexprs: tuple[str, ...]
    parameter_lines: tuple[str, ...]
    argument_lines: tuple[str, ...]


@dataclass(frozen=True)
class HopperGradientLaunch:
    """What the warp-specialised kernel knows of a launch besides the ``GradientLaunch``."""

    number: int
    own: QueryBox  # how descriptors load 64 rows of the program's tile; the name without the tensor's before it
    row_names: tuple[str, ...]  # what differs between the rows of a tile
    narrow: tuple[str, ...]  # tiles of segments with a size of their own
    valid: str  # rows of the tile that are rows of the call
    stored: str  # rows of the gradients that this tile writes


@dataclass(frozen=True)
class HopperBackwardPlan:
    """What ``templates/backward/hopper.py.jinja`` reads besides a ``BackwardPlan``.

    A program has 128 rows (or 64) of two tensors, its ``own``, and visits tiles of two others, ``seen``: queries and dO
    with keys and values for dQ, keys and values with queries and dO for dK and dV.
    """

    entry: str
    dtype: str  # of all four, by Gluon's name
    own: tuple[str, str]
    seen: tuple[str, str]
    parameters: tuple[str, ...]
    types: tuple[str, ...]
    constexprs: tuple[str, ...]
    parameter_lines: tuple[str, ...]  # of the kernel
    inner_parameter_lines: tuple[str, ...]  # of its partitions: shared memory, then the kernel's
    inner_argument_lines: tuple[str, ...]
    launches: Mapping[str, HopperGradientLaunch]  # by function: those that it does
    widths: tuple[int, ...]  # of the column chunks
    sums: bool  # gradients are float32, and later launches add to them
    sum_names: tuple[str, ...]  # of a tile's gradients by column chunks, as products add to them
    # launches, by number, that compute delta of their rows and store STATS; () where the launch before them has to
    prepares: tuple[int, ...] = ()


@dataclass(frozen=True)
class QueriesPart:
    """What a consumer gives of a visited tile's dQ [queries, columns]: column chunk ``index`` or its half of that."""

    index: int
    first: int  # column of the head
    width: int  # columns of a consumer's product
    halves: bool  # each consumer has half of the columns, over all keys; else all columns, over its own keys


@dataclass(frozen=True)
class FusedPlan:
    """What ``templates/backward_fused`` reads besides a ``BackwardPlan`` and a ``HopperBackwardPlan``."""

    parts: tuple[QueriesPart, ...]
    products: int  # asynchronous products for dQ of a tile
    names: tuple[str, ...]  # of the sums of dQ
