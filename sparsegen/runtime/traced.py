"""Calls under ``torch.compile`` that want no gradient: the forward kernel as an operator.

Without ``torch.compile`` such a call launches its kernel at once (``runtime.attend``); a launch cannot be traced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from sparsegen.errors import UnsupportedError
from sparsegen.launch.kernel import Call
from sparsegen.runtime import backward as operators
from sparsegen.runtime.training import Trainable, Training, engine_name

if TYPE_CHECKING:
    from sparsegen.launch.kernel import Kernel
    from sparsegen.runtime.attend import Attend
    from sparsegen.spec.problem import Problem


class Traced(Training):
    """The checks of ``Training`` around forward kernels that are here already: nothing is built while tracing."""

    def __init__(self, attend: Attend):
        super().__init__(attend, None)

    def add_forward(self, problem: Problem, kernel: Kernel) -> None:
        """Register the forward kernel of a problem; it takes the place of an older one of these dims."""
        scale, source = self._attend.pattern.scale, kernel.source
        engine = engine_name(kernel, {}, {})
        made = Trainable.of(engine, problem, scale, source.tables, (source,))
        operators.register(made.engine, operators.Engine(kernel, None, tuple(source.tables)))
        self._made.insert(0, made)  # the newest fits first

    def __call__(self, q: Any, k: Any, v: Any, **given: Any) -> Any:
        """As ``Attend.__call__``.  UnsupportedError for ``out`` and ``variant``, and where a kernel would have to be built."""
        for name in ("out", "variant"):
            if given[name] is not None:
                raise UnsupportedError(
                    f"{name}= is not traced by torch.compile: leave it out there"
                )
        slopes = given["alibi_slopes"]
        if slopes is not None:  # under torch.no_grad() they may require one, and get none
            given["alibi_slopes"] = slopes.detach()
        return super().__call__(q, k, v, **given)

    def _found(self, q: Any, k: Any, v: Any) -> Trainable:
        for made in self._made:
            if made.fits(q, k, v):
                return made
        self._refuse_build()

    def _any_length(self, q: Any, k: Any, v: Any, call: Call) -> Trainable:
        self._refuse_build()

    def _refuse_build(self) -> NoReturn:
        raise UnsupportedError(
            "torch.compile traces no build: call once with such tensors and lengths before"
        )
