"""FlashAttention-4 (``flash_attn.cute``): bands by its own arguments, other masks by ``mask_mod`` and block sparsity."""

from __future__ import annotations

import hashlib
from typing import Any

from sparsegen.bench import torch_peers
from sparsegen.bench.case import Case, Inputs
from sparsegen.bench.interleaved import Launch
from sparsegen.bench.mask_text import cute_text, plain


def sparse_block(head_dim: int, value_dim: int) -> tuple[int, int]:
    """Rows and keys of a sparse block: its key tile on Hopper is one block, and 128 keys fit up to these dims."""
    small = head_dim <= 128 or (head_dim <= 192 and value_dim <= 128)
    return 128, 128 if small else 64


def mask_text(case: Case) -> str:
    """The mask over CuTe's vectors q and k; ``TypeError`` where it is no arithmetic that CuTe can take."""
    ((_, mask),) = case.pattern.exprs
    lengths = {"q_len": case.q_len, "kv_len": case.kv_len}
    return cute_text(plain(mask, lengths), q_from_zero=case.offset >= 0)


def launch_of(case: Case, inputs: Inputs) -> tuple[Launch, float, int]:
    """A call on [B, S, H, D] copies of the inputs, milliseconds of its set-up, and bytes that the set-up keeps."""
    from flash_attn.cute.interface import (  # type: ignore[import-not-found]
        flash_attn_func,
    )

    q, k, v = (t.transpose(1, 2).contiguous() for t in (inputs.q, inputs.k, inputs.v))
    given: dict[str, Any] = {}
    if case.pattern.scale is not None:
        given["softmax_scale"] = case.pattern.scale
    if case.pattern.softcap is not None:
        given["softcap"] = case.pattern.softcap
    if case.pattern.sink_logits:
        given["learnable_sink"] = inputs.extras["sink_logits"]
    mask_ms, kept = 0.0, 0
    band = case.band()
    if band is None:
        more, mask_ms, kept = _sparse(case, inputs)
        given |= more
    elif (band.left, band.right) == (None, 0):
        given["causal"] = True
    else:
        given["window_size"] = (band.left, band.right)

    def launch() -> Any:
        out = flash_attn_func(q, k, v, **given)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return launch, mask_ms, kept


def _sparse(case: Case, inputs: Inputs) -> tuple[dict[str, Any], float, int]:
    """``mask_mod`` and its block lists, which torch builds as for flex (compiled, the second building timed)."""
    from flash_attn.cute.block_sparsity import (  # type: ignore[import-not-found]
        BlockSparseTensorsTorch,
    )

    from sparsegen.bench.clock import nbytes

    block = sparse_block(case.problem.head_dim, case.problem.value_dim)
    found, mask_ms = torch_peers.block_mask(case.pattern, inputs.q, inputs.k, block=block)
    lists = (
        found.kv_num_blocks,
        found.kv_indices,
        found.full_kv_num_blocks,
        found.full_kv_indices,
    )
    tensors = BlockSparseTensorsTorch(*lists, block_size=block)
    more = {"mask_mod": _mask_mod(case), "block_sparse_tensors": tensors}
    return more, mask_ms, nbytes(*lists)


def _mask_mod(case: Case) -> Any:
    """A function of (batch, head, query index, key index, lengths, tensors), traced by CuTe."""
    import cutlass  # type: ignore[import-not-found]
    import cutlass.cute as cute  # type: ignore[import-not-found]
    from flash_attn.cute.utils import scalar_to_ssa  # type: ignore[import-not-found]

    text = f"lambda b, h, i, k, *_: (lambda q: {mask_text(case)})(i + number({case.offset}))"
    number = lambda value: scalar_to_ssa(value, cutlass.Int32)
    made = eval(text, {"number": number, "where": cute.where})  # our own text, printed above
    # Its cache would look at the byte code alone, which is the same for masks that differ in a constant.
    made.__cute_hash__ = hashlib.sha256(text.encode()).hexdigest()
    return made
