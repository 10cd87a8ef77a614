"""Gradients over several sweeps: digits, few rows, chunks of keys and of queries, heads with sweeps of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparsegen.codegen.backward import KEYS, QUERIES
from sparsegen.launch import backward_rooms
from sparsegen.schedule.transpose import transpose
from sparsegen.schedule.tree import Schedule
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from tests.kernels.cases import DEVICE, Case, pattern_of, tensors
from tests.kernels.gradients import compare, expected, extras_of, random_gradients, run, sources
from tests.kernels.schedules import SWEEPS, made, per_head

LENGTHS = {
    "strided": [(70, 70), (65, 100), (40, 25)],
    "columns first": [(48, 53)],
    "few rows": [(60, 360), (90, 65)],
    "split rows": [(350, 350), (40, 340)],
    "split boxes": [(60, 345)],
    "nothing first": [(40, 20)],
    "stripes": [(20, 100), (70, 42)],
    "boxes of 8": [(48, 53), (70, 40)],
    "boxes of 4": [(48, 53)],
    "image": [(48, 53), (70, 40)],
    "video": [(96, 100)],
}


def case_of(name: str, q_len: int, kv_len: int, **more: Any) -> Case:
    settings = {
        n: more.pop(n) for n in ("alibi", "sink_logits", "null_key", "softcap") if n in more
    }
    pattern, schedule = made(name, **settings)
    dims = {"heads": 2, "kv_heads": 1} | more
    return Case(name, pattern, q_len, kv_len, schedule=schedule, **dims)


EACH = [(name, pairs[0]) for name, pairs in LENGTHS.items()]
ONCE = [(name, pair) for name, pairs in LENGTHS.items() for pair in pairs[1:]]


@pytest.mark.parametrize(
    ("name", "lengths"), EACH + [pytest.param(*one, marks=pytest.mark.one_triton) for one in ONCE]
)
def test_queries_over_sweeps_by_hand(name: str, lengths: tuple[int, int]) -> None:
    variant = ("fast", "general")[lengths[0] % 2]
    compare(case_of(name, *lengths, variant=variant))


@pytest.mark.parametrize("name", SWEEPS)
def test_features(name: str) -> None:
    """Learned terms join once, in the first sweep."""
    settings = {"alibi": True, "softcap": 3.0, "sink_logits": True, "null_key": True}
    case = case_of(name, *LENGTHS[name][-1], heads=1, **settings)
    compare(case, **extras_of(case))


NEAR = {"window": {"size": 8}}
STRIDED = {"all_of": ["causal", {"any_of": [NEAR, {"strided": {"stride": 16}}]}]}
SINKS = {"all_of": ["causal", {"any_of": [NEAR, {"sink": {"tokens": 4}}]}]}
FEW = {"any_of": [{"window": {"radius": 4}}, {"global": {"tokens": 3}}]}
FIXED = {
    "all_of": [
        "causal",
        {"any_of": [{"chunks": {"size": 16}}, {"columns": {"stride": 16, "width": 4}}]},
    ]
}
IMAGE = {"neighborhood": {"shape": [8, 16], "radius": [1, 2]}}
TURNED = [
    ("strided", STRIDED, "runs + mod 16", (70, 70)),
    ("strided", STRIDED, "runs + mod 16", (33, 80)),
    ("strided", STRIDED, "runs + mod 16", (80, 33)),
    ("sinks", SINKS, "runs + split rows", (300, 300)),
    ("sinks", SINKS, "runs + split rows", (40, 290)),
    ("sinks", SINKS, "runs", (300, 300)),
    ("few", FEW, "split rows", (290, 270)),
    ("fixed", FIXED, "", (70, 70)),
    ("image", IMAGE, "box", (128, 128)),
    ("image", IMAGE, "box", (50, 100)),
]


def turned_of(pattern: Pattern, label: str) -> Schedule:
    """The first candidate of the transposed schedules whose label has the words."""
    found = transpose(pattern, Problem(lengths=((32768, 32768),)))
    labels = {c.schedule.label: c.schedule for c in found.candidates}
    chosen = next((s for name, s in labels.items() if label in name), None)
    assert chosen is not None, f"no {label!r} among {list(labels)}"
    return chosen


@pytest.mark.parametrize(("name", "mask", "label", "lengths"), TURNED, ids=str)
def test_keys_over_sweeps(name: str, mask: Any, label: str, lengths: tuple[int, int]) -> None:
    """Key tiles of residue classes and boxes; columns that all queries see, in chunks of the queries."""
    pattern = pattern_of(mask)
    case = Case(name, pattern, *lengths, heads=2, kv_heads=1)
    compare(case, turned_of(pattern, label))


def test_a_column_in_chunks_is_deterministic_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bitwise the same again; with room for fewer chunks they are longer, and the sums the same but for rounding."""
    pattern = pattern_of(SINKS)
    case = Case("sinks", pattern, 600, 600, heads=1, kv_heads=1, dtype="float16")
    turned = turned_of(pattern, "split rows")
    q, k, v = tensors(case)
    saved, want, _ = expected(case, q, k, v, *random_gradients(case, q, v))
    first, again = (run(case, saved, turned, "kv") for _ in range(2))
    assert torch.equal(first.k, again.k) and torch.equal(first.v, again.v)
    assert backward_rooms.bounded_chunks(600, 1024, 1) == (3, 256)
    assert backward_rooms.bounded_chunks(600, 1024, 100) == (2, 384)  # no more than run at once
    monkeypatch.setattr(backward_rooms, "MOST_PARTIALS", 1024)
    assert backward_rooms.bounded_chunks(600, 1024, 1) == (1, 640)
    fewer = run(case, saved, turned, "kv")
    assert torch.allclose(fewer.k.double(), want[1], atol=2e-2)
    assert torch.allclose(fewer.k, first.k, atol=2e-3)


