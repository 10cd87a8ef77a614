"""Gradients of a call: the two backward kernels on tensors, argument by argument.

``gradients`` knows the order of the launches and what each of them takes; how one is run is the caller's: a loaded
binary, or the same text through Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sparsegen.codegen.backward import KEYS, QUERIES, BackwardSource
from sparsegen.codegen.grids import Grid
from sparsegen.errors import InputError
from sparsegen.launch.kernel import Call, strides_of
from sparsegen.launch.sizes import Sizes
from sparsegen.schedule.chunks import chunks_of

if TYPE_CHECKING:
    import torch

MOST_PARTIALS = 64 << 20  # bytes of partial sums of a split launch: fewer and longer chunks beyond
# float32 a query row: LSE in log2 units, delta, and two of no use, see ``unpack`` of the template
STATS = 4
# gradients that may be asked for; those of sinks and null key come with any of them
ALL = ("q", "k", "v")

# runs one launch: source, its number, programs, arguments by name
Run = Callable[[BackwardSource, int, int, Mapping[str, Any]], None]
BlockRows = Callable[[BackwardSource, int], int]  # BLOCK_M of a launch


@dataclass(frozen=True)
class Saved:
    """What the forward pass took and gave, and the gradients of its outputs.

    q [B, H, Sq, D], k [B, Hkv, Skv, D], v [B, Hkv, Skv, Dv], out and dout [B, H, Sq, Dv], lse and dlse [B, H, Sq]
    float32 and contiguous; dlse None: LSE was not used.  Last dimensions are contiguous.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None = None


@dataclass(frozen=True)
class Gradients:
    """Gradients in the shape and dtype of what they belong to; None where not asked for or not part of the pattern."""

    q: torch.Tensor | None = None
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    sink_logits: torch.Tensor | None = None
    null_key: tuple[torch.Tensor, torch.Tensor] | None = None


def gradients(
    sources: Mapping[str, BackwardSource],
    run: Run,
    block_rows: BlockRows,
    saved: Saved,
    call: Call,
    wanted: Collection[str] = ALL,
) -> Gradients:
    """All launches of a backward pass.

    ``sources`` by name; only what is ``wanted`` is computed.  Of keys and values one alone is, where there is a kernel
    that gives it alone ("keys-DK", "keys-DV").
    """
    _check(sources, saved, call)
    one = _Pass(run, block_rows, saved, call)
    sinks, null = one.prepare(sources[QUERIES])
    dq = one.queries(sources[QUERIES]) if "q" in wanted else None
    names = [f"D{x.upper()}" for x in "kv" if x in wanted]
    found: dict[str, Any] = {}
    if names:
        alone = sources.get(f"{KEYS}-{names[0]}") if len(names) == 1 else None
        found = one.keys(alone or sources[KEYS])
    dk, dv = (found.get(name) if name in names else None for name in ("DK", "DV"))
    return Gradients(dq, dk, dv, sinks, null)


def _check(sources: Mapping[str, BackwardSource], saved: Saved, call: Call) -> None:
    shift = sources[KEYS].shift if KEYS in sources else 0
    q_rows, kv_rows = saved.q.shape[2], saved.k.shape[2]
    ragged = any(t is not None for t in (call.q_lengths, call.kv_starts, call.kv_lengths))
    first = call.q_start - q_rows + (0 if ragged else kv_rows) if call.relative else call.q_start
    if shift and first + shift < 0:
        raise InputError(
            f"the first query may lie at position {first}; gradients of keys reach back to -{shift}"
        )


