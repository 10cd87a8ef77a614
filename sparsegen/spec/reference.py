"""The oracle: dense attention in float64 from the pattern itself, differentiable, for any device.  And ``merge``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real
from typing import Any

from sparsegen.errors import InputError
from sparsegen.spec.call import Call
from sparsegen.spec.dense import chosen_rows, visible
from sparsegen.spec.fields import show
from sparsegen.spec.pattern import POSITION_NAMES, Pattern
from sparsegen.spec.positions import find_positions
from sparsegen.spec.run_data import check_floating, check_keywords

DTYPES = "bfloat16, float16, float32 or float64"  # of q, k and v


def reference(
    pattern: Pattern,
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    alibi_slopes: Any = None,
    sink_logits: Any = None,
    null_key: Any = None,
    q_start: int | None = None,
    k_start: int | None = None,
    q_lengths: Any = None,
    kv_starts: Any = None,
    kv_lengths: Any = None,
    rows: Any = None,
    partial: bool = False,
    **runtime: Any,
) -> tuple[Any, Any]:
    """Attention of ``q`` [B, H, Sq, D] to ``k`` [B, Hkv, Sk, D], ``v`` [B, Hkv, Sk, Dv] under the pattern.

    Returns ``out`` [B, H, Sq, Dv] and ``lse`` [B, H, Sq] (natural log), both float64, on the tensors' device.  Score =
    scale * q.k (``scale``: the argument, else the pattern's, else 1/sqrt(D)), then softcap * tanh(score / softcap), then
    - alibi_slopes[h] * |q - k|, then the mask.  ``sink_logits`` [H] join the denominator; ``null_key`` = (k [Hkv, D],
    v [Hkv, Dv]) is one more key that every query sees (scaled and capped, no ALiBi).  A row that sees nothing, these
    included: out 0, lse -inf, gradients 0.

    Ragged batches: valid keys of entry b are memory rows kv_starts[b] .. kv_starts[b] + kv_lengths[b] - 1, at positions
    k_start, k_start + 1, …; valid queries are rows 0 .. q_lengths[b] - 1, at positions q_start, q_start + 1, …; all other
    query rows are empty rows.  ``q_start`` and ``k_start`` are ints.  Defaults: k_start 0; q_start = k_start +
    kv_lengths[b] - q_lengths[b] (bottom_right) or k_start (top_left); q_lengths Sq; kv_starts 0; kv_lengths Sk -
    kv_starts[b].  In a mask, q_len and kv_len are the entry's own lengths.

    ``rows``: only these query rows, memory O(len(rows) * Sk).  ``partial=True`` leaves sink logits and null key out, for
    ``merge``.  TypeError: a keyword is missing or unknown.  InputError: tensors or data do not fit.
    """
    import torch

    if not isinstance(pattern, Pattern):
        made = (
            "Pattern.from_yaml makes one of a file or a shipped name, Pattern.from_dict of a dict"
        )
        raise InputError(f"pattern must be a sparsegen.Pattern ({made}), got {show(pattern)}")
    _check_tensors(q, k, v)
    if scale is not None and not (isinstance(scale, Real) and math.isfinite(scale)):
        raise InputError(f"scale must be a finite number, got {show(scale)}")
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1], k.shape[2]
    scores = ("block_scores",) if any(n.keyword == "top_blocks" for _, n in pattern.nodes()) else ()
    # kv_lengths places the tensors for every pattern; key_padding also demands it.
    needed = {"kv_lengths": kv_lengths} if "kv_lengths" in pattern.runtime_names else {}
    check_keywords(pattern, {**runtime, **needed}, (*POSITION_NAMES, *scores))
    extras = {"alibi_slopes": alibi_slopes, "sink_logits": sink_logits, "null_key": null_key}
    check_extras(pattern, extras, partial)

    starts = {
        "q_start": q_start,
        "k_start": k_start,
        "q_lengths": q_lengths,
        "kv_starts": kv_starts,
    }
    at = find_positions(q_len, kv_len, pattern.align, q.device, **starts, kv_lengths=kv_lengths)
    pattern.check_lengths(q_len, kv_len, at.k_start)
    call = Call(pattern, at, heads, runtime, (q, k))
    row = chosen_rows(rows, q_len, q.device)
    mask = visible(call, row)
    if mask.shape[0] not in (1, batch):
        raise InputError(
            f"run-time data are for {mask.shape[0]} batch entries, the tensors have {batch}"
        )

    group = heads // kv_heads
    # Rows that hold no key or no query may hold anything, NaN too: they must not reach a product.
    k_valid, q_valid = at.keys()[1][:, None, :, None], at.queries(row)[1][:, None, :, None]
    spread = lambda t: torch.where(k_valid, t.double(), 0).repeat_interleave(group, 1)
    q64, k64, v64 = torch.where(q_valid, q.double()[:, :, row], 0), spread(k), spread(v)
    scale = (
        scale
        if scale is not None
        else pattern.scale
        if pattern.scale is not None
        else 1 / math.sqrt(head_dim)
    )
    score = capped(scale * (q64 @ k64.transpose(-1, -2)), pattern.softcap)
    if alibi_slopes is not None:
        seen = call.at_rows(row)
        slopes = _per_head("alibi_slopes", alibi_slopes, heads, q)
        score = score - slopes * (seen.q - seen.k).abs().double()
    columns = [torch.where(mask, score, -math.inf)]
    values = v64
    if null_key is not None and not partial:
        null_k, null_v = _null_key(null_key, kv_heads, head_dim, v.shape[3], q)
        null = capped(
            scale * (q64 * null_k.repeat_interleave(group, 0)[None, :, None]).sum(-1, keepdim=True),
            pattern.softcap,
        )
        columns.append(torch.where(q_valid, null, -math.inf))
        wide = null_v.repeat_interleave(group, 0)[None, :, None].expand(batch, -1, -1, -1)
        values = torch.cat([values, wide], 2)
    if sink_logits is not None and not partial:
        sinks = _per_head("sink_logits", sink_logits, heads, q).expand(batch, -1, len(row), -1)
        columns.append(torch.where(q_valid, sinks, -math.inf))
        values = (
            torch.cat([values, torch.zeros_like(values[:, :, :1])], 2)
            if values.shape[2]
            else values.new_zeros(batch, heads, 1, v.shape[3])
        )
    return softmax_product(torch.cat(columns, -1), values)


def softmax_product(score: Any, values: Any) -> tuple[Any, Any]:
    """softmax(score) @ values and the log-sum-exp; rows of -inf give 0 and -inf, with zero gradients."""
    import torch

    if not score.shape[-1]:
        empty = score.sum(-1)
        return empty[..., None] * values.new_zeros(values.shape[-1]), empty - math.inf
    top = score.detach().amax(-1, keepdim=True)
    top = torch.where(top == -math.inf, 0, top)
    weight = torch.exp(score - top)
    total = weight.sum(-1, keepdim=True)
    some = total > 0
    safe = torch.where(some, total, 1)
    lse = torch.where(some, top + torch.log(safe), -math.inf)
    return weight @ values / safe, lse[..., 0]


def capped(score: Any, softcap: float | None) -> Any:
    """softcap * tanh(score / softcap), or the score."""
    import torch

    return score if softcap is None else softcap * torch.tanh(score / softcap)


def check_extras(pattern: Pattern, given: dict[str, Any], partial: bool) -> None:
    """TypeError unless the learned extras that the pattern declares are given, and no others."""
    declared = {
        "alibi_slopes": pattern.alibi,
        "sink_logits": pattern.sink_logits,
        "null_key": pattern.null_key,
    }
    for name, wanted in declared.items():
        setting = "alibi" if name == "alibi_slopes" else name
        if given[name] is not None and not wanted:
            raise TypeError(
                f"{pattern.name}: unknown keyword {name!r}; the pattern has no {setting}: true"
            )
        optional = partial and name != "alibi_slopes"
        if wanted and given[name] is None and not optional:
            raise TypeError(f"{pattern.name}: missing keyword {name}, which {setting}: true needs")


def _check_tensors(q: Any, k: Any, v: Any) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_floating(name, tensor, DTYPES)
        if tensor.dim() != 4:
            raise InputError(
                f"{name} must be [batch, heads, length, dim], got shape {list(tensor.shape)}"
            )
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        raise InputError(
            f"q [B, H, Sq, D], k [B, Hkv, Sk, D] and v [B, Hkv, Sk, Dv] do not fit: {shapes}"
        )
    if not q.shape[3]:
        raise InputError("q and k must have at least one dim, got head_dim 0")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise InputError(
            f"query heads must be a multiple of key heads, got {q.shape[1]} and {k.shape[1]}"
        )


def _per_head(name: str, value: Any, heads: int, q: Any) -> Any:
    """[H] as float64 [1, H, 1, 1]."""
    value = _numbers(name, value, q.device)
    if tuple(value.shape) != (heads,):
        raise InputError(f"{name} must be [H] = [{heads}], got shape {list(value.shape)}")
    return value.double()[None, :, None, None]


def _null_key(pair: Any, kv_heads: int, head_dim: int, value_dim: int, q: Any) -> tuple[Any, Any]:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise InputError("null_key must be a pair (k [Hkv, D], v [Hkv, Dv])")
    null_k, null_v = (_numbers("null_key", t, q.device) for t in pair)
    for name, tensor, shape in (
        ("k", null_k, (kv_heads, head_dim)),
        ("v", null_v, (kv_heads, value_dim)),
    ):
        if tuple(tensor.shape) != shape:
            raise InputError(
                f"null_key's {name} must be {list(shape)}, got shape {list(tensor.shape)}"
            )
    return null_k.double(), null_v.double()


def _numbers(name: str, value: Any, device: Any) -> Any:
    import torch

    try:
        return torch.as_tensor(value, device=device)
    except (TypeError, ValueError):
        raise InputError(f"{name} must be numbers, got {show(value)}") from None


def merge(
    parts: Any,
    *,
    sink_logits: Any = None,
    null_key: Any = None,
    q: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[Any, Any]:
    """Join ``(out, lse)`` pairs over disjoint keys, made with ``partial=True``, into one; differentiable.

    ``out`` [B, H, Sq, Dv], ``lse`` [B, H, Sq].  ``sink_logits`` [H] and ``null_key`` (k [Hkv, D], v [Hkv, Dv]) are added
    once; the null key needs ``q`` [B, H, Sq, D] (and the pattern's scale and softcap).  Computed in float64 if any part
    is, else in float32; the output has the dtype of the first.  A row empty in all parts stays empty: 0 and -inf.  Rows
    that are no queries of a ragged batch would see sinks and null key too: mask them out afterwards.
    """
    import torch

    parts = list(parts) if isinstance(parts, Iterable) else [parts]
    if not parts:
        raise InputError("merge needs at least one (out, lse) pair")
    for part in parts:
        pair = isinstance(part, (tuple, list)) and len(part) == 2
        if not pair or not all(isinstance(t, torch.Tensor) for t in part):
            raise InputError(
                "each part must be a pair of tensors (out, lse), as partial=True returns it with return_lse=True"
            )
        out, lse = part
        if out.shape[:3] != lse.shape or out.shape != parts[0][0].shape:
            raise InputError(
                f"parts must be (out [B, H, S, Dv], lse [B, H, S]) alike, got {list(out.shape)}, {list(lse.shape)}"
            )
    wide = any(torch.float64 in (out.dtype, lse.dtype) for out, lse in parts)
    dtype = torch.float64 if wide else torch.float32
    outs = [out.to(dtype) for out, _ in parts]
    logs = [lse.to(dtype) for _, lse in parts]
    heads, value_dim = outs[0].shape[1], outs[0].shape[3]
    if null_key is not None:
        if q is None:
            raise TypeError("merge: missing keyword q, which null_key needs")
        kv_heads = null_key[0].shape[0]
        null_k, null_v = _null_key(null_key, kv_heads, q.shape[3], value_dim, q)
        group = heads // kv_heads
        factor = 1 / math.sqrt(q.shape[3]) if scale is None else scale
        score = (q.to(dtype) * null_k.to(dtype).repeat_interleave(group, 0)[None, :, None]).sum(-1)
        logs.append(capped(factor * score, softcap))
        outs.append(null_v.to(dtype).repeat_interleave(group, 0)[None, :, None].expand_as(outs[0]))
    if sink_logits is not None:
        logs.append(
            _per_head("sink_logits", sink_logits, heads, outs[0])[..., 0]
            .to(dtype)
            .expand_as(logs[0])
        )
        outs.append(torch.zeros_like(outs[0]))
    # One "key" a part, whose score is its log-sum-exp and whose value is its output.
    score = torch.stack(logs, -1)[..., None, :]
    joined, lse = softmax_product(score, torch.stack(outs, -2))
    return joined[..., 0, :].to(parts[0][0].dtype), lse[..., 0]
