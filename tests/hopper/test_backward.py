"""The warp-specialised gradient kernels, run by the machine, equal float64 autograd: patterns, schedules, dims, features."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from sparsegen.codegen.backward_hopper import shared_bytes
from sparsegen.schedule.build import build
from sparsegen.schedule.transpose import transpose
from sparsegen.schedule.tree import Schedule
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from tests.hopper.backward_runs import case_of, compare, gradients_of, kernel_of, saved_of
from tests.hopper.runs import Run
from tests.hopper.small_patterns import MASKS, extras, gathered_queries, pattern_of, schedules_of
from tests.kernels.gradients import flat, judge
from tests.kernels.schedules import made, per_head


def run_of(name: str, q_len: int, kv_len: int, /, settings: Any = None, **more: Any) -> Run:
    return Run(name, pattern_of(MASKS[name], **(settings or {})), q_len, kv_len, **more)


# Texts of the launches of queries and of keys, where all that can be is warp-specialised: the last launch of a split sweep
# adds partial sums.  ``compare`` adds the launch that prepares where there is one.
ALL = ("h", "h")
TEXTS = {"sinks": ("h", "hhp"), "strided": ("h", "hh"), "longformer": ("h", "hhp")}


# ---------------------------------------------------------------------- lengths, dims, knobs
LENGTHS = [(64, 64), (65, 63), (1, 1), (1, 100), (100, 1), (300, 129), (129, 300), (257, 257)]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", ["sinks", "full"])
def test_ragged_lengths(name: str, lengths: tuple[int, int]) -> None:
    """More queries than keys too: queries before position 0, which see nothing or are counted from another place."""
    compare(run_of(name, *lengths, seed=sum(lengths)), TEXTS.get(name, ALL))


@pytest.mark.parametrize(
    "name", ["causal", "prefix", "window", "two-sided", "dilated", "fixed", "longnet"]
)
def test_patterns(name: str) -> None:
    compare(run_of(name, 128, 256), TEXTS.get(name, ALL))


KNOBS: list[dict[str, Any]] = [
    {"BLOCK_M": 64},
    {"BLOCK_M": 64, "BLOCK_N": 64, "STAGES": 3},
    {"BLOCK_N": 128, "STAGES": 2},
    {"BLOCK_N": 64, "STAGES": 4},
    {"TEST_ALL": True},
    {"HEAVY_FIRST": False, "GROUP_HEADS": 1},
    {"GROUP_HEADS": 4},
]


@pytest.mark.parametrize("knobs", KNOBS, ids=lambda k: "-".join(f"{n}={x}" for n, x in k.items()))
def test_knobs(knobs: dict[str, Any]) -> None:
    """Rings of all depths, one consumer and two, groups of two query heads; tiles with nothing to see."""
    heads = {"batch": 2, "heads": 4, "kv_heads": 2}
    for name, lengths in (("causal", (200, 140)), ("sinks", (100, 190))):
        compare(run_of(name, *lengths, knobs=knobs, **heads), TEXTS.get(name, ALL))


THREE = [{"window": {"size": 20}}, {"strided": {"stride": 32}}, {"strided": {"stride": 24}}]


def test_three_sweeps_are_summed_in_float32() -> None:
    """With two the second adds to rows in their own dtype, see "strided"."""
    pattern = pattern_of({"all_of": ["causal", {"any_of": THREE}]})
    long = Problem(head_dim=16, heads=2, kv_heads=1, lengths=((8192, 8192),))
    run = Run("three", pattern, 192, 192, schedule=build(pattern, long))
    kernel = compare(run, ("hhh", "hhh"), transpose(pattern, long).schedule)
    assert all(kernel.sources[name].sums for name in ("queries", "keys"))


DIMS = [
    ("causal", (64, 64)),
    ("causal", (192, 128)),
    ("causal", (80, 40)),
    ("sinks", (96, 96)),
    ("sinks", (128, 256)),
]


@pytest.mark.parametrize(("name", "dims"), DIMS, ids=str)
def test_head_dims(name: str, dims: tuple[int, int]) -> None:
    """One column chunk, two, a padded one; gradients by way of shared memory, and float32 sums."""
    wide = {"head_dim": dims[0], "value_dim": dims[1]}
    run = run_of(name, 80, 110, heads=2, kv_heads=1, **wide)
    kernel = compare(run, TEXTS.get(name, ALL))
    for source, taken in kernel.shared_bytes.items():
        outputs, config = kernel.sources[source].outputs, kernel.configs[source].as_dict()
        assert taken == shared_bytes(config, run.problem, outputs) - 1024  # room for the barriers


@pytest.mark.parametrize("seed", range(6))
def test_many_interleavings(seed: int) -> None:
    """Other seeds are other schedules of the partitions and other moments of landing, and the same bits."""
    knobs = {"STAGES": 2 + seed % 3, "BLOCK_N": (32, 64)[seed % 2]}
    run = run_of("sinks", 120, 140, knobs=knobs)
    saved, want, _ = saved_of(run)
    first, again = (
        flat(gradients_of(kernel_of(replace(run, seed=s)), run, saved)) for s in (0, seed + 1)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert all((a - b).abs().max() < 1e-4 for a, b in zip(first, want))


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "qv", "kv"])
def test_what_is_not_asked_for(wanted: str) -> None:
    """A kernel of dK or dV alone loads what it needs, and no more."""
    name = "causal" if len(wanted) == 1 else "sinks"
    run = run_of(name, 100, 150, head_dim=32, value_dim=48)
    saved, want, _ = saved_of(run)
    kernel = kernel_of(run)
    got = gradients_of(kernel, run, saved, wanted)
    for letter, right in zip("qkv", want):
        one = getattr(got, letter)
        assert (one is not None) == (letter in wanted)
        assert one is None or (one - right).abs().max() < 1e-4
    assert "h" in "".join(kernel.ran.values())


# ---------------------------------------------------------------------- schedules of the search
SEARCHED: list[tuple[str, str, tuple[int, int], str]] = [
    # pattern, schedule of queries, lengths, texts of its launches
    ("strided", "runs + mod 16", (256, 256), "hh"),
    ("strided", "runs + mod 16", (96, 256), "hh"),
    ("strided", "runs + mod 16", (130, 130), "hp"),  # no whole periods
    ("dilated", "mod 4", (200, 300), "h"),
    ("fixed", "runs + keys mod 16", (200, 256), "h"),
    ("longformer", "runs + split rows", (200, 200), "hhp"),
    ("neighborhood", "box 8 of 8", (512, 512), "h"),
    ("bigbird", "runs + split rows", (48, 64), "pphp"),
]


@pytest.mark.parametrize(
    ("name", "label", "lengths", "ran"), SEARCHED, ids=lambda x: str(x).replace(" ", "")
)
def test_schedules_of_queries(name: str, label: str, lengths: tuple[int, int], ran: str) -> None:
    run = run_of(name, *lengths, schedule=schedules_of(name)[label])
    saved, want, _ = saved_of(run)
    kernel = kernel_of(run)
    got = gradients_of(kernel, run, saved, "q")
    assert kernel.ran == {"queries": ran}
    assert (got.q - want[0]).abs().max() < 1e-4


def turned_of(name: str) -> dict[str, Schedule]:
    """The transposed schedules of a pattern for long inputs, by their labels."""
    from tests.hopper.small_patterns import LONG

    return {
        c.schedule.label: c.schedule for c in transpose(pattern_of(MASKS[name]), LONG).candidates
    }


TURNED: list[tuple[str, str, tuple[int, int], str]] = [
    # pattern, transposed schedule, lengths, texts of its launches
    ("strided", "runs + mod 16", (256, 256), "hh"),
    ("strided", "runs + mod 16", (130, 130), "hp"),
    ("dilated", "mod 4", (200, 300), "h"),
    ("dilated", "mod 4", (201, 300), "p"),
    ("neighborhood", "box 8 of 8", (512, 512), "h"),
]


@pytest.mark.parametrize(
    ("name", "label", "lengths", "ran"), TURNED, ids=lambda x: str(x).replace(" ", "")
)
def test_schedules_of_keys(name: str, label: str, lengths: tuple[int, int], ran: str) -> None:
    run = run_of(name, *lengths)
    saved, want, _ = saved_of(run)
    kernel = kernel_of(run, turned_of(name)[label])
    got = gradients_of(kernel, run, saved, "kv")
    assert kernel.ran == {"queries": "p", "keys": ran}
    assert max((a - b).abs().max() for a, b in zip((got.k, got.v), want[1:])) < 1e-4


# ---------------------------------------------------------------------- schedules written by hand
BY_HAND: dict[str, tuple[tuple[int, int], str]] = {
    "strided": ((96, 96), "hh"),
    "columns first": ((96, 160), "hh"),
    "few rows": ((60, 345), "hh"),
    "split rows": ((30, 330), "hhp"),
    "split boxes": ((10, 310), "hpp"),  # boxes wider than a descriptor's group
    "nothing first": ((70, 70), "pph"),
    "stripes": ((40, 96), "h"),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_schedules_by_hand(name: str) -> None:
    pattern, schedule = made(name)
    lengths, ran = BY_HAND[name]
    run = Run(name, pattern, *lengths, schedule=schedule)
    for knobs in ({}, {"BLOCK_M": 64, "BLOCK_N": 64}):
        own = replace(run, knobs=knobs)
        saved, want, _ = saved_of(own)
        kernel = kernel_of(own)
        got = gradients_of(kernel, own, saved, "q")
        assert kernel.ran == {"queries": ran}
        assert (got.q - want[0]).abs().max() < 1e-4


def test_queries_that_no_descriptor_loads() -> None:
    """Tiles of 3 digits of 12: the forward kernel's consumers gather them, this launch is left to the portable one."""
    pattern, schedule = gathered_queries()
    run = Run("gathered", pattern, 150, 100, schedule=schedule)
    saved, want, _ = saved_of(run)
    kernel = kernel_of(run)
    got = gradients_of(kernel, run, saved, "q")
    assert kernel.ran == {"queries": "pp"} and (got.q - want[0]).abs().max() < 1e-4


