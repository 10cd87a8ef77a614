"""Schedules written by hand, with small strides: what the kernels can do, whatever the compiler picks.

``made`` and ``per_head`` give a pattern and the schedule of its mask.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sparsegen.schedule.branches import Branch
from sparsegen.schedule.forms import BIG, K_FIRST, K_LAST, Q_FIRST, Q_LAST, Lin, Q, floor_, var
from sparsegen.schedule.formula import Range
from sparsegen.schedule.intervals import pick
from sparsegen.schedule.normalise import to_dnf
from sparsegen.schedule.tiling import close
from sparsegen.schedule.tree import HeadClass, Schedule, Segment, Span, Sweep, Tiling
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.predicate import parse

FULL, TAIL = Span("full", False, False), Span("tail", False, True)
WHOLE = Span("whole", True, True)


def segment(
    name: str, tiling: Tiling, row: tuple[Lin, Lin], tile: tuple[Lin, Lin], **more: Any
) -> Segment:
    """A segment with what most of them have."""
    plain = {"live": (), "full_lo": None, "full_hi": None, "guards": (), "spans": (WHOLE,)}
    return Segment(name, Branch(((),), ()), tiling, *row, *tile, **(plain | more))


def window(size: int) -> Segment:
    """The last ``size`` keys."""
    return segment(
        "window",
        Tiling(),
        (pick("max", [K_FIRST, Q - (size - 1)]), pick("min", [K_LAST, Q])),
        (pick("max", [K_FIRST, Q_FIRST - (size - 1)]), pick("min", [K_LAST, Q_LAST])),
    )


def strided(stride: int) -> Segment:
    """Keys q - stride, q - 2 * stride, ...: one residue class of queries and keys."""
    x0 = var("x0")
    first, last = floor_(K_FIRST - x0 + (stride - 1), stride), floor_(K_LAST - x0, stride)

    def before(x1: str) -> Lin:
        return pick("min", [last, var(x1) - 1])

    return segment(
        "strided",
        Tiling((stride,), (1,), (stride,)),
        (first, before("x1")),
        (first, before("x1_last")),
        full_lo=first,
        full_hi=before("x1_first"),
        spans=(FULL, TAIL),
        inner=((x0, x0),),
    )


def older(size: int) -> Segment:
    """All keys before the window."""

    def before(q: Lin) -> Lin:
        return pick("min", [K_LAST, q - size])

    return segment(
        "older",
        Tiling(),
        (K_FIRST, before(Q)),
        (K_FIRST, before(Q_LAST)),
        full_lo=K_FIRST,
        full_hi=before(Q_FIRST),
        spans=(FULL, TAIL),
    )


def rows_of_grid(width: int, box: int) -> Segment:
    """Keys of the query's own row of a grid, up to the query; a tile is ``box`` columns of several rows of the grid."""
    return segment(
        "grid row",
        Tiling((width,), (box,), (width,)),
        (var("x1"), var("x1")),
        (var("x1_first"), pick("min", [var("x1_last"), floor_(K_LAST, width)])),
        inner=((Lin(), var("x0_last")),),
        spans=(replace(WHOLE, tests=(at_most("y0", "x0"), *IN_CALL)),),
    )


def columns_of_grid(width: int, box: int) -> Segment:
    """Keys of the query's column of a grid in earlier rows of it."""
    same = Range(var("x0") - var("y0"), 0, 0)
    return segment(
        "grid column",
        Tiling((width,), (box,), (width,)),
        (floor_(K_FIRST, width), var("x1") - 1),
        (floor_(K_FIRST, width), var("x1_last") - 1),
        inner=((var("x0_first"), var("x0_last")),),
        spans=(replace(WHOLE, lower=False, tests=(same, *IN_CALL)),),
    )


def at_most(a: str, b: str) -> Range:
    return Range(var(b) - var(a), 0, BIG)


def older_in_boxes(size: int, width: int) -> Segment:
    """All keys before the window, as boxes of all digits below ``width``."""
    last = pick("min", [K_LAST, Q_LAST - size])
    test = Range(Q - var("k"), size, BIG)
    return segment(
        "older",
        Tiling((), (), (width,)),
        (floor_(K_FIRST, width), floor_(pick("min", [K_LAST, Q - size]), width)),
        (floor_(K_FIRST, width), floor_(last, width)),
        inner=((Lin(), Lin((), width - 1)),),
        spans=(replace(WHOLE, tests=(test, *IN_CALL)),),
    )


def stripes(step: int, size: int, last: int) -> Segment:
    """Keys with k % step < size up to the group ``last``; nothing but the box says where they end."""
    tile = (floor_(K_FIRST, step), pick("min", [floor_(K_LAST, step), Lin((), last)]))
    return segment(
        "stripes",
        Tiling((), (), (step,)),
        tile,
        tile,
        inner=((Lin(), Lin((), size - 1)),),
        spans=(Span("whole", False, False, IN_CALL),),
    )


