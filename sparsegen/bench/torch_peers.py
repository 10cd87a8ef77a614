"""Peers that torch brings: FlexAttention and SDPA, given the same mask."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from sparsegen.bench.interleaved import Launch
from sparsegen.bench.mask_text import plain, python_text
from sparsegen.spec import expr as ex
from sparsegen.spec.pattern import Pattern

Modes = Mapping[str, tuple[str | None, dict[str, Any] | None]]
Refuse = Callable[[str, str], None]  # is told the name of what does not work, and why

# How flex is compiled: name → (mode of torch.compile, kernel options).
FLEX: Modes = {
    "flex": (None, None),
    "flex max-autotune": ("max-autotune-no-cudagraphs", None),
    "flex USE_TMA": (None, {"USE_TMA": True}),
}
# What max-autotune chose (H200, torch 2.11, 2026-11-29): 64 x 64 or 128 x 64 in every case of head_dim 128, 128 x 128
# for 96 and 192.  Its default is 128 x 64 with the options of the second one.
FLEX_QUICK: Modes = {
    "flex 64x64": (None, {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}),
    "flex 128x64": (None, {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3}),
    "flex 128x128": (None, {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 2}),
}


def quick_modes(head_dim: int) -> Modes:
    """Those of ``FLEX_QUICK`` that max-autotune chose among for this head_dim, its default with them."""
    chosen = ("flex 64x64", "flex 128x64") if head_dim == 128 else ("flex 128x64", "flex 128x128")
    return {name: FLEX_QUICK[name] for name in chosen}


def printed(name: str, reason: str) -> None:
    """A refusal as a line of a benchmark's output."""
    print(f"    {name}: {reason[:120]}", flush=True)


def mask_mod(pattern: Pattern, q_len: int, kv_len: int, heads: int, device: Any) -> Any:
    """The mask as flex takes it: a function of (batch, head, query index, key index), vectorised.

    Arithmetic is printed from the pattern's expressions; ``random_blocks`` is a bool table of blocks, several rules a
    table of heads.  Raises ``TypeError`` for terms that data decide at run time.
    """
    import torch

    offset = kv_len - q_len if pattern.align == "bottom_right" else 0
    tables: dict[str, Any] = {}

    def term(e: ex.Term) -> str:
        if e.kind != "random_blocks":
            raise TypeError(f"{e.kind} is decided by data at run time")
        name, b = f"drawn_{len(tables)}", e["block"]
        tables[name] = drawn_blocks(e, offset, q_len, kv_len).to(device)
        first = offset // b
        row = f"q // {b}" if first == 0 else f"q // {b} - ({first})"
        return f"{name}[{row}, k // {b}]"

    lengths = {"q_len": q_len, "kv_len": kv_len}
    texts = [python_text(plain(mask, lengths), term) for _, mask in pattern.exprs]
    if len(texts) > 1:
        tables["rule"] = torch.tensor(pattern.head_rule_of(heads), device=device)
        texts = [f"((rule[h] == {i}) & {text})" for i, text in enumerate(texts)]
    made = f"lambda b, h, i, k: (lambda q: {' | '.join(texts)})(i + {offset})"
    # our own text, printed one line above; tables are a closure, as in a hand-written mask
    return eval(f"lambda {', '.join(tables)}: {made}", {"torch": torch})(*tables.values())


def drawn_blocks(e: ex.Term, offset: int, q_len: int, kv_len: int) -> Any:
    """Bool [query blocks from that of ``offset`` on, key blocks]: which blocks ``random_blocks`` draws."""
    import torch

    from sparsegen.spec.random_blocks import random_block_table

    b = e["block"]
    first, blocks = offset // b, -(-kv_len // b)
    rows = (offset + q_len - 1) // b - first + 1
    per_row = min(e["per_row"], blocks)
    drawn = random_block_table(b, per_row, e["seed"], first, rows, blocks)  # -1: none
    seen = torch.zeros(rows, blocks + 1, dtype=torch.bool)
    seen.scatter_(1, torch.as_tensor(drawn).long() % (blocks + 1), True)
    return seen[:, :blocks].contiguous()


