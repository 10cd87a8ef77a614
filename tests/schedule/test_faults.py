"""What verify must see: segments and sweeps broken one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sparsegen.schedule.tree import (
    Segment,
    Tiling,
)
from sparsegen.schedule.verify import Call, ScheduleError, execute, mask_of
from tests.schedule.formulas import (
    class_on,
    mask,
)
from tests.schedule.tilings import (
    RUNS,
    STRIDED,
    on,
)


def _fewer(s: Segment) -> Segment:
    return replace(s, inner=tuple((lo, hi - 1) for lo, hi in s.inner))


def _shifted(s: Segment) -> Segment:
    return replace(s, inner=tuple((lo + 1, hi + 1) for lo, hi in s.inner))


def _untested(s: Segment) -> Segment:
    return replace(s, spans=tuple(replace(x, tests=()) for x in s.spans))


def _too_full(s: Segment) -> Segment:
    return replace(s, full_hi=None if s.full_hi is None else s.full_hi + 1)


def _shorter(s: Segment) -> Segment:
    return replace(s, tile_hi=s.tile_hi - 1)


def _unguarded(s: Segment) -> Segment:
    return replace(s, guards=())


@pytest.mark.parametrize(
    ("text", "tiling", "change", "call"),
    [
        ("k % 8 >= 5", Tiling((), (), (8,)), _fewer, (0, 16, 0, 64)),
        ("(q - k) % 8 == 0 and k <= q", on((8,), (1,)), _shifted, (0, 64, 0, 64)),
        ("abs(q % 8 - k % 8) <= 1", on((8,), (4,)), _untested, (0, 64, 0, 64)),
        ("(q - k) % 8 == 0 and k <= q", on((8,), (1,)), _too_full, (0, 64, 0, 64)),
        ("(q - k) % 8 == 0 and k <= q", on((8,), (1,)), _shorter, (0, 64, 0, 64)),
        ("k % 8 >= 5", Tiling((), (), (8,)), _unguarded, (0, 16, 6, 64)),
        ("k % 8 >= 5", Tiling((), (), (8,)), _untested, (0, 16, 0, 63)),  # the last key
    ],
)
def test_verify_finds_a_fault(text: str, tiling: Tiling, change: object, call: Call) -> None:
    one = class_on(text, tiling)
    assert np.array_equal(execute(one, call, 4, 1), mask_of(mask(text), call))
    (sweep,) = one.sweeps
    broken = replace(sweep, segments=tuple(map(change, sweep.segments)))  # type: ignore[arg-type]
    try:
        got = execute(replace(one, sweeps=(broken,)), call, 4, 1)
    except ScheduleError:  # a cell outside the keys
        return
    assert not np.array_equal(got, mask_of(mask(text), call))


@pytest.mark.parametrize(
    "change",
    [
        lambda s: (replace(s[0], rows=(0, 9)), *s[1:]),
        lambda s: (replace(s[0], split=True), *s[1:]),
        lambda s: (s[0], replace(s[1], tiling=Tiling((128,), (2,)))),
        lambda s: (s[0], replace(s[1], tiling=Tiling((128,), (1,), (128,)))),
        lambda s: (s[0], replace(s[1], split=True)),
    ],
)
def test_sweeps_that_no_kernel_runs(change: object) -> None:
    one = class_on(STRIDED, RUNS, on((128,), (1,)))
    execute(one, (0, 9, 0, 9), 16, 16)
    with pytest.raises(ScheduleError):
        execute(replace(one, sweeps=change(one.sweeps)), (0, 9, 0, 9), 16, 16)  # type: ignore[operator]
