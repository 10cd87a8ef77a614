"""Kernels on inputs whose answer is known by hand: Q = 0 makes the weights uniform, so a row is the mean of what it sees."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sparsegen.codegen import render
from sparsegen.schedule.build import build
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from sparsegen.spec.reference import reference
from tests.kernels.cases import (
    DEVICE,
    ON_GPU,
    Case,
    compile_all,
    judge,
    kernel_of,
    pattern_of,
    run,
    tensors,
)

SINKS = {"all_of": ["causal", {"any_of": [{"window": {"size": 4}}, {"sink": {"tokens": 4}}]}]}
TOP_LEFT = {"align": "top_left"}


def case_of(mask: Any, q_len: int, kv_len: int, **more: Any) -> Case:
    settings = {n: more.pop(n) for n in ("align", "sink_logits") if n in more}
    dims = {"heads": 1, "kv_heads": 1, **more}
    return Case("hand", pattern_of(mask, **settings), q_len, kv_len, **dims)


def means(case: Case) -> tuple[list[float], list[float]]:
    """(output, LSE) of each row with Q = 0 and V[j] = j."""
    q, k, v = tensors(case)
    v[:] = torch.arange(case.kv_len)[:, None]
    out, lse = run(case, torch.zeros_like(q), k, v)
    assert (out == out[..., :1]).all()
    return out[0, 0, :, 0].tolist(), lse[0, 0].tolist()


def weights(case: Case, **extras: Any) -> torch.Tensor:
    """Weights [q_len, kv_len] of each row with Q = 0: the values are the unit vectors."""
    q, k, v = tensors(case)
    v[:] = torch.eye(16)[: case.kv_len]
    out, _ = run(case, torch.zeros_like(q), k, v, **extras)
    return out[0, 0, :, : case.kv_len].cpu()


def keys(row: torch.Tensor) -> list[int]:
    """What a row of uniform weights sees; each weight is one over their number."""
    seen = row.nonzero().flatten().tolist()
    assert torch.allclose(row[seen], torch.full((len(seen),), 1 / max(1, len(seen))), atol=1e-6)
    return seen


# ---------------------------------------------------------------------- alignment (B06)
ALIGNMENT = [
    ("causal", {}, (2, 5), [1.5, 2.0]),
    ("causal", TOP_LEFT, (2, 5), [0.0, 0.5]),
    ("causal", {}, (5, 2), [0, 0, 0, 0.0, 0.5]),
    ("causal", TOP_LEFT, (5, 2), [0.0, 0.5, 0.5, 0.5, 0.5]),
]


@pytest.mark.parametrize(("mask", "settings", "lengths", "want"), ALIGNMENT, ids=str)
def test_alignment(mask: Any, settings: dict, lengths: tuple, want: list) -> None:
    out, lse = means(case_of(mask, *lengths, **settings))
    assert out == pytest.approx(want, abs=1e-6)
    empty = max(0, lengths[0] - lengths[1]) if not settings else 0
    assert lse[:empty] == [-math.inf] * empty and all(map(math.isfinite, lse[empty:]))
    assert out[:empty] == [0.0] * empty  # exactly


def test_one_kernel_serves_all_lengths() -> None:
    """The offset is no constant of the program: (1, 257), (7, 300) and (128, 128) are one kernel (B06)."""
    all_lengths = [(1, 257), (7, 300), (128, 128)] if ON_GPU else [(1, 257), (7, 300), (40, 40)]
    cases = [case_of("causal", *lengths) for lengths in all_lengths]
    assert len({id(kernel_of(case)) for case in cases}) == 1
    for case in cases:
        out, _ = means(case)
        first = case.kv_len - case.q_len
        want = [(first + i) / 2 for i in range(case.q_len)]
        assert out == pytest.approx(want, abs=1e-4), case


# ---------------------------------------------------------------------- windows (B09, B32)
WINDOWS = [
    ({"window": {"size": 3}}, (8, 8), {0: [0], 2: [0, 1, 2], 3: [1, 2, 3], 5: [3, 4, 5]}),
    ({"window": {"left": 3}}, (8, 8), {2: [0, 1, 2], 3: [0, 1, 2, 3], 5: [2, 3, 4, 5]}),
    ({"window": {"size": 1}}, (8, 8), {0: [0], 5: [5]}),
    ({"window": {"radius": 2}}, (9, 9), {0: [0, 1, 2], 4: [2, 3, 4, 5, 6], 8: [6, 7, 8]}),
    ({"window": {"left": 1, "right": 3}}, (9, 9), {4: [3, 4, 5, 6, 7]}),
    ({"window": {"left": "inf", "right": 1}}, (9, 9), {0: [0, 1], 4: [0, 1, 2, 3, 4, 5]}),
    ({"window": {"size": 4}}, (1, 12), {0: [8, 9, 10, 11]}),
    ({"window": {"left": 4}}, (1, 12), {0: [7, 8, 9, 10, 11]}),
    (SINKS, (12, 12), {5: [0, 1, 2, 3, 4, 5], 9: [0, 1, 2, 3, 6, 7, 8, 9]}),  # B22: overlap once
    ({"dilated": {"size": 4, "dilation": 3}}, (11, 11), {5: [2, 5], 10: [1, 4, 7, 10]}),  # B34
    ({"dilated": {"size": 4, "dilation": 100}}, (11, 11), {10: [10]}),
    ({"sink": {"tokens": 0}}, (3, 3), {0: [], 2: []}),
    ({"prefix": {"tokens": 50}}, (3, 5), {0: [0, 1, 2, 3, 4]}),
    ({"columns": {"stride": 4, "width": 1}}, (9, 9), {0: [3, 7], 8: [3, 7]}),
    ({"chunks": {"size": 4}}, (10, 10), {5: [4, 5, 6, 7], 9: [8, 9]}),
    ({"global": {"positions": [4, 1, 500]}}, (8, 8), {0: [1, 4], 1: list(range(8))}),
]  # fmt: skip


@pytest.mark.parametrize(("mask", "lengths", "want"), WINDOWS, ids=str)
def test_what_rows_see(mask: Any, lengths: tuple, want: dict) -> None:
    got = weights(case_of(mask, *lengths))
    assert {row: keys(got[row]) for row in want} == want


@pytest.mark.parametrize("variant", ["fast", "general"])
def test_one_decoded_query_keeps_its_window(variant: str) -> None:
    """Keys 193..256 of 257 and never the whole cache (B09)."""
    out, lse = means(case_of({"window": {"size": 64}}, 1, 257, variant=variant))
    assert out == pytest.approx([224.5], abs=1e-3) and lse == pytest.approx([math.log(64)])
    out, _ = means(case_of({"window": {"left": 64}}, 1, 257, variant=variant))
    assert out == pytest.approx([224.0], abs=1e-3)


def test_sinks_beyond_all_keys_are_plain_causal() -> None:
    """B22: sinks >= kv_len."""
    many = {"all_of": ["causal", {"any_of": [{"window": {"size": 4}}, {"sink": {"tokens": 50}}]}]}
    assert torch.equal(weights(case_of(many, 12, 12)), weights(case_of("causal", 12, 12)))


# ---------------------------------------------------------------------- learned sinks (B22)
def test_a_learned_sink_takes_its_share_and_no_value() -> None:
    """Q = 0, sink 0: row i has weight 1/(i + 2) on each of its i + 1 keys."""
    case = case_of("causal", 9, 9, sink_logits=True)
    got = weights(case, sink_logits=torch.zeros(1, device=DEVICE))
    for i in range(9):
        assert torch.allclose(got[i, : i + 1], torch.full((i + 1,), 1 / (i + 2)), atol=1e-6)


def test_a_row_that_sees_the_sink_alone() -> None:
    """All keys masked: output 0 and LSE = the sink's logit; left out of a partial result, the row is empty."""
    case = case_of("causal", 5, 2, sink_logits=True)
    q, k, v = tensors(case)
    sink = torch.tensor([1.25], device=DEVICE)
    out, lse = run(case, q, k, v, sink_logits=sink)
    assert (out[:, :, :3] == 0).all() and torch.allclose(lse[:, :, :3], sink)
    out, lse = run(case, q, k, v, sink_logits=sink, joins=0)
    assert (out[:, :, :3] == 0).all() and (lse[:, :, :3] == -math.inf).all()


