"""Layouts, lengths and positions of a call: strided views, ragged batches, context-parallel shards, 64-bit offsets."""

from __future__ import annotations

import math

import pytest
import torch

from sparsegen.launch import Call
from sparsegen.spec.reference import merge, reference
from tests.kernels.cases import (
    DEVICE,
    DTYPES,
    ON_GPU,
    Case,
    judge,
    kernel_of,
    pattern_of,
    run,
    tensors,
)

WINDOW = {"all_of": ["causal", {"any_of": [{"window": {"size": 20}}, {"sink": {"tokens": 3}}]}]}
POINTERS = (("TMA", False),)  # descriptors take neither zero strides nor per-batch lengths


def test_views_give_the_same_bits() -> None:
    """Fused QKV, [B, S, H, D] transposed, value heads expanded with stride 0 (CASES B17)."""
    case = Case("window", pattern_of(WINDOW), 50, 50, batch=2, heads=4, kv_heads=4, knobs=POINTERS)
    q, k, v = tensors(case)
    fused = torch.stack([q, k, v], 2).permute(0, 3, 2, 1, 4).contiguous()  # [B, S, 3, H, D]
    fq, fk, fv = (fused[:, :, i].transpose(1, 2) for i in range(3))
    plain, lse = run(case, q, k, v)
    for a, b, c in (
        (fq, fk, fv),
        (q, fk, v),
        (q.transpose(1, 2).contiguous().transpose(1, 2), k, fv),
    ):
        assert not (a.is_contiguous() and b.is_contiguous() and c.is_contiguous())
        got, got_lse = run(case, a, b, c)
        assert torch.equal(got, plain) and torch.equal(got_lse, lse)
    one = v[:, :1].expand(-1, 4, -1, -1)
    general = Case(
        "window", pattern_of(WINDOW), 50, 50, batch=2, heads=4, kv_heads=4, variant="general"
    )
    for which in (case, general):
        assert torch.equal(run(which, q, k, one)[0], run(which, q, k, one.contiguous())[0])


def test_unaligned_views() -> None:
    """Rows that start anywhere in memory: the general variant takes them."""
    case = Case(
        "window", pattern_of(WINDOW), 50, 70, batch=2, heads=4, kv_heads=4, variant="general"
    )
    q, k, v = tensors(case)
    padded = [
        torch.full((*t.shape[:3], t.shape[3] + 3), math.nan, dtype=t.dtype, device=t.device)
        for t in (q, k, v)
    ]
    views = [p[..., 1 : 1 + t.shape[3]] for p, t in zip(padded, (q, k, v))]
    for view, t in zip(views, (q, k, v)):
        view.copy_(t)
    out, lse = run(case, *views)
    judge(case, q, k, v, out, lse)


