"""Boxes of a grid as key tiles: neighbourhoods on the warp-specialised kernel, by boxes that a descriptor loads.

``tests/kernels`` runs the portable text of the same schedules, ``tests/schedule/test_key_boxes.py`` their key tiles.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch

from sparsegen.codegen import key_boxes
from sparsegen.schedule.build import candidates
from sparsegen.schedule.tree import HeadClass, Schedule, Tiling
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from sparsegen.spec.reference import merge, reference
from tests.hopper.backward_runs import gradients_of, kernel_of, saved_of
from tests.hopper.runs import NEAR, Run, compare, judge, rendered
from tests.hopper.small_patterns import extras, pattern_of
from tests.kernels.schedules import near_on_grid, schedule

LARGE = {"BLOCK_N": 128}
ALONE = {"PERSISTENT": True, "BLOCK_M": 64, "BLOCK_N": 16}
DEEP = {"PERSISTENT": True, "BLOCK_N": 64, "STAGES": 3}


def grid(*shape: int) -> list[str]:
    """Digits of q and k on a grid, rows slowest: the text of each and of its distance."""
    out, step = [], 1
    for t, n in enumerate(reversed(shape)):
        q, k = ((f"{x} // {step}" if step > 1 else x) for x in "qk")
        out.append(f"{q} - {k}" if t == len(shape) - 1 else f"{q} % {n} - {k} % {n}")
        step *= n
    return out


def near(shape: tuple[int, ...], radius: tuple[int, ...], also: str = "") -> str:
    """Neighbours within a radius an axis, as a predicate."""
    parts = (f"abs({d}) <= {r}" for d, r in zip(grid(*shape), reversed(radius)))
    return " and ".join([*parts, *([also] if also else [])])


@cache
def made(mask: str, tiling: Tiling) -> tuple[Pattern, Schedule]:
    pattern = pattern_of({"predicate": mask})
    return pattern, schedule(HeadClass(None, (near_on_grid(mask, tiling),), mask))


def run_of(mask: str, tiling: Tiling, q_len: int, kv_len: int, **more: Any) -> Run:
    pattern, of = made(mask, tiling)
    settings = more.pop("settings", None)
    if settings:
        pattern = pattern_of({"predicate": mask}, **settings)
    return Run("near", pattern, q_len, kv_len, schedule=of, **more)


IMAGE, VIDEO = (16,), (10, 120)
GRIDS: list[tuple[str, Tiling, tuple[int, int]]] = [
    (near((32, 16), (3, 4)), Tiling(IMAGE, (4,), IMAGE, 8), (512, 512)),
    (near((32, 16), (3, 4)), Tiling(IMAGE, (8,), IMAGE, 16), (256, 512)),  # the last queries alone
    (near((24, 24), (2, 5)), Tiling((24,), (8,), (24,), 16), (576, 576)),  # boxes beyond a line's end
    (near((20, 40), (8, 1)), Tiling((40,), (16,), (40,), 4), (800, 400)),  # more queries than keys
    (near((9, 48), (20, 7)), Tiling((48,), (2,), (48,), 8), (432, 432)),  # all lines
    (near((16, 8), (1, 6)), Tiling((8,), (8,), (8,), 16), (128, 128)),  # boxes wider than a line
    (near((32, 16), (3, 4), "k <= q"), Tiling(IMAGE, (2,), IMAGE, 4), (512, 512)),
    (near((4, 12, 10), (1, 2, 3)), Tiling(VIDEO, (4, 4), VIDEO, 8), (480, 480)),  # 30 query tiles
    (near((4, 12, 10), (1, 2, 3)), Tiling(VIDEO, (8, 2), VIDEO, 4), (333, 480)),  # any queries
    (near((4, 12, 10), (1, 2, 3)), Tiling(VIDEO, (4, 4), VIDEO, 16), (480, 250)),  # keys end in a frame
    (near((6, 8, 16), (2, 3, 4), "k <= q"), Tiling((16, 128), (8, 2), (16, 128), 16), (768, 768)),
]  # fmt: skip


@pytest.mark.parametrize("knobs", [{}, LARGE], ids=str)
@pytest.mark.parametrize(("mask", "tiling", "lengths"), GRIDS, ids=str)
def test_grids(mask: str, tiling: Tiling, lengths: tuple[int, int], knobs: dict[str, Any]) -> None:
    """Edges on all sides, boxes beyond a line's end, tiles with fewer rows than they hold."""
    compare(run_of(mask, tiling, *lengths, knobs=knobs))


