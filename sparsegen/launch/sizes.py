"""Sizes of a call and of its launches: programs, chunks of a split launch, room for its partial results."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparsegen.codegen.grids import Grid
from sparsegen.schedule.chunks import chunks_of

if TYPE_CHECKING:
    from sparsegen.codegen.source import KernelSource
    from sparsegen.launch.kernel import Call


@dataclass(frozen=True)
class Sizes:
    """Lengths of the tensors of a call."""

    batch: int
    heads: int
    kv_heads: int
    q_rows: int
    kv_rows: int
    value_dim: int

    @classmethod
    def of(cls, q: Any, k: Any, v: Any) -> Sizes:
        return cls(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], v.shape[3])

    def of_launch(
        self, source: KernelSource, grid: Grid, call: Call, block_m: int
    ) -> tuple[list[int], int]:
        """The kernel's arguments from ``heads`` on, and how many programs the launch has."""
        chunks, chunk = chunks_of(self.kv_rows)
        tiles = grid.tiles(self.q_rows, self._first_query(call), block_m, chunks)
        batch_heads = self.batch * grid.heads_of(self.heads)
        args = [self.heads, self.heads // self.kv_heads, batch_heads, self.q_rows, self.kv_rows]
        args.append(tiles)
        if any(g.split for g in source.grids):
            args += [chunks, chunk]
        return args, tiles * batch_heads

    def partials(self, grids: Iterable[Grid]) -> tuple[int, ...]:
        """Elements of the partial outputs and of their LSE, float32; () where no launch is split."""
        rows = [g.rows_of(self.q_rows) for g in grids if g.split]
        if not rows:
            return ()
        states = chunks_of(self.kv_rows)[0] * self.batch * self.heads * max(rows)
        return states * self.value_dim, states

    def _first_query(self, call: Call) -> int | None:
        """Position of query row 0; None where batch entries have their own."""
        own = (call.q_lengths, call.kv_starts, call.kv_lengths)
        if not call.relative:
            return call.q_start
        if any(t is not None for t in own):
            return None
        return call.q_start + self.kv_rows - self.q_rows
