"""The fused gradient kernel, run by the machine, equals float64 autograd: patterns, schedules, dims, features, calls."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from sparsegen.codegen.backward_fused import shared_bytes, uncovered
from sparsegen.errors import UnsupportedError
from sparsegen.schedule.transpose import transpose
from sparsegen.schedule.tree import Schedule
from sparsegen.spec.pattern import Pattern
from tests.hopper.backward_runs import case_of, gradients_of, saved_of
from tests.hopper.fused_runs import compare_fused, fused_kernel_of, fused_source
from tests.hopper.runs import Run
from tests.hopper.small_patterns import LONG, MASKS, extras, pattern_of
from tests.kernels.gradients import expected, flat, judge

WIDE = {"head_dim": 128, "value_dim": 32}  # dQ in halves of the columns, dS exchanged
SMALL = {"head_dim": 32, "value_dim": 16}  # a consumer's own keys


def run_of(name: str, q_len: int, kv_len: int, /, settings: Any = None, **more: Any) -> Run:
    return Run(name, pattern_of(MASKS[name], **(settings or {})), q_len, kv_len, **more)


# Texts of its launches: sweeps, with the one that adds partial sums behind a split one, and the last, which makes DQ.
TEXTS = {"sinks": "hhpp", "strided": "hhp", "longformer": "hhpp"}


# ---------------------------------------------------------------------- lengths, dims, knobs
LENGTHS = [(64, 64), (65, 63), (1, 1), (1, 100), (100, 1), (300, 129), (129, 300), (257, 257)]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", ["sinks", "full"])
def test_ragged_lengths(name: str, lengths: tuple[int, int]) -> None:
    """Keys behind the last one give nothing to dQ; queries before position 0; tiles with nothing to visit."""
    dims = WIDE if sum(lengths) % 2 else SMALL
    compare_fused(run_of(name, *lengths, seed=sum(lengths), **dims), TEXTS.get(name, "hp"))


@pytest.mark.parametrize(
    "name", ["causal", "prefix", "window", "two-sided", "dilated", "fixed", "longnet"]
)
def test_patterns(name: str) -> None:
    for dims in (WIDE, SMALL):
        compare_fused(run_of(name, 128, 256, **dims), TEXTS.get(name, "hp"))


KNOBS: list[dict[str, Any]] = [
    {"STAGES": 3},
    {"STAGES": 4, "TEST_ALL": True},
    {"TEST_ALL": True},
    {"HEAVY_FIRST": False, "GROUP_HEADS": 1},
    {"GROUP_HEADS": 4},
]


@pytest.mark.parametrize("knobs", KNOBS, ids=lambda k: "-".join(f"{n}={x}" for n, x in k.items()))
def test_knobs(knobs: dict[str, Any]) -> None:
    heads = {"batch": 2, "heads": 4, "kv_heads": 2}
    for name, lengths in (("causal", (200, 140)), ("sinks", (100, 190))):
        run = run_of(name, *lengths, knobs=knobs, **heads, **WIDE)
        compare_fused(run, TEXTS.get(name, "hp"))


DIMS = [(64, 64), (128, 64), (80, 40), (96, 96), (24, 8), (192, 64)]


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_head_dims(dims: tuple[int, int]) -> None:
    """Chunks in halves, whole ones, one of each, padded ones."""
    run = run_of("causal", 80, 150, head_dim=dims[0], value_dim=dims[1])
    kernel = compare_fused(run)
    config = kernel.configs["fused"].as_dict()
    assert kernel.shared_bytes["fused"] == shared_bytes(config, run.problem) - 1024


@pytest.mark.parametrize("seed", range(6))
def test_many_interleavings(seed: int) -> None:
    """Sums of dQ come in another order each time; dK and dV are the same to the bit."""
    run = run_of("sinks", 120, 140, knobs={"STAGES": 2 + seed % 3}, **(WIDE, SMALL)[seed % 2])
    saved, want, _ = saved_of(run)
    first, again = (
        gradients_of(fused_kernel_of(replace(run, seed=s)), run, saved) for s in (0, seed + 1)
    )
    assert torch.equal(first.k, again.k) and torch.equal(first.v, again.v)
    assert all((a - b).abs().max() < 1e-4 for a, b in zip(flat(again), want))


# ---------------------------------------------------------------------- schedules
def turned_of(name: str) -> dict[str, Schedule]:
    found = transpose(pattern_of(MASKS[name]), LONG).candidates
    return {c.schedule.label: c.schedule for c in found}


TURNED: list[tuple[str, str, tuple[int, int], str]] = [
    # pattern, transposed schedule, lengths, texts of its launches
    ("strided", "runs + mod 16", (256, 256), "hhp"),
    ("dilated", "mod 4", (200, 300), "hp"),
    ("neighborhood", "box 8 of 8", (512, 512), "hp"),
]


@pytest.mark.parametrize(
    ("name", "label", "lengths", "ran"), TURNED, ids=lambda x: str(x).replace(" ", "")
)
def test_schedules_of_keys(name: str, label: str, lengths: tuple[int, int], ran: str) -> None:
    compare_fused(run_of(name, *lengths), ran, turned_of(name)[label])


@pytest.mark.parametrize("heads", [(2, 1), (3, 3)], ids=str)
def test_two_views_of_the_queries_in_one_launch(heads: tuple[int, int]) -> None:
    """The last tile of a segment is added before the next segment, whose rows have another descriptor."""
    run = run_of("strided", 256, 256, heads=heads[0], kv_heads=heads[1], **WIDE)
    found = transpose(run.pattern, replace(run.problem, head_dim=16, value_dim=16)).candidates
    (turned,) = (c.schedule for c in found if c.schedule.label == "mod 16")
    source = fused_source(run.pattern, run.problem, turned)
    assert source.grids[0].described == ((1, 1), (16, 1))
    compare_fused(run, "hp", turned)


def test_axial_images() -> None:
    compare_fused(run_of("axial", 512, 512, **SMALL), "hp")


def test_heads_with_masks_of_their_own() -> None:
    """Branches of one launch, one of them without anything to see; query heads of a group have several masks."""
    rules = [
        {"heads": 0, "mask": {"not": "full"}},
        {"heads": "1-3", "mask": MASKS["window"]},
        {"heads": "rest", "mask": "causal"},
    ]
    pattern = Pattern.from_dict({"name": "heads", "heads": rules})
    compare_fused(Run("heads", pattern, 150, 190, 2, 8, 2, **WIDE))


def test_a_schedule_that_it_cannot_run_over() -> None:
    """Drawn blocks have no boxes: the reason is said, and nothing is rendered."""
    pattern = pattern_of(MASKS["bigbird"])
    run = Run("bigbird", pattern, 64, 64)
    found = transpose(pattern, run.problem)
    why = uncovered(found.schedule, run.problem)
    assert why is not None and "no boxes that a tensor descriptor has" in why
    with pytest.raises(UnsupportedError, match="no boxes"):
        fused_source(pattern, run.problem, None)
    wide = replace(run.problem, dtype="float32")
    assert uncovered(transpose(pattern_of("causal"), wide).schedule, wide) == (
        "the fused kernel takes bfloat16 or float16, not float32"
    )


# ---------------------------------------------------------------------- features
FEATURES: list[dict[str, Any]] = [
    {"softcap": 3.0},
    {"alibi": True},
    {"sink_logits": True},
    {"null_key": True},
    {"scale": -0.5},
    {"scale": 0},
    {"softcap": 2.0, "alibi": True, "sink_logits": True, "null_key": True, "scale": 0.3},
]
WHERE = [("sinks", s) for s in FEATURES] + [(n, s) for n in ("full", "dilated") for s in (FEATURES[1], FEATURES[-1])]  # fmt: skip


@pytest.mark.parametrize(("name", "settings"), WHERE, ids=lambda x: "-".join(x) if isinstance(x, dict) else x)  # fmt: skip
def test_features(name: str, settings: dict[str, Any]) -> None:
    """Score modifications and extra terms, also on rows that see no key; with queries counted from another place."""
    for lengths in ((72, 92), (92, 24)):
        run = run_of(name, *lengths, settings, head_dim=24, value_dim=40)
        compare_fused(run, TEXTS.get(name, "hp"), **extras(run.pattern, 2, 1, 24, 40))


# ---------------------------------------------------------------------- calls
def test_scores_far_below_zero() -> None:
    """Keys behind the last one are zeros, whose weight would overflow beside an LSE so low."""
    run = run_of("full", 70, 70, **WIDE)
    saved, _, _ = saved_of(run)
    q, k = (t.fill_(x) for t, x in ((saved.q, 4.0), (saved.k, -4.0)))
    case = case_of(run)
    dout = torch.randn(saved.dout.shape, generator=torch.Generator().manual_seed(3))
    saved, want, _ = expected(case, q, k, saved.v, dout, torch.zeros_like(saved.lse))
    assert (saved.lse < -170).all()
    judge(case, gradients_of(fused_kernel_of(run), run, saved), want)


@pytest.mark.parametrize("name", ["q_lengths", "kv_starts", "kv_lengths"])
def test_per_batch_lengths_go_to_the_split_kernels(name: str) -> None:
    run = run_of("causal", 100, 100, batch=2)
    own = torch.tensor([100, 60] if name != "kv_starts" else [0, 13], dtype=torch.int32)
    saved, _, _ = saved_of(run)
    kernel = fused_kernel_of(run)
    gradients_of(kernel, run, saved, **{name: own})
    assert set(kernel.ran) == {"queries", "keys"}


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "qv", "kv"])
def test_fewer_gradients_go_to_the_split_kernels(wanted: str) -> None:
    run = run_of("causal", 70, 70)
    saved, _, _ = saved_of(run)
    kernel = fused_kernel_of(run)
    gradients_of(kernel, run, saved, wanted)
    assert "fused" not in kernel.ran


def test_no_whole_periods_go_to_the_split_kernels() -> None:
    run = run_of("dilated", 201, 300)
    saved, want, _ = saved_of(run)
    kernel = fused_kernel_of(run, turned_of("dilated")["mod 4"])
    judge(case_of(run), gradients_of(kernel, run, saved), want)
    assert set(kernel.ran) == {"queries", "keys"}


def test_deterministic_algorithms_are_the_split_kernels() -> None:
    run = run_of("causal", 70, 70)
    saved, _, _ = saved_of(run)
    kernel = fused_kernel_of(run)
    for wanted, source in ((True, "keys"), (False, "fused")):
        torch.use_deterministic_algorithms(wanted)
        try:
            gradients_of(kernel, run, saved)
        finally:
            torch.use_deterministic_algorithms(False)
        assert source in kernel.ran


def test_queries_that_all_lie_before_position_0() -> None:
    """They see nothing; gradients are zeros that somebody has to write."""
    run = run_of("causal", 40, 100)
    saved, _, _ = saved_of(run)
    nothing = torch.full_like(saved.lse, -math.inf)
    saved = replace(saved, out=torch.zeros_like(saved.out), lse=nothing)
    kernel = fused_kernel_of(run)
    got = gradients_of(kernel, run, saved, q_start=-50, relative=0)
    assert "fused" in kernel.ran and all((t == 0).all() for t in flat(got))
