"""Transposed schedules, executed tile by tile, show every key exactly the queries that see it, each once."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparsegen.errors import UnsupportedError
from sparsegen.schedule.text import expr_text
from sparsegen.schedule.transpose import SHIFT, Transposed, transpose, transpose_exprs
from sparsegen.schedule.tree import Schedule
from sparsegen.schedule.verify import class_of, execute, mask_of
from sparsegen.spec import expr as ex
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from sparsegen.spec.shipped import shipped_patterns
from tests.schedule.formulas import mask, random_blocks, random_mask

PATTERNS = {
    p.stem: Pattern.from_yaml(p)
    for p in sorted((Path(__file__).parents[1] / "data" / "acceptance" / "patterns").glob("*.yaml"))
}
STATIC = [name for name, p in PATTERNS.items() if p.position_only]
LENGTHS = [(37, 37), (1, 41), (29, 11), (8, 53), (1, 1)]
BLOCKS = [(16, 16), (4, 8), (8, 5)]


def check(
    found: Transposed,
    rules: Iterable[tuple[Any, ex.Bool]],
    call: tuple[int, int, int, int],
    blocks: tuple[int, int] = (16, 16),
    schedule: Schedule | None = None,
) -> None:
    """Every class of a schedule against its mask; ``call``: q_start, q_len, k_start, kv_len."""
    q_start, q_len, k_start, kv_len = call
    # what a kernel does: queries before -shift are left out, the others are shifted
    skipped = max(0, -(q_start + found.shift))
    columns = q_len - skipped
    for heads, e in rules:
        want = mask_of(e, call)
        assert not want[:skipped].any(), f"{expr_text(e)}: queries left out at {call} see keys"
        if columns <= 0:
            continue
        turned = (k_start, kv_len, q_start + skipped + found.shift, columns)
        one = class_of(schedule or found.schedule, heads)
        got = execute(one, turned, *blocks)
        wrong = np.argwhere((got - want[skipped:].T).T)
        assert not len(wrong), f"{expr_text(e)} at {call}, tiles {blocks}: {wrong[0]}"


@pytest.mark.parametrize("name", STATIC)
def test_acceptance_patterns(name: str) -> None:
    """Square, more keys, more queries than keys, one row; ragged tiles; every candidate."""
    pattern = PATTERNS[name]
    found = transpose(pattern)
    for candidate in found.candidates:
        for i, (q_len, kv_len) in enumerate(LENGTHS):
            start = kv_len - q_len if pattern.align == "bottom_right" else 0
            call = (start, q_len, 0, kv_len)
            check(found, pattern.exprs, call, BLOCKS[i % 3], candidate.schedule)
    check(found, pattern.exprs, (25, 23, 9, 31), (8, 8))


@pytest.mark.parametrize("name", shipped_patterns())
def test_shipped_patterns_are_transposed(name: str) -> None:
    """At small lengths, with their large windows: what of them lies within a few hundred positions."""
    pattern = Pattern.from_yaml(shipped_patterns()[name])
    if not pattern.position_only:
        with pytest.raises(UnsupportedError, match="run-time data"):
            transpose(pattern)
        return
    found = transpose(pattern)
    for call in [(0, 150, 0, 150), (31, 60, 0, 91), (-20, 60, 0, 40)]:
        check(found, pattern.exprs, call, (32, 16))


@pytest.mark.parametrize("seed", range(60))
def test_random_masks(seed: int) -> None:
    rng = random.Random(f"transpose {seed}")
    e = random_mask(rng, rng.randint(1, 4))
    align = rng.choice(["bottom_right", "top_left"])
    found = transpose_exprs([(None, e)], align)
    for _ in range(3):
        q_len, kv_len = rng.randint(1, 40), rng.randint(1, 40)
        start = kv_len - q_len if align == "bottom_right" else 0
        blocks = rng.choice([(4, 4), (8, 4), (16, 16), (8, 16)])
        if start + found.shift < 0 and "q_len" in expr_text(e):
            continue  # the check here cannot tell columns from the length that the mask names
        check(found, [(None, e)], (start, q_len, 0, kv_len), blocks)


SHIFTS = [
    ("causal", 0),
    ("q // 5 == k // 5", 0),
    ("k < 4", SHIFT),
    ("abs(q - k) <= 3", SHIFT),
    ("abs(q - k) <= 3 and (q - k) % 3 == 0", -(-SHIFT // 3) * 3),
    ("abs(q - k) <= 3 and q >= 0", 0),
]


@pytest.mark.parametrize(("text", "shift"), SHIFTS)
def test_queries_before_position_zero(text: str, shift: int) -> None:
    """They are left out where they see nothing, and moved by a multiple of the moduli where they see keys."""
    e = mask("k <= q" if text == "causal" else text)
    found = transpose_exprs([(None, e)])
    assert found.shift == shift
    check(found, [(None, e)], (-25, 60, 0, 35), (8, 4))


def test_a_class_alone_decides_for_all() -> None:
    """One shift for all heads: the kernel has one position for a query."""
    rules = [(((0, 0),), mask("k <= q")), (None, mask("abs(q - k) <= 3"))]
    found = transpose_exprs(rules)
    assert found.shift == SHIFT
    check(found, rules, (-5, 40, 0, 35))


def test_columns_that_all_queries_see_are_split_over_them() -> None:
    """Sinks and global keys: a sweep of their own over chunks of the queries."""
    found = transpose_exprs([(None, mask("k <= q and (q - k < 1024 or k < 4)"))])
    first, second = found.schedule.classes[0].sweeps
    assert (first.rows, first.split) == (None, False)
    assert (second.rows, second.split) == ((0, 3), True)


def test_a_program_goes_through_all_query_heads_of_a_group() -> None:
    """So the longest one takes as many times as long: global keys of a grouped problem are split sooner."""
    pattern = Pattern.from_dict(
        {
            "name": "p",
            "mask": {
                "all_of": [
                    "causal",
                    {"any_of": [{"window": {"size": 4096}}, {"sink": {"tokens": 8}}]},
                ]
            },
        }
    )
    labels = {
        kv_heads: transpose(
            pattern, Problem(heads=32, kv_heads=kv_heads, lengths=((32768, 32768),))
        )
        for kv_heads in (32, 1)
    }
    assert [x.schedule.label for x in labels.values()] == ["runs", "runs + split rows"]


def test_rows_of_one_residue_become_keys_of_one() -> None:
    found = transpose_exprs([(None, mask("k <= q and (q - k < 128 or (q - k) % 128 == 0)"))])
    assert [w.tiling.q_cuts for w in found.schedule.classes[0].sweeps] == [(), (128,)]


@pytest.mark.parametrize("text", ["k <= q", "abs(q - k) <= 9", "k <= q and q % 7 == 2"])
def test_the_check_finds_a_fault(text: str) -> None:
    """A schedule whose last query is one short."""
    e = mask(text)
    found = transpose_exprs([(None, e)])
    (one,) = found.schedule.classes
    (sweep,) = one.sweeps
    short = replace(
        sweep, segments=tuple(replace(s, tile_hi=s.tile_hi - 1) for s in sweep.segments)
    )
    broken = replace(found.schedule, classes=(replace(one, sweeps=(short,)),))
    check(found, [(None, e)], (0, 41, 0, 41), (8, 4))
    with pytest.raises(AssertionError, match="tiles"):
        check(found, [(None, e)], (0, 41, 0, 41), (8, 4), broken)


def test_drawn_blocks_are_read_backwards() -> None:
    """A key block's walk lists the query blocks that draw it; queries before position 0 draw none."""
    term = random_blocks(8, 2)
    both = ex.Or((mask("abs(q - k) <= 3"), term))
    for e in (term, both, ex.And((mask("k <= q"), ex.Not(term)))):
        found = transpose_exprs([(None, e)])
        for call in [(0, 70, 0, 70), (20, 50, 0, 70), (-9, 70, 0, 61)]:
            check(found, [(None, e)], call, (16, 16))
    walked = transpose_exprs([(None, both)]).schedule.classes[0].sweeps[0].segments
    assert any(s.table is not None for s in walked)


@pytest.mark.parametrize("radius", [256, 4096])
def test_two_sided_windows_have_tiles_without_edges(radius: int) -> None:
    """They are looked for at keys beyond the shift of queries before position 0."""
    pattern = Pattern.from_dict({"name": "p", "mask": {"window": {"radius": radius}}})
    found = transpose(pattern, Problem(lengths=((32768, 32768),)))
    (sweep,) = found.schedule.classes[0].sweeps
    (band,) = sweep.segments
    assert found.shift and band.full_lo is not None
    assert "full" in [span.kind for span in band.spans]
