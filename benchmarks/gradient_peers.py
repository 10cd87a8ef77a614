"""Backward passes of peers: compiled FlexAttention, SDPA through cuDNN and FlashAttention-2, FlashAttention-4."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sparsegen.bench import torch_peers
from sparsegen.bench.case import Case
from sparsegen.bench.torch_peers import printed

Launch = Callable[[], Any]

FLEX: torch_peers.Modes = {"flex": (None, None)}
# Its default tiles take 128 keys and 8 warps up to head_dim 128; these are smaller, for narrow masks.
FLEX_TILES: torch_peers.Modes = FLEX | {
    "flex 64x64": (
        None,
        {"bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 64,
         "bwd_num_warps": 4, "bwd_num_stages": 3},
    ),
}  # fmt: skip
FLEX_MORE: torch_peers.Modes = FLEX_TILES | {
    "flex max-autotune": ("max-autotune-no-cudagraphs", None)
}
MODES = {"quick": FLEX, "tiles": FLEX_TILES, "all": FLEX_MORE}


class Pass:
    """A forward and a backward pass of one contender: ``forward`` gives OUT, ``backward`` (dq, dk, dv)."""

    def __init__(self, attend: Launch, leaves: Any, dout: Any):
        self._attend, self._leaves, self._dout = attend, leaves, dout
        self._out = attend()
        self.grads()

    def grads(self) -> Any:
        """Gradients of the forward pass made at first: what is timed."""
        import torch

        return torch.autograd.grad(self._out, self._leaves, self._dout, retain_graph=True)

    def whole(self) -> Any:
        """Both passes, nothing kept in between but what autograd keeps: what memory is measured of."""
        import torch

        return torch.autograd.grad(self._attend(), self._leaves, self._dout)

    def __call__(self) -> Any:
        return self.grads()


def leaves_of(*tensors: Any) -> list[Any]:
    """The same values as leaves of autograd."""
    return [t.detach().clone().requires_grad_() for t in tensors]


def flex(
    pattern: Any, q: Any, k: Any, v: Any, dout: Any, modes: torch_peers.Modes = FLEX
) -> dict[str, Pass]:
    """Compiled FlexAttention in each mode; one that this torch refuses is told.

    Its block mask belongs to the forward pass and is built uncompiled: compiled, that of causal at 16k kept ptxas busy for
    two minutes (torch 2.11, 2026-11-30).
    Its backward has no option for determinism in Triton: without captured buffers it adds nothing atomically.
    """
    import torch._functorch.config as functorch

    functorch.donated_buffer = False  # else a compiled backward runs once
    leaves = leaves_of(q, k, v)
    found = torch_peers.flex(pattern, *leaves, modes=modes, mask_time=False)
    out: dict[str, Pass] = {}
    for name, launch in found.items():
        _try(out, name, lambda: Pass(launch, leaves, dout))  # noqa: B023
    return out


def sdpa(q: Any, k: Any, v: Any, dout: Any) -> dict[str, Pass]:
    """SDPA, causal, by backend."""
    leaves = leaves_of(q, k, v)
    out: dict[str, Pass] = {}
    for name, launch in torch_peers.sdpa(*leaves).items():
        _try(out, name, lambda: Pass(launch, leaves, dout))  # noqa: B023
    return out


def flash4(case: Case, q: Any, k: Any, v: Any, dout: Any) -> dict[str, Pass]:
    """FlashAttention-4 in its fast and its deterministic mode, for masks that are one band; {} where it is not here."""
    try:
        from flash_attn.cute.interface import flash_attn_func  # type: ignore[import-not-found]
    except Exception as error:  # its packages raise many types where one of them is absent
        printed("fa4", f"not here: {type(error).__name__} {error}")
        return {}
    band = case.band()
    if band is None:
        return {}
    turned = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    leaves, dout = leaves_of(*turned), dout.transpose(1, 2).contiguous()
    plain = (band.left, band.right) == (None, 0)
    given: dict[str, Any] = {"causal": True} if plain else {"window_size": (band.left, band.right)}

    def attend(deterministic: bool) -> Any:
        found = flash_attn_func(*leaves, deterministic=deterministic, **given)
        return found[0] if isinstance(found, tuple) else found

    out: dict[str, Pass] = {}
    for name, mode in (("fa4", False), ("fa4 deterministic", True)):
        _try(out, name, lambda: _Turned(partial(attend, mode), leaves, dout))  # noqa: B023
    return out


class _Turned(Pass):
    """With gradients as [B, H, S, D] views, to be compared."""

    def __call__(self) -> Any:
        return tuple(t.transpose(1, 2) for t in self.grads())


def _try(out: dict[str, Pass], name: str, make: Callable[[], Pass]) -> None:
    try:
        out[name] = make()
    except Exception as error:  # whatever a peer's compiler raises: a missing column, said
        printed(name, f"{type(error).__name__} {error}")
