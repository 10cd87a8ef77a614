"""What the cost model knows of the machine, and the sizes that a prediction is for.  All its constants are here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparsegen.spec.problem import Problem


@dataclass(frozen=True)
class Machine:
    """An H200 with bfloat16 inputs; other dtypes are predicted at the same rate, with their own bytes.

    "fitted": to nine patterns at 32,768 tokens (``benchmarks/forward.py --cases structured``, one H200, 2026-11-30).
    "believed": nobody has measured it, so it is the first to be doubted.
    """

    sms: int = 132  # data sheet
    flops: float = 500e12  # causal at 32,768 tokens takes 2 ms a TFLOP (one H200, 2026-10)
    bandwidth: float = 4.3e12  # bytes/s of a copy (one H200, 2026-10)
    launch: float = 5e-6  # one more kernel in a stream; believed
    # share of the rate that a tile reaches, by BLOCK_M * BLOCK_N; chunks and prefixes: 498, 490 and 543 TFLOP/s (H200,
    # 2026-11-30)
    tile_rate: tuple[tuple[int, float], ...] = ((128 * 128, 1.0), (128 * 64, 0.98), (64 * 64, 1.09))
    small_tile_rate: float = 0.5  # of any smaller tile; believed
    # in key tiles without a test
    program: float = 2.5  # a query tile starts in a sweep: its rows are loaded, the pipeline fills, outputs leave; fitted
    start: float = 1.0  # it enters a segment; fitted
    partial: float = 1.1  # a tile with limits to test; windows and causal masks with and without (H200, 2026-11-30)
    remainder: float = (
        1.35  # a tile that tests // or % by no power of two, a product, or an opaque term; believed
    )
    conjunct: float = 0.05  # each conjunct tested beside the row limits; believed
    gather: float = 1.1  # key rows that are not one run; believed
    divided: float = 1.6  # and whose digits take a division, in boxes of varying size; fitted
    segment: float = 2.0  # one more loop to compile, to load and to skip on most calls; believed

    def rate(self, block_m: int, block_n: int) -> float:
        """Operations per second in tiles of this size."""
        area = block_m * block_n
        share = next((x for least, x in self.tile_rate if area >= least), self.small_tile_rate)
        return self.flops * share


H200 = Machine()


@dataclass(frozen=True)
class Sizes:
    """What multiplies the tiles of one head: those of the problem, one batch entry of it."""

    heads: int = 8  # query heads
    dim: int = 128  # of a row of q and k
    value_dim: int = 128  # of a row of v and the outputs
    kv_heads: int = 8
    dtype: str = "bfloat16"
    group: int = 1  # query heads that one program goes through, for gradients of keys

    @classmethod
    def of(cls, problem: Problem) -> Sizes:
        """Of a problem.  The batch is left out: schedules with the same key have the same prediction."""
        kv_heads = problem.heads if problem.kv_heads is None else problem.kv_heads
        value_dim = problem.head_dim if problem.value_dim is None else problem.value_dim
        return cls(problem.heads, problem.head_dim, value_dim, kv_heads, problem.dtype)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return 4 if self.dtype == "float32" else 2

    def __str__(self) -> str:
        heads = f"{self.heads} heads" if self.heads != 1 else "1 head"
        if self.kv_heads != self.heads:
            heads = f"{self.heads} query and {self.kv_heads} key heads"
        dims = f"{self.dim}" if self.value_dim == self.dim else f"{self.dim} and {self.value_dim}"
        return f"{heads} of {dims} in {self.dtype}"

    def operations(self, cells: int) -> int:
        """Of both matrix products, over so many cells of every head."""
        return 2 * cells * (self.dim + self.value_dim) * self.heads

    def once(self, q_len: int, kv_len: int) -> int:
        """Bytes of q, k, v and the outputs, each moved once."""
        row = (self.dim + self.value_dim) * self.itemsize
        return self.heads * q_len * (row + 4) + self.kv_heads * kv_len * row

    def state(self, rows: int) -> int:
        """Bytes that a later sweep moves for its rows: q again, OUT and LSE read and written."""
        return (
            self.heads
            // self.group
            * rows
            * ((self.dim + 2 * self.value_dim) * self.itemsize + 2 * 4)
        )

    def partial(self, rows: int) -> int:
        """Bytes of the workspace that holds partial states of so many rows: OUT and LSE in float32."""
        return self.heads // self.group * rows * (self.value_dim + 1) * 4
