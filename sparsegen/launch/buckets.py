"""Several kernels of one pattern, each decided for a pair of lengths: a call takes the one of the nearest pair.

Near is counted in powers of two, the keys' and the queries' together, as the tuner counts when it looks for a measured
winner (``tune.store``): a call of 6,000 queries and keys takes what was decided for 8,192 and not for 4,096.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from sparsegen.errors import ArtifactError
from sparsegen.launch.kernel import Call, Kernel, Launch

if TYPE_CHECKING:
    import torch

Lengths = tuple[int, int]  # q_len, kv_len


def nearest(lengths: Lengths, pairs: Sequence[Lengths]) -> Lengths:
    """The pair that is nearest to a call's lengths; of several the first."""
    return min(pairs, key=lambda pair: sum(map(_apart, pair, lengths)))


def _apart(a: int, b: int) -> float:
    return abs(math.log2(max(a, 1) / max(b, 1)))


class BucketKernel(Kernel):
    """Kernels by lengths as one; that of the first pair stands for all where a source or a configuration is asked for."""

    def __init__(self, first: Kernel, opened: Mapping[Lengths, Callable[[], Kernel]]):
        """``opened``: gives the kernel of each pair when a call first needs it; ``first`` among them."""
        super().__init__(first.source, first.config, first._directories)
        self._pairs, self._opened = tuple(opened), dict(opened)
        self._kernels: dict[Lengths, Kernel] = {}
        self._nearest = lru_cache(maxsize=4096)(lambda lengths: nearest(lengths, self._pairs))

    def of(self, q_len: int, kv_len: int) -> Kernel:
        """The kernel for calls of these lengths.

        ``ArtifactError`` where it takes other tables, or is proven for other positions, than the first: nothing builds such.
        """
        pair = self._nearest((q_len, kv_len))
        kernel = self._kernels.get(pair)
        if kernel is None:
            kernel = self._opened[pair]()
            if _promised(kernel) != _promised(self):
                raise ArtifactError(
                    f"the kernels for lengths {self._pairs[0]} and {pair} do not take the same calls; build them again"
                )
            self._kernels[pair] = kernel
        return kernel

    def prepare(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, call: Call
    ) -> Launch:
        """See ``Kernel``."""
        return self.of(q.shape[2], k.shape[2]).prepare(q, k, v, out, call)


def _promised(kernel: Kernel) -> tuple[object, ...]:
    source = kernel.source
    drawn = [(t.term, t.block, t.per_row) for t in source.tables]
    return drawn, source.max_position, source.min_position
