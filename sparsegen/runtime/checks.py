"""Checks of one call of a compiled pattern.  Each error is one sentence; none reads data from the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparsegen.errors import InputError, UnsupportedError
from sparsegen.launch.kernel import Call
from sparsegen.spec.run_data import check_floating

if TYPE_CHECKING:
    from sparsegen.spec.pattern import Pattern

DEVICE = "cuda"  # as torch calls GPUs of every maker
FURTHEST = 1 << 36  # the schedule's proofs hold for positions up to here
COMPILED = "bfloat16, float16 or float32"  # dtypes of q, k and v that kernels are made for
NO_OUT = (
    "out= takes no result that a gradient is wanted of: leave it out, or call under torch.no_grad()"
)


def check_kinds(q: Any, k: Any, v: Any, **others: Any) -> None:
    """InputError for what is no tensor, before anything is asked of it; ``others``: by keyword, None where not given."""
    import torch

    for name, t in (("q", q), ("k", k), ("v", v)):
        check_floating(name, t, COMPILED)
    null = others.pop("null_key", None)
    if isinstance(null, (tuple, list)):
        others |= {f"null_key[{i}]": t for i, t in enumerate(null)}
    for name, t in others.items():
        if t is not None and not isinstance(t, torch.Tensor):
            raise InputError(f"{name} must be a torch.Tensor, got {type(t).__name__}")


def check_tensors(q: Any, k: Any, v: Any, dtypes: str = COMPILED) -> None:
    """Shapes, dtypes, devices and strides of one call; InputError says in one sentence what is wrong."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        check_floating(name, t, dtypes)
        if t.dim() != 4:
            raise InputError(f"{name} must be [batch, heads, length, dim], got {list(t.shape)}")
        if t.stride(3) != 1 and t.shape[3] > 1:
            raise InputError(
                f"the last dim of {name} must be contiguous (stride 1), got stride {t.stride(3)}; use .contiguous()"
            )
    if not q.dtype == k.dtype == v.dtype:
        raise InputError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if not q.device == k.device == v.device:
        raise InputError(
            f"q, k and v must be on one device, got {q.device}, {k.device}, {v.device}"
        )
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise InputError(
            f"q, k and v must have one batch size, got {q.shape[0]}, {k.shape[0]}, {v.shape[0]}"
        )
    if k.shape[1:3] != v.shape[1:3]:
        raise InputError(
            f"k and v must have the same heads and length, got {list(k.shape)} and {list(v.shape)}"
        )
    if q.shape[3] != k.shape[3]:
        raise InputError(f"q and k must have the same dim, got {q.shape[3]} and {k.shape[3]}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise InputError(
            f"query heads must be a multiple of key heads, got {q.shape[1]} and {k.shape[1]}"
        )


def check_out(q: Any, v: Any, out: Any) -> None:
    """InputError unless ``out`` can hold the result: [B, H, Sq, Dv] in q's dtype on q's device, last dim contiguous."""
    import torch

    wanted = (*q.shape[:3], v.shape[3])
    if not isinstance(out, torch.Tensor):
        raise InputError(f"out must be a torch.Tensor {list(wanted)}, got {type(out).__name__}")
    if tuple(out.shape) != wanted or out.dtype != q.dtype or out.device != q.device:
        raise InputError(
            f"out must be {q.dtype} {list(wanted)} on {q.device}, got {out.dtype} {list(out.shape)} on {out.device}"
        )
    if out.stride(3) != 1 and out.shape[3] > 1:
        raise InputError("the last dim of out must be contiguous (stride 1)")


def check_extras(
    q: Any, k: Any, v: Any, alibi_slopes: Any, sink_logits: Any, null_key: Any
) -> None:
    """InputError unless slopes and sinks are float32 [H] and the null key a pair in q's dtype, all on q's device."""
    for name, t in (("alibi_slopes", alibi_slopes), ("sink_logits", sink_logits)):
        if t is not None and (
            tuple(t.shape) != (q.shape[1],)
            or str(t.dtype) != "torch.float32"
            or t.device != q.device
            or not t.is_contiguous()
        ):
            raise InputError(
                f"{name} must be contiguous float32 [{q.shape[1]}] on {q.device}, got {t.dtype} {list(t.shape)} on {t.device}"
            )
    if null_key is not None:
        if not isinstance(null_key, (tuple, list)) or len(null_key) != 2:
            raise InputError("null_key must be a pair (k [Hkv, D], v [Hkv, Dv])")
        for name, t, dim in (
            ("null_key[0]", null_key[0], q.shape[3]),
            ("null_key[1]", null_key[1], v.shape[3]),
        ):
            if (
                tuple(t.shape) != (k.shape[1], dim)
                or t.dtype != q.dtype
                or t.device != q.device
                or not t.is_contiguous()
            ):
                raise InputError(
                    f"{name} must be contiguous {q.dtype} [{k.shape[1]}, {dim}] on {q.device}, "
                    f"got {t.dtype} {list(t.shape)} on {t.device}"
                )


