"""The roof: how fast this GPU multiplies and copies, measured in the same run, and how near a kernel comes to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparsegen.bench.interleaved import in_turns
from sparsegen.tune.measure import PUBLISHED, Turns

if TYPE_CHECKING:
    from sparsegen.bench.clock import Device
    from sparsegen.spec.problem import Problem

MATRIX = 8192  # rows and columns of the bf16 product
COPIED = 1 << 30  # bytes of the copy


@dataclass(frozen=True)
class Roof:
    """Measured rates: operations per second of a large bf16 matrix product, bytes per second of a large copy
    (read and written)."""

    matmul: float
    copy: float

    @property
    def ridge(self) -> float:
        """Operations a byte from which on the product is the limit."""
        return self.matmul / self.copy

    def attainable(self, intensity: float) -> float:
        """Operations per second at so many operations a byte."""
        return min(self.matmul, intensity * self.copy)


@dataclass(frozen=True)
class Work:
    """What a case asks for: operations of its visible cells, and q, k, v, out and LSE moved once.

    ``cells`` are summed over heads and batch entries.
    """

    cells: int
    flop: int
    bytes: int

    @classmethod
    def of(cls, problem: Problem, cells: int) -> Work:
        """``cells`` visible ones in all; a cell is a product of head_dim and one of value_dim."""
        (q_len, kv_len), p = problem.lengths[0], problem
        item = 4 if p.dtype == "float32" else 2
        row = item * (p.head_dim + p.value_dim)
        q_rows, kv_rows = p.batch * p.heads * q_len, p.batch * p.kv_heads * kv_len
        moved = q_rows * (row + 4) + kv_rows * row
        return cls(cells, 2 * (p.head_dim + p.value_dim) * cells, moved)

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.flop / self.bytes

    def floor_us(self, roof: Roof) -> float:
        """Microseconds below which no kernel can be: the larger of product and copy."""
        return 1e6 * max(self.flop / roof.matmul, self.bytes / roof.copy)

    def tflops(self, us: float) -> float:
        """10^12 visible operations per second."""
        return self.flop / us / 1e6

    def gbs(self, us: float) -> float:
        """10^9 bytes per second, each byte counted once."""
        return self.bytes / us / 1e3


def measure(device: Device, turns: Turns = PUBLISHED) -> Roof:
    """The roof of the GPU here: medians of both rates, in turns, nothing flushed."""
    import torch

    a, b = (torch.randn(MATRIX, MATRIX, device=device.name, dtype=torch.bfloat16) for _ in range(2))
    big = torch.empty(COPIED, device=device.name, dtype=torch.int8)
    into = torch.empty_like(big)
    launches = {"matmul": lambda: a @ b, "copy": lambda: into.copy_(big)}
    timed = in_turns(launches, device.bare, turns, sustained=False)
    return roof_of({name: t.us for name, t in timed.items()})


def roof_of(us: Mapping[str, float]) -> Roof:
    """From the microseconds of the product and of the copy."""
    return Roof(2e6 * MATRIX**3 / us["matmul"], 2e6 * COPIED / us["copy"])
