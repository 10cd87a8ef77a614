"""When a kernel's result is right: no further from float64 than eager attention in the same dtype may be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Verdict:
    """True when accepted.  Errors are against float64; ``reason`` says what was broken, "" when nothing was."""

    max_abs: float
    max_abs_allowed: float
    relative_l2: float
    relative_l2_allowed: float
    reason: str = ""

    def __bool__(self) -> bool:
        return not self.reason


def within_tolerance(out: torch.Tensor, expected64: torch.Tensor, eager: torch.Tensor) -> Verdict:
    """The acceptance rule of every kernel.

    Max-abs and relative L2 error against float64 are at most twice those of eager attention in the same dtype, plus
    one ulp of max|expected| (for the relative error: that ulp as a share of max|expected|).  Infinities (the LSE of
    an empty row) must stand in the same places; NaN is never right.

    Args:
        out: what the kernel wrote, any floating dtype and shape.
        expected64: float64 reference, same shape.
        eager: dense attention computed in the kernel's dtype, same shape, any device and dtype.
    """
    import torch

    if not out.shape == expected64.shape == eager.shape:
        shapes = f"{tuple(out.shape)}, {tuple(expected64.shape)}, {tuple(eager.shape)}"
        raise ValueError(f"out, expected64 and eager must have one shape, got {shapes}")
    want = expected64.detach().double()
    got = out.detach().to(want.device).double()
    yard = eager.detach().to(want.device).double()
    finite = want.isfinite()
    if not torch.equal(got[~finite], want[~finite]):
        return Verdict(math.inf, 0.0, math.inf, 0.0, _misplaced(got, finite))
    got, want, yard = got[finite], want[finite], yard[finite]
    if not got.isfinite().all():
        bad = int((~got.isfinite()).sum())
        reason = f"{bad} of {got.numel()} values are NaN or infinite: not written, or overflowed"
        return Verdict(math.inf, 0.0, math.inf, 0.0, reason)
    if want.numel() == 0:
        return Verdict(0.0, 0.0, 0.0, 0.0)
    return _judge(got, want, yard, out.dtype)


def ulp(value: float, dtype: torch.dtype) -> float:
    """The distance from ``value`` to the next larger number of ``dtype``."""
    import torch

    info = torch.finfo(dtype)
    if abs(value) < info.tiny:
        return float(info.smallest_normal * info.eps)
    return float(info.eps * 2.0 ** math.floor(math.log2(abs(value))))


def _judge(
    got: torch.Tensor, want: torch.Tensor, yard: torch.Tensor, dtype: torch.dtype
) -> Verdict:
    largest = float(want.abs().max())
    one = ulp(largest, dtype)
    max_abs, relative = _errors(got, want)
    # Eager may overflow where a kernel does not; it then allows nothing beyond the ulp.
    eager_abs, eager_relative = _errors(yard, want) if yard.isfinite().all() else (0.0, 0.0)
    max_abs_allowed = 2.0 * eager_abs + one
    relative_allowed = 2.0 * eager_relative + (one / largest if largest else 0.0)
    broken = []
    if not max_abs <= max_abs_allowed:
        broken.append(f"max-abs error {max_abs:.3g} > {max_abs_allowed:.3g} allowed")
    if not relative <= relative_allowed:
        broken.append(f"relative L2 error {relative:.3g} > {relative_allowed:.3g} allowed")
    return Verdict(max_abs, max_abs_allowed, relative, relative_allowed, "; ".join(broken))


def _errors(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    difference = got - want
    norm, missed = float(want.norm()), float(difference.norm())
    if norm == 0.0:  # all zero, as empty rows are: nothing else is right
        return float(difference.abs().max()), 0.0 if missed == 0.0 else math.inf
    return float(difference.abs().max()), missed / norm


def _misplaced(got: torch.Tensor, finite: torch.Tensor) -> str:
    wrong = int((got[~finite].isnan()).sum())
    return (
        f"{int((~finite).sum())} values must be infinite (LSE of empty rows) and are not all; "
        f"{wrong} of them are NaN"
    )
