"""Whether gradients of the benchmark are right: rows of them in float64, short inputs by autograd, the same bits twice."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sparsegen.launch import Kernel
from sparsegen.launch.backward import Saved
from sparsegen.launch.backward_kernel import BackwardKernel
from sparsegen.spec.pattern import Pattern
from sparsegen.tune.gradient_check import full_of_nan
from sparsegen.tune.gradient_rows import GradientRows

if TYPE_CHECKING:
    from gradient_contender import GradientContender

CHECKED = (700, 933)  # ragged lengths, q_len != kv_len


class Samples:
    """Some rows of each gradient in float64, from the inputs and from the OUT and LSE that the kernels are given."""

    def __init__(self, pattern: Pattern, saved: Saved, scale: float, rows: Any, keys: Any):
        import torch

        self.rows = {"q": rows, "k": keys, "v": keys}
        one = GradientRows(pattern, saved, scale, torch.float64)
        self.values = {"q": one.queries(rows)} | dict(zip("kv", one.keys(keys)))

    def difference(self, name: str, got: Any) -> float:
        """Relative L2 error of a gradient on its rows; infinite where anything of it is NaN."""
        if not got.isfinite().all():
            return math.inf
        return difference(got[:, :, self.rows[name]], self.values[name])


def difference(got: Any, want: Any) -> float:
    """Relative L2."""
    norm = want.double().norm()
    return float((got.double() - want.double()).norm() / (norm if norm > 0 else 1.0))


def small(contender: GradientContender, forward: Kernel, kernel: BackwardKernel) -> str:
    """What is wrong with all gradients on short ragged lengths, judged by float64 autograd of the reference; "" if nothing is."""
    import torch

    from sparsegen.spec.reference import reference
    from sparsegen.tune.accept import within_tolerance
    from sparsegen.tune.eager import eager_attention

    texts = [forward.source, *kernel.sources.values()]
    whole = math.lcm(*(p for source in texts for p in source.periods))
    saved, call = contender.saved(*(-(-n // whole) * whole for n in CHECKED), forward)
    got = kernel(saved, call, ("q", "k", "v"), "fast", full_of_nan)
    pattern, given = contender.pattern, [t.double() for t in (saved.q, saved.k, saved.v)]

    def wanted(attend: Any, tensors: Any, dout: Any) -> Any:
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        return torch.autograd.grad(attend(pattern, *leaves)[0], leaves, dout)

    want = wanted(reference, given, saved.dout.double())
    low = wanted(eager_attention, (saved.q, saved.k, saved.v), saved.dout)
    for name, right, eager in zip("qkv", want, low):
        verdict = within_tolerance(getattr(got, name), right, eager)
        if not verdict:
            return f"d{name}: {verdict.reason}"
    return ""


def repeats(launch: Callable[..., Any]) -> bool:
    """Whether all gradients are the same to the bit a second time."""
    import torch

    one, two = launch(), launch()
    return all(torch.equal(getattr(one, n), getattr(two, n)) for n in "qkv")