class _Pass:
    """One backward pass: what all its launches share."""

    def __init__(self, run: Run, block_rows: BlockRows, saved: Saved, call: Call):
        self.run, self.block_rows, self.saved, self.call = run, block_rows, saved, call
        self.sizes = Sizes.of(saved.q, saved.k, saved.v)
        self.stats = saved.lse.new_empty((*saved.lse.shape, STATS))
        self.given = self._given()
        self._drawn: dict[str, dict[str, Any]] = {}  # tables, by source

    def prepare(self, source: BackwardSource) -> tuple[Any, Any]:
        """Launch 0 of the queries: LSE and delta of all rows; gradients of the sink logits and of the null key from its parts."""
        s, call = self.sizes, self.call
        tiles = -(-s.q_rows // self.block_rows(source, 0))
        room = self.saved.lse.new_zeros
        parts: dict[str, Any] = {}
        if call.sink_logits is not None:
            parts["SINK_PARTS"] = room(s.batch, s.heads, tiles)
        if call.null_key is not None:
            for name, t in zip(("NULL_K_PARTS", "NULL_V_PARTS"), call.null_key):
                parts[name] = room(s.batch, s.heads, tiles, t.shape[1])
        self.given |= parts
        unused = {"DQ": self.stats, "PARTIAL_DQ": self.stats, "chunks": 1, "chunk": 0}
        if tiles:
            self._launch(source, 0, tiles, s.batch * s.heads, unused)
        sinks = null = None
        if call.sink_logits is not None:
            sinks = parts["SINK_PARTS"].sum((0, 2)).to(call.sink_logits.dtype)
        if call.null_key is not None:
            group = (s.batch, s.kv_heads, s.heads // s.kv_heads, tiles)
            sums = [
                parts[n].view(*group, -1).sum((0, 2, 3)) for n in ("NULL_K_PARTS", "NULL_V_PARTS")
            ]
            null = tuple(x.to(t.dtype) for x, t in zip(sums, call.null_key))
        return sinks, null

    def queries(self, source: BackwardSource) -> Any:
        """dQ [B, H, Sq, D]."""
        s, q = self.sizes, self.saved.q
        (dq,) = self._sums(source, ((s.heads, s.q_rows, q.shape[3]),), ("DQ",), zero=False)
        for i, grid in enumerate(source.grids[1:], 1):
            self._sweep(source, i, grid, s.q_rows, self._first_query(), s.kv_rows, s.heads)
        return dq.to(q.dtype)

    def keys(self, source: BackwardSource) -> dict[str, Any]:
        """ "DK" [B, Hkv, Skv, D] and "DV" [B, Hkv, Skv, Dv], or the one that the source gives."""
        s, tensors = self.sizes, {"DK": self.saved.k, "DV": self.saved.v}
        shapes = [(s.kv_heads, s.kv_rows, tensors[name].shape[3]) for name in source.outputs]
        # rows that are no keys of a batch entry are no rows of any tile
        ragged = self.call.kv_starts is not None or self.call.kv_lengths is not None
        sums = self._sums(source, shapes, source.outputs, zero=ragged)
        for i, grid in enumerate(source.grids):
            self._sweep(source, i, grid, s.kv_rows, self.call.k_start, s.q_rows, s.kv_heads)
        return {name: t.to(tensors[name].dtype) for name, t in zip(source.outputs, sums)}

    # ---- launches ----

    def _sums(
        self,
        source: BackwardSource,
        shapes: Sequence[tuple[int, int, int]],
        names: Sequence[str],
        zero: bool,
    ) -> list[Any]:
        """Room for gradients, and for the partial sums of split launches."""
        lse, s = self.saved.lse, self.sizes
        dtype = lse.dtype if source.sums else self.saved.q.dtype
        make = lse.new_zeros if zero else lse.new_empty
        out = [make((s.batch, *shape), dtype=dtype) for shape in shapes]
        self.given |= dict(zip(names, out))
        rows = [g.rows_of(shapes[0][1]) for g in source.grids if g.split]
        if rows:
            other = s.kv_rows if source.part == QUERIES else s.q_rows
            states = s.batch * shapes[0][0] * max(rows)
            columns = [shape[2] for shape in shapes]
            chunks, chunk = _chunks(other, 4 * states * sum(columns))
            self.given |= {"chunks": chunks, "chunk": chunk}
            for name, n in zip(names, columns):
                self.given[f"PARTIAL_{name}"] = lse.new_empty(states * chunks * n)
        return out

    def _sweep(
        self,
        source: BackwardSource,
        launch: int,
        grid: Grid,
        rows: int,
        first: int | None,
        other: int,
        heads: int,
    ) -> None:
        """One launch over the rows of one side: ``rows`` of them, the first at position ``first``."""
        chunks = self.given.get("chunks", 1)
        tiles = grid.tiles(rows, first, self.block_rows(source, launch), chunks)
        own = grid.heads_of(heads) if source.part == QUERIES else heads
        if tiles and own:
            self._launch(source, launch, tiles, self.sizes.batch * own)

    def _launch(
        self,
        source: BackwardSource,
        launch: int,
        tiles: int,
        batch_heads: int,
        unused: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        values = {**unused, **self.given, "tiles": tiles, "batch_heads": batch_heads}
        if source.name not in self._drawn:
            self._drawn[source.name] = self._tables(source)
        values |= self._drawn[source.name]
        args = {name: values[name] for name, _ in source.parameters}
        self.run(source, launch, tiles * batch_heads, args)

    # ---- arguments ----

    def _given(self) -> dict[str, Any]:
        """Arguments that no launch changes, by name."""
        saved, call, s = self.saved, self.call, self.sizes
        nothing = saved.lse.new_zeros(1, dtype=_int32())
        tensors = {"q": saved.q, "k": saved.k, "v": saved.v, "o": saved.out, "g": saved.dout}
        out: dict[str, Any] = {
            "Q": saved.q,
            "K": saved.k,
            "V": saved.v,
            "OUT": saved.out,
            "DO": saved.dout,
            "LSE": saved.lse,
            "DLSE": saved.lse if saved.dlse is None else saved.dlse,
            "has_dlse": int(saved.dlse is not None),
            "STATS": self.stats,
        }
        for t, tensor in tensors.items():
            out |= {f"stride_{t}{axis}": x for axis, x in zip("bhs", strides_of(tensor))}
        for name in ("q_lengths", "kv_starts", "kv_lengths"):
            value = getattr(call, name)
            out |= {
                name.upper(): nothing if value is None else value,
                f"has_{name}": int(value is not None),
            }
        out |= {
            "heads": s.heads,
            "heads_per_kv": s.heads // s.kv_heads,
            "q_rows": s.q_rows,
            "kv_rows": s.kv_rows,
            "q_start": call.q_start,
            "k_start": call.k_start,
            "relative": call.relative,
            "scale": call.scale,
            "joins": call.joins,
            "ALIBI_SLOPES": call.alibi_slopes,
            "SINK_LOGITS": call.sink_logits,
        }
        if call.null_key is not None:
            out |= dict(zip(("NULL_K", "NULL_V"), call.null_key))
        return out

    def _tables(self, source: BackwardSource) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for table, (drawn, first_row) in zip(source.tables, self.call.tables, strict=True):
            i = table.index
            out |= {f"TABLE{i}": drawn, f"table{i}_row": first_row}
            if source.walks:
                first = self.call.k_start // table.block
                last = (self.call.k_start + self.sizes.kv_rows - 1) // table.block
                lists, ends = listed(drawn, first_row, first, last - first + 1)
                out |= {f"LIST{i}": lists, f"LIST{i}_ENDS": ends, f"list{i}_row": first}
        return out

    def _first_query(self) -> int | None:
        return self.sizes._first_query(self.call)


def _int32() -> Any:
    import torch

    return torch.int32


def _chunks(entries: int, bytes_each: int) -> tuple[int, int]:
    """Chunks of a split launch, and entries in each: fewer where their partial sums would take too much memory."""
    chunks, chunk = chunks_of(entries)
    most = max(1, MOST_PARTIALS // max(bytes_each, 1))
    return (chunks, chunk) if chunks <= most else (most, -(-entries // (most * 128)) * 128)


def listed(
    drawn: torch.Tensor, first_row: int, first_block: int, blocks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A random_blocks table read backwards: which block rows of queries draw each key block.

    ``drawn``: int32 [block rows, per_row], -1 = none, row 0 is block row ``first_row``.  Returns the block rows of key
    block ``first_block``, of the next one, and so on, each ascending, int32; and int32 [blocks + 1], where they begin.
    """
    import torch

    rows = torch.arange(drawn.shape[0], device=drawn.device, dtype=torch.int32) + first_row
    key = (drawn.long() - first_block).flatten()
    here = (key >= 0) & (key < blocks) & (drawn.flatten() >= 0)
    key = torch.where(here, key, blocks)  # the others go to the end, behind all that is read
    order = torch.argsort(key, stable=True)
    lists = rows[:, None].expand_as(drawn).flatten()[order].contiguous()
    ends = torch.searchsorted(
        key[order].contiguous(), torch.arange(blocks + 1, device=drawn.device)
    )
    return lists, ends.to(torch.int32)
