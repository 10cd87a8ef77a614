"""What ``verify_exprs`` checks, and what it leaves out because the schedule does not promise it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparsegen.schedule.build import build_from_exprs
from sparsegen.schedule.tree import Schedule
from sparsegen.schedule.verify import ScheduleError, verify_exprs
from tests.schedule.formulas import mask

NEAR = mask("abs(q - k) <= 20")  # all of it where positions are 0..20


@pytest.fixture
def near() -> Schedule:
    got = build_from_exprs([(None, NEAR)], lengths=[(9, 9)])
    assert (got.max_position, got.min_position) == (21, 0)
    return got


def check(schedule: Schedule, q_len: int, kv_len: int, start: tuple[int, int]) -> None:
    verify_exprs(schedule, [(None, NEAR)], [(q_len, kv_len)], [(8, 8)], [start])


BEYOND = [
    (9, 9, (-15, 0)),  # begins before min_position
    (30, 9, (0, 0)),  # the alignment alone puts rows there
    (9, 9, (25, 0)),  # rows beyond max_position
    (9, 9, (0, 25)),  # keys beyond it
    (25, 25, (0, 0)),
]


@pytest.mark.parametrize(("q_len", "kv_len", "start"), BEYOND)
def test_calls_beyond_what_is_proven_are_left_out(
    near: Schedule, q_len: int, kv_len: int, start: tuple[int, int]
) -> None:
    check(near, q_len, kv_len, start)
    free = replace(near, max_position=None, min_position=None)
    with pytest.raises(ScheduleError, match="wanted"):
        check(free, q_len, kv_len, start)


@pytest.mark.parametrize(("q_len", "kv_len", "start"), [(21, 21, (0, 0)), (1, 1, (20, 0))])
def test_calls_up_to_the_limits_are_checked(
    near: Schedule, q_len: int, kv_len: int, start: tuple[int, int]
) -> None:
    """On a schedule of another mask a difference is found there."""
    other = build_from_exprs([(None, mask("q - k < 20"))])
    wrong = replace(other, max_position=near.max_position, min_position=near.min_position)
    check(near, q_len, kv_len, start)
    with pytest.raises(ScheduleError, match="wanted"):
        check(wrong, q_len, kv_len, start)


def test_without_min_position_rows_count_from_minus_max_position() -> None:
    text = "k <= q and (q - k < 20 or k < 4)"
    got = build_from_exprs([(None, mask(text))], lengths=[(9, 9)])
    assert got.max_position == 20 and got.min_position is None
    wrong = replace(
        got, classes=build_from_exprs([(None, mask("k <= q and q >= 0 or q < -30"))]).classes
    )
    verify_exprs(wrong, [(None, mask(text))], [(9, 9)], [(8, 8)], [(-40, 0)])
    with pytest.raises(ScheduleError, match="wanted"):
        free = replace(wrong, max_position=None)
        verify_exprs(free, [(None, mask(text))], [(9, 9)], [(8, 8)], [(-40, 0)])