def test_heads_with_launches_of_their_own() -> None:
    """One sweep, two, a split one and none, over query heads; key heads take part in every launch."""
    pattern, schedule = per_head(sink_logits=True)
    run = Run("heads", pattern, 8, 312, 2, 7, 7, schedule=schedule)
    kernel = kernel_of(run)
    saved, want, more = saved_of(run, **extras(pattern, 7, 7, 16, 16))
    judge(case_of(run), gradients_of(kernel, run, saved, **more), want)
    assert kernel.ran["queries"] == "phhhp" and "h" in kernel.ran["keys"]


def test_heads_with_masks_of_their_own() -> None:
    """Branches of one launch, one of them without anything to see; query heads of a group have several masks."""
    rules = [
        {"heads": 0, "mask": {"not": "full"}},
        {"heads": "1-3", "mask": MASKS["window"]},
        {"heads": "rest", "mask": "causal"},
    ]
    pattern = Pattern.from_dict({"name": "heads", "heads": rules})
    compare(Run("heads", pattern, 150, 190, 2, 8, 2))


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
        compare(run, TEXTS.get(name, ALL), **extras(run.pattern, 2, 1, 24, 40))


# ---------------------------------------------------------------------- calls
CALLS = {
    # name: (per-batch lengths, texts): what is visited must have no rows that are no rows of the call
    "q_lengths": ("h", "ppp"),
    "kv_starts": ("h", "hhp"),
    "kv_lengths": ("pp", "hhp"),
}


