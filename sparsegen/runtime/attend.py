"""The callable that users hold, around a compiled kernel: checks a call, fills in defaults, launches.

``ReferenceAttend`` (``runtime.reference``) is the float64 reference under the same signature.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from sparsegen.errors import InputError
from sparsegen.launch.capture import refuse_capture
from sparsegen.launch.kernel import VARIANT_GUARDS, Call, Kernel, Launch
from sparsegen.runtime import backward as operators
from sparsegen.runtime.checks import (
    beyond_proof,
    check_device,
    check_extras,
    check_features,
    check_kinds,
    check_lengths,
    check_out,
    check_starts,
    check_tensors,
)
from sparsegen.runtime.problems import described, dims_of, problem_of, reaching
from sparsegen.runtime.reference import ReferenceAttend
from sparsegen.runtime.tables import TABLES_KEPT, Tables
from sparsegen.runtime.traced import Traced
from sparsegen.runtime.training import Backward, Training, wants_gradient
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem

if TYPE_CHECKING:
    import torch

__all__ = ["LAYOUTS_KEPT", "Attend", "ReferenceAttend"]

LAYOUTS_KEPT = 1024  # shapes that were checked; decoding meets a new one every step


class Attend:
    """Attention with one pattern, compiled.  Made by ``sparsegen.compile`` and ``sparsegen.load``."""

    def __init__(
        self,
        pattern: Pattern,
        problem: Problem,
        kernel: Kernel,
        rebuild: Callable[[Problem], Kernel] | None = None,
        gradients: Callable[[Problem], Backward] | None = None,
        backward: Backward | None = None,
    ):
        """``rebuild`` makes a kernel for other dims (compile()d callables); without it they are an error (load()ed).

        ``gradients`` gives the kernels of gradients when they are first needed, ``backward`` are those of ``problem``
        where they are here already.
        """
        self.pattern, self.problem, self.kernel = pattern, problem, kernel
        self._rebuild = rebuild
        self._kernels: dict[tuple[Any, ...], Kernel] = {dims_of(problem): kernel}
        self._checked: dict[Any, tuple[Kernel, float]] = {}
        self._ready: dict[Any, Launch] = {}  # layouts of plain calls, checked and prepared
        self._tables = Tables()
        self.on_grid = any(node.grid() is not None for _, node in pattern.nodes())
        self._training, self._traced = Training(self, gradients), Traced(self)
        self._traced.add_forward(problem, kernel)
        if backward is not None:
            self._training.add(problem, kernel, backward)

    def __copy__(self) -> Attend:
        """Itself, as of a function: copies of a model share its kernels."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Attend:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """TypeError: memory of a driver and functions are no data, and an artifact is found by its key in any process."""
        raise TypeError(
            f"{self!r} belongs to this process and cannot be pickled: make it in each process with sparsegen.load "
            "or sparsegen.compile; a sparsegen.nn.SparseAttention can be, and does that at its first call"
        )

    def __repr__(self) -> str:
        return f"<sparsegen.Attend {self.pattern.name!r} {self.problem.dtype} head_dim {self.problem.head_dim}>"

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        q_start: int | None = None,
        k_start: int = 0,
        q_lengths: torch.Tensor | None = None,
        kv_starts: torch.Tensor | None = None,
        kv_lengths: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        sink_logits: torch.Tensor | None = None,
        null_key: tuple[torch.Tensor, torch.Tensor] | None = None,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
        partial: bool = False,
        variant: str | None = None,
    ) -> Any:
        """Attention of q [B, H, Sq, D] over k [B, Hkv, Skv, D] and v [B, Hkv, Skv, Dv] → [B, H, Sq, Dv] in q's dtype.

        Strides are free but for the last dim, which is contiguous.  ``return_lse`` adds the log-sum-exp
        (float32, natural log, [B, H, Sq]).  Rows that see nothing are 0 with LSE -inf.

        q_start, k_start: absolute positions of the first query and the first key (>= 0); defaults: see ``align``.
        q_lengths, kv_starts, kv_lengths: int32 [B], valid query rows, first valid key row, valid keys.
        alibi_slopes, sink_logits: float32 [H].  null_key: (k [Hkv, D], v [Hkv, Dv]).
        partial: leave sink logits and null key out, to merge shards later with ``sparsegen.merge``.
        Gradients go to q, k, v, sink_logits and null_key, as far as they require one; see ``runtime.training``.
        variant: launch this variant ("fast", "pointers" or "general") or raise ``UnsupportedError``.

        Raises ``TypeError`` for a missing or unknown keyword, ``InputError`` for tensors that do not fit.
        """
        import torch

        # a launch cannot be traced, an operator can
        tracing = torch.compiler.is_compiling()
        if not tracing:  # the operators do both for themselves
            if not type(q) is type(k) is type(v) is torch.Tensor:  # the cheapest way to ask
                check_kinds(q, k, v)
            if torch._C._is_any_autocast_enabled():
                check_kinds(q, k, v, null_key=null_key)  # integers are not cast
                q, k, v, null_key = operators.autocast(q, k, v, null_key)
            if torch._C._functorch.maybe_current_level() is not None:
                operators.refuse_transforms(q, k, v)
        plain = (
            q_start is q_lengths is kv_starts is kv_lengths is out is variant is None  # type: ignore[comparison-overlap]
            and alibi_slopes is sink_logits is null_key is None  # type: ignore[comparison-overlap]
            and not (k_start or partial or tracing)
        )
        if not plain:
            check_kinds(
                q,
                k,
                v,
                q_lengths=q_lengths,
                kv_starts=kv_starts,
                kv_lengths=kv_lengths,
                alibi_slopes=alibi_slopes,
                sink_logits=sink_logits,
                null_key=null_key,
                out=out,
            )
        if plain and not (q.requires_grad or k.requires_grad or v.requires_grad):
            launch = self._ready.get(_layout(q, k, v))
            if launch is not None:
                out, lse = _empty(q, v)
                launch(q, k, v, out, lse)
                return (out, lse) if return_lse else out
        wanted = wants_gradient(q, k, v, alibi_slopes, sink_logits, null_key, out)
        if wanted or tracing:
            return (self._training if wanted else self._traced)(
                q,
                k,
                v,
                q_start=q_start,
                k_start=k_start,
                q_lengths=q_lengths,
                kv_starts=kv_starts,
                kv_lengths=kv_lengths,
                alibi_slopes=alibi_slopes,
                sink_logits=sink_logits,
                null_key=null_key,
                out=out,
                return_lse=return_lse,
                partial=partial,
                variant=variant,
            )
        kernel, scale = self._checked_layout(q, k, v)
        check_features(self.pattern, alibi_slopes, sink_logits, null_key)
        if alibi_slopes is not None or sink_logits is not None or null_key is not None:
            check_extras(q, k, v, alibi_slopes, sink_logits, null_key)
        check_starts(q_start, k_start)
        if variant is not None and variant not in VARIANT_GUARDS:
            raise InputError(f"variant must be one of {', '.join(VARIANT_GUARDS)}, got {variant!r}")
        if q_lengths is not None or kv_starts is not None or kv_lengths is not None:
            check_lengths(
                self.pattern, bool(kernel.source.tables), q, q_lengths, kv_starts, kv_lengths
            )
        if self.on_grid:
            self.pattern.check_lengths(q.shape[2], k.shape[2], k_start)
        relative = int(q_start is None and self.pattern.align == "bottom_right")
        first = k_start if q_start is None else q_start
        call = Call(
            q_start=first,
            k_start=k_start,
            relative=relative,
            scale=scale,
            q_lengths=q_lengths,
            kv_starts=kv_starts,
            kv_lengths=kv_lengths,
            alibi_slopes=alibi_slopes,
            sink_logits=sink_logits,
            null_key=null_key,
            joins=int(not partial),
            tables=self._random_blocks(kernel, q, k, first, relative),
        )
        if kernel.source.max_position is not None and beyond_proof(
            kernel.source, q.shape[2], k.shape[2], call
        ):
            kernel = self.any_length(kernel, q, k, v, call)
            call = replace(call, tables=self._random_blocks(kernel, q, k, first, relative))
        out, lse = _outputs(q, v, out)
        if q.numel() and q.shape[1]:
            launch = kernel.prepare(q, k, v, out, call)
            launch(q, k, v, out, lse, variant)
            if plain:
                # a launch keeps its tables alive
                if len(self._ready) >= (TABLES_KEPT if kernel.source.tables else LAYOUTS_KEPT):
                    self._ready.clear()
                self._ready[_layout(q, k, v)] = launch
        return (out, lse) if return_lse else out

    # ---- checks, once per layout ----

    def _checked_layout(self, q: Any, k: Any, v: Any) -> tuple[Kernel, float]:
        """The kernel for these tensors, and the scale of its scores."""
        key = (
            q.shape,
            k.shape,
            v.shape,
            q.dtype,
            k.dtype,
            v.dtype,
            q.device,
            k.device,
            v.device,
            q.stride(3) if q.dim() == 4 else None,
            k.stride()[-1:],
            v.stride()[-1:],
        )
        found = self._checked.get(key)
        if found is None:
            if len(self._checked) >= LAYOUTS_KEPT:
                self._checked.clear()
            found = self._checked[key] = self._check(q, k, v)
        return found

    def _check(self, q: Any, k: Any, v: Any) -> tuple[Kernel, float]:
        check_tensors(q, k, v)
        check_device(q)
        kernel = self.kernel_of(problem_of(self.problem, q, k, v))
        scale = self.pattern.scale
        return kernel, 1.0 / math.sqrt(q.shape[3]) if scale is None else scale

    def kernel_of(self, problem: Problem) -> Kernel:
        """The kernel for these dims: the one at hand, or built now where this callable may build."""
        kernel = self._kernels.get(dims_of(problem))
        if kernel is None:
            if self._rebuild is None:
                raise InputError(
                    f"this artifact was built for {described(self.problem)}, the tensors are {described(problem)}; "
                    "build it with sparsegen.compile or `sparsegen warm`"
                )
            refuse_capture(f"no kernel is built for {described(problem)}")
            kernel = self._kernels[dims_of(problem)] = self._rebuild(problem)
            self._traced.add_forward(problem, kernel)
        return kernel

    def prepare_gradients(self) -> None:
        """Build or load the kernels of gradients for its problem now, and not at the first call that needs them."""
        self._training.prepare(self.problem)

    def any_length(self, kernel: Kernel, q: Any, k: Any, v: Any, call: Call) -> Kernel:
        """A kernel whose proofs hold for every position: once, since a longer call would need it again."""
        why = beyond_proof(kernel.source, q.shape[2], k.shape[2], call)
        if self._rebuild is None:
            raise InputError(
                f"this artifact is proven for {why}; build it with lengths in its problem that reach there"
            )
        asked = reaching(problem_of(self.problem, q, k, v), q.shape[2], k.shape[2])
        refuse_capture(f"the kernel is proven for {why}")
        rebuilt = self._kernels[dims_of(asked)] = self._rebuild(asked)
        self._traced.add_forward(asked, rebuilt)
        self._checked.clear()
        self._ready.clear()
        if beyond_proof(rebuilt.source, q.shape[2], k.shape[2], call):
            raise InputError(f"no kernel takes these positions: it is proven for {why}")
        return rebuilt

    # ---- random_blocks ----

    def _random_blocks(
        self, kernel: Kernel, q: Any, k: Any, first: int, relative: int
    ) -> list[tuple[Any, int]]:
        """The tables of these lengths."""
        q_len, kv_len = q.shape[2], k.shape[2]
        q_first = first + (kv_len - q_len if relative else 0)
        return [
            self._tables.of(table, q_first, q_len, kv_len, q.device)
            for table in kernel.source.tables
        ]


def _layout(q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    """All of three tensors that a launch depends on, but for their addresses."""
    return (
        q.shape, q.stride(), q.dtype, q.device,
        k.shape, k.stride(), k.dtype, k.device,
        v.shape, v.stride(), v.dtype, v.device,
    )  # fmt: skip


def _empty(q: Any, v: Any) -> tuple[Any, Any]:
    """Room for out [B, H, Sq, Dv] in q's dtype and lse [B, H, Sq] in float32."""
    import torch

    rows = q.shape[:3]
    same = q.shape[3] == v.shape[3] and q.is_contiguous()  # half the host time of a new shape
    out = torch.empty_like(q) if same else q.new_empty((*rows, v.shape[3]))
    return out, q.new_empty(rows, dtype=torch.float32)


def _outputs(q: Any, v: Any, out: Any) -> tuple[Any, Any]:
    made, lse = _empty(q, v)
    if out is None:
        return made, lse
    check_out(q, v, out)
    return out, lse