def check_device(q: Any) -> None:
    """InputError unless the tensors are where compiled kernels run."""
    if q.device.type != DEVICE:
        raise InputError(
            f"the compiled kernel runs on a GPU and the tensors are on {q.device}; "
            "sparsegen.compile(pattern, backend='reference') runs on any device"
        )


def check_features(pattern: Pattern, alibi_slopes: Any, sink_logits: Any, null_key: Any) -> None:
    """TypeError for a keyword that the pattern needs and the call lacks, or the other way round."""
    for name, wanted, given in (
        ("alibi_slopes", pattern.alibi, alibi_slopes),
        ("sink_logits", pattern.sink_logits, sink_logits),
        ("null_key", pattern.null_key, null_key),
    ):
        if wanted and given is None:
            raise TypeError(f"pattern {pattern.name!r} needs the keyword {name!r}")
        if given is not None and not wanted:
            raise TypeError(
                f"pattern {pattern.name!r} takes no {name!r}: its file does not ask for it"
            )


def check_lengths(pattern: Pattern, has_tables: bool, q: Any, *given: Any) -> None:
    """InputError unless q_lengths, kv_starts and kv_lengths, where given, are contiguous int32 [B] on q's device.

    UnsupportedError for a kernel that has tables of random_blocks.
    """
    for name, t in zip(("q_lengths", "kv_starts", "kv_lengths"), given):
        if t is None:
            continue
        if tuple(t.shape) != (q.shape[0],) or str(t.dtype) != "torch.int32" or t.device != q.device:
            raise InputError(
                f"{name} must be int32 [{q.shape[0]}] on {q.device}, got {t.dtype} {list(t.shape)} on {t.device}"
            )
        if not t.is_contiguous():
            raise InputError(f"{name} must be contiguous")
    if has_tables:
        place = next(
            pattern.place(path) for path, node in pattern.nodes() if node.keyword == "random_blocks"
        )
        raise UnsupportedError(
            f"{place}: random_blocks has one table for all batch entries: per-batch lengths do not go with it"
        )


def check_starts(q_start: Any, k_start: Any) -> None:
    """InputError unless both are integers within 2^36 and keys start at 0 or later, as every proof assumes."""
    for name, value in (("q_start", 0 if q_start is None else q_start), ("k_start", k_start)):
        if type(value) is not int or not -FURTHEST <= value <= FURTHEST:
            raise InputError(f"{name} must be an integer within 2^36, got {value!r}")
    if k_start < 0:
        raise InputError(
            f"k_start must be 0 or more, got {k_start}: keys have no positions below 0"
        )


def beyond_proof(source: Any, q_len: int, kv_len: int, call: Call) -> str:
    """What the kernel is proven for, in words, where the call goes beyond it; else "".

    See ``max_position`` and ``min_position`` of ``schedule.tree.Schedule``.  Lengths per batch entry are on the device
    and are not read: an entry is taken to be as short as they could make it.
    """
    most = source.max_position
    if most is None:
        return ""
    first, end = call.q_start, call.q_start + q_len
    if call.relative:
        shortest = kv_len if call.kv_lengths is None and call.kv_starts is None else 0
        first, end = call.q_start + shortest - q_len, call.q_start + kv_len
    reached = max(end, call.k_start + kv_len, q_len, kv_len)
    if reached > most:
        return (
            f"positions up to {most} (from the lengths of its problem), the call reaches {reached}"
        )
    least = getattr(source, "min_position", None)
    least = -most if least is None else least
    if q_len and first < least:
        return f"queries from position {least} on (from the lengths of its problem), the call starts at {first}"
    return ""
