"""What of a call reaches the kernel, and which kernel: positions, settings, tables, and what kernels are proven for."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sparsegen.errors import InputError, UnsupportedError
from sparsegen.launch.kernel import Call
from sparsegen.runtime.attend import LAYOUTS_KEPT, Attend
from sparsegen.runtime.checks import beyond_proof
from sparsegen.spec.fields import LIMIT
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from tests.runtime.calls import (
    EVERYTHING,
    PROBLEM,
    StandIn,
    attend_of,
    extras,
    qkv,
    tensor,
)

pytestmark = pytest.mark.one_triton  # kernels are stand-ins


@pytest.fixture(autouse=True)
def no_gpu_needed():
    with FakeTensorMode():
        yield


# ---------------------------------------------------------------------- what reaches the kernel
@pytest.mark.parametrize(
    ("align", "given", "call"),
    [
        ("bottom_right", {}, (0, 0, 1)),
        ("top_left", {}, (0, 0, 0)),
        ("bottom_right", {"k_start": 5}, (5, 5, 1)),
        ("top_left", {"k_start": 5}, (5, 5, 0)),
        ("bottom_right", {"q_start": -3}, (-3, 0, 0)),
        ("top_left", {"q_start": 7, "k_start": 2}, (7, 2, 0)),
    ],
)
def test_positions_of_a_call(align: str, given: dict, call: tuple) -> None:
    attend, kernel = attend_of(align=align)
    attend(**qkv(8, 20), **given)
    ((sent, variant),) = kernel.calls
    assert (sent.q_start, sent.k_start, sent.relative) == call
    assert (sent.scale, sent.joins, variant) == (0.25, 1, None)


def test_settings_of_a_call() -> None:
    attend, kernel = attend_of(scale=0.7, **EVERYTHING)
    given = extras()
    out = tensor(1, 4, 8, 16)
    got = attend(**qkv(), **given, out=out, partial=True, return_lse=True, variant="general")
    ((sent, variant),) = kernel.calls
    assert got[0] is out and got[1].shape == (1, 4, 8)
    assert (sent.scale, sent.joins, variant) == (0.7, 0, "general")
    assert sent.sink_logits is given["sink_logits"] and sent.null_key is given["null_key"]


def test_nothing_to_do_launches_nothing() -> None:
    attend, kernel = attend_of()
    assert attend(**qkv(0)).shape == (1, 4, 0, 16)
    assert not kernel.calls
    attend(**qkv(3, 0))  # rows that see no key are still written
    assert len(kernel.calls) == 1


def test_random_blocks_and_lengths_per_entry_do_not_go_together() -> None:
    mask = "mask:\n  any_of:\n    - causal\n    - random_blocks: {block: 4, per_row: 1, seed: 0}\n"
    pattern = Pattern.from_yaml_text(mask, file="b.yaml")
    attend = Attend(pattern, PROBLEM, StandIn(tables=("one",)))
    with pytest.raises(UnsupportedError) as error:
        attend(**qkv(), q_lengths=tensor(1, dtype=torch.int32))
    assert str(error.value) == (
        "b.yaml:4:7: random_blocks has one table for all batch entries: per-batch lengths do not go with it"
    )


def test_memory_of_checked_layouts_is_bounded() -> None:
    attend, _ = attend_of()
    found = attend._check(*qkv().values())
    attend._checked = dict.fromkeys(range(LAYOUTS_KEPT), found)
    attend(**qkv())
    assert len(attend._checked) == 1


# ---------------------------------------------------------------------- limits of the proofs
def test_other_dims_build_once_and_keep_the_problems_lengths() -> None:
    asked: list[Problem] = []
    attend, _ = attend_of(rebuild=lambda problem: asked.append(problem) or StandIn())
    for _ in range(2):
        attend(**qkv(v=tensor(1, 2, 8, 32)))
    assert asked == [replace(PROBLEM, value_dim=32)]


def relative(q_start: int = 0, k_start: int = 0, **more: Any) -> Call:
    return Call(q_start=q_start, k_start=k_start, **more)


BATCH = "lengths"  # stands for a tensor: only its presence counts
PROOFS = [
    # (max_position, min_position), (q_len, kv_len), call, what is said
    ((None, None), (9999, 9999), relative(), ""),
    ((100, None), (100, 100), relative(), ""),
    ((100, None), (1, 101), relative(), "positions up to 100 .* the call reaches 101"),
    ((100, None), (101, 5), relative(), "positions up to 100 .* the call reaches 101"),
    ((100, None), (10, 10), relative(k_start=91), "the call reaches 101"),
    ((100, None), (10, 10), relative(90, relative=0), ""),
    ((100, None), (10, 10), relative(91, relative=0), "the call reaches 101"),
    ((100, None), (50, 5), relative(), ""),  # rows from -45
    ((100, None), (10, 10), relative(-100, relative=0), ""),
    ((100, None), (10, 10), relative(-101, relative=0), "from position -100 on .* starts at -101"),
    ((100, 0), (8, 8), relative(), ""),
    ((100, 0), (8, 7), relative(), "queries from position 0 on .* the call starts at -1"),
    ((100, 0), (8, 8), relative(-1, relative=0), "the call starts at -1"),
    ((100, -5), (8, 3), relative(), ""),
    ((100, -5), (9, 3), relative(), "queries from position -5 on .* starts at -6"),
    ((100, 0), (8, 8), relative(q_lengths=BATCH), ""),  # a shorter query side starts later
    ((100, 0), (8, 8), relative(kv_lengths=BATCH), "the call starts at -8"),
    ((100, 0), (8, 8), relative(kv_starts=BATCH), "the call starts at -8"),
    ((100, None), (100, 100), relative(kv_lengths=BATCH, q_lengths=BATCH), ""),
    ((100, 0), (0, 0), relative(-1), ""),
]


@pytest.mark.parametrize(("limits", "lengths", "call", "words"), PROOFS)
def test_calls_beyond_the_proofs(limits: tuple, lengths: tuple, call: Call, words: str) -> None:
    import re

    source = SimpleNamespace(max_position=limits[0], min_position=limits[1])
    said = beyond_proof(source, *lengths, call)
    assert bool(said) == bool(words) and re.search(words, said), said


def test_a_longer_call_builds_once_for_all_lengths() -> None:
    asked: list[Problem] = []
    free = StandIn()
    attend, kernel = attend_of(
        kernel=StandIn(64), rebuild=lambda problem: asked.append(problem) or free
    )
    attend(**qkv(8, 64))
    for length in (65, 66, 500):
        attend(**qkv(8, length))
    assert asked == [replace(PROBLEM, lengths=((8, 65), (LIMIT, LIMIT)))]
    assert len(kernel.calls) == 1 and len(free.calls) == 3


def test_a_longer_call_of_other_dims_keeps_its_dims() -> None:
    asked: list[Problem] = []

    def rebuild(problem: Problem) -> StandIn:
        asked.append(problem)
        return StandIn(64 if len(asked) == 1 else None)

    attend, _ = attend_of(rebuild=rebuild)
    wide = tensor(1, 2, 65, 32, dtype=torch.bfloat16)
    narrow = [tensor(1, h, 65, 16, dtype=torch.bfloat16) for h in (4, 2)]
    attend(*narrow, wide)
    assert (asked[1].value_dim, asked[1].dtype) == (32, "bfloat16")


def test_a_loaded_artifact_refuses_calls_beyond_its_proofs() -> None:
    attend, kernel = attend_of(kernel=StandIn(64, 0))
    for lengths, words in (
        ((8, 65), "positions up to 64 (from the lengths of its problem), the call reaches 65"),
        ((8, 7), "queries from position 0 on (from the lengths of its problem), the call starts at -1"),
    ):  # fmt: skip
        with pytest.raises(InputError) as error:
            attend(**qkv(*lengths))
        assert str(error.value) == (
            f"this artifact is proven for {words}; build it with lengths in its problem that reach there"
        )
    assert not kernel.calls


def test_a_build_that_proves_no_more_is_never_launched() -> None:
    attend, kernel = attend_of(kernel=StandIn(64), rebuild=lambda problem: StandIn(64))
    with pytest.raises(InputError, match="^no kernel takes these positions: it is proven for"):
        attend(**qkv(8, 65))


def test_tables_are_those_of_the_kernel_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel for short calls may need no table, the one for all lengths does."""
    made = StandIn(tables=(SimpleNamespace(term="t"),))
    attend, _ = attend_of(kernel=StandIn(64), rebuild=lambda problem: made)
    monkeypatch.setattr("sparsegen.runtime.tables.random_table", lambda *given: (given, 3))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    attend(**qkv(8, 65))
    ((call, _),) = made.calls
    assert [row for _, row in call.tables] == [3]
