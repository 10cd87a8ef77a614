"""Stages of a backward pass: launches that belong together, their arguments, and the room they need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sparsegen.codegen.backward import BackwardSource
from sparsegen.launch import backward_rooms as rooms
from sparsegen.launch.backward_rooms import WHOLE, Room
from sparsegen.launch.backward_shares import row_elements, shares
from sparsegen.launch.kernel import Call, strides_of
from sparsegen.launch.sizes import Sizes

if TYPE_CHECKING:
    import torch

    from sparsegen.codegen.grids import Grid

# memory of a pass: tensors that a call brings, and what is made for it
MEMORY = frozenset(
    ("Q", "K", "V", "OUT", "DO", "LSE", "DLSE", "STATS", "SUMS", "DS", "DQ", "DK", "DV", "PARTIAL_DQ", "PARTIAL_DK", "PARTIAL_DV")
    + ("SINK_PARTS", "NULL_K_PARTS", "NULL_V_PARTS")
)  # fmt: skip
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
class Step:
    """One launch.

    ``memory``: parameters that are memory of a pass, and what it is called there.  ``rest``: all other arguments by name,
    the same in every pass of the plan.
    """

    source: BackwardSource
    launch: int
    programs: int
    memory: Mapping[str, str]
    rest: Mapping[str, Any]

    def values(self, memory: Mapping[str, Any]) -> dict[str, Any]:
        """All arguments of the portable text by name, in its order."""
        given = {name: memory[of] for name, of in self.memory.items()} | dict(self.rest)
        return {name: given[name] for name, _ in self.source.parameters}


@dataclass
class Stage:
    """Launches that belong together, the room they need, and those of its parts that are results."""

    rooms: dict[str, Room] = field(default_factory=dict)
    # parts of memory under names of their own: whose, and which
    slices: dict[str, tuple[str, Any]] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    results: tuple[str, ...] = ()


class Stages:
    """Makes the stages of a pass on tensors of one layout and with one set of run-time arguments."""

    def __init__(self, block_rows: BlockRows, saved: Saved, call: Call):
        self.call, self._block_rows = call, block_rows
        self.sizes = Sizes.of(saved.q, saved.k, saved.v)
        self._columns = {"DQ": saved.q.shape[3], "DK": saved.k.shape[3], "DV": saved.v.shape[3]}
        self._rest = self._given(saved)
        self._drawn: dict[str, dict[str, Any]] = {}  # tables, by source

    def prepare(self, source: BackwardSource, prepared: bool) -> Stage:
        """Launch 0 of the queries: LSE and delta of all rows, and the parts of sink logits and null key.

        ``prepared``: other launches do that; what they fill is made here.
        """
        s, call = self.sizes, self.call
        tiles = -(-s.q_rows // self._block_rows(source, 0))
        null = () if call.null_key is None else [t.shape[1] for t in call.null_key]
        rows = (s.batch, s.heads, s.q_rows)
        stage = Stage(rooms.prepared(rows, tiles, call.sink_logits is not None, null))
        if tiles and not prepared:
            unused = {"DQ": "STATS", "PARTIAL_DQ": "STATS"}  # not written by this launch
            step = self._step(source, 0, tiles, s.batch * s.heads, WHOLE, unused)
            stage.steps.append(step)
        return stage

    def queries(self, source: BackwardSource) -> Stage:
        """DQ [B, H, Sq, D]."""
        s = self.sizes
        stage, counts = self._sums(source, s.heads, s.q_rows, s.kv_rows, zero=False)
        first = s._first_query(self.call)
        for i, grid in enumerate(source.grids[1:], 1):
            tiles = grid.tiles(s.q_rows, first, self._block_rows(source, i), counts["chunks"])
            heads = s.batch * grid.heads_of(s.heads)
            if tiles and heads:
                stage.steps.append(self._step(source, i, tiles, heads, counts))
        return stage

    def keys(self, source: BackwardSource, wanted: tuple[str, ...]) -> Stage:
        """DK [B, Hkv, Skv, D] and DV [B, Hkv, Skv, Dv], or the one that the source gives."""
        s, call = self.sizes, self.call
        # rows that are no keys of a batch entry are no rows of any tile
        ragged = call.kv_starts is not None or call.kv_lengths is not None
        stage, counts = self._sums(source, s.kv_heads, s.kv_rows, s.q_rows, zero=ragged)
        stage.results = wanted
        self._over_keys(stage, source, source.grids, counts, s.batch * s.kv_heads)
        return stage

    def _over_keys(
        self, stage: Stage, source: BackwardSource, grids: Sequence[Grid],
        counts: Mapping[str, Any], heads: int, other: Mapping[str, str] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """Launches over key tiles of so many ``heads`` of batch entries; ``other`` as of ``_step``."""
        s = self.sizes
        for i, grid in enumerate(grids):
            rows = self._block_rows(source, i)
            tiles = grid.tiles(s.kv_rows, self.call.k_start, rows, counts["chunks"])
            if tiles and heads:
                stage.steps.append(self._step(source, i, tiles, heads, counts, other))

    def fused(self, source: BackwardSource) -> Stage:
        """DQ, DK and DV; SUMS [B, H, Sq, D] is dQ as key tiles add to it, and its last launch makes DQ of that."""
        s = self.sizes
        stage, counts = self._sums(source, s.kv_heads, s.kv_rows, s.q_rows, zero=False)
        shape = (s.batch, s.heads, s.q_rows, self._columns["DQ"])
        stage.rooms |= {"SUMS": Room(shape, zero=True), "DQ": Room(shape, float32=False)}
        stage.results = ("DQ", *source.outputs)
        *grids, _ = source.grids
        self._over_keys(stage, source, grids, counts, s.batch * s.kv_heads)
        tiles = -(-s.q_rows // self._block_rows(source, len(grids)))
        stage.steps.append(self._step(source, len(grids), tiles, s.batch * s.heads, counts))
        return stage

    def stored(self, keys: BackwardSource, queries: BackwardSource, workspace: int) -> Stage:
        """DQ, DK and DV, some heads at a time: their dS into DS, then dQ of it."""
        s, call = self.sizes, self.call
        stage, of_keys = self._sums(keys, s.kv_heads, s.kv_rows, s.q_rows, zero=False)
        other, of_queries = self._sums(queries, s.heads, s.q_rows, s.kv_rows, zero=False)
        stage.rooms |= other.rooms
        stage.results = (*queries.outputs, *keys.outputs)
        found = shares(s, workspace)
        first = found[0]
        shape = (first.entries, first.heads(s), s.q_rows, row_elements(s.kv_rows))
        stage.rooms["DS"] = Room(shape, float32=False)
        q_first = s._first_query(call)
        for n, share in enumerate(found):
            heads = share.heads(s)
            parts = share.parts(s)
            stage.slices |= {f"{name}@{n}": (name, part) for name, part in parts.items()}
            names = {name: f"{name}@{n}" for name in parts}
            given: dict[str, Any] = {"heads": heads}
            if call.alibi_slopes is not None:
                given["ALIBI_SLOPES"] = call.alibi_slopes[parts["Q"][1]]
            kv_heads = share.entries * (share.last - share.first)
            self._over_keys(stage, keys, keys.grids, {**of_keys, **given}, kv_heads, names)
            for i, grid in enumerate(queries.grids):
                rows, chunks = self._block_rows(queries, i), of_queries["chunks"]
                tiles = grid.tiles(s.q_rows, q_first, rows, chunks)
                counts = {**of_queries, **given}
                if tiles and heads:
                    many = share.entries * heads
                    stage.steps.append(self._step(queries, i, tiles, many, counts, names))
        return stage

    def _sums(
        self, source: BackwardSource, heads: int, rows: int, other: int, zero: bool
    ) -> tuple[Stage, Mapping[str, int]]:
        """Room for gradients and for the partial sums of split launches; chunks of those, and ``other`` rows in each."""
        columns = {name: self._columns[name] for name in source.outputs}
        shape = (self.sizes.batch, heads, rows)
        found, counts = rooms.summed(columns, source.grids, shape, other, source.sums, zero)
        return Stage(found, results=source.outputs), counts

    # ---- arguments ----

    def _step(
        self,
        source: BackwardSource,
        launch: int,
        tiles: int,
        batch_heads: int,
        counts: Mapping[str, Any],
        other: Mapping[str, str] = MappingProxyType({}),
    ) -> Step:
        """``other``: memory that a parameter takes in place of that of its name."""
        rest = {**self._rest, **counts, "tiles": tiles, "batch_heads": batch_heads}
        if source.name not in self._drawn:
            self._drawn[source.name] = self._tables(source)
        rest |= self._drawn[source.name]
        names = [name for name, _ in source.parameters]
        memory = {name: other.get(name, name) for name in names if name in MEMORY}
        kept = {name: rest[name] for name in names if name not in memory}
        return Step(source, launch, tiles * batch_heads, memory, kept)

    def _given(self, saved: Saved) -> dict[str, Any]:
        """Arguments that no launch changes and that are no memory of a pass, by name."""
        call, s = self.call, self.sizes
        nothing = saved.lse.new_zeros(1, dtype=_int32())
        tensors = {"q": saved.q, "k": saved.k, "v": saved.v, "o": saved.out, "g": saved.dout}
        out: dict[str, Any] = {"has_dlse": int(saved.dlse is not None)}
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


def _int32() -> Any:
    import torch

    return torch.int32


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
