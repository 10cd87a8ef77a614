"""The warp-specialised gradient kernels: which launches they take, their parameters, and what fits a multiprocessor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sparsegen.codegen import hopper
from sparsegen.codegen.backward_plan import (
    BackwardPlan,
    GradientLaunch,
    HopperBackwardPlan,
    HopperGradientLaunch,
)
from sparsegen.codegen.backward_planner import KEYS, OUTPUTS, QUERIES
from sparsegen.codegen.grids import Grid
from sparsegen.codegen.hopper import DTYPES, ROWS
from sparsegen.codegen.plan import Chunk, QueryBox
from sparsegen.codegen.planner import chunks
from sparsegen.codegen.segments import descriptor_name
from sparsegen.codegen.text import floor_by, lines_of
from sparsegen.spec.gpu import Gpu
from sparsegen.spec.problem import Problem

OWN_KNOBS = ("TEST_ALL",)  # that the portable text does not have
CONSTEXPRS = ("BLOCK_M", "BLOCK_N", "STAGES", "HEAVY_FIRST", "GROUP_HEADS", *OWN_KNOBS)
NARROW = 32  # a segment that never shows more rows has tiles of its own size; BLOCK_N is no smaller
# bf16 columns of a box of STATS, which has 8: a product takes no fewer than 16, and what lies outside reads as 0
STATS = 16
# Registers of a thread that sums and tiles may take, of 240.  At 224 (dK and dV of 128 columns, 64 queries) up to 100
# bytes are spilled, at 256 more than twice as many (Triton 3.6 and 3.9, 2026-11-30).
MOST_REGISTERS = 224
OWN = {QUERIES: ("q", "do"), KEYS: ("k", "v")}  # tensors of a tile; the other pair is visited


def gluon(text: str, at: str = "", names: Iterable[str] = ()) -> str:
    """``hopper.gluon`` for tiles of scores whose columns may be queries."""
    return hopper.gluon(text, at, names).replace("KEYS", "COLUMNS")


# ---- configurations ----


def unfit(
    knobs: Mapping[str, Any], problem: Problem, gpu: Gpu, outputs: tuple[str, ...]
) -> str | None:
    """Why the kernel that gives ``outputs`` cannot work for a problem on a GPU with these knobs, or None."""
    said = _unfit_anywhere(knobs, problem, gpu)
    if said is not None:
        return said
    taken = registers(knobs, problem, outputs)
    if taken > MOST_REGISTERS:
        return (
            f"KERNEL=hopper keeps sums and tiles of {' and '.join(outputs)} in registers: {taken} a thread with "
            f"BLOCK_N={knobs['BLOCK_N']}, {MOST_REGISTERS} at most"
        )
    needed = shared_bytes(knobs, problem, outputs)
    if needed > gpu.shared_bytes:
        return f"tiles take {needed} bytes of shared memory, {gpu.name} has {gpu.shared_bytes}"
    return None


def _unfit_anywhere(knobs: Mapping[str, Any], problem: Problem, gpu: Gpu) -> str | None:
    """What the kernels of all gradients have in common with the forward one."""
    if (reason := hopper.unavailable(problem, gpu)) is not None:
        return reason
    if knobs["BLOCK_M"] not in (64, 128):
        return "KERNEL=hopper has consumers of 64 rows, one or two: BLOCK_M is 64 or 128"
    if knobs["BLOCK_N"] < NARROW:
        return (
            f"KERNEL=hopper visits tiles of {NARROW} rows or more: BLOCK_N is {NARROW}, 64 or 128"
        )
    return None


def registers(knobs: Mapping[str, Any], problem: Problem, outputs: tuple[str, ...]) -> int:
    """Registers of a thread for float32 sums of a consumer's 64 rows, a tile's S and dP, and what of them is on its way
    to the tensor cores."""
    qk, v = _columns(problem)
    sums = {"DQ": qk, "DK": qk, "DV": v}
    rows = int(knobs["BLOCK_N"])
    scores = rows if outputs == ("DV",) else 2 * rows
    return (sum(sums[x] for x in outputs) + scores + rows // 2) // 2


def shared_bytes(knobs: Mapping[str, Any], problem: Problem, outputs: tuple[str, ...]) -> int:
    """Shared memory of a program: its own tiles, the rings of visited ones, and room for the barriers."""
    row = 2 * sum(_columns(problem))
    visited = row if outputs == OUTPUTS[QUERIES] else row + 2 * STATS
    rings = int(knobs["STAGES"]) * int(knobs["BLOCK_N"]) * visited
    return int(knobs["BLOCK_M"]) * row + rings + 1024


def _columns(problem: Problem) -> tuple[int, int]:
    qk, v = (sum(c.width for c in chunks(d)) for d in (problem.head_dim, problem.value_dim))
    return qk, v


def starts(
    default: Mapping[str, Any], problem: Problem, gpu: Gpu, outputs: tuple[str, ...]
) -> tuple[dict[str, Any], ...]:
    """Configurations to measure first, from a portable ``default`` on.

    Two consumers with the largest visited tiles and then most stages that fit; one consumer, of which two programs share
    a multiprocessor and hide each other's start and end; the first with other tests of masks and smaller tiles; and the
    second with smaller ones, for rows that see few keys (gpt-oss's window of 128, head_dim 64, H200: 599 µs with the kernel
    of 2026-11-30, and a search of 12-01 that did not come to it ended at 736).
    """
    own = {**default, "KERNEL": "hopper", "num_warps": 4, "GROUP_HEADS": 4}
    tiles = [{"BLOCK_N": n, "STAGES": stages} for n in (128, 64, 32) for stages in (3, 2)]

    def fitting(rows: int, most: int) -> list[dict[str, Any]]:
        """The best of every size of visited tiles."""
        found: dict[int, dict[str, Any]] = {}
        for config in (own | {"BLOCK_M": rows} | t for t in tiles):
            fits = unfit(config, problem, gpu, outputs) is None
            if fits and shared_bytes(config, problem, outputs) <= most:
                found.setdefault(config["BLOCK_N"], config)
        return list(found.values())

    large = fitting(128, gpu.shared_bytes)
    small = fitting(64, gpu.shared_bytes // 2)
    everywhere = [large[0] | {"TEST_ALL": True}] if large else []
    return (*large[:1], *small[:1], *everywhere, *large[1:2], *small[1:2])


# ---- the plan ----


def covers(launch: GradientLaunch, grid: Grid) -> bool:
    """Whether the kernel can do a launch.

    Its own rows and those that it visits come in boxes that a tensor descriptor loads, in no table's order; whether any
    row lives is told by scalars, since the producer has no rows to look at.
    """
    if launch.kind != "sweep" or launch.rows is None or grid.queries is None:
        return False
    segments = [seg for cls in launch.classes for seg in cls.segments]
    boxes = [
        bool(seg.descriptor) and seg.table is None and "in_table" not in seg.loop.mask
        for seg in segments
    ]
    told = any(line.startswith("live_rows = ") for line in launch.rows.scalars)
    return told and bool(boxes) and all(boxes)


def hopper_plan(
    plan: BackwardPlan, grids: Sequence[Grid], dtype: str, sums: bool
) -> HopperBackwardPlan | None:
    """What the template is given besides ``plan``; None where no launch, or not this dtype, can be done.

    ``grids``: of the plan's launches.
    """
    launches = {
        launch.function: _launch(i, launch, grid, plan.part)
        for i, (launch, grid) in enumerate(zip(plan.launches, grids, strict=True))
        if covers(launch, grid)
    }
    if dtype not in DTYPES or not launches:
        return None
    own, seen = OWN[plan.part], OWN[KEYS if plan.part == QUERIES else QUERIES]
    described = [grids[x.number] for x in launches.values()]
    parameters, types = zip(*_parameters(plan, own, seen, described))
    constexprs = (*CONSTEXPRS, *(("SWEEP",) if len(plan.launches) > 1 else ()))
    shared = [f"{t}_smem{c.index}" for pair in (own, seen) for t, c in _chunked(plan, pair)]
    shared += ["stats_smem"] if plan.part == KEYS else []
    shared += ["own_ready", *(f"{t}_ready" for t in seen), "empty"]
    typed = [f"{c}: gl.constexpr" for c in constexprs]
    return HopperBackwardPlan(
        entry=f"{plan.entry}_hopper",
        dtype=dtype,
        own=own,
        seen=seen,
        parameters=parameters,
        types=types,
        constexprs=constexprs,
        parameter_lines=lines_of([*parameters, *typed]),
        inner_parameter_lines=lines_of([*shared, *parameters, *typed]),
        inner_argument_lines=lines_of([*shared, *parameters, *constexprs]),
        launches=launches,
        widths=tuple(sorted({c.width for c in (*plan.qk_chunks, *plan.v_chunks)})),
        sums=sums,
        sum_names=_sum_names(plan),
    )


def preparing(plan: BackwardPlan, special: HopperBackwardPlan) -> tuple[int, ...]:
    """The launches of queries that write first, if they can do without the launch that prepares: they have dO at hand.

    Sinks and the null key have gradients of their own in that launch, and a split launch has each row several times.
    """
    first = [x for x in plan.launches if x.kind == "sweep" and not x.chained]
    here = all(x.function in special.launches and not x.cut for x in first)
    if plan.part != QUERIES or plan.sink_logits or plan.null_key or not here:
        return ()
    return tuple(special.launches[x.function].number for x in first)


def _sum_names(plan: BackwardPlan) -> tuple[str, ...]:
    columns = {"DQ": plan.qk_chunks, "DV": plan.v_chunks, "DK": plan.qk_chunks}
    kept = [(name, chunks) for name, chunks in columns.items() if name in plan.outputs]
    return tuple(f"{name.lower()}{c.index}" for name, chunks in kept for c in chunks)


def _chunked(plan: BackwardPlan, pair: tuple[str, str]) -> Iterable[tuple[str, Chunk]]:
    """The column chunks of two tensors: the first has those of queries and keys, the second those of values."""
    for tensor, columns in zip(pair, (plan.qk_chunks, plan.v_chunks)):
        yield from ((tensor, c) for c in columns)


def _parameters(
    plan: BackwardPlan, own: tuple[str, str], seen: tuple[str, str], grids: Iterable[Grid]
) -> list[tuple[str, str]]:
    """The portable kernel's, with descriptors behind its tensors: of own rows, then of those visited."""
    used = list(grids)
    tiles = sorted({g.queries for g in used if g.queries is not None})
    visits = sorted({described for g in used for described in g.described})
    out = []
    for rows, pair, views in ((f":{ROWS}", own, tiles), ("", seen, visits)):
        for view in views:
            period, group = view
            for tensor, c in _chunked(plan, pair):
                name = f"{descriptor_name(tensor.upper(), view)}{c.index}"
                out.append((name, f"desc:{period}:{group}:{c.width}{rows}"))
    if plan.part == KEYS:
        out += [(f"{descriptor_name('STATS', v)}0", f"desc:{v[0]}:{v[1]}:{STATS}") for v in visits]
    given = list(zip(plan.parameters, plan.types))
    first = next(i for i, (_, kind) in enumerate(given) if kind == "stride")
    return [*given[:first], *out, *given[first:]]


