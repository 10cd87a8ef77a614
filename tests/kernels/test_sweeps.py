"""Kernels of schedules with digits, several sweeps, few rows and keys in chunks equal the float64 reference."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from sparsegen.spec.reference import merge, reference
from tests.kernels.cases import (
    DEVICE,
    ON_GPU,
    Case,
    compare,
    compile_all,
    extras_of,
    once,
    run,
    source_of,
    tensors,
)
from tests.kernels.schedules import SOME, SWEEPS, made, per_head

NAMES = list(SWEEPS)
POINTERS = (("TMA", False),)
SOME_ROWS = [(60, 360), (5, 330), (40, 340), (90, 65)]
LENGTHS = {
    "strided": [(70, 70), (65, 200), (100, 65), (1, 100), (33, 1), (256, 259)],
    "columns first": [(70, 70), (65, 200), (100, 65), (1, 100)],
    "few rows": SOME_ROWS,
    "split rows": [(350, 350), *SOME_ROWS],
    "split boxes": SOME_ROWS,
    "nothing first": [(70, 70), (40, 20)],
    "stripes": [(20, 100), (70, 42)],
    "boxes of 8": [(70, 70), (65, 150), (100, 65), (1, 100), (48, 53)],
    "boxes of 4": [(70, 70), (100, 65)],
    "image": [(70, 70), (65, 150), (100, 65)],
    "video": [(65, 150), (100, 65)],
}
SHORT = [name for name in SWEEPS if "rows" not in name and name != "split boxes"]


def lengths_of(name: str) -> tuple[int, int]:
    """A call that has all kinds of rows of the schedule."""
    return (48, 53) if name in SHORT else (60, 345)


def case_of(name: str, q_len: int, kv_len: int, **more: Any) -> Case:
    settings = {
        n: more.pop(n) for n in ("alibi", "sink_logits", "null_key", "softcap") if n in more
    }
    pattern, schedule = made(name, **settings)
    return Case(
        name, pattern, q_len, kv_len, schedule=schedule, **{"heads": 2, "kv_heads": 1} | more
    )


def _lengths() -> dict[str, list[Case]]:
    out: dict[str, list[Case]] = {}
    for name, lengths in LENGTHS.items():
        for i, (q_len, kv_len) in enumerate(lengths):
            dtype, variant = ("float32", "float16")[i % 2], ("fast", "general", "general")[i % 3]
            case = case_of(name, q_len, kv_len, dtype=dtype, variant=variant)
            out.setdefault(name, []).append(case)
    return out


def _structure() -> list[Case]:
    out = []
    structure = [
        {"PERSISTENT": True},
        {"HEAVY_FIRST": False, "GROUP_HEADS": 1},
        {"BLOCK_M": 128, "BLOCK_N": 32, "num_warps": 8},
    ]
    for name in ("strided", "split rows", "boxes of 8", "image"):
        more = {"batch": 2, "heads": 3} if name in SHORT else {}
        out += [case_of(name, *lengths_of(name), knobs=tuple(k.items()), **more) for k in structure]
        out.append(case_of(name, *lengths_of(name), head_dim=24, value_dim=40))
    return out


# of each schedule two calls, in both dtypes, show what depends on Triton
EACH = _structure() + [case for cases in _lengths().values() for case in cases[:2]]
ONCE = [case for cases in _lengths().values() for case in cases[2:]]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    if ON_GPU:
        compile_all(ONCE + EACH)


@pytest.mark.parametrize("case", EACH + once(ONCE), ids=str)
def test_equals_reference(case: Case) -> None:
    compare(case)


@pytest.mark.parametrize("name", NAMES)
def test_features(name: str) -> None:
    """Scores that depend on positions; terms that join once, in the first sweep."""
    settings = {"alibi": True, "softcap": 3.0, "sink_logits": True, "null_key": True}
    case = case_of(name, *lengths_of(name), heads=1, **settings)
    compare(case, **extras_of(case))


@pytest.mark.parametrize("name", NAMES)
def test_ragged_batch(name: str) -> None:
    """Per-batch lengths and left padding, so each entry has positions of its own; what is outside holds NaN."""
    q_len, most = lengths_of(name)
    variant = ("fast", "general")[NAMES.index(name) % 2]
    case = case_of(name, q_len, most, batch=4, heads=1, variant=variant, knobs=POINTERS)
    q, k, v = tensors(case)
    data = {
        "q_lengths": torch.tensor([q_len, 17, 0, 33], dtype=torch.int32, device=DEVICE),
        "kv_starts": torch.tensor([0, 13, 5, 3], dtype=torch.int32, device=DEVICE),
        "kv_lengths": torch.tensor([most, most - 19, 20, 25], dtype=torch.int32, device=DEVICE),
    }
    for b in range(4):
        q[b, :, int(data["q_lengths"][b]) :] = math.nan
        start = int(data["kv_starts"][b])
        stop = start + int(data["kv_lengths"][b])
        for t in (k, v):
            t[b, :, :start] = math.nan
            t[b, :, stop:] = math.nan
    out, lse = run(case, q, k, v, **data)
    want, want_lse = reference(case.pattern, q, k, v, **data)
    assert not out.isnan().any() and not lse.isnan().any()
    assert torch.allclose(out.double(), want, atol=2e-5, rtol=0)
    assert torch.equal(lse.isinf(), want_lse.isinf())
    assert (out[2] == 0).all() and (out[1, :, 17:] == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_shards_merge_to_the_whole(name: str) -> None:
    """Keys in two parts at their own positions, which cut residue classes, grid rows and chunks anywhere."""
    first = 50 if name in SHORT else 297
    case = case_of(name, 40, first + 40, heads=1, sink_logits=True)
    q, k, v = tensors(case)
    sinks = torch.tensor([0.5], device=DEVICE)
    whole, whole_lse = reference(case.pattern, q, k, v, sink_logits=sinks)
    parts = []
    cuts = [0, 37, *([] if name in SHORT else [293]), first + 40]
    for a, b in zip(cuts, cuts[1:]):
        given = {"q_start": first, "k_start": a, "relative": 0, "joins": 0, "sink_logits": sinks}
        parts.append(run(case, q, k[:, :, a:b], v[:, :, a:b], **given))
    merged, merged_lse = merge(parts, sink_logits=sinks)
    assert torch.allclose(merged.double(), whole, atol=2e-5, rtol=0)
    assert torch.allclose(merged_lse.double(), whole_lse, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ["strided", "boxes of 8"])
def test_positions_beyond_32_bits(name: str) -> None:
    """Digits of positions beyond 2^31, and the same rows at multiples of both steps: the general variant."""
    case = case_of(name, 30, 50, variant="general")
    q, k, v = tensors(case)
    out, _ = run(case, q, k, v)
    far = 24 * (5 << 31)
    got, _ = run(case, q, k, v, q_start=far + 20, k_start=far, relative=0)
    assert torch.equal(got, out)


@pytest.mark.parametrize("persistent", [False, True])
def test_heads_with_sweeps_of_their_own(persistent: bool) -> None:
    """A launch has programs only for the heads that take part, and writes only their rows."""
    pattern, schedule = per_head(sink_logits=True)
    dims = {"batch": 2, "heads": 7, "kv_heads": 7, "knobs": (("PERSISTENT", persistent),)}
    case = Case("heads", pattern, 50, 345, schedule=schedule, **dims)
    grids = source_of(case).grids
    assert [g.heads_of(7) for g in grids] == [7, 3, 1, 1]
    assert [(g.split, g.combine) for g in grids[2:]] == [(True, False), (False, True)]
    compare(case, **extras_of(case))


def test_a_split_sweep_is_deterministic() -> None:
    case = case_of("split rows", 20, 330, dtype="float16")
    q, k, v = tensors(case)
    first, again = run(case, q, k, v), run(case, q, k, v)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


def test_rows_that_no_sweep_touches_keep_their_bits() -> None:
    """The sweep of few rows leaves all other rows as the first sweep wrote them."""
    alone = case_of("few rows", 60, 350)
    band = alone.schedule.classes[0].sweeps[:1]
    one = replace(alone.schedule, classes=(replace(alone.schedule.classes[0], sweeps=band),))
    q, k, v = tensors(alone)
    both, lse = run(alone, q, k, v)
    first, first_lse = run(replace(alone, schedule=one), q, k, v)
    other = [i for i in range(60) if not SOME[0] <= 290 + i <= SOME[1]]
    assert torch.equal(both[:, :, other], first[:, :, other])
    assert torch.equal(lse[:, :, other], first_lse[:, :, other])
    assert not torch.equal(both[:, :, SOME[0] - 290], first[:, :, SOME[0] - 290])