@pytest.mark.parametrize("variant", ["fast", "general"])
def test_nothing_beyond_the_last_key_leaks(variant: str) -> None:
    """K and V are slices of a larger buffer full of NaN; Q = 0, V = 1 makes a leak visible (CASES B02)."""
    case = Case("full", pattern_of("full"), 100, 100, heads=2, kv_heads=2, variant=variant)
    q, k, v = tensors(case)
    big = [torch.full((1, 2, 160, 16), math.nan, dtype=t.dtype, device=t.device) for t in (k, v)]
    k, v = (b[:, :, :100] for b in big)
    k.normal_()
    v.fill_(1.0)
    out, lse = run(case, torch.zeros_like(q), k, v)
    assert torch.allclose(out, torch.ones_like(out), atol=1e-6, rtol=0)
    assert torch.allclose(lse, torch.full_like(lse, math.log(100)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("variant", ["fast", "general"])
def test_ragged_batch(variant: str) -> None:
    """Per-batch lengths and left padding; rows and keys outside them hold NaN."""
    dims = {"batch": 3, "heads": 4, "kv_heads": 2}
    case = Case("window", pattern_of(WINDOW), 50, 70, **dims, variant=variant, knobs=POINTERS)
    q, k, v = tensors(case)
    data = {
        "q_lengths": torch.tensor([50, 7, 0], dtype=torch.int32, device=DEVICE),
        "kv_starts": torch.tensor([0, 13, 5], dtype=torch.int32, device=DEVICE),
        "kv_lengths": torch.tensor([70, 31, 20], dtype=torch.int32, device=DEVICE),
    }
    for b in range(3):
        q[b, :, int(data["q_lengths"][b]) :] = math.nan
        start = int(data["kv_starts"][b])
        stop = start + int(data["kv_lengths"][b])
        for t in (k, v):
            t[b, :, :start] = math.nan
            t[b, :, stop:] = math.nan
    out, lse = run(case, q, k, v, **data)
    want, want_lse = reference(case.pattern, q, k, v, **data)
    assert not out.isnan().any()
    assert torch.allclose(out.double(), want, atol=2e-5, rtol=0)
    assert torch.equal(lse.isinf(), want_lse.isinf())
    assert (out[2] == 0).all() and (out[1, :, 7:] == 0).all()


@pytest.mark.parametrize("variant", ["fast", "general"])
def test_shards_merge_to_the_whole(variant: str) -> None:
    """Context-parallel shards: keys in two parts at their own positions, queries at theirs, merged by LSE."""
    settings = {"sink_logits": True}
    case = Case(
        "window", pattern_of(WINDOW, **settings), 40, 90, heads=4, kv_heads=2, variant=variant
    )
    q, k, v = tensors(case)
    sinks = torch.linspace(-1, 1, 4, device=DEVICE)
    whole, _ = reference(case.pattern, q, k, v, sink_logits=sinks)
    parts = []
    for a, b in ((0, 33), (33, 90)):
        parts.append(
            run(
                case,
                q,
                k[:, :, a:b],
                v[:, :, a:b],
                q_start=50,
                k_start=a,
                relative=0,
                sink_logits=sinks,
                joins=0,
            )
        )
    merged, _ = merge(parts, sink_logits=sinks)
    assert torch.allclose(merged.double(), whole, atol=2e-5, rtol=0)


def test_positions_beyond_32_bits() -> None:
    """q_start and k_start beyond 2^31: the general variant's arithmetic is 64-bit."""
    case = Case(
        "window",
        pattern_of({"window": {"size": 20}}),
        30,
        50,
        heads=2,
        kv_heads=2,
        variant="general",
    )
    q, k, v = tensors(case)
    out, _ = run(case, q, k, v)
    far = 5 << 31
    got, _ = run(case, q, k, v, q_start=far + 20, k_start=far, relative=0)
    assert torch.equal(got, out)


def test_decode_equals_prefill() -> None:
    """One query at a time over a growing cache gives the rows of the prefill (CASES B09)."""
    case = Case("window", pattern_of(WINDOW), 60, 60, heads=2, kv_heads=2)
    q, k, v = tensors(case)
    whole, _ = run(case, q, k, v)
    for i in (0, 1, 19, 20, 23, 41, 59):
        one, _ = run(case, q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1])
        assert torch.allclose(one[:, :, 0], whole[:, :, i], atol=1e-5, rtol=0)


@pytest.mark.parametrize("q_len", [8, 1, 257 if ON_GPU else 65])
def test_heads_of_their_own(q_len: int) -> None:
    """A head that sees nothing beside causal ones, with few queries and many heads (CASES B42)."""
    rules = [
        {"heads": 0, "mask": {"not": "full"}},
        {"heads": "1-3", "mask": {"window": {"size": 6}}},
        {"heads": "rest", "mask": "causal"},
    ]
    from sparsegen.spec.pattern import Pattern

    pattern = Pattern.from_dict({"name": "heads", "heads": rules})
    for kv_heads in (8, 2):
        lengths = (q_len, max(q_len, 30))
        case = Case("heads", pattern, *lengths, batch=4, heads=8, kv_heads=kv_heads)
        q, k, v = tensors(case)
        out, lse = run(case, q, k, v)
        judge(case, q, k, v, out, lse)
        assert (out[:, 0] == 0).all() and torch.isinf(lse[:, 0]).all()


@pytest.mark.gpu
def test_row_stride_beyond_32_bits() -> None:
    """K rows 2^26 elements apart: row * stride passes 2^31 (CASES B08)."""
    dtype = DTYPES["float16"]
    case = Case(
        "full",
        pattern_of("full"),
        33,
        33,
        heads=1,
        kv_heads=1,
        head_dim=64,
        value_dim=64,
        dtype="float16",
        variant="general",
    )
    q, k, v = tensors(case)
    storage = torch.empty(33 * 67_108_864, dtype=dtype, device="cuda")
    far = torch.as_strided(storage, (1, 1, 33, 64), (1, 1, 67_108_864, 1))
    far.copy_(k)
    assert torch.equal(run(case, q, far, v)[0], run(case, q, k, v)[0])


@pytest.mark.gpu
def test_graph_capture() -> None:
    """A captured launch replays with new values in the same tensors (CASES B37)."""
    case = Case("window", pattern_of(WINDOW), 300, 300, dtype="bfloat16", head_dim=64, value_dim=64)
    q, k, v = tensors(case)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device="cuda")
    fn, call = kernel_of(case), Call(scale=0.125)
    fn(q, k, v, out, lse, call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn(q, k, v, out, lse, call)
    q.normal_()
    graph.replay()
    torch.cuda.synchronize()
    again = torch.empty_like(out)
    fn(q, k, v, again, lse, call)
    assert torch.equal(out, again)