def _launch(number: int, launch: GradientLaunch, grid: Grid, part: str) -> HopperGradientLaunch:
    rows = launch.rows
    assert rows is not None and grid.queries is not None
    # a tile whose rows no segment shows has live_rows = 0 by then, and its rows are rows still
    valid = rows.valid.replace("live_rows", "tile_rows")
    stored = rows.stored if part == QUERIES and not launch.cut else valid
    if launch.chained and not launch.cut:
        stored = f"({valid}) & (live_rows > 0)"
    blocks = {seg.block for cls in launch.classes for seg in cls.segments} - {"BLOCK_N"}
    assigned = [line.split(" = ")[0] for line in rows.vectors]
    return HopperGradientLaunch(
        number=number,
        own=_own_box(grid.queries, part),
        row_names=(*assigned, "row_lo", "row_hi", *(("lse", "delta") if part == QUERIES else ())),
        narrow=tuple(sorted(blocks)),
        valid=valid,
        stored=stored,
    )


def _own_box(described: tuple[int, int], part: str) -> QueryBox:
    """Boxes of a consumer's 64 rows, as ``hopper._query_box`` has them; of keys the digits are y and not x."""
    period, group = described
    name = descriptor_name("", described)
    first, axis = ("first_query", "x") if part == QUERIES else ("first_key", "y")
    if period == 1:
        row = "row" if part == QUERIES else "kv_row + row"
        return QueryBox(name, f"{row} + i * {ROWS}", str(ROWS))
    top = f"{axis}1_first + i * {ROWS // group} - {floor_by(first, period)}"
    low = f"{axis}0" if group == 1 else f"{axis}0_first"
    return QueryBox(name, f"({top}).to(gl.int32), {low}", f"{ROWS // group}, {group}")


def corner_of(corner: tuple[str, ...], part: str) -> tuple[str, str]:
    """Where a visited box starts, between head and column: two numbers.

    Rows of queries are counted from the call's first one, which may lie before position 0, where ``q_first`` is 0.
    """
    top, low = corner
    if part == KEYS:
        top = re.sub(r"\bq_first\b", "first_query", top)
    return gluon(top), gluon(low)