def some_keys(first: int, last: int) -> Segment:
    """One run of keys for every row; nothing but the range says where it ends."""
    tile = pick("max", [K_FIRST, Lin((), first)]), pick("min", [K_LAST, Lin((), last)])
    return segment("some", Tiling(), tile, tile, spans=(Span("whole", False, False),))


def near_on_grid(mask: str, tiling: Tiling) -> Sweep:
    """Neighbours on a grid, closed by the compiler for key tiles that are boxes themselves."""
    (cube,) = to_dnf(parse(mask))
    found = close(Branch((cube,), ()), tiling)
    assert found is not None and found.tiling.k_extent
    return Sweep(Tiling(tiling.q_cuts, tiling.extent), (replace(found, name="near"),))


IN_CALL = (at_most("k_first", "k"), at_most("k", "k_last"))
S, GRID = 8, 12
SOME = (300, 337)  # rows of their own: more than a tile of them
NEAR, FAR = f"(k <= q and q - k < {S})", f"(k <= q and (q - k) % {S} == 0)"
MASKS = {
    "strided": f"{NEAR} or {FAR}",
    "rows": f"{NEAR} or ({SOME[0]} <= q and q <= {SOME[1]} and k <= q)",
    "window": NEAR,
    "stripes": "k % 8 < 4 and k < 40 or 64 <= k and k <= 84",
    "image": f"abs(q // {GRID} - k // {GRID}) <= 2 and abs(q % {GRID} - k % {GRID}) <= 3",
    "video": "abs(q // 48 - k // 48) <= 1 and abs(q // 8 % 6 - k // 8 % 6) <= 1 and abs(q % 8 - k % 8) <= 3",
    "grid": f"k <= q and (q // {GRID} == k // {GRID} or (q - k) % {GRID} == 0)",
}
BAND, COLUMNS = Sweep(Tiling(), (window(S),)), Sweep(Tiling((S,), (1,)), (strided(S),))
FEW = Sweep(Tiling(), (older(S),), SOME)
SPLIT = replace(FEW, split=True)


def boxes(size: int) -> Sweep:
    return Sweep(Tiling((GRID,), (size,)), (rows_of_grid(GRID, size), columns_of_grid(GRID, size)))


SWEEPS: dict[str, tuple[str, tuple[Sweep, ...]]] = {
    "strided": ("strided", (BAND, COLUMNS)),
    # a first sweep with query cuts writes every row, wherever its residue class starts
    "columns first": ("strided", (COLUMNS, BAND)),
    "few rows": ("rows", (BAND, FEW)),
    "split rows": ("rows", (BAND, SPLIT)),
    "split boxes": ("rows", (BAND, replace(SPLIT, segments=(older_in_boxes(S, GRID),)))),
    # rows that are empty before a sweep whose first keys they do not see
    "nothing first": ("window", (Sweep(Tiling(), ()), BAND)),
    "stripes": ("stripes", (Sweep(Tiling(), (stripes(8, 4, 4), some_keys(64, 84))),)),
    "boxes of 8": ("grid", (boxes(8),)),  # the second box of a grid row has 4 columns
    "boxes of 4": ("grid", (boxes(4),)),
    # key tiles of 4 columns and several lines of the grid; of 8 columns, several lines and one frame
    "image": ("image", (near_on_grid(MASKS["image"], Tiling((GRID,), (4,), (GRID,), 4)),)),
    "video": ("video", (near_on_grid(MASKS["video"], Tiling((8, 48), (4, 2), (8, 48), 8)),)),
}


def schedule(*classes: HeadClass, **more: Any) -> Schedule:
    return Schedule("bottom_right", classes, position_limit=1 << 30, **more)


def made(name: str, **settings: Any) -> tuple[Pattern, Schedule]:
    """A pattern with one mask for all heads, and the schedule of that name."""
    mask, sweeps = SWEEPS[name]
    pattern = Pattern.from_dict({"name": "case", "mask": {"predicate": MASKS[mask]}, **settings})
    return pattern, schedule(HeadClass(None, sweeps, MASKS[mask]))


def per_head(**settings: Any) -> tuple[Pattern, Schedule]:
    """Heads with one sweep, two, a split one, and none: 0 sees nothing, 2 and 5-6 strided, 3 few rows, others a window."""
    rules = [
        {"heads": 0, "mask": {"not": "full"}},
        {"heads": [2, "5-6"], "mask": {"predicate": MASKS["strided"]}},
        {"heads": 3, "mask": {"predicate": MASKS["rows"]}},
        {"heads": "rest", "mask": {"window": {"size": S}}},
    ]
    classes = (
        HeadClass(((0, 0),), (), "nothing"),
        HeadClass(((2, 2), (5, 6)), (BAND, COLUMNS), "strided"),
        HeadClass(((3, 3),), (BAND, SPLIT), "rows"),
        HeadClass(None, (BAND,), "window"),
    )
    return Pattern.from_dict({"name": "heads", "heads": rules, **settings}), schedule(*classes)