def score_mod(pattern: Pattern, offset: int, slopes: Any = None) -> Any:
    """``softcap`` and ALiBi as flex takes them, or None where the pattern has neither."""
    import torch

    cap = pattern.softcap
    if cap is None and slopes is None:
        return None

    def changed(score: Any, b: Any, h: Any, i: Any, k: Any) -> Any:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        if slopes is not None:
            score = score - slopes[h] * abs(i + offset - k)
        return score

    return changed


def block_mask(
    pattern: Pattern,
    q: Any,
    k: Any,
    mask_time: bool = True,
    block: Any = None,
) -> tuple[Any, float]:
    """Flex's block mask, and the milliseconds that a second building of it took.

    ``mask_time`` False builds it uncompiled, which takes q_len * kv_len bytes and more, and no time is told.
    """
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    mod = mask_mod(pattern, q.shape[2], k.shape[2], q.shape[1], q.device)
    heads = None if len(pattern.rules) == 1 else q.shape[1]
    sizes = {} if block is None else {"BLOCK_SIZE": block}
    torch._dynamo.reset()  # after eight masks it would build uncompiled, and say so once
    build: Any = torch.compile(create_block_mask, dynamic=False) if mask_time else create_block_mask
    made = lambda: build(mod, None, heads, q.shape[2], k.shape[2], device=q.device, **sizes)
    first = made()
    if not mask_time:
        return first, 0.0
    wait = torch.cuda.synchronize if q.is_cuda else lambda: None
    wait()
    start = time.perf_counter()
    second = made()
    wait()
    return second, 1e3 * (time.perf_counter() - start)


def flex(
    pattern: Pattern,
    q: Any,
    k: Any,
    v: Any,
    modes: Modes | None = None,
    mask_time: bool = True,
    refuse: Refuse = printed,
    slopes: Any = None,
    mask: tuple[Any, float] | None = None,
) -> dict[str, Launch]:
    """Compiled FlexAttention in each mode (``FLEX``, or ``FLEX_QUICK``); a mode that this torch refuses is told.

    ``mask``: what ``block_mask`` gave, default a new one.  Each launch has its milliseconds as ``mask_ms``.
    """
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    made, mask_ms = mask or block_mask(pattern, q, k, mask_time)
    offset = k.shape[2] - q.shape[2] if pattern.align == "bottom_right" else 0
    given: dict[str, Any] = {"block_mask": made, "enable_gqa": q.shape[1] != k.shape[1]}
    if (changed := score_mod(pattern, offset, slopes)) is not None:
        given["score_mod"] = changed
    if pattern.scale is not None:
        given["scale"] = pattern.scale
    out: dict[str, Launch] = {}
    for name, (mode, options) in (modes or FLEX).items():
        torch._dynamo.reset()
        fn: Any = torch.compile(flex_attention, dynamic=False, mode=mode)

        def launch(fn: Any = fn, options: Any = options) -> Any:
            return fn(q, k, v, kernel_options=options, **given)

        try:
            launch()
        except Exception as error:  # whatever its compiler raises: a missing column, said
            refuse(name, f"{type(error).__name__} {error}")
            continue
        launch.mask_ms = mask_ms  # type: ignore[attr-defined]
        out[name] = launch
    return out


def sdpa(
    q: Any,
    k: Any,
    v: Any,
    causal: bool = True,
    scale: float | None = None,
    refuse: Refuse = printed,
) -> dict[str, Launch]:
    """SDPA, causal (aligned top left) or full, through cuDNN and FlashAttention-2; a backend that refuses is told."""
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
                return F.scaled_dot_product_attention(
                    q, k, v, is_causal=causal, scale=scale, enable_gqa=gqa
                )

        try:
            launch()
        except RuntimeError as error:
            refuse(name, str(error))
            continue
        out[name] = launch
    return out
