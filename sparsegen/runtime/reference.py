"""The float64 reference as a callable, under the signature of the compiled one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparsegen.errors import UnsupportedError
from sparsegen.runtime.checks import NO_OUT, check_out, check_tensors
from sparsegen.spec.pattern import Pattern

if TYPE_CHECKING:
    import torch


class ReferenceAttend:
    """The float64 reference under the signature of ``Attend``; differentiable, on any device, O(S²) memory."""

    def __init__(self, pattern: Pattern):
        self.pattern = pattern

    def __repr__(self) -> str:
        return f"<sparsegen.ReferenceAttend {self.pattern.name!r}>"

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
        **runtime: Any,
    ) -> Any:
        """As ``Attend`` (but for ``variant``), and with the run-time keywords of every node of the language.

        UnsupportedError for ``out`` where a gradient is wanted.
        """
        import torch

        from sparsegen.spec.reference import DTYPES, reference

        for name in ("scale", "rows"):  # of ``reference`` and not of a call
            if name in runtime:
                raise TypeError(f"{self.pattern.name}: unknown keyword {name!r}")
        check_tensors(q, k, v, DTYPES)
        if out is not None:
            check_out(q, v, out)
        result, lse = reference(self.pattern, q, k, v, **runtime)
        result = result.to(q.dtype)
        if out is not None:
            if torch.is_grad_enabled() and (result.requires_grad or out.requires_grad):
                raise UnsupportedError(NO_OUT)
            result = out.copy_(result)
        return (result, lse.float()) if return_lse else result
