"""``SparseAttention``: attention with a pattern as a layer of a PyTorch model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsegen.artifact.manifest import LEVELS
from sparsegen.artifact.store import Store
from sparsegen.errors import InputError, SpecError, UnsupportedError
from sparsegen.launch.capture import refuse_capture
from sparsegen.runtime import checks
from sparsegen.runtime.api import BACKENDS, check_designs, check_store, compile, load
from sparsegen.runtime.attend import Attend, ReferenceAttend
from sparsegen.spec.fields import show
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem

Rotary = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

KERNELS = ("compile", "load")
# keywords of ``Attend`` that change what a call gives, which a layer cannot hand on
_NOT_HERE = ("out", "return_lse", "partial", "variant")


class SparseAttention(nn.Module):
    """Projections, attention with one pattern, projection: [B, S, embed_dim] → [B, S, embed_dim].

    Args:
        embed_dim: width of what comes in and goes out.
        num_heads, num_kv_heads: query heads, and key heads (default: as many); the first a multiple of the second.
        pattern: a ``Pattern``, a file, or a shipped name.  It gives the mask, ``scale`` and ``softcap``.
        head_dim: default ``embed_dim // num_heads``.
        bias: of the four projections.
        dropout: 0.0; attention weights are never in memory, another value is an ``UnsupportedError``.
        rotary: called with q [B, H, Sq, D] and k [B, Hkv, Skv, D] after their projections, returns both: rotary
            embeddings, normalisation.  A ``nn.Module`` becomes a submodule.  Results are cast to the dtype of v.
        alibi_slopes: one number a head, where the pattern has ``alibi: true``; no gradient.
        backend: ``triton``, or ``reference`` for the dense float64 reference on any device.
        kernels: ``compile`` builds what is not stored, ``load`` takes stored artifacts alone.
        tune: of ``compile``, as in ``sparsegen.compile``; ``off`` measures nothing.
        deterministic: gradients are the same to the bit from run to run; ``False`` as in ``sparsegen.compile``.
        workspace: bytes for dS, as in ``sparsegen.compile``.
        lengths: typical lengths, as in ``Problem``; default: the pattern's own.
        store: where artifacts are; default: the user's cache.
        device, dtype: of the parameters.

    A pattern with ``sink_logits: true`` adds the parameter ``sink_logits`` [H], one with ``null_key: true`` ``null_k``
    and ``null_v`` [Hkv, D].  Kernels are built or loaded at the first call with inputs of a dtype, or by ``prepare``;
    layers with the same pattern and dims share them.
    """

    alibi_slopes: Tensor | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        pattern: Pattern | str | Path,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        rotary: Rotary | None = None,
        alibi_slopes: Sequence[float] | None = None,
        backend: str = "triton",
        kernels: str = "compile",
        tune: str = "off",
        deterministic: bool = True,
        workspace: int | None = None,
        lengths: Sequence[int | tuple[int, int]] | None = None,
        store: Store | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Raises ``InputError`` for sizes that do not fit, ``SpecError`` for a pattern with mistakes."""
        super().__init__()
        _one_of("backend", backend, BACKENDS)
        _one_of("kernels", kernels, KERNELS)
        _one_of("tune", tune, LEVELS)
        check_designs(deterministic, workspace)
        check_store(store)
        if rotary is not None and not callable(rotary):
            raise InputError(f"rotary must be called with q and k, got {type(rotary).__name__}")
        if dropout != 0.0:
            raise UnsupportedError(
                f"dropout of attention weights is not supported, got dropout={dropout!r}: "
                "use 0.0, and nn.Dropout on the output"
            )
        self.pattern = pattern if isinstance(pattern, Pattern) else Pattern.from_yaml(pattern)
        for name, size in (("embed_dim", embed_dim), ("num_heads", num_heads)):
            if type(size) is not int or size < 1:
                raise InputError(f"{name} must be an integer, 1 or more, got {size!r}")
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = _head_dim(embed_dim, num_heads) if head_dim is None else head_dim
        self.backend, self.kernels, self.tune, self.store = backend, kernels, tune, store
        self.deterministic, self.workspace = deterministic, workspace
        self.problem = self._problem(lengths)
        self.rotary = rotary
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        wide, narrow = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(embed_dim, wide, bias, **made)
        self.k_proj = nn.Linear(embed_dim, narrow, bias, **made)
        self.v_proj = nn.Linear(embed_dim, narrow, bias, **made)
        self.out_proj = nn.Linear(wide, embed_dim, bias, **made)
        if self.pattern.sink_logits:
            self.sink_logits = nn.Parameter(torch.empty(num_heads, **made))
        if self.pattern.null_key:
            shape = (self.num_kv_heads, self.head_dim)
            self.null_k = nn.Parameter(torch.empty(shape, **made))
            self.null_v = nn.Parameter(torch.empty(shape, **made))
        self._slopes = self._checked_slopes(alibi_slopes)
        slopes = None if self._slopes is None else torch.tensor(self._slopes, device=device)
        self.register_buffer("alibi_slopes", slopes, persistent=False)
        # by the dtype of q: autocast brings another one than the parameters have
        self._callables: dict[torch.dtype, Attend | ReferenceAttend] = {}
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Zeros for the learned sink and the null key; the projections are reset by themselves."""
        for name in ("sink_logits", "null_k", "null_v"):
            if hasattr(self, name):
                nn.init.zeros_(getattr(self, name))

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        **runtime: Any,
    ) -> Tensor:
        """Attention of ``query`` [B, Sq, E] to ``key`` and ``value`` [B, Skv, E], by default to itself → [B, Sq, E].

        ``runtime``: keywords of ``Attend`` that place the tensors (``q_start``, ``kv_lengths``, …), and of the pattern's
        run-time nodes with the reference.  ``TypeError`` for others, ``InputError`` for tensors that do not fit.
        """
        wrong = [name for name in _NOT_HERE if name in runtime]
        if wrong:
            raise TypeError(
                f"SparseAttention takes no {wrong[0]!r}; a sparsegen.Attend on its own does"
            )
        key = query if key is None else key
        value = key if value is None else value
        for name, t in (("query", query), ("key", key), ("value", value)):
            if not isinstance(t, Tensor) or t.dim() != 3 or t.shape[2] != self.embed_dim:
                got = list(t.shape) if isinstance(t, Tensor) else type(t).__name__
                raise InputError(f"{name} must be [batch, length, {self.embed_dim}], got {got}")
        q = self._heads(self.q_proj(query), self.num_heads)
        k = self._heads(self.k_proj(key), self.num_kv_heads)
        v = self._heads(self.v_proj(value), self.num_kv_heads)
        if self.rotary is not None:
            q, k = (t.to(v.dtype) for t in self.rotary(q, k))
        return self.out_proj(self.attend(q, k, v, **runtime).transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **runtime: Any) -> Tensor:
        """Attention alone: q [B, H, Sq, D], k and v [B, Hkv, Skv, D] → [B, H, Sq, D].  A subclass may replace it."""
        found = self._callables.get(q.dtype)
        if found is None:
            found = self._opened(q)
        if self.pattern.sink_logits:
            runtime["sink_logits"] = self.sink_logits.float()
        if self.pattern.null_key:
            runtime["null_key"] = self.null_k.to(q.dtype), self.null_v.to(q.dtype)
        if self.alibi_slopes is not None:
            runtime["alibi_slopes"] = self.alibi_slopes
        return found(q, k, v, **runtime)

    def prepare(
        self, dtype: torch.dtype | None = None, *, backward: bool = True
    ) -> SparseAttention:
        """Build or load the kernels now, for inputs of this dtype (default: that of the parameters), and return self.

        ``torch.compile`` and CUDA graphs build nothing, so they need it, or one call before.  ``backward``: also those
        of gradients.
        """
        dtype = self.q_proj.weight.dtype if dtype is None else dtype
        found = self._open(dtype)
        if backward and isinstance(found, Attend):
            found.prepare_gradients()
        return self

    def extra_repr(self) -> str:
        """What ``print(model)`` shows beside the projections."""
        return (
            f"{self.embed_dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"head_dim={self.head_dim}, pattern={self.pattern.name!r}, backend={self.backend!r}"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles go without kernels, and find them again at their first call."""
        return {**self.__dict__, "_callables": {}}

    def _apply(self, fn: Any, recurse: bool = True) -> SparseAttention:
        super()._apply(fn, recurse)
        if self._slopes is not None:  # float32 whatever the layer is cast to, filled after to_empty
            assert self.alibi_slopes is not None
            self.alibi_slopes = torch.tensor(self._slopes, device=self.alibi_slopes.device)
        return self

    # ---- kernels ----

    def _opened(self, q: Tensor) -> Attend | ReferenceAttend:
        if torch.compiler.is_compiling():
            raise UnsupportedError(
                f"torch.compile traces no build: call prepare() of this layer, or the layer once with {q.dtype}, before"
            )
        if self.backend != "reference" and q.device.type != checks.DEVICE:
            raise InputError(
                f"compiled kernels run on a GPU and the tensors are on {q.device}; "
                "SparseAttention(..., backend='reference') runs on any device"
            )
        refuse_capture(f"the kernels of {self.pattern.name!r} are not built yet")
        return self._open(q.dtype)

    def _open(self, dtype: torch.dtype) -> Attend | ReferenceAttend:
        found = self._callables.get(dtype)
        if found is None:
            if self.backend == "reference":
                found = ReferenceAttend(self.pattern)
            else:
                problem = self._for_dtype(dtype)
                how = self.kernels, self.tune, self.store, self.deterministic, self.workspace
                found = open_callable(self.pattern, problem, *how)
            self._callables[dtype] = found
        return found

    def _for_dtype(self, dtype: torch.dtype) -> Problem:
        name = str(dtype).removeprefix("torch.")
        try:
            return replace(self.problem, dtype=name)
        except SpecError as error:
            raise InputError(f"no kernel takes these tensors: {_mistake(error)}") from None

    def _problem(self, lengths: Sequence[int | tuple[int, int]] | None) -> Problem:
        given: dict[str, Any] = {
            "head_dim": self.head_dim,
            "value_dim": self.head_dim,
            "heads": self.num_heads,
            "kv_heads": self.num_kv_heads,
        }
        if lengths is not None:
            given["lengths"] = list(lengths) if isinstance(lengths, Sequence) else lengths
        try:
            return replace(self.pattern.problem or Problem(), **given)
        except SpecError as error:
            raise InputError(f"SparseAttention: {_mistake(error)}") from None

    # ---- tensors ----

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        """[B, S, heads * D] seen as [B, heads, S, D], without a copy."""
        return x.unflatten(2, (heads, self.head_dim)).transpose(1, 2)

    def _checked_slopes(self, slopes: Sequence[float] | None) -> tuple[float, ...] | None:
        wanted, given = self.pattern.alibi, slopes is not None
        if wanted != given:
            has = "needs alibi_slopes" if wanted else "takes no alibi_slopes"
            raise InputError(f"pattern {self.pattern.name!r} {has}, one number a head")
        if slopes is None:
            return None
        try:
            found = tuple(map(float, slopes))
        except (TypeError, ValueError):
            found = ()
        if len(found) != self.num_heads or not all(map(math.isfinite, found)):
            raise InputError(
                f"alibi_slopes must be {self.num_heads} finite numbers, one a head, got {show(slopes)}"
            )
        return found


@cache
def open_callable(
    pattern: Pattern,
    problem: Problem,
    kernels: str,
    tune: str,
    store: Store | None,
    deterministic: bool = True,
    workspace: int | None = None,
) -> Attend:
    """The callable of a problem, built or loaded once in this process: layers that are alike share it."""
    if kernels == "load":
        return load(pattern, problem, store=store, deterministic=deterministic, workspace=workspace)
    options: dict[str, Any] = {"tune": tune, "store": store}
    options |= {"deterministic": deterministic, "workspace": workspace}
    found = compile(pattern, problem, passes=("forward",), **options)
    assert isinstance(found, Attend)
    return found


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InputError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def _head_dim(embed_dim: int, num_heads: int) -> int:
    if embed_dim % num_heads:
        raise InputError(
            f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}; or give head_dim"
        )
    return embed_dim // num_heads


def _mistake(error: SpecError) -> str:
    mistake = error.mistakes[0]
    return f"{mistake.path} {mistake.message}".strip()