# ---------------------------------------------------------------------- rows that see nothing (B01)
HOLES = "k <= q and q != 3 and q < 9"


@pytest.mark.parametrize("variant", ["fast", "general"])
@pytest.mark.parametrize("dtype", ["float32", "float16"] + ["bfloat16"] * ON_GPU)
def test_an_empty_row_is_zero_and_spoils_no_other(dtype: str, variant: str) -> None:
    """Row 3 and the rows from 9 on see nothing, and their queries are NaN: 0 and -inf, exactly."""
    case = case_of({"predicate": HOLES}, 12, 12, dtype=dtype, variant=variant, heads=2)
    q, k, v = tensors(case)
    judge(case, q, k, v, *run(case, q, k, v))
    want, want_lse = run(case, q, k, v)
    empty = [3, 9, 10, 11]
    q[:, :, empty] = math.nan
    out, lse = run(case, q, k, v)
    assert (out[:, :, empty] == 0).all() and (lse[:, :, empty] == -math.inf).all()
    assert torch.equal(out, want) and torch.equal(lse, want_lse)


def test_a_mask_that_shows_nothing_at_all() -> None:
    out, lse = means(case_of({"not": "full"}, 7, 9))
    assert out == [0.0] * 7 and lse == [-math.inf] * 7


# ---------------------------------------------------------------------- blocks of any size (B34)
@pytest.mark.parametrize("block", [8, 12, 48, 512])
def test_random_blocks_of_any_size(block: int) -> None:
    """Smaller than a tile of a dot, no power of two, longer than the call; alone (walked) and in a union (tested)."""
    node = {"random_blocks": {"block": block, "per_row": 2, "seed": 3}}
    for mask in (node, {"any_of": [{"window": {"size": 5}}, node]}):
        case = case_of(mask, 50, 61)
        q, k, v = tensors(case)
        judge(case, q, k, v, *run(case, q, k, v))


