"""What a template is given: names, numbers and Triton text in frozen records.

Jinja places these; it computes nothing.  ``planner`` fills them.
"""

from __future__ import annotations

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
class SpanPlan:
    """What a loop over key tiles tests, as Triton text."""

    mask: str  # "" where nothing is left to test
    needs_k_pos: bool
    overhangs: bool  # the tile may reach past the last key


@dataclass(frozen=True)
class Loop:
    """One loop over key tiles; ``start`` and ``stop`` are Triton text."""

    start: str
    stop: str
    stages: str
    comment: str
    span: SpanPlan


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
    """One segment: its key ranges for a row and for a tile of rows, and its loops, as Triton text."""

    name: str
    comment: str
    row_lo: str
    row_hi: str
    tile_lo: str
    tile_hi: str
    live: str
    full_lo: str  # "" where no tile has a full part
    full_end: str
    body_holds: str
    block: str
    tma: str
    loops: tuple[Loop, ...]
    table: WalkPlan | None


@dataclass(frozen=True)
class ClassPlan:
    """Heads with one mask: the condition that picks them, and their segments."""

    keyword: str  # "if h == 1", "elif …", "else"
    comment: str
    segments: tuple[SegmentPlan, ...]


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
    classes: tuple[ClassPlan, ...]
    parameters: tuple[str, ...]
    types: tuple[str, ...]  # of the parameters: dtype pointers, "stride", i32, i64, fp32, "desc:k0"
    constexprs: tuple[str, ...]  # of the kernel, after the parameters
    parameter_lines: tuple[
        str, ...
    ]  # the same names as the lines of a parameter list, of an argument list
    argument_lines: tuple[str, ...]