@pytest.mark.parametrize("name", CALLS)
def test_ragged_batch(name: str) -> None:
    """What is outside holds NaN and stays there."""
    run = run_of("sinks", 150, 200, batch=3)
    numbers = {"q_lengths": [150, 17, 0], "kv_starts": [0, 13, 5], "kv_lengths": [200, 160, 31]}
    own = torch.tensor(numbers[name], dtype=torch.int32)
    saved, _, _ = saved_of(run)
    for b, n in enumerate(numbers[name]):
        if name == "q_lengths":
            saved.q[b, :, n:] = saved.dout[b, :, n:] = math.nan
        for t in (saved.k, saved.v) if name != "q_lengths" else ():
            t[b, :, slice(None, n) if name == "kv_starts" else slice(n, None)] = math.nan
    given = {name: own}
    want = by_itself(run, saved, **given)
    kernel = kernel_of(run)
    got = gradients_of(kernel, run, want[0], **given)
    assert (kernel.ran["queries"], kernel.ran["keys"]) == CALLS[name]
    judge(case_of(run), got, want[1])


def by_itself(run: Run, saved: Any, **given: Any) -> Any:
    """The same call without gradients of what is outside: float64 autograd of the reference."""
    from tests.kernels.gradients import expected

    case = case_of(run)
    dout = torch.where(saved.dout.isnan(), 0.0, saved.dout)
    dlse = torch.zeros_like(saved.lse)
    found, want, _ = expected(case, saved.q, saved.k, saved.v, dout, dlse, **given)
    want = [torch.where(w.isnan(), 0.0, w) for w in want]
    return replace(found, dout=saved.dout), want


