"""Dense attention in the dtype of its inputs: the yardstick that a kernel's rounding is compared with."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from sparsegen.spec.pattern import Pattern


def eager_attention(
    pattern: Pattern,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sink_logits: torch.Tensor | None = None,
    null_key: tuple[torch.Tensor, torch.Tensor] | None = None,
    **runtime: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a model's own eager attention gives: every step rounds to the dtype of q.

    Args:
        q: [B, H, Sq, D]; k: [B, Hkv, Sk, D]; v: [B, Hkv, Sk, Dv].
        rows: int64 query indexes; only these rows are computed.
        alibi_slopes, sink_logits: [H]; null_key: ([Hkv, D], [Hkv, Dv]).

    Returns:
        (out [B, H, R, Dv] in the dtype of q, lse [B, H, R] in at least float32, natural log); empty rows are 0 and
        -inf.
    """
    import torch

    q_len, kv_len, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    index = torch.arange(q_len, device=q.device) if rows is None else rows.to(q.device)
    q = q[:, :, index]
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    scale = pattern.scale if pattern.scale is not None else 1.0 / math.sqrt(q.shape[-1])
    scores = _capped(q @ k.transpose(-1, -2) * scale, pattern.softcap)
    if alibi_slopes is not None:
        offset = kv_len - q_len if pattern.align == "bottom_right" else 0
        distance = (index[:, None] + offset - torch.arange(kv_len, device=q.device)).abs()
        scores = scores - alibi_slopes.to(q.dtype)[:, None, None] * distance.to(q.dtype)
    mask = pattern.dense_mask(
        q_len, kv_len, device=q.device, rows=rows, heads=q.shape[1], **runtime
    )
    scores = scores.masked_fill(~mask, -math.inf)
    if null_key is not None:
        null_k, null_v = (t.to(q.dtype).repeat_interleave(group, dim=0) for t in null_key)
        null_score = _capped(q @ null_k[:, :, None] * scale, pattern.softcap)
        scores = torch.cat([scores, null_score], dim=-1)
        v = torch.cat([v, null_v[None, :, None].expand(v.shape[0], -1, 1, -1)], dim=2)
    if sink_logits is not None:
        sinks = sink_logits.to(q.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1).nan_to_num(
        0.0
    )  # a row that sees nothing divides 0 by 0
    wide = scores.double() if scores.dtype == torch.float64 else scores.float()
    return weights[..., : v.shape[2]] @ v, torch.logsumexp(wide, dim=-1)


def _capped(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return scores if softcap is None else softcap * (scores / softcap).tanh()
