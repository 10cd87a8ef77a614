"""Peers to measure beside sparsegen: FlexAttention and SDPA of the installed torch, given the same mask.

Flex gets its mask as Python text printed from the pattern's own expression, so that the compiler behind it sees
plain arithmetic, as it would from a hand-written ``mask_mod``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from sparsegen.spec import expr as ex
from sparsegen.spec.pattern import Pattern

Launch = Callable[[], Any]


def python_text(e: Any) -> str:
    """A mask expression as Python over tensors q and k."""
    p = python_text
    match e:
        case ex.Const(v) | ex.Truth(v):
            return str(v)
        case ex.Name(n):
            return n
        case ex.Neg(a):
            return f"(-{p(a)})"
        case ex.Abs(a):
            return f"abs({p(a)})"
        case ex.Add(a, b) | ex.Sub(a, b) | ex.Mul(a, b) | ex.FloorDiv(a, b) | ex.Mod(a, b):
            op = {ex.Add: "+", ex.Sub: "-", ex.Mul: "*", ex.FloorDiv: "//", ex.Mod: "%"}[type(e)]
            return f"({p(a)} {op} {p(b)})"
        case ex.Compare(op, a, b):
            return f"({p(a)} {op} {p(b)})"
        case ex.And(args):
            return "(" + " & ".join(map(p, args)) + ")"
        case ex.Or(args):
            return "(" + " | ".join(map(p, args)) + ")"
        case ex.Not(a):
            return f"(~{p(a)})"
        case ex.Min(args) | ex.Max(args):
            name = "torch.minimum" if isinstance(e, ex.Min) else "torch.maximum"
            out = p(args[0])
            for a in args[1:]:
                out = f"{name}({out}, {p(a)})"
            return out
    raise TypeError(f"flex gets no {e!r}")


# How flex is compiled: name → (mode of torch.compile, kernel options).
FLEX: dict[str, tuple[str | None, dict[str, Any] | None]] = {
    "flex": (None, None),
    "flex max-autotune": ("max-autotune-no-cudagraphs", None),
    "flex USE_TMA": (None, {"USE_TMA": True}),
}
# What max-autotune chose (H200, torch 2.11, 2026-11-29): 64 x 64 or 128 x 64 in every case of head_dim 128, 128 x 128
# for 96 and 192.  Its default is 128 x 64 with the options of the second one.
FLEX_QUICK: dict[str, tuple[str | None, dict[str, Any] | None]] = {
    "flex 64x64": (None, {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}),
    "flex 128x64": (None, {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3}),
    "flex 128x128": (None, {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 2}),
}


def flex(
    pattern: Pattern, q: Any, k: Any, v: Any, modes: Any = None, mask_time: bool = True
) -> dict[str, Launch]:
    """Compiled FlexAttention in each mode (``FLEX``, or ``FLEX_QUICK``).

    Building the block mask is compiled and timed apart; ``mask_time`` False builds it uncompiled, which takes
    q_len * kv_len bytes and more, and no time is told.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    ((_, mask),) = pattern.exprs
    q_len, kv_len = q.shape[2], k.shape[2]
    text = f"lambda b, h, i, k: (lambda q: {python_text(mask)})(i + {kv_len - q_len})"
    mask_mod = eval(text, {"torch": torch})  # our own text, printed two lines above
    build = torch.compile(create_block_mask, dynamic=False) if mask_time else create_block_mask
    block_mask = build(mask_mod, None, None, q_len, kv_len, device=q.device)
    mask_ms = 0.0
    if mask_time:
        torch.cuda.synchronize()
        start = time.perf_counter()
        block_mask = build(mask_mod, None, None, q_len, kv_len, device=q.device)
        torch.cuda.synchronize()
        mask_ms = 1e3 * (time.perf_counter() - start)
    gqa = q.shape[1] != k.shape[1]
    out: dict[str, Launch] = {}
    for name, (mode, options) in (modes or FLEX).items():
        torch._dynamo.reset()
        fn = torch.compile(flex_attention, dynamic=False, mode=mode)

        def launch(fn: Any = fn, options: Any = options) -> Any:
            return fn(q, k, v, block_mask=block_mask, enable_gqa=gqa, kernel_options=options)

        try:
            launch()
        except (
            Exception
        ) as error:  # a mode that a version cannot compile is a missing column, not our failure
            print(f"    {name}: {type(error).__name__} {str(error)[:120]}", flush=True)
            continue
        launch.mask_ms = mask_ms  # type: ignore[attr-defined]
        out[name] = launch
    return out


def sdpa(q: Any, k: Any, v: Any) -> dict[str, Launch]:
    """Causal SDPA through cuDNN and FlashAttention-2."""
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    gqa = q.shape[1] != k.shape[1]
    out: dict[str, Launch] = {}
    for name, backend in (
        ("cudnn", SDPBackend.CUDNN_ATTENTION),
        ("flash-2", SDPBackend.FLASH_ATTENTION),
    ):

        def launch(backend: Any = backend) -> Any:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)

        try:
            launch()
        except RuntimeError as error:
            print(f"    {name}: {str(error)[:120]}", flush=True)
            continue
        out[name] = launch
    return out
