"""The rows of a query tile as text: positions, digits, rows in memory, and which of them exist."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sparsegen.codegen import text
from sparsegen.codegen.grids import Grid, Launch
from sparsegen.codegen.plan import RowsPlan

FIRST = "q_start.to(POSITION) + (kv_len - q_len) * relative"


def rows_plan(launch: Launch, used: frozenset[str]) -> RowsPlan:
    """``used``: the symbols that the segments' forms mention; only these are set."""
    grid = launch.grid
    if grid.q_cuts:
        return _box(launch, used)
    if grid.rows is not None:
        lines = _some_rows(grid, grid.rows)
    else:
        lines = (
            "row = tile * BLOCK_M",
            f"q_first = {FIRST} + row",
            "live_rows = tl.minimum(q_len - row, BLOCK_M)",
        )
    if "q_last" in used:
        lines += ("q_last = q_first + tl.maximum(live_rows, 1) - 1",)
    vectors = ("rows = tl.arange(0, BLOCK_M)", "q_pos = q_first + rows")
    stored = "rows < live_rows" if launch.chained else "row + rows < q_rows"
    return RowsPlan(lines, vectors, gathered=False, valid="rows < live_rows", stored=stored)


def _some_rows(grid: Grid, rows: tuple[int, int]) -> tuple[str, ...]:
    first, last = rows
    return (
        f"first_query = {FIRST}",
        f"q_first = tl.maximum(first_query, {first}) + tile * BLOCK_M",
        "row = (q_first - first_query).to(tl.int32)",
        f"live_rows = tl.minimum(tl.minimum({last} - q_first + 1, q_len - row), BLOCK_M).to(tl.int32)",
    )


def varying(grid: Grid) -> tuple[str, ...]:
    """Digits that differ between the rows of a tile."""
    if not grid.q_cuts:
        return ("q",)
    lower = [f"x{t}" for t, size in enumerate(grid.extent) if size > 1]
    return (*lower, f"x{len(grid.q_cuts)}")


def _box(launch: Launch, used: frozenset[str]) -> RowsPlan:
    """A box of digits: lower axes first, the top one takes what is left of BLOCK_M."""
    grid = launch.grid
    lines, digits, on_axis = [f"first_query = {FIRST}", f"# {_said(grid)}"], [], []
    over, below = 1, 1  # tiles, and rows of a tile, in one step along the axis at hand
    told = len(grid.q_cuts) == 1 or _in_key_boxes(launch)
    last_used = set(used) | ({f"x{t}_last" for t in range(len(grid.extent))} if told else set())
    for t, (radix, size, tiles) in enumerate(zip(grid.radices, grid.extent, grid.lower_tiles)):
        place = f"{_over('tile', over)} % {tiles}"
        over *= tiles
        if size == 1:
            lines.append(f"x{t} = ({place}).to(POSITION)")
            continue
        lines.append(f"x{t}_first = ({place} * {size}).to(POSITION)")
        if f"x{t}_last" in last_used:
            end = f"x{t}_first + {size - 1}"
            lines.append(
                f"x{t}_last = {f'tl.minimum({end}, {radix - 1})' if radix % size else end}"
            )
        digits.append(f"x{t} = x{t}_first + {_over('i', below)} % {size}")
        if radix % size:
            on_axis.append(f"(x{t} < {radix})")
        below *= size
    top, step = len(grid.q_cuts), grid.q_cuts[-1]
    long = "BLOCK_M" if below == 1 else f"(BLOCK_M // {below})"
    first = text.floor_by("first_query", step)
    lines.append(f"x{top}_first = {first} + {_over('tile', over)} * {long}")
    if f"x{top}_last" in used:
        last = text.floor_by("(first_query + q_len - 1)", step)
        lines.append(f"x{top}_last = tl.minimum(x{top}_first + {long} - 1, {last})")
    digits.append(f"x{top} = x{top}_first + {_over('i', below)}")
    exists = " & ".join(["(rows >= 0)", *on_axis])
    vectors = [
        "i = tl.arange(0, BLOCK_M)",
        *digits,
        f"q_pos = {text.from_digits('x', grid.q_cuts)}",
        "rows = (q_pos - first_query).to(tl.int64)",
        f"live = {exists} & (rows < q_len)",
    ]
    if told:
        lines.append(f"live_rows = {_rows_of_class(grid, long)}")
    else:
        vectors.append("live_rows = tl.sum(live.to(tl.int32), 0)")
    stored = "live" if launch.chained else f"{exists} & (rows < q_rows)"
    return RowsPlan(tuple(lines), tuple(vectors), gathered=True, valid="live", stored=stored)


def _in_key_boxes(launch: Launch) -> bool:
    """Whether boxes of keys are loaded for the tile, which a partition without any rows may ask for."""
    return any(seg.tiling.k_extent for _, sweep in launch.parts for seg in sweep.segments)


def _rows_of_class(grid: Grid, long: str) -> str:
    """How many values of the top digit have a query of the call beside one lower digit, without a vector's sum.

    A sum over rows goes through shared memory, and the first keys wait for it.  Of two lower digits the least and the
    greatest position are compared, so that a tile without rows may count as one that has some.
    """
    step, top = grid.q_cuts[-1], len(grid.q_cuts)
    ends = [(f"x{t}", f"x{t}") if n == 1 else (f"x{t}_first", f"x{t}_last") for t, n in enumerate(grid.extent)]  # fmt: skip
    first, last = (" - ".join(_steps(grid, digits)) for digits in zip(*ends))
    lowest = text.floor_by(f"(first_query - {last} + {step - 1})", step)
    highest = text.floor_by(f"(first_query + q_len - 1 - {first})", step)
    end = f"tl.minimum(x{top}_first + {long} - 1, {highest})"
    return f"({end} - tl.maximum(x{top}_first, {lowest}) + 1).to(tl.int32)"


def _steps(grid: Grid, digits: Iterable[str]) -> Iterator[str]:
    """Lower digits times their steps."""
    for step, digit in zip((1, *grid.q_cuts), digits):
        yield digit if step == 1 else f"{step} * {digit}"


def _over(name: str, n: int) -> str:
    return name if n == 1 else f"{name} // {n}"


def _said(grid: Grid) -> str:
    digits = text.from_digits("x", grid.q_cuts)
    sizes = [f"{size} of x{t}" if size > 1 else f"one x{t}" for t, size in enumerate(grid.extent)]
    return (
        f"q = {digits}; a tile: {', '.join(sizes)}, the rest of its rows along x{len(grid.q_cuts)}"
    )
