"""What the cost model knows of the machine, and the sizes that a prediction is for.  All its constants are here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """An H200 with bfloat16 inputs.

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
    chunk: int = 32  # key tiles of one program of a split sweep; believed

    def rate(self, block_m: int, block_n: int) -> float:
        """Operations per second in tiles of this size."""
        area = block_m * block_n
        share = next((x for least, x in self.tile_rate if area >= least), self.small_tile_rate)
        return self.flops * share


H200 = Machine()


@dataclass(frozen=True)
class Sizes:
    """What multiplies the tiles of one head."""

    heads: int = 8
    dim: int = 128
    itemsize: int = 2

    def once(self, q_len: int, kv_len: int) -> int:
        """Bytes of q, k, v and the outputs, each moved once."""
        row = self.dim * self.itemsize
        return self.heads * (q_len * (2 * row + 4) + kv_len * 2 * row)

    def state(self, rows: int) -> int:
        """Bytes that a later sweep moves for its rows: q again, OUT and LSE read and written."""
        return self.heads * rows * (3 * self.dim * self.itemsize + 2 * 4)

    def partial(self, rows: int) -> int:
        """Bytes of the workspace that holds partial states of so many rows, in float32."""
        return self.heads * rows * (self.dim + 2) * 4
