"""The warp-specialised kernel, run by the machine, equals the float64 reference: patterns, schedules, dims, features."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sparsegen.codegen.hopper import shared_bytes
from sparsegen.launch.tables import random_table
from sparsegen.spec.reference import merge, reference
from tests.hopper.machine import Machine
from tests.hopper.runs import NEAR, Run, compare, judge
from tests.hopper.small_patterns import MASKS, extras, gathered_queries, pattern_of, schedules_of
from tests.kernels.schedules import made, per_head


def run_of(name: str, q_len: int, kv_len: int, /, settings: Any = None, **more: Any) -> Run:
    return Run(name, pattern_of(MASKS[name], **(settings or {})), q_len, kv_len, **more)


# ---------------------------------------------------------------------- lengths, dims, knobs
LENGTHS = [(64, 64), (65, 63), (1, 1), (1, 100), (100, 1), (300, 129), (129, 300), (257, 257)]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", ["causal", "sinks"])
def test_ragged_lengths(name: str, lengths: tuple[int, int]) -> None:
    """More queries than keys too: then the first rows see nothing."""
    compare(run_of(name, *lengths, seed=sum(lengths)))


@pytest.mark.parametrize("name", ["full", "window", "two-sided"])
def test_runs_of_keys(name: str) -> None:
    compare(run_of(name, 150, 200))


KNOBS: list[dict[str, Any]] = [
    {"PERSISTENT": True},
    {"PERSISTENT": True, "BLOCK_M": 64, "STAGES": 3},
    {"PERSISTENT": True, "BLOCK_N": 128, "STAGES": 4, "GROUP_HEADS": 1},
    {"BLOCK_M": 64},
    {"BLOCK_N": 16, "STAGES": 4},
    {"BLOCK_N": 64, "STAGES": 3},
    {"HEAVY_FIRST": False, "GROUP_HEADS": 1},
    {"GROUP_HEADS": 4},
    {"LATE_VALUES": True},
    {"LATE_VALUES": True, "PERSISTENT": True, "BLOCK_N": 128, "STAGES": 4},
]


@pytest.mark.parametrize("knobs", KNOBS, ids=lambda k: "-".join(f"{n}={x}" for n, x in k.items()))
def test_knobs(knobs: dict[str, Any]) -> None:
    """Programs walk over several tiles, some without keys; rings of all depths; one consumer and two."""
    heads = {"batch": 2, "heads": 6, "kv_heads": 3}
    for name, lengths in (("causal", (300, 200)), ("sinks", (150, 290))):
        compare(run_of(name, *lengths, knobs=knobs, **heads))


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (192, 128), (80, 40), (128, 256)], ids=str)
@pytest.mark.parametrize("persistent", [False, True])
def test_head_dims(dims: tuple[int, int], persistent: bool) -> None:
    """One column chunk, two, a padded one; outputs as wide as a chunk of the queries, and not."""
    knobs = {"PERSISTENT": persistent, "LATE_VALUES": dims == (192, 128)}
    wide = {"head_dim": dims[0], "value_dim": dims[1], "knobs": knobs}
    run = run_of("sinks", 140, 170, heads=4, kv_heads=2, **wide)
    kernel = compare(run)
    promised = shared_bytes(run.config().as_dict(), run.problem)
    assert kernel.shared_bytes == promised - 1024  # room for the barriers


def test_sixteen_bits() -> None:
    """Values and weights rounded as the hardware does, judged as the tuner judges."""
    compare(run_of("sinks", 150, 200, head_dim=64, value_dim=64, rounds=True))


@pytest.mark.parametrize("seed", range(12))
def test_many_interleavings(seed: int) -> None:
    """Other seeds are other schedules of the partitions and other moments of landing, and the same bits."""
    knobs = {
        "PERSISTENT": True,
        "STAGES": 2 + seed % 3,
        "BLOCK_N": (16, 128)[seed % 2],
        "LATE_VALUES": seed % 4 > 1,
    }
    run = run_of("sinks", 200, 140, heads=4, knobs=knobs)
    q, k, v = run.tensors()
    first, again = (
        Run(**{**vars(run), "seed": s}).kernel().attend(q, k, v, run.call()) for s in (0, seed + 1)
    )
    judge(run, q, k, v, *first)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


# ---------------------------------------------------------------------- schedules of the search
SEARCHED: list[tuple[str, str, tuple[int, int], str]] = [
    # pattern, schedule, lengths, texts of the launches
    ("strided", "runs + mod 16", (256, 256), "hopper hopper"),
    ("strided", "runs + mod 16", (96, 256), "hopper hopper"),
    ("strided", "runs + mod 16", (130, 130), "hopper portable"),  # no whole periods
    ("strided", "runs", (250, 260), "hopper"),
    ("dilated", "mod 4", (200, 300), "hopper"),
    ("dilated", "runs", (203, 301), "hopper"),
    ("fixed", "runs + keys mod 16", (200, 256), "hopper"),
    ("fixed", "runs", (201, 255), "hopper"),
    ("axial", "runs", (512, 512), "hopper"),
    ("longnet", "runs", (240, 300), "hopper"),
    ("longformer", "runs + split rows", (200, 200), "hopper hopper portable"),
    ("longformer", "runs", (201, 190), "hopper"),
    ("neighborhood", "runs", (512, 512), "hopper"),
    ("neighborhood", "box 8 of 8", (512, 512), "hopper"),
    ("bigbird", "runs + split rows", (48, 64), "portable hopper portable"),
]


@pytest.mark.parametrize(
    ("name", "label", "lengths", "ran"), SEARCHED, ids=lambda x: str(x).replace(" ", "")
)
def test_schedules_of_the_search(name: str, label: str, lengths: tuple[int, int], ran: str) -> None:
    run = run_of(name, *lengths, schedule=schedules_of(name)[label])
    compare_with_tables(run, ran)
    if ran.startswith("hopper"):
        compare_with_tables(Run(**{**vars(run), "knobs": {"PERSISTENT": True, "BLOCK_M": 64}}), ran)


def compare_with_tables(run: Run, ran: str) -> None:
    kernel, (q, k, v) = run.kernel(), run.tensors()
    first = run.kv_len - run.q_len
    tables = [random_table(t, first, run.q_len, run.kv_len, "cpu") for t in kernel.source.tables]
    out, lse = kernel.attend(q, k, v, run.call(tables=tables))
    assert " ".join(kernel.ran) == ran
    judge(run, q, k, v, out, lse)


# ---------------------------------------------------------------------- schedules written by hand
BY_HAND: dict[str, tuple[tuple[int, int], str]] = {
    "strided": ((96, 96), "hopper hopper"),
    "columns first": ((96, 160), "hopper hopper"),
    "few rows": ((60, 345), "hopper hopper"),
    "split rows": ((30, 330), "hopper hopper portable"),
    "split boxes": ((10, 310), "hopper portable portable"),  # boxes wider than a descriptor's group
    "nothing first": ((70, 70), "portable hopper"),
    "stripes": ((40, 96), "hopper"),
}


def by_hand(name: str, settings: Any = None, **more: Any) -> Run:
    pattern, schedule = made(name, **(settings or {}))
    return Run(name, pattern, *BY_HAND[name][0], schedule=schedule, **more)


@pytest.mark.parametrize("name", BY_HAND)
def test_schedules_by_hand(name: str) -> None:
    alone = {"PERSISTENT": True, "BLOCK_M": 64, "BLOCK_N": 16}
    for knobs in ({}, alone) if "portable" not in BY_HAND[name][1] else (alone,):
        compare(by_hand(name, knobs=knobs), BY_HAND[name][1])


@pytest.mark.parametrize("persistent", [False, True])
def test_gathered_queries(persistent: bool) -> None:
    pattern, schedule = gathered_queries()
    knobs = {"PERSISTENT": persistent}
    compare(Run("gathered", pattern, 150, 100, schedule=schedule, knobs=knobs))


def test_heads_with_launches_of_their_own() -> None:
    """One sweep, two, a split one and none; a term in the denominator joins once."""
    pattern, schedule = per_head(sink_logits=True)
    knobs = {"PERSISTENT": True}
    run = Run("heads", pattern, 8, 312, 2, 7, 7, schedule=schedule, knobs=knobs)
    compare(run, "hopper hopper hopper portable", **extras(pattern, 7, 7, 16, 16))


def test_heads_with_masks_of_their_own() -> None:
    """Branches of one launch, one of them without keys; query heads share key heads."""
    from sparsegen.spec.pattern import Pattern

    rules = [
        {"heads": 0, "mask": {"not": "full"}},
        {"heads": "1-3", "mask": MASKS["sinks"]},
        {"heads": "rest", "mask": "causal"},
    ]
    pattern = Pattern.from_dict({"name": "heads", "heads": rules})
    compare(Run("heads", pattern, 150, 190, 2, 8, 2, knobs={"PERSISTENT": True}))


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


@pytest.mark.parametrize("settings", FEATURES, ids=lambda s: "-".join(s))
def test_features(settings: dict[str, Any]) -> None:
    """Score modifications and extra terms, also on rows that see no key."""
    for lengths in ((130, 150), (90, 25)):
        run = run_of("sinks", *lengths, settings, heads=4, kv_heads=2, head_dim=24, value_dim=40)
        compare(run, **extras(run.pattern, 4, 2, 24, 40))


@pytest.mark.parametrize("name", ["strided", "columns first", "split rows"])
def test_features_of_chained_launches(name: str) -> None:
    settings = {"alibi": True, "softcap": 3.0, "sink_logits": True, "null_key": True}
    run = by_hand(name, settings)
    compare(run, BY_HAND[name][1], **extras(run.pattern, 2, 1, 16, 16))


# ---------------------------------------------------------------------- calls
@pytest.mark.parametrize("name", ["sinks", "few rows", "split rows"])
def test_ragged_batch(name: str) -> None:
    """Per-batch query lengths and left padding; what is outside holds NaN and stays there."""
    run = run_of(name, 150, 200) if name == "sinks" else by_hand(name)
    run = Run(**{**vars(run), "batch": 3, "knobs": {"PERSISTENT": True}})
    q, k, v = run.tensors()
    lengths, starts = [run.q_len, 17, 0], [0, 13, 5]
    for b, (n, start) in enumerate(zip(lengths, starts)):
        q[b, :, n:] = math.nan
        k[b, :, :start] = math.nan
        v[b, :, :start] = math.nan
    given = {
        "q_lengths": torch.tensor(lengths, dtype=torch.int32),
        "kv_starts": torch.tensor(starts, dtype=torch.int32),
    }
    out, lse = run.kernel().attend(q, k, v, run.call(**given))
    want, want_lse = reference(run.pattern, q, k, v, **given)
    assert not out.isnan().any() and torch.equal(lse.isinf(), want_lse.isinf())
    assert (out - want).abs().max() < NEAR
    assert (out[2] == 0).all() and (out[1, :, 17:] == 0).all()


@pytest.mark.parametrize("name", ["sinks", "strided"])
def test_shards_merge_to_the_whole(name: str) -> None:
    """Keys in two parts at their own positions; the terms of the denominator join at the merge."""
    settings = {"sink_logits": True}
    run = by_hand(name, settings) if name == "strided" else run_of(name, 96, 160, settings)
    q, k, v = run.tensors()
    more = extras(run.pattern, 2, 1, 16, 16)
    whole, whole_lse = reference(run.pattern, q, k, v, **more)
    first, cut, parts = run.kv_len - run.q_len, 56, []
    for a, b in ((0, cut), (cut, run.kv_len)):
        call = run.call(q_start=first, k_start=a, relative=0, joins=0, **more)
        parts.append(run.kernel().attend(q, k[:, :, a:b], v[:, :, a:b], call))
    merged, merged_lse = merge(parts, **more)
    assert (merged - whole).abs().max() < NEAR and (merged_lse - whole_lse).abs().max() < NEAR


def test_views() -> None:
    """Strided tensors give the same bits: a fused projection, [B, S, H, D] seen as [B, H, S, D]."""
    run = run_of("sinks", 150, 150, batch=2, heads=2, kv_heads=2)
    q, k, v = run.tensors()
    fused = torch.stack([q, k, v], 2).permute(0, 3, 2, 1, 4).contiguous()  # [B, S, 3, H, D]
    views = [fused[:, :, i].transpose(1, 2) for i in range(3)]
    assert not any(t.is_contiguous() for t in views)
    plain, seen = (run.kernel().attend(*t, run.call()) for t in ((q, k, v), views))
    assert torch.equal(plain[0], seen[0]) and torch.equal(plain[1], seen[1])


def test_nothing_beyond_the_last_key_leaks() -> None:
    """Keys and values are slices of a buffer full of NaN."""
    run = run_of("full", 100, 100, kv_heads=2)
    q, _, _ = run.tensors()
    k, v = (torch.full((1, 2, 160, 16), math.nan)[:, :, :100] for _ in range(2))
    k.normal_()
    v.fill_(1.0)
    out, lse = run.kernel().attend(torch.zeros_like(q), k, v, run.call())
    assert (out - 1.0).abs().max() < 1e-6 and (lse - math.log(100)).abs().max() < 1e-5


def test_the_machine_runs_the_text_alone() -> None:
    """Without the launch code's help: a name that the text does not take is an error."""
    source = run_of("causal", 64, 64).source()
    with pytest.raises(TypeError, match="nonsense"):
        Machine(source.hopper.text).launch(source.hopper.entry, 1, {"nonsense": 1}, {})