def test_zero_strides_go_by_pointers() -> None:
    """dO of a sum is one number for all rows."""
    run = run_of("causal", 100, 100)
    saved, _, _ = saved_of(run)
    saved = replace(saved, dout=torch.ones(1, 1, 1, 16).expand(1, 2, 100, 16), dlse=None)
    kernel = kernel_of(run)
    got = gradients_of(kernel, run, saved)
    assert kernel.ran == {"queries": "pp", "keys": "p"}
    same = kernel_of(run)
    again = gradients_of(same, run, replace(saved, dout=saved.dout.contiguous()))
    assert same.ran == {"queries": "h", "keys": "h"}
    assert all((a - b).abs().max() < 1e-5 for a, b in zip(flat(got), flat(again)))


def test_views() -> None:
    """Strided tensors give the same bits: a fused projection, [B, S, H, D] seen as [B, H, S, D]."""
    run = run_of("sinks", 150, 150, batch=2, heads=2, kv_heads=2)
    saved, _, _ = saved_of(run)
    stack = torch.stack([saved.q, saved.k, saved.v, saved.dout], 2).permute(0, 3, 2, 1, 4)
    fused = stack.contiguous()  # [B, S, 4, H, D]
    q, k, v, dout = (fused[:, :, i].transpose(1, 2) for i in range(4))
    assert not q.is_contiguous()
    plain = gradients_of(kernel_of(run), run, saved)
    seen = gradients_of(kernel_of(run), run, replace(saved, q=q, k=k, v=v, dout=dout))
    assert all(torch.equal(a, b) for a, b in zip(flat(plain), flat(seen)))


def test_queries_that_all_lie_before_position_0() -> None:
    """They see nothing; gradients of keys are zeros that somebody has to write."""
    run = run_of("causal", 40, 100)
    saved, _, _ = saved_of(run)
    nothing = torch.full_like(saved.lse, -math.inf)
    saved = replace(saved, out=torch.zeros_like(saved.out), lse=nothing)
    kernel = kernel_of(run)
    got = gradients_of(kernel, run, saved, q_start=-50, relative=0)
    assert kernel.ran == {"queries": "h", "keys": "h"}
    assert all((t == 0).all() for t in flat(got))
