"""The float64 oracle: values by hand, autograd, ragged batches, learned extras, and merging of shards."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sparsegen.errors import InputError
from sparsegen.spec import Pattern
from sparsegen.spec.reference import merge, reference


def pattern(mask: Any, **more: Any) -> Pattern:
    return Pattern.from_dict({"name": "p", "mask": mask, **more})


def inputs(
    batch: int, heads: int, kv_heads: int, q_len: int, kv_len: int, dim: int = 8, value_dim: int = 8
) -> list:
    torch.manual_seed(batch + heads + q_len + kv_len)
    shapes = (
        (batch, heads, q_len, dim),
        (batch, kv_heads, kv_len, dim),
        (batch, kv_heads, kv_len, value_dim),
    )
    return [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]


def counting(q_len: int, kv_len: int) -> tuple:
    """Q = 0 and V[j] = j: every output is the mean of the visible positions."""
    return (
        torch.zeros(1, 1, q_len, 4),
        torch.randn(1, 1, kv_len, 4),
        torch.arange(float(kv_len))[None, None, :, None],
    )


def means(p: Pattern, q_len: int, kv_len: int, **more: Any) -> list[float]:
    return reference(p, *counting(q_len, kv_len), **more)[0].flatten().tolist()


# ---------------------------------------------------------------------- by hand
def test_alignment() -> None:
    assert means(pattern("causal"), 2, 5) == [1.5, 2.0]
    assert means(pattern("causal", align="top_left"), 2, 5) == [0.0, 0.5]
    out, lse = reference(pattern("causal"), *counting(5, 2))
    assert out.flatten().tolist() == [0, 0, 0, 0, 0.5]
    assert lse.flatten().tolist() == pytest.approx([-math.inf] * 3 + [0, math.log(2)])


def test_windows_and_sinks() -> None:
    assert means(pattern({"window": {"size": 64}}), 1, 257) == [224.5]
    assert means(pattern({"window": {"size": 3}}), 8, 8)[5] == 4.0
    assert means(pattern({"window": {"left": 3}}), 8, 8)[5] == 3.5
    sinks = pattern(
        {"all_of": ["causal", {"any_of": [{"window": {"size": 4}}, {"sink": {"tokens": 4}}]}]}
    )
    assert means(sinks, 12, 12)[5] == pytest.approx(2.5) and means(sinks, 12, 12)[
        9
    ] == pytest.approx(36 / 8)


def test_rows_are_the_rows() -> None:
    q, k, v = inputs(2, 4, 2, 9, 12)
    whole, some = (
        reference(pattern("causal"), q, k, v),
        reference(pattern("causal"), q, k, v, rows=[7, 0]),
    )
    assert all((s - w[:, :, [7, 0]]).abs().max() < 1e-12 for s, w in zip(some, whole, strict=True))


def test_float64_whatever_comes_in() -> None:
    q, k, v = (t.detach().bfloat16() for t in inputs(1, 2, 1, 4, 4))
    out, lse = reference(pattern("full"), q, k, v)
    assert out.dtype == lse.dtype == torch.float64
    assert out.equal(reference(pattern("full"), q.double(), k.double(), v.double())[0])


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (8, 1), (6, 3), (4, 4)])
@pytest.mark.parametrize(("dim", "value_dim"), [(8, 8), (8, 16), (16, 8)])
def test_grouped_heads_against_torch(heads: int, kv_heads: int, dim: int, value_dim: int) -> None:
    q, k, v = inputs(2, heads, kv_heads, 10, 14, dim, value_dim)
    p = pattern({"window": {"size": 5}})
    out, _ = reference(p, q, k, v)
    group = heads // kv_heads
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q,
        k.repeat_interleave(group, 1),
        v.repeat_interleave(group, 1),
        attn_mask=p.dense_mask(10, 14)[None],
    )
    assert (out - wanted).abs().max() < 1e-12
    weight = torch.randn_like(out)
    ours = torch.autograd.grad((out * weight).sum(), (q, k, v))
    theirs = torch.autograd.grad((wanted * weight).sum(), (q, k, v))
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(ours, theirs, strict=True))


def test_heads_of_their_own_mask() -> None:
    q, k, v = inputs(1, 4, 2, 8, 8)
    rules = [{"heads": 0, "mask": {"not": "full"}}, {"heads": "rest", "mask": "causal"}]
    out, lse = reference(Pattern.from_dict({"heads": rules}), q, k, v)
    assert out[:, 0].abs().max() == 0 and (lse[:, 0] == -math.inf).all()
    assert out[:, 1:].equal(reference(pattern("causal"), q, k, v)[0][:, 1:])


# ---------------------------------------------------------------------- empty rows
def test_an_empty_row_costs_nothing_and_poisons_nothing() -> None:
    """Five causal rows and one that sees nothing: exact zeros, -inf, and gradients as if the row were not there."""
    q, k, v = inputs(1, 2, 2, 6, 10)
    mask = torch.zeros(1, 1, 6, 10, dtype=torch.bool)
    for row in range(5):
        mask[..., row, : row + 5] = True
    p = pattern({"block_mask": {"block": [1, 1]}})
    out, lse = reference(p, q, k, v, block_mask=mask)
    assert out[:, :, 5].abs().max() == 0 and (lse[:, :, 5] == -math.inf).all()
    seen = torch.where(lse == -math.inf, 0, lse)
    grads = torch.autograd.grad(out.square().sum() + out[:, :, 5].sum() + seen.sum(), (q, k, v))
    out5, lse5 = reference(p, q[:, :, :5], k, v, block_mask=mask[:, :, :5])
    grads5 = torch.autograd.grad(out5.square().sum() + lse5.sum(), (q, k, v))
    assert grads[0][:, :, 5].abs().max() == 0
    assert all(
        g.isfinite().all() and (g - h).abs().max() < 1e-12
        for g, h in zip(grads, grads5, strict=True)
    )


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 4), (3, 0), (0, 0)])
def test_no_queries_or_no_keys(q_len: int, kv_len: int) -> None:
    out, lse = reference(pattern("causal"), *inputs(1, 2, 1, q_len, kv_len))
    assert out.shape == (1, 2, q_len, 8) and lse.shape == (1, 2, q_len)
    assert out.abs().sum() == 0 and (lse == -math.inf).all()
    sinks = torch.tensor([0.5, 1.5])
    out, lse = reference(
        pattern("causal", sink_logits=True), *inputs(1, 2, 1, q_len, kv_len), sink_logits=sinks
    )
    assert out.abs().sum() == 0 and lse.equal(sinks.double()[None, :, None].expand(1, 2, q_len))


# ---------------------------------------------------------------------- scores
def test_scale_softcap_and_alibi_in_order() -> None:
    q, k, v = inputs(1, 2, 1, 5, 7)
    slopes = torch.tensor([0.5, 0.25])
    out, lse = reference(
        pattern("causal", scale=0.3, softcap=2, alibi=True), q, k, v, alibi_slopes=slopes
    )
    distance = (torch.arange(5)[:, None] + 2 - torch.arange(7)[None]).double()
    score = 2 * torch.tanh(0.3 * (q @ k.mT) / 2) - slopes[None, :, None, None] * distance.abs()
    score = score.masked_fill(distance < 0, -math.inf)
    assert (out - torch.softmax(score, -1) @ v).abs().max() < 1e-12
    assert (lse - torch.logsumexp(score, -1)).abs().max() < 1e-12
    assert reference(pattern("full", scale=0.3), q, k, v, scale=0.7)[1].equal(
        reference(pattern("full"), q, k, v, scale=0.7)[1]
    )


def test_learned_sink_logits() -> None:
    """Q = 0, s = 0: row i shares its weight with one more; a row that sees no key gives 0 and LSE = s."""
    q, k, v = counting(4, 4)
    p = pattern("causal", sink_logits=True)
    out, _ = reference(p, q, k, torch.ones_like(v), sink_logits=torch.zeros(1))
    assert out.flatten().tolist() == pytest.approx([(i + 1) / (i + 2) for i in range(4)])
    out, lse = reference(
        pattern({"not": "full"}, sink_logits=True), q, k, v, sink_logits=torch.tensor([0.7])
    )
    assert out.abs().max() == 0 and lse.flatten().tolist() == pytest.approx([0.7] * 4)
    q, k, v = inputs(1, 2, 2, 3, 5)
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda *t: reference(p, *t[:3], sink_logits=t[3]), (q, k, v, sinks)
    )


def test_null_key() -> None:
    """The same as one more key and value in front that every row sees."""
    q, k, v = inputs(2, 4, 2, 5, 7)
    null = (
        torch.randn(2, 8, dtype=torch.float64, requires_grad=True),
        torch.randn(2, 8, dtype=torch.float64),
    )
    out, lse = reference(
        pattern({"window": {"size": 3}}, softcap=3, null_key=True), q, k, v, null_key=null
    )
    wide_k, wide_v = (
        torch.cat([n[None, :, None].expand(2, -1, -1, -1), t], 2)
        for n, t in zip(null, (k, v), strict=True)
    )
    sees = {"any_of": [{"sink": {"tokens": 1}}, {"window": {"size": 3}}]}
    wanted = reference(pattern(sees, softcap=3), q, wide_k, wide_v)
    assert (out - wanted[0]).abs().max() < 1e-12 and (lse - wanted[1]).abs().max() < 1e-12
    out, lse = reference(pattern({"not": "full"}, null_key=True), q, k, v, null_key=null)
    assert (out - null[1].repeat_interleave(2, 0)[None, :, None]).abs().max() < 1e-12


# ---------------------------------------------------------------------- ragged batches
def ragged_wanted(
    p: Pattern, q: Any, k: Any, v: Any, q_n: list, starts: list, kv_n: list, **more: Any
) -> list:
    """Each entry by itself, cut to its own tensors."""
    parts = []
    for b, (n, first, m) in enumerate(zip(q_n, starts, kv_n, strict=True)):
        parts.append(
            reference(
                p,
                q[b : b + 1, :, :n],
                k[b : b + 1, :, first : first + m],
                v[b : b + 1, :, first : first + m],
                **more,
            )
        )
    return parts


@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
@pytest.mark.parametrize(
    "mask",
    [
        "causal",
        {"window": {"size": 3}},
        {"predicate": "k < kv_len - 1 and q % 3 != q_len % 3"},
        {"random_blocks": {"block": 2, "per_row": 2, "seed": 4}},
    ],
)
def test_ragged_batches_equal_their_entries(align: str, mask: Any) -> None:
    q, k, v = inputs(4, 2, 1, 6, 9)
    q_n, starts, kv_n = [6, 3, 0, 5], [0, 4, 2, 1], [9, 5, 4, 0]
    p = pattern(mask, align=align)
    poison = k.detach().clone()  # rows that hold no key may hold anything
    for b in range(4):
        poison[b, :, : starts[b]] = math.nan
        poison[b, :, starts[b] + kv_n[b] :] = math.inf
    poison.requires_grad_()
    out, lse = reference(
        p, q, poison, v, q_lengths=q_n, kv_starts=starts, kv_lengths=torch.tensor(kv_n)
    )
    for b, (one, log) in enumerate(ragged_wanted(p, q, k, v, q_n, starts, kv_n)):
        assert (out[b : b + 1, :, : q_n[b]] - one).abs().sum() < 1e-12
        assert lse[b : b + 1, :, : q_n[b]].sub(log).nan_to_num(0).abs().sum() < 1e-12  # -inf - -inf
        assert lse[b : b + 1, :, : q_n[b]].isinf().equal(log.isinf())
        assert out[b, :, q_n[b] :].abs().sum() == 0 and (lse[b, :, q_n[b] :] == -math.inf).all()
    out.square().sum().backward()
    assert poison.grad.isfinite().all() and q.grad.isfinite().all()


def test_rows_beyond_the_queries_are_empty_for_sinks_too() -> None:
    q, k, v = inputs(2, 2, 2, 3, 3)
    null = torch.zeros(2, 8), torch.ones(2, 8)
    p = pattern("full", sink_logits=True, null_key=True)
    out, lse = reference(p, q, k, v, q_lengths=[1, 3], sink_logits=torch.zeros(2), null_key=null)
    assert (
        out[0, :, 1:].abs().sum() == 0
        and (lse[0, :, 1:] == -math.inf).all()
        and lse[1].isfinite().all()
    )


def test_chunked_prefill_equals_the_whole() -> None:
    q, k, v = inputs(1, 2, 1, 12, 12)
    p = pattern(
        {"any_of": [{"window": {"size": 4}}, {"all_of": ["causal", {"chunks": {"size": 5}}]}]}
    )
    whole = reference(p, q, k, v)[0]
    for first in range(0, 12, 4):
        assert (
            reference(p, q[:, :, first : first + 4], k, v, q_start=first)[0]
            - whole[:, :, first : first + 4]
        ).abs().max() < 1e-12


# ---------------------------------------------------------------------- merging
def test_shards_merge_to_the_whole() -> None:
    q, k, v = inputs(2, 4, 2, 6, 12)
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    null = torch.randn(2, 8, dtype=torch.float64), torch.randn(2, 8, dtype=torch.float64)
    p = pattern({"window": {"size": 5}}, sink_logits=True, null_key=True, softcap=4, alibi=True)
    extras = {"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])}
    whole = reference(p, q, k, v, sink_logits=sinks, null_key=null, **extras)
    shards = [
        reference(p, q, k[:, :, a:b], v[:, :, a:b], partial=True, q_start=6, k_start=a, **extras)
        for a, b in ((0, 5), (5, 6), (6, 12))
    ]
    joined = merge(shards, sink_logits=sinks, null_key=null, q=q, softcap=4)
    weight = torch.randn_like(whole[0])
    assert (joined[0] - whole[0]).abs().max() < 1e-12 and (joined[1] - whole[1]).abs().max() < 1e-12
    leaves = (q, k, v, sinks)
    ours = torch.autograd.grad((joined[0] * weight).sum() + joined[1].sum(), leaves)
    theirs = torch.autograd.grad((whole[0] * weight).sum() + whole[1].sum(), leaves)
    assert all((a - b).abs().max() < 1e-10 for a, b in zip(ours, theirs, strict=True))


def test_merging_empty_rows_and_low_precision() -> None:
    out = torch.zeros(1, 1, 2, 4, dtype=torch.bfloat16, requires_grad=True)
    lse = torch.full((1, 1, 2), -math.inf, requires_grad=True)
    joined, log = merge([(out, lse), (out, lse)])
    assert joined.dtype == torch.bfloat16 and log.dtype == torch.float32
    assert joined.abs().sum() == 0 and (log == -math.inf).all()
    joined.sum().backward()
    assert out.grad.isfinite().all() and lse.grad.isfinite().all()
    with pytest.raises(TypeError, match=r"^merge: missing keyword q, which null_key needs$"):
        merge([(out, lse)], null_key=(torch.zeros(1, 4), torch.zeros(1, 4)))


# ---------------------------------------------------------------------- refusals
KEYWORDS = [
    ({"alibi": True}, {}, "p: missing keyword alibi_slopes, which alibi: true needs"),
    ({"sink_logits": True}, {}, "p: missing keyword sink_logits, which sink_logits: true needs"),
    ({"null_key": True}, {}, "p: missing keyword null_key, which null_key: true needs"),
    (
        {},
        {"alibi_slopes": torch.ones(2)},
        "p: unknown keyword 'alibi_slopes'; the pattern has no alibi: true",
    ),
    (
        {},
        {"window": 3},
        "p: unknown keyword 'window'; it takes q_start, k_start, q_lengths, kv_starts, kv_lengths",
    ),
]


@pytest.mark.parametrize(("settings", "given", "message"), KEYWORDS, ids=[k[2] for k in KEYWORDS])
def test_keywords(settings: dict, given: dict, message: str) -> None:
    with pytest.raises(TypeError) as error:
        reference(pattern("causal", **settings), *inputs(1, 2, 1, 4, 4), **given)
    assert str(error.value) == message


SHAPES = [
    (
        torch.zeros(2, 4, 8),
        torch.zeros(1, 2, 4, 8),
        torch.zeros(1, 2, 4, 8),
        {},
        "q must be [batch, heads, length, dim], got shape [2, 4, 8]",
    ),
    (
        torch.zeros(1, 3, 4, 8),
        torch.zeros(1, 2, 4, 8),
        torch.zeros(1, 2, 4, 8),
        {},
        "query heads must be a multiple of key heads, got 3 and 2",
    ),
    (
        torch.zeros(1, 2, 4, 8),
        torch.zeros(1, 2, 4, 8),
        torch.zeros(1, 2, 5, 8),
        {},
        "q [B, H, Sq, D], k [B, Hkv, Sk, D] and v [B, Hkv, Sk, Dv] do not fit: q [1, 2, 4, 8], k [1, 2, 4, 8], v [1, 2, 5, 8]",
    ),
    (
        torch.zeros(2, 2, 4, 8),
        torch.zeros(2, 2, 4, 8),
        torch.zeros(2, 2, 4, 8),
        {"kv_lengths": [1, 2, 3]},
        "run-time data are for 3 batch entries, the tensors have 2",
    ),
]


@pytest.mark.parametrize(
    ("q", "k", "v", "given", "message"), SHAPES, ids=[s[4][:30] for s in SHAPES]
)
def test_shapes(q: Any, k: Any, v: Any, given: dict, message: str) -> None:
    with pytest.raises(InputError) as error:
        reference(pattern("causal"), q, k, v, **given)
    assert str(error.value) == message
    with pytest.raises(InputError, match=r"^sink_logits must be \[H\] = \[2\], got shape \[3\]$"):
        reference(
            pattern("causal", sink_logits=True), *inputs(1, 2, 1, 4, 4), sink_logits=torch.ones(3)
        )
    with pytest.raises(InputError, match=r"^null_key's v must be \[1, 8\], got shape \[1, 4\]$"):
        reference(
            pattern("causal", null_key=True),
            *inputs(1, 2, 1, 4, 4),
            null_key=(torch.ones(1, 8), torch.ones(1, 4)),
        )


@pytest.mark.parametrize("found", ["causal", {"mask": "causal"}, None], ids=repr)
def test_what_is_no_pattern(found: Any) -> None:
    with pytest.raises(InputError, match="^pattern must be a sparsegen.Pattern .*, got "):
        reference(found, *inputs(1, 2, 1, 4, 4))


def test_no_dim_at_all() -> None:
    q = torch.zeros(1, 2, 4, 0)
    with pytest.raises(InputError, match="at least one dim"):
        reference(pattern("causal"), q, q, torch.zeros(1, 2, 4, 8))


def test_parts_that_are_no_pairs() -> None:
    with pytest.raises(InputError, match="each part must be a pair"):
        merge([(torch.zeros(1, 2, 4, 8),)])
    with pytest.raises(InputError, match="each part must be a pair"):
        merge([torch.zeros(2, 2, 4, 8)])