# ---------------------------------------------------------------------- grouped heads (B27)
def _groups() -> list[Case]:
    """Every divisor and pair of dims, one mask for all heads and masks per head; the interpreter takes a half of them."""
    rules = [
        {"heads": 0, "mask": "causal"},
        {"heads": [1, "4-5"], "mask": {"not": "causal"}},
        {"heads": "rest", "mask": {"window": {"size": 70 if ON_GPU else 7}}},
    ]
    per_head = Pattern.from_dict({"name": "rules", "heads": rules})
    shared = pattern_of(rules[-1]["mask"])
    length = 200 if ON_GPU else 20
    pairs = [(8, 2), (8, 1), (6, 3), (12, 2), (8, 8)]
    dims = [(64, 64), (64, 128), (128, 64)] if ON_GPU else [(16, 16), (16, 32), (32, 16)]
    out = []
    for i, (heads, kv_heads) in enumerate(pairs):
        for j, (d, dv) in enumerate(dims):
            for name, pattern in (("shared", shared), ("per-head", per_head)):
                if ON_GPU or (i + j + len(name)) % 2:
                    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": d, "value_dim": dv}
                    label = f"{name}-{heads}:{kv_heads}"
                    out.append(Case(label, pattern, length, length, dtype="float16", **sizes))
    return out


GROUPS = _groups()


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    if ON_GPU:
        compile_all(GROUPS)


@pytest.mark.parametrize("case", GROUPS, ids=str)
def test_a_query_head_reads_the_keys_of_its_group(case: Case) -> None:
    q, k, v = tensors(case)
    judge(case, q, k, v, *run(case, q, k, v))


def test_the_judge_sees_a_wrong_divisor() -> None:
    """Heads read with the wrong divisor would fail the test above: the groups' keys differ."""
    case = GROUPS[0]
    q, k, v = tensors(case)
    wrong = torch.roll(k, 1, 1), torch.roll(v, 1, 1)
    with pytest.raises(AssertionError):
        judge(case, q, k, v, *run(case, q, *wrong))