@pytest.mark.parametrize("knobs", [ALONE, DEEP], ids=str)
@pytest.mark.parametrize("case", [1, 6, 9])
def test_knobs(case: int, knobs: dict[str, Any]) -> None:
    mask, tiling, lengths = GRIDS[case]
    compare(run_of(mask, tiling, *lengths, knobs=knobs))


@pytest.mark.parametrize("heads", [(2, 6, 3), (1, 8, 1), (3, 2, 2)], ids=str)
def test_heads_share_keys(heads: tuple[int, int, int]) -> None:
    batch, query_heads, kv_heads = heads
    shared = {"batch": batch, "heads": query_heads, "kv_heads": kv_heads, "knobs": DEEP}
    compare(run_of(*GRIDS[0][:2], 256, 256, **shared))
    compare(run_of(*GRIDS[7][:2], 200, 240, **shared))


@pytest.mark.parametrize("case", [0, 7])
def test_features(case: int) -> None:
    settings = {"softcap": 2.0, "alibi": True, "sink_logits": True, "null_key": True, "scale": 0.3}
    mask, tiling, lengths = GRIDS[case]
    run = run_of(mask, tiling, *lengths, settings=settings, head_dim=24, value_dim=40)
    compare(run, **extras(run.pattern, 2, 1, 24, 40))


def test_sixteen_bits() -> None:
    mask, tiling, lengths = GRIDS[0]
    compare(run_of(mask, tiling, *lengths, head_dim=64, value_dim=64, rounds=True))


def test_heads_with_neighbourhoods_of_their_own() -> None:
    """Branches of one launch, each with boxes of its own width; other heads see one run of keys."""
    masks = [near((32, 16), (3, 4)), near((32, 16), (1, 7)), near((32, 16), (5, 0))]
    rules = [
        {"heads": heads, "mask": {"predicate": mask}}
        for heads, mask in zip((0, "1-2", "rest"), masks)
    ]
    classes = [
        HeadClass(heads, (near_on_grid(mask, Tiling(IMAGE, (4,), IMAGE, width)),), mask)
        for heads, mask, width in zip((((0, 0),), ((1, 2),), None), masks, (8, 16, 4))
    ]
    pattern = Pattern.from_dict({"name": "heads", "heads": rules})
    for knobs in ({}, ALONE):
        compare(Run("heads", pattern, 512, 512, 1, 4, 2, schedule=schedule(*classes), knobs=knobs))


# ---------------------------------------------------------------------- calls
@pytest.mark.parametrize(
    ("case", "lengths"),
    [(0, (120, 128)), (0, (64, 120)), (7, (40, 115)), (7, (31, 121))],
    ids=str,
)
def test_ragged_lines_go_by_pointers(case: int, lengths: tuple[int, int]) -> None:
    """A descriptor's view has whole lines; of queries too, where they come by one."""
    compare(run_of(*GRIDS[case][:2], *lengths), "portable")


def test_left_padding_goes_by_pointers() -> None:
    run = run_of(*GRIDS[0][:2], 64, 96, batch=2)
    q, k, v = run.tensors()
    starts = torch.tensor([0, 24], dtype=torch.int32)
    kernel = run.kernel()
    out, lse = kernel.attend(q, k, v, run.call(kv_starts=starts))
    assert kernel.ran == ["portable"]
    judge(run, q, k, v, out, lse, kv_starts=starts)


