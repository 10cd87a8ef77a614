"""Gradients with stored dS, run by the machine, equal float64 autograd: patterns, dims, features, shares of the heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sparsegen.codegen.backward_stored import (
    SHARED_BOXES,
    render_stored,
    shared_bytes,
    uncovered,
)
from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.errors import InputError, UnsupportedError
from sparsegen.schedule.build import build
from sparsegen.schedule.transpose import transpose
from tests.hopper.backward_runs import case_of, gradients_of, saved_of
from tests.hopper.registers import plain
from tests.hopper.runs import GPU, Run
from tests.hopper.shared import Outgoing
from tests.hopper.small_patterns import MASKS, extras, pattern_of
from tests.hopper.stored_runs import compare_stored, stored_kernel_of
from tests.kernels.gradients import flat, judge


def run_of(name: str, q_len: int, kv_len: int, /, settings: Any = None, **more: Any) -> Run:
    return Run(name, pattern_of(MASKS[name], **(settings or {})), q_len, kv_len, **more)


LENGTHS = [(64, 64), (65, 63), (1, 1), (1, 100), (100, 1), (300, 129), (129, 300), (257, 257)]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", ["two-sided", "full"])
def test_ragged_lengths(name: str, lengths: tuple[int, int]) -> None:
    compare_stored(run_of(name, *lengths, seed=sum(lengths)))


@pytest.mark.parametrize("name", ["causal", "window", "two-sided", "full"])
def test_patterns(name: str) -> None:
    compare_stored(run_of(name, 192, 256))


# ---------------------------------------------------------------------- where boxes of dS may begin
WINDOW = {"window": {"size": 230}}
WIDE: dict[str, tuple[Any, tuple[int, int]]] = {  # masks in ranges that begin anywhere
    "longer": ("causal", (300, 341)),
    "shorter": ("causal", (341, 300)),
    "window": (WINDOW, (300, 341)),
    "two-sided": (MASKS["two-sided"], (300, 341)),
    "chunks": ({"chunks": {"size": 88}}, (341, 300)),
    "from-37": ({"predicate": "37 <= k and k <= q"}, (300, 341)),
}


@pytest.mark.parametrize("knobs", [{}, {"BLOCK_M": 64}], ids=["two consumers", "one consumer"])
@pytest.mark.parametrize("name", WIDE)
def test_boxes_begin_at_any_query(
    name: str, knobs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Boxes that are stored begin inside of DS, at any query and at whole boxes of keys; none has a cell of another.

    All gradients are right, so all visible cells are in boxes.
    """
    mask, lengths = WIDE[name]
    sent: list[tuple[Any, ...]] = []

    def sending(scheduler: Any, descriptor: Any, corner: Any, source: Any, adds: bool) -> Outgoing:
        at = [int(plain(c)) for c in corner]
        sent.append((at, list(descriptor.shape), source.shape))
        return Outgoing(scheduler, descriptor, corner, source, adds)

    monkeypatch.setattr("tests.hopper.machine.Outgoing", sending)
    compare_stored(Run("wide", pattern_of(mask), *lengths, knobs=knobs))
    stored = torch.zeros(sent[0][1], dtype=torch.int32)
    for at, shape, box in sent:
        assert at[3] % 64 == 0 and all(0 <= c < m for c, m in zip(at, shape))
        assert at[3] + box[3] <= shape[3] == stored.shape[3]
        b, h, q, k = at
        stored[b, h, q : q + box[2], k : k + box[3]] += 1
    assert any(at[2] % 8 for at, *_ in sent)
    assert stored.max() == 1


def test_wide_tiles_of_keys() -> None:
    """The kernel of queries with 128 keys a tile, whose boxes reach beyond the rows of DS."""
    run = Run("window", pattern_of(WINDOW), 200, 433)
    kernel = stored_kernel_of(run)
    config = kernel.configs["stored-queries"].as_dict()
    kernel.configs["stored-queries"] = LaunchConfig.of(config | {"BLOCK_N": 128})
    saved, want, _ = saved_of(run)
    judge(case_of(run), gradients_of(kernel, run, saved), want)
    assert kernel.ran == {"queries": "p", "stored-keys": "h", "stored-queries": "h"}


@pytest.mark.parametrize("dims", [(64, 64), (128, 64), (80, 40), (96, 96)], ids=str)
def test_head_dims(dims: tuple[int, int]) -> None:
    took_what_was_promised(run_of("causal", 80, 150, head_dim=dims[0], value_dim=dims[1]))


def took_what_was_promised(run: Run) -> None:
    """Shared memory, in a run whose gradients are right."""
    kernel = compare_stored(run)
    for name in ("stored-keys", "stored-queries"):
        source, config = kernel.sources[name], kernel.configs[name].as_dict()
        taken = shared_bytes(config, run.problem, source.part) - 1024
        assert kernel.shared_bytes[name] == taken


def test_two_programs_of_one_consumer_share_a_multiprocessor() -> None:
    """Each has one place for boxes of dS."""
    run = run_of("causal", 200, 150, head_dim=128, value_dim=128, knobs={"BLOCK_M": 64})
    took_what_was_promised(run)
    knobs = stored_kernel_of(run).configs["stored-keys"].as_dict()
    assert 2 * shared_bytes(knobs, run.problem, "keys") <= GPU.shared_bytes