# ---------------------------------------------------------------------- masks per head (B42)
@pytest.mark.parametrize(
    ("q_len", "kv_len"), [(8, 8), (1, 300), (257, 257)] if ON_GPU else [(8, 8), (1, 60), (33, 33)]
)
@pytest.mark.parametrize("group", [1, 4])
def test_heads_take_turns(q_len: int, kv_len: int, group: int) -> None:
    """Even query heads with a window, odd ones full with sinks: short calls and long, grouped or not."""
    heads = 32 if ON_GPU else 8
    even = [h for h in range(heads) if h % 2 == 0]
    rules = [
        {"heads": even, "mask": {"window": {"size": 64 if ON_GPU else 5}}},
        {"heads": "rest", "mask": {"any_of": ["full", {"sink": {"tokens": 4}}]}},
    ]
    pattern = Pattern.from_dict({"name": "turns", "heads": rules})
    dims = {"dtype": "bfloat16", "head_dim": 128, "value_dim": 128} if ON_GPU else {}
    case = Case("turns", pattern, q_len, kv_len, heads=heads, kv_heads=heads // group, **dims)
    q, k, v = tensors(case)
    judge(case, q, k, v, *run(case, q, k, v))


def test_equal_rules_per_head_are_the_shared_kernel() -> None:
    shared = pattern_of("causal")
    rules = [
        {"heads": ["0-3"], "mask": "causal"},
        {"heads": "rest", "mask": {"not": {"predicate": "k > q"}}},
    ]
    per_head = Pattern.from_dict({"name": "heads", "heads": rules})
    texts = [render(p, build(p), Problem()).text for p in (shared, per_head)]
    assert texts[0] == texts[1]


# ---------------------------------------------------------------------- large scores (B31)
@pytest.mark.parametrize("dtype", ["float16", "float32"] + ["bfloat16"] * ON_GPU)
@pytest.mark.parametrize(
    "mask", ["causal", {"chunks": {"size": 24}}], ids=["causal", "documents of 24"]
)
def test_a_row_of_logits_of_300(mask: Any, dtype: str) -> None:
    """One row's logits are +-300: finite everywhere, no worse than eager attention in the same dtype."""
    length = 1024 if ON_GPU else 50
    case = case_of(mask, length, length, dtype=dtype, heads=2)
    q, k, v = tensors(case)
    signs = torch.where(torch.arange(length) % 3 == 0, 1.0, -1.0)
    k[:, :, :, 0] = signs.to(k)  # the row's query reads this column alone
    q[:, :, 40] = 0
    q[:, :, 40, 0] = 300 * 4
    out, lse = run(case, q, k, v)
    assert out.isfinite().all() and lse.isfinite().all()
    assert lse[0, 0, 40].item() > 295
    judge(case, q, k, v, out, lse)


# ---------------------------------------------------------------------- offsets beyond 32 bits (B08)
@pytest.mark.gpu
def test_an_output_beyond_2_to_the_31_elements() -> None:
    """33 heads of 2^20 rows of 64: the last head lies beyond 2^31 elements of the output."""
    case = Case("full", pattern_of("full"), 1 << 20, 16, heads=33, kv_heads=1, head_dim=64,
                value_dim=64, dtype="float16", knobs=(("TMA", False),))  # fmt: skip
    small = Case("full", case.pattern, 1 << 10, 16, heads=33, kv_heads=1, head_dim=64,
                 value_dim=64, dtype="float16", knobs=case.knobs)  # fmt: skip
    q, k, v = tensors(small)
    rows = q.repeat(1, 1, 1 << 10, 1)
    out, lse = run(case, rows, k, v)
    assert out.numel() > 1 << 31
    want, want_lse = run(small, q, k, v)
    for part in (slice(0, 1 << 10), slice(-(1 << 10), None)):
        assert torch.equal(out[:, :, part], want) and torch.equal(lse[:, :, part], want_lse)
    assert not out[:, -1].isnan().any()


def test_reference_and_kernel_share_the_meaning_of_q_start() -> None:
    """A call that names its positions: keys 3.., queries 5.., as the reference places them."""
    case = case_of({"window": {"size": 4}}, 6, 12)
    q, k, v = tensors(case)
    out, _ = run(case, q, k, v, q_start=5, k_start=3, relative=0)
    want, _ = reference(case.pattern, q, k, v, q_start=5, k_start=3)
    assert torch.allclose(out.double(), want, atol=1e-5, rtol=0)
