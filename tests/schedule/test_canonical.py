"""Masks that are equal have one canonical form, one class and one schedule."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from sparsegen.schedule.build import build_from_exprs
from sparsegen.schedule.canonical import canonical_text, text_digest
from sparsegen.schedule.dump import dump
from sparsegen.schedule.prepare import PASSES
from sparsegen.schedule.verify import verify_exprs
from tests.schedule.formulas import mask


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("k <= q and (q - k) % 1 == 0", "k <= q"),
        ("k <= q or k > q", "all"),
        ("k <= q and k > q", "none"),
        ("q - k < 10 and k <= q", "0 <= q - k and q - k <= 9"),
        ("k <= q and q - k < 8 or k <= q and q - k < 4", "k <= q and q - k < 8"),
        ("k <= q and (q - k < 4 or 4 <= q - k and q - k < 9)", "k <= q and q - k < 9"),
        ("not (k > q or q - k > 5)", "k <= q and q - k <= 5"),
        ("k <= q and q // 64 == k // 64", "k <= q and k >= q // 64 * 64"),
        ("k <= q and k // 16 < q // 16 or k <= q and k // 16 == q // 16", "k <= q"),
        ("(q - k) % 4 == 0 and (q - k) % 8 == 0", "(q - k) % 8 == 0"),
        ("min(q - k, 5) >= 0", "k <= q"),
        ("k <= q and k < 8 or k < 4 and k <= q", "k < 8 and k <= q"),
        ("k >= 0 and k <= q", "k <= q"),
    ],
)
def test_equal_masks_have_equal_texts(one: str, other: str) -> None:
    assert canonical_text(mask(one)) == canonical_text(mask(other))
    assert dump(build_from_exprs([(None, mask(one))])) == dump(
        build_from_exprs([(None, mask(other))])
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [("k <= q", "k < q"), ("q - k < 10", "q - k < 11"), ("(q - k) % 4 == 0", "(q - k) % 4 == 1")],
)
def test_other_masks_have_other_digests(one: str, other: str) -> None:
    digests = {text_digest(canonical_text(mask(t))) for t in (one, other)}
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("text", "lengths", "plain", "limit", "least"),
    [
        ("0 <= q - k and q - k < 65536", [(4096, 4096)], "k <= q", 65536, None),
        ("0 <= q - k and q - k < 4096", [(1, 4096), (4096, 4096)], "k <= q", 4096, None),
        ("k <= q and (q - k < 8192 or k < 4)", [(4096, 4096)], "k <= q", 8192, None),
        ("abs(q - k) <= 4096", [(4096, 4096)], "all", 4097, 0),
        ("k <= q and q // 8192 == k // 8192", [(4096, 8192)], "k <= q", 8192, None),
        ("k <= q or k < 9000", [(4096, 4096)], "all", 9000, None),
        ("abs(q - k) <= 4096", [(1024, 1024)], "all", 4097, 0),
        ("abs(q - k) <= 4096", [(1024, 512)], "all", 2048, None),  # rows before position 0
    ],
)
def test_what_no_length_reaches_is_the_plain_form(
    text: str, lengths: list[tuple[int, int]], plain: str, limit: int, least: int | None
) -> None:
    got = build_from_exprs([(None, mask(text))], lengths=lengths)
    assert got.classes == build_from_exprs([(None, mask(plain))]).classes
    assert (got.max_position, got.min_position) == (limit, least)
    assert any("below position" in note for note in got.notes)  # and says so


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("0 <= q - k and q - k < 4095", [(4096, 4096)]),
        ("0 <= q - k and q - k < 65536", [(4096, 4096), (4096, 131072)]),
        ("abs(q - k) <= 4000", [(4096, 1024)]),
        ("abs(q - k) <= 24 or k < 10 or 0 <= q and q < 10", [(4096, 4096)]),
        ("q - k < 65536", []),
    ],
)
def test_lengths_that_decide_nothing_limit_nothing(
    text: str, lengths: list[tuple[int, int]]
) -> None:
    got = build_from_exprs([(None, mask(text))], lengths=lengths)
    assert got.max_position is None and got.min_position is None
    assert got == build_from_exprs([(None, mask(text))])


def test_a_budget_that_runs_out_limits_nothing() -> None:
    """Whether the lengths or the sign of the rows made a form shorter is not known then."""
    text = (
        "(16 < abs(q - k) or (q % 12 == 1 and k % 12 <= 5)"
        " or max(abs(q // 12 - k // 12), abs(q % 12 - k % 12)) <= 1) and not (10 <= q and q <= 15)"
    )
    got = build_from_exprs([(None, mask(text))], lengths=[(4096, 4096)])
    assert got.max_position is None and got.min_position is None
    verify_exprs(got, [(None, mask(text))], [(29, 11)], [(16, 16)])


def test_the_limit_is_the_last_position_that_holds() -> None:
    """At the limit the plain form is still right, one further it is not."""
    for text, lengths in [("0 <= q - k and q - k < 20", [(9, 9)]), ("abs(q - k) <= 20", [(9, 9)])]:
        got = build_from_exprs([(None, mask(text))], lengths=lengths)
        limit = got.max_position
        assert limit is not None and limit > 9
        verify_exprs(got, [(None, mask(text))], [(limit, limit), (3, limit)], [(8, 8)])
        with pytest.raises(Exception, match="wanted"):
            free = replace(got, max_position=None)
            verify_exprs(free, [(None, mask(text))], [(limit + 1, limit + 1)], [(8, 8)])


def test_heads_with_one_mask_are_one_class() -> None:
    window, same = mask("k <= q and q - k < 8"), mask("0 <= q - k and q - k <= 7")
    rules = [(((0, 0), (2, 3)), window), (((1, 1),), mask("k <= q")), (((4, 4),), same)]
    got = build_from_exprs([*rules, (None, mask("all"))])
    assert [c.heads for c in got.classes] == [((0, 0), (2, 3), (4, 4)), ((1, 1),), None]
    verify_exprs(got, rules, [(9, 9)], [(4, 4)])


def test_a_rule_equal_to_the_rest_joins_it() -> None:
    got = build_from_exprs([(((0, 3),), mask("k <= q")), (None, mask("not k > q"))])
    assert [c.heads for c in got.classes] == [None]


def test_the_choice_is_noted() -> None:
    (note,) = build_from_exprs([(None, mask("k <= q and (q - k < 1024 or k < 4)"))]).notes
    found = re.fullmatch(
        r"2 disjoint branches: (\d+) key tiles .*, (\d+) as one masked branch", note
    )
    assert found
    # 64 query tiles: the window takes 18 key tiles of 64, and every key below the diagonal half of 64 * 128
    assert 64 * 18 < int(found[1]) < 64 * 22 and int(found[2]) > 64 * 64


def test_passes_are_named_once() -> None:
    names = [name for name, _ in PASSES]
    assert len(names) == len(set(names)) == 3


def test_a_schedule_does_not_depend_on_hash_seeds_or_on_what_ran_before() -> None:
    text = "k <= q and (q - k < 9 or k % 5 == 0 or q // 7 == k // 7 or (q - k) % 6 == 1)"
    code = (
        "import sys; from sparsegen.schedule.build import build_from_exprs as b;"
        "from sparsegen.schedule.dump import dump; from sparsegen.spec.predicate import parse;"
        "[b([(None, parse(t))]) for t in sys.argv[2:]];"
        "print(dump(b([(None, parse(sys.argv[1]))])), end='')"
    )
    before = ["k <= q and (q - k < 9 or k % 5 == 0)", "q // 7 == k // 7"]
    dumps = {
        subprocess.run(
            [sys.executable, "-c", code, text, *more],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed, more in [("1", []), ("2", before), ("3", before[::-1])]
    }
    assert len(dumps) == 1