KNOBS: list[dict[str, Any]] = [
    {"STAGES": 4},
    {"TEST_ALL": True},
    {"HEAVY_FIRST": False},
    {"BLOCK_M": 64},
]


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_knobs(knobs: dict[str, Any]) -> None:
    heads = {"batch": 2, "heads": 4, "kv_heads": 2}
    compare_stored(run_of("two-sided", 150, 190, knobs=knobs, **heads))
    compare_stored(run_of("causal", 190, 150, knobs=knobs, **heads))


@pytest.mark.parametrize("seed", range(4))
def test_the_same_to_the_bit_in_any_order(seed: int) -> None:
    run = run_of("two-sided", 200, 140)
    saved, _, _ = saved_of(run)
    first, again = (
        flat(gradients_of(stored_kernel_of(replace(run, seed=s)), run, saved))
        for s in (0, seed + 1)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, again))


FEATURES: list[dict[str, Any]] = [
    {"softcap": 3.0},
    {"alibi": True},
    {"sink_logits": True},
    {"softcap": 2.0, "alibi": True, "sink_logits": True, "scale": 0.3},
]


@pytest.mark.parametrize("settings", FEATURES, ids="-".join)
def test_features(settings: dict[str, Any]) -> None:
    for lengths in ((72, 92), (92, 24)):
        run = run_of("two-sided", *lengths, settings, head_dim=24, value_dim=40)
        compare_stored(run, **extras(run.pattern, 2, 1, 24, 40))


# ---------------------------------------------------------------------- shares
@pytest.mark.parametrize(
    ("workspace", "shares"), [(1 << 30, 1), (4 * 110_000, 2), (2 * 110_000, 3), (110_000, 6)]
)
def test_some_heads_at_a_time(workspace: int, shares: int) -> None:
    """Whole batch entries, then key heads of one, as many as fit."""
    alibi = {"alibi": True}
    run = run_of("two-sided", 140, 130, alibi, batch=3, heads=4, kv_heads=2)
    assert 2 * 140 * 192 * 2 == 107_520  # bytes of a key head: two query heads, rows of three boxes
    ran = "h" * shares, "h" * shares
    given = extras(run.pattern, 4, 2, 16, 16)
    kernel = compare_stored(run, ran, workspace, **given)
    taken = [t for t in kernel._memory.values() if t.ndim == 4 and t.shape[3] == 192]
    assert len(taken) == 1 and taken[0].numel() * 2 <= workspace


def test_a_workspace_without_room_for_a_head() -> None:
    run = run_of("causal", 100, 90)
    saved, _, _ = saved_of(run)
    said = (
        "workspace=51199 holds dS of no head: 100 queries and 90 keys take 51200 bytes a key head"
    )
    with pytest.raises(InputError, match=said):
        gradients_of(stored_kernel_of(run, 51199), run, saved)


# ---------------------------------------------------------------------- what it does not do
def test_reasons() -> None:
    problem = run_of("causal", 1, 1).problem
    for name, settings, said in (
        ("causal", {"null_key": True}, "stored dS has none of the null key"),
        ("dilated", {}, "dS is stored in boxes of runs; this schedule has other rows"),
    ):
        pattern = pattern_of(MASKS[name], **settings)
        found = transpose(pattern, problem)
        schedules = [c.schedule for c in found.candidates]
        assert said in [uncovered(pattern, s, problem, "keys") for s in schedules]


@pytest.mark.parametrize("name", ["sinks", "longformer", "strided"])
def test_several_segments_are_refused(name: str) -> None:
    """In the transposed schedule alone: dQ may be a product over several."""
    pattern, problem = pattern_of(MASKS[name]), run_of(name, 1, 1).problem
    found = transpose(pattern, problem)
    for one in found.candidates:
        assert uncovered(pattern, one.schedule, problem, "keys") == SHARED_BOXES
        with pytest.raises(UnsupportedError, match=SHARED_BOXES):
            render_stored(pattern, one.schedule, problem, "keys", found.shift)
    assert uncovered(pattern, build(pattern, problem), problem, "queries") != SHARED_BOXES


@pytest.mark.parametrize("wanted", ["q", "kv"])
def test_fewer_gradients_go_to_the_split_kernels(wanted: str) -> None:
    run = run_of("causal", 70, 70)
    saved, _, _ = saved_of(run)
    kernel = stored_kernel_of(run)
    gradients_of(kernel, run, saved, wanted)
    assert not any(name.startswith("stored") for name in kernel.ran)


@pytest.mark.parametrize("name", ["q_lengths", "kv_starts", "kv_lengths"])
def test_per_batch_lengths_go_to_the_split_kernels(name: str) -> None:
    """Their keys may begin anywhere in a row of dS."""
    run = run_of("causal", 100, 100, batch=2)
    own = torch.tensor([100, 60] if name != "kv_starts" else [0, 13], dtype=torch.int32)
    saved, _, _ = saved_of(run)
    kernel = stored_kernel_of(run)
    gradients_of(kernel, run, saved, **{name: own})
    assert set(kernel.ran) == {"queries", "keys"}
