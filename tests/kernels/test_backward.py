"""Gradients of both backward kernels equal float64 autograd of the reference, in Triton's interpreter."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from sparsegen.errors import InputError
from sparsegen.spec.problem import Problem
from tests.kernels.cases import (
    DEVICE,
    ON_GPU,
    Case,
    acceptance,
    acceptance_names,
    once,
    pattern_of,
    tensors,
)
from tests.kernels.gradients import (
    compare,
    compile_all,
    expected,
    extras_of,
    kernel_of,
    random_gradients,
    run,
    sources,
)

SINKS = {"all_of": ["causal", {"any_of": [{"window": {"size": 40}}, {"sink": {"tokens": 4}}]}]}
BOTH_WAYS = {"any_of": [{"window": {"radius": 9}}, {"global": {"tokens": 3}}]}


def _patterns() -> list[Case]:
    out = []
    for i, name in enumerate(acceptance_names()):
        heads, kv_heads = (6, 2) if name == "per_head" else (2, 1)
        dims = {"heads": heads, "kv_heads": kv_heads, "variant": ("fast", "general")[i % 2]}
        out.append(Case(name, acceptance(name), *((72, 72), (40, 61), (61, 40))[i % 3], **dims))
    return out


def _lengths() -> list[Case]:
    """Ragged tails, one row, one key, rows before the first key (CASES B02, B09)."""
    pairs = [(1, 1), (33, 65), (1, 50), (50, 1), (60, 25)]
    masks: dict[str, Any] = {"causal": "causal", "full": "full", "both": BOTH_WAYS}
    return [
        Case(name, pattern_of(mask), q, k, heads=2)
        for name, mask in masks.items()
        for q, k in pairs
    ] + [Case("top_left", acceptance("top_left"), q, k) for q, k in ((5, 33), (33, 5))]


def _dims() -> list[Case]:
    causal = pattern_of("causal")
    pairs = [(64, 64), (96, 96), (192, 128), (24, 40), (80, 80)]
    out = [
        Case("causal", causal, 37, 50, heads=2, kv_heads=1, head_dim=d, value_dim=dv)
        for d, dv in pairs
    ]
    groups = [(8, 2), (6, 3), (8, 1), (3, 3)]
    return out + [Case("group", pattern_of(SINKS), 40, 50, 2, h, kv) for h, kv in groups]


def _knobs() -> list[Case]:
    some = [
        {"HEAVY_FIRST": False, "GROUP_HEADS": 1},
        {"GROUP_HEADS": 16, "STAGES": 3},
        {"BLOCK_M": 64, "BLOCK_N": 64},
        {"BLOCK_N": 128},
    ]
    return [Case("both", pattern_of(BOTH_WAYS), 90, 110, 2, knobs=tuple(k.items())) for k in some]


ONCE, EACH = _patterns() + _lengths(), _dims() + _knobs()


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    if ON_GPU:
        compile_all([(case, None) for case in ONCE + EACH])


@pytest.mark.parametrize("case", once(ONCE) + EACH, ids=str)
def test_equals_autograd(case: Case) -> None:
    compare(case)


HALF = [
    Case("causal", pattern_of("causal"), 70, 70, dtype="float16", head_dim=32, value_dim=32),
    Case("sinks", pattern_of(SINKS), 65, 90, dtype="float16"),
    Case("large", pattern_of("causal"), 64, 64, dtype="float16", size=5.0),
]


@pytest.mark.parametrize("case", HALF, ids=str)
def test_half_precision_rounds_no_worse_than_eager(case: Case) -> None:
    compare(case)


FEATURES = [
    {"softcap": 3.0},
    {"alibi": True},
    {"sink_logits": True},
    {"null_key": True},
    {"scale": -0.5},
    {"scale": 0},
    {"softcap": 2.0, "alibi": True, "sink_logits": True, "null_key": True, "scale": 0.3},
]


@pytest.mark.parametrize("settings", FEATURES, ids=lambda s: "-".join(s))
@pytest.mark.parametrize("mask", [SINKS, BOTH_WAYS], ids=["causal", "both"])
def test_features(settings: dict, mask: Any) -> None:
    """Score modifications and learned terms, and on rows that see no key (40 queries, 25 keys)."""
    for lengths in [(50, 60), (40, 25)]:
        case = Case("-".join(settings), pattern_of(mask, **settings), *lengths)
        compare(case, **extras_of(case))


def test_empty_rows_get_and_give_nothing() -> None:
    """No gradient of a row that sees nothing, whatever dO and dLSE are there."""
    case = Case("causal", pattern_of("causal"), 60, 20)
    q, k, v = tensors(case)
    dout, dlse = random_gradients(case, q, v)
    dlse[:, :, :40] = float("inf")
    saved, _, _ = expected(case, q, k, v, dout, torch.zeros_like(dlse))
    got = run(case, replace(saved, dlse=dlse))
    _, want, _ = expected(case, q, k, v, dout, torch.where(dlse.isinf(), 0.0, dlse))
    assert (got.q[:, :, :40] == 0).all()
    assert torch.allclose(got.k.double(), want[1], atol=1e-5)


def test_partial_results_leave_learned_terms_out() -> None:
    case = Case("part", pattern_of(SINKS, sink_logits=True, null_key=True), 40, 50)
    q, k, v = tensors(case)
    extras = extras_of(case)
    dout, dlse = random_gradients(case, q, v)
    plain = Case("plain", pattern_of(SINKS), 40, 50)
    saved, want, _ = expected(plain, q, k, v, dout, dlse)
    got = run(case, saved, joins=0, **extras)
    assert (got.sink_logits == 0).all() and all((t == 0).all() for t in got.null_key)
    for one, right in zip((got.q, got.k, got.v), want):
        assert torch.allclose(one.double(), right, atol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"softcap": 3.0, "alibi": True}], ids=len)
def test_only_what_is_asked_for(settings: dict) -> None:
    """dQ, or dK and dV; one of these alone has a kernel that computes nothing for the other, and the same bits."""
    case = Case("both", pattern_of(BOTH_WAYS, **settings), 33, 40)
    q, k, v = tensors(case)
    extras = extras_of(case)
    saved, _, _ = expected(case, q, k, v, *random_gradients(case, q, v), **extras)
    every = run(case, saved, **extras)
    for wanted, left in (("q", "kv"), ("kv", "q"), ("k", "qv"), ("v", "qk")):
        got = run(case, saved, wanted=wanted, alone=True, **extras)
        assert all(getattr(got, name) is None for name in left)
        assert all(torch.equal(getattr(got, n), getattr(every, n)) for n in wanted)
    texts = {name: s.text for name, s in kernel_of(case, alone=True).sources.items()}
    assert "dv0" not in texts["keys-DK"] and "dk0" not in texts["keys-DV"]
    assert all(s not in texts["keys-DV"] for s in ("load_rows(v_base", " ds = ", " dp = "))


@pytest.mark.parametrize("mask", [SINKS, BOTH_WAYS, {"strided": {"stride": 7}}], ids=str)
def test_ragged_batch(mask: Any) -> None:
    """Per-batch lengths and left padding; what is outside holds NaN, and its gradients are 0."""
    case = Case("ragged", pattern_of(mask), 48, 70, batch=4, heads=2)
    q, k, v = tensors(case)
    data = {
        "q_lengths": torch.tensor([48, 17, 0, 40], dtype=torch.int32, device=DEVICE),
        "kv_starts": torch.tensor([0, 13, 5, 3], dtype=torch.int32, device=DEVICE),
        "kv_lengths": torch.tensor([70, 51, 20, 25], dtype=torch.int32, device=DEVICE),
    }
    dout, dlse = random_gradients(case, q, v)
    for b in range(4):
        for t in (q, dout):
            t[b, :, int(data["q_lengths"][b]) :] = float("nan")
        start, count = int(data["kv_starts"][b]), int(data["kv_lengths"][b])
        for t in (k, v):
            t[b, :, :start] = float("nan")
            t[b, :, start + count :] = float("nan")
    clean = torch.where(dout.isnan(), 0.0, dout)
    saved, want, _ = expected(case, q, k, v, clean, dlse, **data)
    got = run(case, replace(saved, dout=dout), **data)
    for name, one, right in zip("qkv", (got.q, got.k, got.v), want):
        right = torch.where(right.isnan(), 0.0, right)
        assert not one.isnan().any(), name
        assert torch.allclose(one.double(), right, atol=1e-5), name


def test_positions_of_a_shard() -> None:
    """Keys of a context-parallel shard at their own positions: gradients of the parts add up to the whole."""
    case = Case("shards", pattern_of(SINKS), 40, 90)
    q, k, v = tensors(case)
    dout, dlse = random_gradients(case, q, v)
    saved, want, _ = expected(case, q, k, v, dout, dlse)
    dq = torch.zeros_like(want[0])
    for a, b in ((0, 37), (37, 90)):
        part = replace(saved, k=k[:, :, a:b].contiguous(), v=v[:, :, a:b].contiguous())
        got = run(case, part, q_start=50, k_start=a, relative=0)
        dq += got.q.double()
        assert torch.allclose(got.k.double(), want[1][:, :, a:b], atol=1e-5)
        assert torch.allclose(got.v.double(), want[2][:, :, a:b], atol=1e-5)
    assert torch.allclose(dq, want[0], atol=1e-5)


def test_positions_beyond_32_bits() -> None:
    mask = {"all_of": ["causal", {"any_of": [{"window": {"size": 8}}, {"strided": {"stride": 8}}]}]}
    case = Case("strided", pattern_of(mask), 40, 40, heads=2, variant="general")
    q, k, v = tensors(case)
    saved, _, _ = expected(case, q, k, v, *random_gradients(case, q, v))
    far = 8 * (5 << 31)
    near, moved = run(case, saved), run(case, saved, q_start=far, k_start=far, relative=0)
    for a, b in zip((near.q, near.k, near.v), (moved.q, moved.k, moved.v)):
        assert torch.equal(a, b)


def test_queries_before_position_0_that_see_a_sink_alone() -> None:
    """They have an LSE, so nothing but the range of queries keeps them from keys that they do not see."""
    mask = {"predicate": "abs(q - k) <= 3 and q >= 0"}
    case = Case("from 0", pattern_of(mask, sink_logits=True), 60, 25, heads=2)
    compare(case, **extras_of(case))


def test_queries_further_back_than_the_schedule_reaches() -> None:
    case = Case("both", pattern_of(BOTH_WAYS), 20, 30)
    q, k, v = tensors(case)
    saved, _, _ = expected(case, q, k, v, *random_gradients(case, q, v))
    with pytest.raises(InputError, match="at position -16777217; .* reach back to -16777216"):
        run(case, saved, q_start=-(1 << 24) - 1, relative=0)
    run(case, saved, q_start=-(1 << 24), relative=0)


def test_no_query_at_or_after_position_0() -> None:
    """Queries that all lie before the keys: every gradient is written, and is 0."""
    case = Case("before", pattern_of("causal"), 20, 30)
    q, k, v = tensors(case)
    saved, _, _ = expected(case, q, k, v, *random_gradients(case, q, v))
    saved = replace(saved, out=torch.zeros_like(saved.out), lse=saved.lse - math.inf)
    got = run(case, saved, q_start=-40, relative=0)
    assert all((t == 0).all() for t in (got.q, got.k, got.v))


def test_any_layout_of_inputs() -> None:
    """Strided views: what the rows of q, k, v, out and dO lie between does not matter."""
    case = Case("views", pattern_of(SINKS), 40, 50)
    q, k, v = tensors(case)
    dout, dlse = random_gradients(case, q, v)
    saved, _, _ = expected(case, q, k, v, dout, dlse)
    turned = lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)
    names = ("q", "k", "v", "out", "dout")
    views = replace(saved, **{n: turned(getattr(saved, n)) for n in names})
    for a, b in zip(run(case, saved).__dict__.values(), run(case, views).__dict__.values()):
        assert a is None or torch.equal(a, b)


def test_rendered_text_is_the_same_every_time() -> None:
    pattern = pattern_of(BOTH_WAYS)
    one = sources(pattern, Problem(head_dim=16))
    two = sources.__wrapped__(pattern, Problem(head_dim=16))
    assert {p: s.digest for p, s in one.items()} == {p: s.digest for p, s in two.items()}
