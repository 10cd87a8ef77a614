"""Calls whose inputs require a gradient: checked, and sent to the operators of ``runtime.backward``.

All that a call does here is plain Python on shapes, which ``torch.compile`` traces without a graph break: dims are
compared with numbers, so that only lengths stay free.  Kernels are built or loaded outside of that.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from sparsegen.errors import UnsupportedError
from sparsegen.launch.capture import refuse_capture
from sparsegen.launch.kernel import Call
from sparsegen.runtime import backward as operators
from sparsegen.runtime.checks import (
    NO_OUT,
    beyond_proof,
    check_device,
    check_extras,
    check_features,
    check_lengths,
    check_starts,
    check_tensors,
)
from sparsegen.runtime.problems import problem_of, reaching

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import torch

    from sparsegen.codegen.backward import BackwardSource
    from sparsegen.codegen.knobs import LaunchConfig
    from sparsegen.codegen.source import KernelSource
    from sparsegen.launch.backward import Gradients, Saved
    from sparsegen.launch.kernel import Kernel
    from sparsegen.runtime.attend import Attend
    from sparsegen.spec.problem import Problem


class Backward(Protocol):
    """``launch.backward_kernel.BackwardKernel``, or what a test puts in its place."""

    sources: dict[str, BackwardSource]
    configs: dict[str, LaunchConfig]

    def __call__(self, saved: Saved, call: Call, wanted: Collection[str]) -> Gradients: ...


@dataclass(frozen=True)
class Trainable:
    """Kernels of both directions for one set of dims, as operators find them.

    ``proofs``: the sources whose proofs a call must keep to.
    """

    engine: str
    head_dim: int
    value_dim: int
    heads: int
    kv_heads: int
    dtype: torch.dtype
    scale: float
    tables: bool
    proofs: tuple[KernelSource, ...]

    @classmethod
    def of(
        cls,
        engine: str,
        problem: Problem,
        scale: float | None,
        tables: Sequence[Any],
        sources: Sequence[KernelSource],
    ) -> Trainable:
        """For the dims of a problem; ``scale`` of the pattern, ``sources``: those of all kernels."""
        import torch

        return cls(
            engine=engine,
            head_dim=problem.head_dim,
            value_dim=problem.value_dim,
            heads=problem.heads,
            kv_heads=problem.kv_heads,
            dtype=getattr(torch, problem.dtype),
            scale=1.0 / math.sqrt(problem.head_dim) if scale is None else float(scale),
            tables=bool(tables),
            proofs=tuple(s for s in sources if s.max_position is not None),
        )

    def fits(self, q: Any, k: Any, v: Any) -> bool:
        """Whether these tensors have its dims."""
        return (
            q.dtype == self.dtype
            and q.shape[3] == self.head_dim
            and v.shape[3] == self.value_dim
            and q.shape[1] == self.heads
            and k.shape[1] == self.kv_heads
        )


class Training:
    """The differentiable calls of one ``Attend``."""

    def __init__(self, attend: Attend, gradients: Callable[[Problem], Backward] | None):
        """``gradients`` gives the kernels for a problem; None: this callable was made without any."""
        self._attend, self._gradients = attend, gradients
        self._made: list[Trainable] = []

    def add(self, problem: Problem, forward: Kernel, backward: Backward) -> Trainable:
        """Register kernels for the dims of a problem; they take the place of older ones."""
        from sparsegen.codegen.backward import QUERIES

        source, scale = backward.sources[QUERIES], self._attend.pattern.scale
        engine = engine_name(forward, backward.sources, backward.configs)
        made = Trainable.of(engine, problem, scale, source.tables, (forward.source, source))
        operators.register(made.engine, operators.Engine(forward, backward, source.tables))
        same = lambda t: replace(t, engine="", proofs=()) == replace(made, engine="", proofs=())
        self._made = [made, *(t for t in self._made if not same(t))]
        return made

    def prepare(self, problem: Problem) -> None:
        """Kernels of both directions for a problem, built or loaded now where they are not here."""
        dims = (problem.head_dim, problem.value_dim, problem.heads, problem.kv_heads)
        here = [(t.head_dim, t.value_dim, t.heads, t.kv_heads, str(t.dtype)) for t in self._made]
        if (*dims, f"torch.{problem.dtype}") not in here:
            self.add(problem, self._attend.kernel_of(problem), self._kernels(problem))

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        q_start: int | None,
        k_start: int,
        q_lengths: Any,
        kv_starts: Any,
        kv_lengths: Any,
        alibi_slopes: Any,
        sink_logits: Any,
        null_key: Any,
        out: Any,
        return_lse: bool,
        partial: bool,
        variant: str | None,
    ) -> Any:
        """As ``Attend.__call__``.  UnsupportedError for ``out``, ``variant`` and gradients of ALiBi slopes."""
        _refuse(alibi_slopes, out, variant)
        pattern = self._attend.pattern
        check_features(pattern, alibi_slopes, sink_logits, null_key)
        q, k, v, null_key = operators.autocast(q, k, v, null_key)
        check_tensors(q, k, v)
        check_device(q)
        check_extras(q, k, v, alibi_slopes, sink_logits, null_key)
        check_starts(q_start, k_start)
        found = self._found(q, k, v)
        if q_lengths is not None or kv_starts is not None or kv_lengths is not None:
            check_lengths(pattern, found.tables, q, q_lengths, kv_starts, kv_lengths)
        if self._attend.on_grid:
            pattern.check_lengths(q.shape[2], k.shape[2], k_start)
        relative = int(q_start is None and pattern.align == "bottom_right")
        first = k_start if q_start is None else q_start
        if found.proofs:
            call = Call(first, k_start, relative, 1.0, q_lengths, kv_starts, kv_lengths)
            if any(beyond_proof(s, q.shape[2], k.shape[2], call) for s in found.proofs):
                found = self._any_length(q, k, v, call)
        result, lse = operators.attend(
            q,
            k,
            v,
            engine=found.engine,
            scale=found.scale,
            q_start=first,
            k_start=k_start,
            relative=relative,
            joins=int(not partial),
            q_lengths=q_lengths,
            kv_starts=kv_starts,
            kv_lengths=kv_lengths,
            alibi_slopes=alibi_slopes,
            sink_logits=sink_logits,
            null_key=null_key,
        )
        return (result, lse) if return_lse else result

    def _found(self, q: Any, k: Any, v: Any) -> Trainable:
        for made in self._made:
            if made.fits(q, k, v):
                return made
        problem = self._problem(q, k, v)
        return self.add(problem, self._attend.kernel_of(problem), self._kernels(problem))

    def _any_length(self, q: Any, k: Any, v: Any, call: Call) -> Trainable:
        """Kernels of both directions whose proofs hold for every position."""
        problem = self._problem(q, k, v)
        forward = self._attend.kernel_of(problem)
        if beyond_proof(forward.source, q.shape[2], k.shape[2], call):
            forward = self._attend.any_length(forward, q, k, v, call)
        longer = reaching(problem, q.shape[2], k.shape[2])
        return self.add(problem, forward, self._kernels(longer))

    def _problem(self, q: Any, k: Any, v: Any) -> Problem:
        import torch

        if torch.compiler.is_compiling():
            raise UnsupportedError(
                "torch.compile traces no build: name passes=('forward', 'backward') in sparsegen.compile, or call once "
                "with such tensors before"
            )
        return problem_of(self._attend.problem, q, k, v)

    def _kernels(self, problem: Problem) -> Backward:
        if self._gradients is None:
            raise UnsupportedError(
                f"this callable of {self._attend.pattern.name!r} was made without gradients: "
                "call under torch.no_grad(), or make it with sparsegen.compile"
            )
        refuse_capture(f"the gradients of {self._attend.pattern.name!r} are not built yet")
        return self._gradients(problem)


def wants_gradient(
    q: Any, k: Any, v: Any, alibi_slopes: Any, sink_logits: Any, null_key: Any, out: Any
) -> bool:
    """Whether autograd would follow the call."""
    asked = q.requires_grad or k.requires_grad or v.requires_grad
    learned = not (alibi_slopes is sink_logits is null_key is out is None)
    if not asked and learned:
        null = null_key if isinstance(null_key, (tuple, list)) else ()
        more = (alibi_slopes, sink_logits, out, *null)
        asked = any(t is not None and t.requires_grad for t in more)
    if not asked:
        return False
    import torch

    return torch.is_grad_enabled()


def _refuse(alibi_slopes: Any, out: Any, variant: str | None) -> None:
    if out is not None:
        raise UnsupportedError(NO_OUT)
    if variant is not None:
        raise UnsupportedError(
            "variant= names a forward kernel alone: leave it out where a gradient is wanted, or call under torch.no_grad()"
        )
    if alibi_slopes is not None and alibi_slopes.requires_grad:
        raise UnsupportedError(
            "alibi_slopes get no gradient: pass alibi_slopes.detach(), or use backend='reference'"
        )


def engine_name(
    forward: Any, sources: Mapping[str, BackwardSource], configs: Mapping[str, LaunchConfig]
) -> str:
    """A digest of texts and configurations: the same in every process."""
    parts = [forward.source.digest, str(forward.config)]
    parts += [f"{name} {sources[name].digest} {configs[name]}" for name in sorted(sources)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