@pytest.mark.parametrize("case", [0, 7])
def test_shards_merge_to_the_whole(case: int) -> None:
    """Keys in two parts at their own positions, cut at a line that is no frame's first."""
    mask, tiling, (n, _) = GRIDS[case]
    run = run_of(mask, tiling, n, n)
    q, k, v = run.tensors()
    whole, whole_lse = reference(run.pattern, q, k, v)
    cut, parts = 15 * tiling.k_cuts[0], []
    for a, b in ((0, cut), (cut, n)):
        kernel = run.kernel()
        call = run.call(q_start=0, k_start=a, relative=0, joins=0)
        parts.append(kernel.attend(q, k[:, :, a:b], v[:, :, a:b], call))
        assert kernel.ran == ["hopper"]
    merged, merged_lse = merge(parts)
    assert (merged - whole).abs().max() < NEAR and (merged_lse - whole_lse).abs().max() < NEAR


def test_nothing_beyond_the_keys_leaks() -> None:
    """Keys and values are slices of a buffer full of NaN, and the box of the last lines goes beyond them."""
    mask, tiling, _ = GRIDS[0]
    run = run_of(mask, tiling, 128, 240, kv_heads=2)
    q, _, _ = run.tensors()
    k, v = (torch.full((1, 2, 512, 16), math.nan)[:, :, :240] for _ in range(2))
    k.normal_()
    v.fill_(1.0)
    kernel = run.kernel()
    out, lse = kernel.attend(q, k, v, run.call())
    assert kernel.ran == ["hopper"]
    seen = lse.isfinite()
    assert seen.any() and (out[seen] - 1.0).abs().max() < 1e-5


def test_gradients_of_queries() -> None:
    """dQ over the same key tiles; with three axes the portable kernel does it, see the kernel tests."""
    mask, tiling, lengths = GRIDS[1]
    short = tuple(n // 2 for n in lengths)
    run = run_of(mask, tiling, *short, knobs={"BLOCK_M": 64, "BLOCK_N": 64})
    saved, want, _ = saved_of(run)
    kernel = kernel_of(run)
    got = gradients_of(kernel, run, saved, "q")
    assert kernel.ran == {"queries": "h"}
    assert (got.q - want[0]).abs().max() < 1e-4


# ---------------------------------------------------------------------- what the search hands out
LONG = Problem(head_dim=16, value_dim=16, heads=2, kv_heads=1, dtype="float16", lengths=((32768, 32768),))  # fmt: skip
SEARCHED = [
    ({"neighborhood": {"shape": [32, 64], "radius": [8, 8]}}, 1024),
    ({"neighborhood": {"shape": [8, 16, 16], "radius": [1, 4, 4]}}, 1024),
    ({"all_of": ["causal", {"neighborhood": {"shape": [24, 48], "radius": [8, 4]}}]}, 1152),
]


@pytest.mark.parametrize(("mask", "length"), SEARCHED, ids=str)
def test_every_twin_of_the_search(mask: Any, length: int) -> None:
    pattern = pattern_of(mask)
    twins = [c.schedule for c in candidates(pattern, LONG) if "key boxes" in c.schedule.label]
    assert twins
    for found in twins:
        compare(Run(found.label, pattern, length, length, schedule=found, knobs={"BLOCK_N": 64}))


# ---------------------------------------------------------------------- these tests can fail
def broken(run: Run) -> bool:
    """Whether the kernel is found wrong; its text is rendered anew."""
    rendered.cache_clear()
    try:
        compare(run)
    except AssertionError:
        return True
    finally:
        rendered.cache_clear()
    return False


WRONG = {
    "beyond": (2, lambda self, upper: ("y0[None, :] >= 0",)),
    "row_hi": (0, property(lambda self: "x1 + 30")),
    "corner": (0, property(lambda self: ("y1_first.to(tl.int32)", "y0_first"))),
    "of_lines": (9, lambda self, tests: ((), ())),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_fault_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, wrong = WRONG[what]
    mask, tiling, lengths = GRIDS[case]
    assert not broken(run_of(mask, tiling, *lengths))
    monkeypatch.setattr(key_boxes.KeyBoxes, what, wrong)
    assert broken(run_of(mask, tiling, *lengths))


def test_the_kernel_tests_lines_and_no_single_keys() -> None:
    """Whole lines: no cell is compared with the call's first and last key."""
    mask, tiling, lengths = GRIDS[0]
    source = run_of(mask, tiling, *lengths).source()
    assert source.hopper is not None
    consumer = source.hopper.text.split("def consume_", 1)[1]
    assert "k_pos" not in consumer and "k_pos" in source.text
