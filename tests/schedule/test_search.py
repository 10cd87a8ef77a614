"""Which schedule is chosen: what it reaches at 32,768 tokens, and that every candidate computes the mask."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace

import pytest

from sparsegen.report.shipped import shipped
from sparsegen.schedule import count
from sparsegen.schedule.build import build, build_from_exprs
from sparsegen.schedule.build import candidates as of_pattern
from sparsegen.schedule.canonical import canonical_text
from sparsegen.schedule.cost import cost_of
from sparsegen.schedule.decompose import by_residue
from sparsegen.schedule.machine import Sizes
from sparsegen.schedule.normalise import to_dnf
from sparsegen.schedule.search import candidates, typical_call
from sparsegen.schedule.tree import IDENTITY, Schedule, Tiling
from sparsegen.schedule.verify import verify, verify_exprs
from sparsegen.schedule.ways import Group, name
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from tests.schedule.formulas import mask, random_blocks
from tests.schedule.unions import union
from tests.work import at_most

N = 32_768

# name → (percent at 64x64, percent at 128x64 at least, spellings)
CASES: dict[str, tuple[float, float, tuple[str, ...]]] = {
    "causal": (99.8, 99.5, ("k <= q", "not q < k")),
    "window and sinks": (
        89.3,
        84.5,
        (
            "k <= q and (q - k < 1024 or k < 4)",
            "(0 <= q - k and q - k < 1024) or (k < 4 and k <= q)",
        ),
    ),
    "longformer": (
        91.1,
        70.0,
        (
            "abs(q - k) <= 256 or k < 64 or q < 64",
            "min(q, k) < 64 or not (q - k > 256 or k - q > 256)",
        ),
    ),
    "dilated": (
        66.7,
        49.0,
        (
            "(q - k) % 8 == 0 and 0 <= q - k and q - k <= 1016",
            "q % 8 == k % 8 and k <= q and q // 8 - k // 8 < 128",
        ),
    ),
    "dilated 1, 2, 4": (
        66.6,
        44.0,
        (
            "0 <= q - k and (q - k <= 255 or ((q - k) % 2 == 0 and q - k <= 510)"
            " or ((q - k) % 4 == 0 and q - k <= 1020))",
            "k <= q and (q - k < 256 or (q % 2 == k % 2 and q - k <= 510)"
            " or (q % 4 == k % 4 and q - k <= 1020))",
        ),
    ),
    "strided": (
        72.6,
        55.0,
        (
            "k <= q and (q - k < 128 or (q - k) % 128 == 0)",
            "q >= k and (q % 128 == k % 128 or not q - k >= 128)",
        ),
    ),
    "fixed": (
        94.8,
        88.0,
        (
            "k <= q and (q // 128 == k // 128 or k % 128 >= 120)",
            "(k <= q and q - q % 128 == k - k % 128) or (k % 128 > 119 and q >= k)",
        ),
    ),
    "chunks": (
        99.2,
        98.0,
        ("q // 8192 == k // 8192 and k <= q", "q // 8192 * 8192 <= k and k <= q"),
    ),
    "prefix": (99.8, 99.5, ("k <= q or k < 2048", "not (k > q and k > 2047)")),
    "axial": (
        99.7,
        95.0,
        (
            "q // 256 == k // 256 or q % 256 == k % 256",
            "(q - k) % 256 == 0 or (q // 256 * 256 <= k and k < q // 256 * 256 + 256)",
        ),
    ),
    "neighbourhood": (
        50.8,
        38.0,
        (
            "abs(q // 256 - k // 256) <= 8 and abs(q % 256 - k % 256) <= 8",
            "not (q // 256 - k // 256 > 8 or k // 256 - q // 256 > 8)"
            " and -8 <= q % 256 - k % 256 and q % 256 - k % 256 <= 8",
        ),
    ),
    "neighbourhood in space": (
        34.2,
        22.0,
        (
            "abs(q // 4096 - k // 4096) <= 1 and abs(q // 64 % 64 - k // 64 % 64) <= 4"
            " and abs(q % 64 - k % 64) <= 4",
            "max(abs(q % 64 - k % 64), abs(q // 64 % 64 - k // 64 % 64)) < 5"
            " and -1 <= k // 4096 - q // 4096 and k // 4096 - q // 4096 < 2",
        ),
    ),
    "video": (
        99.3,
        95.0,
        ("q // 256 == k // 256 or (k // 8) % 16 == 0", "k % 128 < 8 or q // 256 == k // 256"),
    ),
    "bigbird without random": (
        100.0,
        86.5,
        (
            "abs(q // 64 - k // 64) <= 1 or k < 128 or q < 128",
            "(-1 <= q // 64 - k // 64 and q // 64 - k // 64 <= 1) or k // 64 < 2 or q // 64 <= 1",
        ),
    ),
    "ring": (
        28.1,
        20.0,
        (
            "abs(q - k) <= 50 and not abs(q - k) <= 10 and not (q - k) % 3 == 0",
            "10 < abs(q - k) and abs(q - k) < 51 and q % 3 != k % 3",
        ),
    ),
    "not local": (99.7, 99.4, ("k <= q and not (0 <= q - k and q - k < 24)", "q - k >= 24")),
    "two strides": (
        83.6,
        77.0,
        (
            "k <= q and ((q - k) % 24 == 0 or (q - k) % 128 == 0)",
            "k <= q and not (q % 24 != k % 24 and (k - q) % 128 != 0)",
        ),
    ),
}


def efficiency(schedule: Schedule, tile: tuple[int, int], n: int = N) -> tuple[float, int]:
    """(percent of the computed cells that are visible, computed cells)."""
    seen = count.count(schedule, n, n)
    computed = count.computed_cells(schedule, n, n, *tile)
    return 100 * seen.cells / computed, computed


@pytest.mark.parametrize("name", CASES)
def test_what_is_computed_is_nearly_what_is_seen(name: str) -> None:
    small, large, spellings = CASES[name]
    for tile, least in (((64, 64), small - 1), ((128, 64), large)):
        found = []
        for text in spellings:
            schedule = build_from_exprs([(None, mask(text))], lengths=[(N, N)], tile=tile)
            share, computed = efficiency(schedule, tile)
            assert share >= least, (text, tile, schedule.label)
            found.append((computed, schedule.label))
        assert found[0] == found[1], f"{name}: two spellings, two schedules"


PLAIN = (
    "k <= q",
    "k <= q and (q - k < 1024 or k < 4)",
    "q // 8192 == k // 8192 and k <= q",
    "k <= q or k < 2048",
    "q - k >= 24",
    "q // 64 == k // 64",
)


@pytest.mark.parametrize("text", PLAIN)
def test_what_no_tiling_helps_stays_plain(text: str) -> None:
    for tile in ((128, 64), (64, 64)):
        (only,) = candidates([(None, mask(text))], tile=tile)
        assert only.schedule.label == "runs" and only.to_measure
        (sweep,) = only.schedule.classes[0].sweeps
        assert sweep.tiling == IDENTITY and all(s.tiling == IDENTITY for s in sweep.segments)


def test_candidates_are_distinct_and_cheapest_first() -> None:
    for _, _, (text, _) in CASES.values():
        found = candidates([(None, mask(text))], lengths=[(N, N)])
        labels = [c.schedule.label for c in found]
        assert len(labels) == len(set(labels)) and all(len(x) < 60 for x in labels)
        near = [c for c in found if c.to_measure]
        assert found[: len(near)] == tuple(near)
        assert 1 <= len([c for c in near if "key boxes" not in c.schedule.label]) <= 3
        others = [c.cost.seconds for c in near if c.schedule.label != "runs"]
        assert others == sorted(others)


def test_labels_say_how_tiles_lie() -> None:
    labels = {
        name: build_from_exprs([(None, mask(CASES[name][2][0]))], lengths=[(N, N)]).label
        for name in ("strided", "fixed", "dilated", "axial", "neighbourhood", "longformer")
    }
    assert labels.pop("neighbourhood").startswith("box ")
    assert labels == {
        "strided": "runs + mod 128",
        "fixed": "runs + keys mod 128",
        "dilated": "mod 8",
        "axial": "runs + mod 256",
        "longformer": "runs + split rows",
    }


@pytest.mark.parametrize(
    ("shapes", "want"),
    [
        ([Tiling((128,), (2,)), IDENTITY], "runs + box 2 of 128"),
        ([Tiling((4,), (1,), (2,)), Tiling((12,), (1,))], "mod 4 + mod 12 + keys mod 2"),
        ([Tiling((128,), (4,)), Tiling((4096,), (1,)), IDENTITY], "runs + mod 4096 + box 4 of 128"),
        ([Tiling((4,), (1,)), Tiling((2,), (1,))], "mod 2 + mod 4"),
        ([Tiling((), (), (8,)), Tiling((2,), (1,))], "runs + mod 2 + keys mod 8"),
        ([Tiling((256,), (16,)), Tiling((256,), (8,))], "box 8 of 256 + box 16 of 256"),
    ],
)
def test_a_label_has_one_order_of_parts(shapes: list[Tiling], want: str) -> None:
    (segment,) = build_from_exprs([(None, mask("k <= q"))]).classes[0].sweeps[0].segments
    groups = [
        Group(replace(t, k_cuts=()), (replace(segment, tiling=t),), (), rows=None) for t in shapes
    ]
    apart = Group(IDENTITY, (segment,), (), (0, 63), split=True)
    for order in itertools.permutations(groups):
        assert name(order) == want
        assert name([*order, apart]) == name([apart, *order]) == f"{want} + split rows"


def test_a_label_does_not_follow_the_order_of_the_sweeps() -> None:
    """At 4,096 tokens boxes of 2 residues have more query tiles with keys than runs, so they are swept first."""
    found = candidates([(None, mask(CASES["strided"][2][0]))], lengths=[(4096, 4096)])
    at = {c.schedule.label: c.schedule.classes[0].sweeps for c in found}
    assert [w.tiling.q_cuts for w in at["runs + box 2 of 128"]] == [(128,), ()]
    assert [w.tiling.q_cuts for w in at["runs + box 4 of 128"]] == [(), (128,)]


def test_global_rows_are_swept_apart_and_split() -> None:
    text = "abs(q - k) <= 256 or k < 64 or 0 <= q and q < 64"
    schedule = build_from_exprs([(None, mask(text))], lengths=[(N, N)])
    first, second = schedule.classes[0].sweeps
    assert (first.rows, first.split) == (None, False)
    assert (second.rows, second.split) == ((0, 63), True)
    assert [s.name for s in second.segments] == ["rows"]


def test_only_heavy_rows_still_write_every_row() -> None:
    schedule = build_from_exprs([(None, mask("8 <= q and q < 16"))], lengths=[(N, N)])
    first, second = schedule.classes[0].sweeps
    assert first.segments == () and first.rows is None and second.rows == (8, 15)
    verify_exprs(schedule, [(None, mask("8 <= q and q < 16"))])


def test_each_class_of_heads_is_chosen_alone() -> None:
    strided, causal = mask(CASES["strided"][2][0]), mask("k <= q")
    schedule = build_from_exprs([(((0, 3),), strided), (None, causal)], lengths=[(N, N)])
    assert [len(c.sweeps) for c in schedule.classes] == [2, 1]
    assert schedule.label == "runs + mod 128 / runs"


@pytest.mark.parametrize(
    ("lengths", "most", "want"),
    [
        ([], None, (32_768, 32_768)),
        ([(512, 512), (4096, 4096)], None, (4096, 4096)),
        ([(64, 64)], None, (2048, 2048)),
        ([(1 << 20, 1 << 20)], None, (65_536, 65_536)),
        ([(1, 8192)], None, (1, 8192)),
        ([], 64, (64, 64)),
    ],
)
def test_the_call_that_schedules_are_compared_at(
    lengths: list[tuple[int, int]], most: int | None, want: tuple[int, int]
) -> None:
    assert typical_call(lengths, most) == want


@pytest.mark.parametrize("row", [r["name"] for r in shipped()])
def test_every_candidate_of_a_shipped_pattern_is_right(row: str) -> None:
    pattern = Pattern.from_yaml(row)
    if any(node.decided_by_data for _, node in pattern.nodes()):
        pytest.skip("decided by run-time data: no schedule")
    seen = set()
    for tile in ((128, 64), (64, 64)):
        for c in of_pattern(pattern, tile=tile):
            if c.schedule.classes not in seen:
                verify(c.schedule, pattern, ((37, 37), (8, 153)), ((64, 32),))
            seen.add(c.schedule.classes)


@pytest.mark.parametrize("seed", range(20))
def test_every_candidate_of_a_random_union_is_right(seed: int) -> None:
    text = union(random.Random(seed))
    rules, tile = [(None, mask(text))], ((128, 64), (64, 64))[seed % 2]
    lengths = [(4096, 4096)] if seed % 3 else ()
    for i, c in enumerate(candidates(rules, lengths=lengths, tile=tile)):
        calls, blocks = ((37, 37), (29, 11), (8, 53)), ((16, 16), (32, 8))[i % 2]
        verify_exprs(c.schedule, rules, calls, (blocks,))


def test_drawn_blocks_keep_their_walk_beside_other_tilings() -> None:
    from sparsegen.spec.expr import Or

    drawn = Or((mask(CASES["strided"][2][0]), random_blocks(8, 2)))
    for c in candidates([(None, drawn)], lengths=[(N, N)]):
        verify_exprs(c.schedule, [(None, drawn)], ((64, 64), (29, 53)), ((16, 16),))
        tables = [s for w in c.schedule.classes[0].sweeps for s in w.segments if s.table]
        assert tables and all(s.tiling == IDENTITY for s in tables)


STUBBORN = (
    # strides of which none divides another
    "k <= q and (" + " or ".join(f"(q - k) % {m} == 0" for m in (5, 6, 7, 8, 9)) + ")",
    # two spaces whose digits have nothing in common
    "(k // 2) % 16 == 2"
    " or (abs(q // 20 - k // 20) <= 1 and abs(q // 5 % 4 - k // 5 % 4) <= 2"
    " and abs(q % 5 - k % 5) <= 3)"
    " or (abs(q // 48 - k // 48) <= 1 and abs(q // 12 % 4 - k // 12 % 4) <= 2"
    " and abs(q % 12 - k % 12) <= 3)",
)


@pytest.mark.parametrize(("text", "calls"), [*zip(STUBBORN, (2_000_000, 25_000_000))])
def test_the_search_has_an_end(text: str, calls: int) -> None:
    """The budget ends it, and the best way so far is right."""
    with at_most(calls):
        found = candidates([(None, mask(text))])
    assert any(re.search("budget", note) for note in found[0].schedule.notes)
    for c in found:
        verify_exprs(c.schedule, [(None, mask(text))], ((64, 64), (29, 53)), ((16, 16),))


LONG = "k <= " + " + ".join(f"q // {m}" for m in range(3, 40))  # about 80 operations


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (STUBBORN[0], "the budget of 12,000 proof steps ran out while the mask was reduced"),
        (
            "k <= q and "
            + " and ".join(f"(k % {m} == 0 or q % {m} == 1)" for m in (5, 7, 11, 13, 17, 19, 23)),
            "tested cell by cell, having no normal form of 48 cubes at most: [(",
        ),
        (LONG, "forms of more than 60 operations became tests or wider limits"),
    ],
)
def test_what_a_bound_costs_is_noted(text: str, note: str) -> None:
    found = candidates([(None, mask(text))])
    assert all(any(note in n for n in c.schedule.notes) for c in found)
    again = candidates([(None, mask(text))])  # what is remembered is noted like what is new
    assert [c.schedule.notes for c in again] == [c.schedule.notes for c in found]
    short = "budget|cell by cell|operations"
    for plain in ("k <= q", CASES["strided"][2][0], CASES["neighbourhood in space"][2][0]):
        (best, *_) = candidates([(None, mask(plain))])
        assert not any(re.search(short, n) for n in best.schedule.notes)


def test_predictions_are_for_the_sizes_of_the_problem() -> None:
    pattern = Pattern.from_yaml("sparse_transformer_strided")
    problem = Problem(lengths=((N, N),), heads=4, kv_heads=2, head_dim=64)
    for c in of_pattern(pattern, problem):
        sizes = Sizes(heads=4, kv_heads=2, dim=64, value_dim=64)
        assert c.cost == cost_of(c.schedule, N, N, (128, 64), sizes)
    free = replace(pattern, problem=None)
    assert {c.cost.sizes for c in of_pattern(free)} == {Sizes()}


def test_few_heads_have_long_programs_split() -> None:
    """64 rows that see all keys are a long program for each head: many heads fill the machine beside them."""
    pattern = Pattern.from_dict(
        {"name": "g", "mask": {"any_of": [{"window": {"radius": 256}}, {"global": {"tokens": 64}}]}}
    )
    few, many = (build(pattern, Problem(lengths=((N, N),), heads=h)) for h in (4, 64))
    assert (few.label, many.label) == ("runs + split rows", "runs")


def test_the_problem_decides_what_is_compared() -> None:
    """A stride of 128 has 32 rows in 4096 tokens, and only a box of residues fills a tile with them."""
    pattern = Pattern.from_yaml("sparse_transformer_strided")
    long = build(pattern, Problem(lengths=((N, N),)))
    short = build(pattern, Problem(lengths=((2048, 2048),)))
    assert long.label == "runs + mod 128" and short.label != long.label


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("(q - k) % 8 == 0 and 0 <= q - k and q - k <= 5", "q - k == 0"),
        ("(q - k) % 8 == 3 and 0 <= q - k and q - k <= 2", "none"),
        ("q // 64 == k // 64 and q % 64 == k % 64", "q - k == 0"),
        ("(q // 64 - k // 64) % 64 == 0 and q // 4096 == k // 4096", "(q // 64) - (k // 64) == 0"),
        ("(q - k) % 8 == 4 and abs(q - k) < 4", "none"),
    ],
)
def test_a_remainder_that_meets_one_multiple_is_an_equality(text: str, want: str) -> None:
    assert canonical_text(mask(text)) == want
    verify_exprs(build_from_exprs([(None, mask(text))]), [(None, mask(text))])


def test_two_multiples_stay_a_remainder() -> None:
    assert "== 4" in canonical_text(mask("(q - k) % 8 == 4 and abs(q - k) < 5"))


def test_few_residues_become_classes_of_their_own() -> None:
    text = "0 <= q - k and q - k < 4096 and (q - k) % 64 < 2"
    cubes = to_dnf(mask(text))
    assert by_residue(cubes) is not None and len(by_residue(cubes) or ()) == 2
    assert by_residue(to_dnf(mask("(q - k) % 64 == 3"))) is None
    assert by_residue(to_dnf(mask("(q - k) % 64 < 9"))) is None
    schedule = build_from_exprs([(None, mask(text))], lengths=[(N, N)])
    assert schedule.label == "mod 64" and len(schedule.classes[0].sweeps[0].segments) == 2
    assert efficiency(schedule, (128, 64))[0] > 30


def test_lines_along_each_axis_of_a_space() -> None:
    """Rows, columns and frames of a grid of 8 x 64 x 64: three tilings, one for each direction."""
    pattern = Pattern.from_dict({"name": "lines", "mask": {"axial": {"shape": [8, 64, 64]}}})
    (best, *_, plain) = of_pattern(pattern, Problem(lengths=((N, N),)))
    assert best.schedule.label.startswith("runs + mod 64 + box ") and plain.schedule.label == "runs"
    assert best.cost.tile_cells * 50 < plain.cost.tile_cells
    small = Pattern.from_dict({"name": "lines", "mask": {"axial": {"shape": [3, 4, 5]}}})
    for c in of_pattern(small):
        verify(c.schedule, small, ((60, 60), (29, 53)), ((32, 16),))


def test_rows_before_position_0_are_left_to_a_plain_branch() -> None:
    text = "abs(q - k) <= 256 or q < 64"
    schedule = build_from_exprs([(None, mask(text))], lengths=[(N, N)])
    first, second = schedule.classes[0].sweeps
    assert second.rows == (0, 63) and any("q <= -1" in str(s.branch) for s in first.segments)
    verify_exprs(schedule, [(None, mask(text))], ((29, 11), (90, 90)), ((16, 16),))