@pytest.mark.parametrize("name", ["strided", "split rows"])
def test_ragged_batch(name: str) -> None:
    """Each entry has positions of its own, in every kind of launch."""
    lengths = (48, 70) if name == "strided" else (60, 345)
    case = case_of(name, *lengths, batch=3, heads=1)
    q, k, v = tensors(case)
    data = {
        "q_lengths": torch.tensor([lengths[0], 17, 33], dtype=torch.int32, device=DEVICE),
        "kv_starts": torch.tensor([0, 13, 3], dtype=torch.int32, device=DEVICE),
        "kv_lengths": torch.tensor(
            [lengths[1], lengths[1] - 19, 25], dtype=torch.int32, device=DEVICE
        ),
    }
    dout, dlse = random_gradients(case, q, v)
    saved, want, _ = expected(case, q, k, v, dout, dlse, **data)
    got = run(case, saved, **data)
    for which, one, right in zip("qkv", (got.q, got.k, got.v), want):
        assert torch.allclose(one.double(), right, atol=1e-5), which


def test_heads_with_sweeps_of_their_own() -> None:
    """Heads that see nothing, with one sweep, two, a split one: dQ by heads, dK and dV by groups of mixed heads."""
    pattern, schedule = per_head(sink_logits=True)
    for heads, kv_heads in ((7, 7), (7, 1)):
        case = Case("heads", pattern, 50, 345, schedule=schedule, heads=heads, kv_heads=kv_heads)
        grids = sources(pattern, Problem(head_dim=16, dtype="float32"), schedule)[QUERIES].grids
        assert [g.heads_of(7) for g in grids] == [7, 7, 3, 1, 1]
        compare(case, **extras_of(case))


THREE = [{"window": {"size": 128}}, {"strided": {"stride": 128}}, {"strided": {"stride": 96}}]
SEVERAL = {"all_of": ["causal", {"any_of": THREE}]}


@pytest.mark.parametrize(
    ("mask", "summed"),
    [("causal", False), (STRIDED, False), (SINKS, False), (SEVERAL, True)],
    ids=str,
)
def test_sums_of_several_launches_are_float32(mask: Any, summed: bool) -> None:
    """Gradients of one launch are written in their dtype, and a second one adds to that; those of three are summed first."""
    problem = Problem(head_dim=32, heads=2, dtype="float16", lengths=((8192, 8192),))
    found = sources(pattern_of(mask), problem)
    outputs = [
        dict(found[p].parameters)[n] for p, n in ((QUERIES, "DQ"), (KEYS, "DK"), (KEYS, "DV"))
    ]
    assert outputs == ["*fp32" if summed else "*data"] * 3
    assert [found[p].sums for p in (QUERIES, KEYS)] == [summed] * 2
