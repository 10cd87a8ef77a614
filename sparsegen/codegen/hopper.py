"""The warp-specialised kernel: which launches it takes, its parameters, and the planner's Triton text said in Gluon."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sparsegen.codegen.grids import Grid
from sparsegen.codegen.plan import (
    Chunk,
    ClassPlan,
    ForwardPlan,
    HopperLaunch,
    HopperPlan,
    LaunchPlan,
    QueryBox,
    SegmentPlan,
    Step,
)
from sparsegen.codegen.planner import chunks
from sparsegen.codegen.segments import descriptor_name
from sparsegen.codegen.text import floor_by, lines_of
from sparsegen.spec.gpu import Gpu
from sparsegen.spec.problem import Problem

ENTRY = "attend_forward_hopper"
OWN_KNOBS = ("LATE_VALUES",)  # that the portable text does not have
CONSTEXPRS = (
    *("BLOCK_M", "BLOCK_N", "STAGES", "HEAVY_FIRST", "GROUP_HEADS", "PERSISTENT"),
    *OWN_KNOBS,
)
TRITONS = (3, 6), (3, 9)  # first and last whose Gluon the text was compiled with
OWN = (
    *("lo", "end", "body_lo", "body_end", "inside_lo", "inside_end"),
    *("chunk_lo", "chunk_end", "j", "k_pos"),
)  # of a segment
ROWS = 64  # query rows of a consumer: what one instruction of a warpgroup takes
# Queries of so few columns are an operand from registers: shared memory need not give them again for every key tile.
# Measured on an H200, 2026-11-30, against shared memory: 64 columns 1.05x, 96 columns 1.05x; 128 columns 0.99x, so
# these stay there.
REGISTER_COLUMNS = 96
DTYPES = ("bfloat16", "float16")  # by torch's names, which are Gluon's


def unavailable(problem: Problem, gpu: Gpu) -> str | None:
    """Why no warp-specialised kernel works here, forward or backward, whatever the knobs; or None."""
    installed = _triton()
    if installed is not None and not TRITONS[0] <= installed <= TRITONS[1]:
        tested = " to ".join(".".join(map(str, v)) for v in TRITONS)
        return (
            f"KERNEL=hopper is written for the Gluon of triton {tested}, which changes between versions; "
            f"{'.'.join(map(str, installed))} is installed"
        )
    if gpu.arch != 90:
        return f"KERNEL=hopper needs sm_90, {gpu.name} is another architecture"
    if problem.dtype not in DTYPES:
        return f"KERNEL=hopper takes {' or '.join(DTYPES)}, not {problem.dtype}"
    return None


def unfit(knobs: Mapping[str, Any], problem: Problem, gpu: Gpu) -> str | None:
    """Why the kernel cannot work for a problem on a GPU with these knobs, or None."""
    if (reason := unavailable(problem, gpu)) is not None:
        return reason
    if knobs["BLOCK_M"] not in (64, 128):
        return "KERNEL=hopper has consumers of 64 query rows, one or two: BLOCK_M is 64 or 128"
    if knobs["BLOCK_N"] * problem.value_dim > 128 * 192:
        return (
            "KERNEL=hopper keeps scores and output in registers: fewer keys beside so many columns"
        )
    needed = shared_bytes(knobs, problem)
    if needed > gpu.shared_bytes:
        return f"queries and rings take {needed} bytes of shared memory, {gpu.name} has {gpu.shared_bytes}"
    return None


@cache
def _triton() -> tuple[int, int] | None:
    """Major and minor version of the installed Triton, under any name of its packages; None where there is none."""
    for name in ("triton", "pytorch-triton"):
        try:
            major, minor, *_ = version(name).split(".")
        except PackageNotFoundError:
            continue
        return int(major), int(minor)
    return None


def starts(default: Mapping[str, Any], problem: Problem, gpu: Gpu) -> tuple[dict[str, Any], ...]:
    """Configurations to measure first, from the template's ``default`` on: what was best for most patterns on an H200.

    Tiles of 128 x 128 with as many stages as fit, with late values if need be, one program a tile; the same, going on
    to further tiles; and two programs of one consumer on a multiprocessor, for tiles that see few keys.
    """
    large = {**default, "KERNEL": "hopper", "BLOCK_M": 128, "BLOCK_N": 128, "STAGES": 3}
    large |= {"GROUP_HEADS": 4}
    small = large | {"BLOCK_M": 64, "BLOCK_N": 64, "STAGES": 2, "GROUP_HEADS": 1}
    fewer = (
        *({"STAGES": 2}, {"STAGES": 2, "LATE_VALUES": True}),
        *({"BLOCK_N": 64}, {"BLOCK_N": 64, "STAGES": 2}),
    )
    found: list[dict[str, Any]] = []
    for wanted in (
        large,
        large | {"PERSISTENT": True, "GROUP_HEADS": 1},
        small | {"PERSISTENT": True},
    ):
        fits = (c for c in (wanted, *(wanted | f for f in fewer)) if unfit(c, problem, gpu) is None)
        found += [c for c in [next(fits, None)] if c is not None and c not in found]
    return tuple(found)


def shared_bytes(knobs: Mapping[str, Any], problem: Problem) -> int:
    """Shared memory of a program: queries, the rings of keys and values, and room for the barriers.

    A persistent one has the queries of its next tile beside those of this one.  There is one value tile more than key
    tiles, since values are read a tile later; as many where they also come a tile later.
    """
    qk, v = (sum(c.width for c in chunks(d)) for d in (problem.head_dim, problem.value_dim))
    queries = (2 if knobs["PERSISTENT"] else 1) * knobs["BLOCK_M"] * qk * 2
    value_slots = knobs["STAGES"] + (not knobs["LATE_VALUES"])
    rings = knobs["BLOCK_N"] * (knobs["STAGES"] * qk + value_slots * v) * 2
    return int(queries + rings + 1024)


def gluon(text: str, at: str = "", names: Iterable[str] = ()) -> str:
    """The planner's text in Gluon, where every tensor has a layout.

    ``at`` marks values that lie beside other scores than those of BLOCK_N keys: it is appended to the layouts' names
    and to ``names``, the values that differ between rows.
    """
    text = text.replace("tl.arange(0, BLOCK_M)", f"FIRST_ROW + tl.arange(0, {ROWS}, ROWS{at})")
    text = re.sub(r"tl\.arange\(0, (\w+)\)", rf"tl.arange(0, \1, KEYS{at})", text)
    if at and names:
        text = re.sub(rf"\b({'|'.join(names)})\b", rf"\1{at}", text)
    return text.replace("tl.", "gl.")


def covers(launch: LaunchPlan) -> bool:
    """Whether the kernel can do a launch.

    Its keys come in boxes that a tensor descriptor loads, in no table's order; and whether any row lives is told by
    scalars, since the producer has no rows to look at.
    """
    segments = [seg for cls in launch.classes for seg in cls.segments]
    boxes = [bool(seg.descriptor) and seg.table is None for seg in segments]
    told = any(line.startswith("live_rows = ") for line in launch.rows.scalars)
    return not launch.combine and told and bool(boxes) and all(boxes)


def row_names(launch: LaunchPlan) -> tuple[str, ...]:
    """Names of the values that differ between the rows of a tile."""
    assigned = [line.split(" = ")[0] for line in launch.rows.vectors]
    return (*assigned, "row_lo", "row_hi")


def steps(cls: ClassPlan, launch: LaunchPlan) -> tuple[Step, ...]:
    """The segments of a class of heads in order; a narrow one joins the first key tile of the wide one behind it.

    Its scores and those of that tile are asked for together and go through one softmax, in place of a pass of its own.
    """
    out: list[Step] = []
    guest: SegmentPlan | None = None
    for seg in cls.segments:
        narrow = seg.block != "BLOCK_N"
        if guest is not None and narrow:
            out.append(Step(guest))
            guest = None
        if narrow and launch.split is None and not seg.box_lines:
            guest = seg
        else:
            out.append(Step(seg, guest))
            guest = None
    return (*out, Step(guest)) if guest is not None else tuple(out)


def hopper_plan(plan: ForwardPlan, grids: Sequence[Grid], dtype: str) -> HopperPlan | None:
    """What the template is given besides ``plan``; None where no launch, or not this dtype, can be done."""
    launches = {
        launch.function: HopperLaunch(
            i,
            _query_box(grid.queries),
            row_names(launch),
            (*row_names(launch), *OWN),
            _narrow(launch),
            tuple(steps(cls, launch) for cls in launch.classes),
        )
        for i, (launch, grid) in enumerate(zip(plan.launches, grids))
        if covers(launch)
    }
    if dtype not in DTYPES or not launches:
        return None
    parameters, types = zip(*_parameters(plan, launches, grids))
    constexprs = (*CONSTEXPRS, *(("SWEEP",) if len(plan.launches) > 1 else ()))
    shared = [
        *(f"{x}_smem{c.index}" for c in plan.qk_chunks for x in "qk"),
        *(f"v_smem{c.index}" for c in plan.v_chunks),
        *("q_ready", "q_empty", "ready", "values_ready", "free"),
    ]
    typed = [f"{c}: gl.constexpr" for c in constexprs]
    return HopperPlan(
        entry=ENTRY,
        dtype=dtype,
        parameters=parameters,
        types=types,
        constexprs=constexprs,
        parameter_lines=lines_of([*parameters, *typed]),
        inner_parameter_lines=lines_of([*shared, *parameters, *typed]),
        inner_argument_lines=lines_of([*shared, *parameters, *constexprs]),
        launches=launches,
        widths=tuple(sorted({c.width for c in (*plan.qk_chunks, *plan.v_chunks)})),
        accs=", ".join(f"acc{c.index}" for c in plan.v_chunks),
        staging=tuple(_staging(c, plan.qk_chunks) for c in plan.v_chunks),
        limits=frozenset(
            limit.name
            for launch in plan.launches
            if launch.function in launches
            for cls in launch.classes
            for seg in cls.segments
            for limit in seg.loop.limits
        ),
        queries_in_registers=sum(c.width for c in plan.qk_chunks) <= REGISTER_COLUMNS,
    )


def _parameters(
    plan: ForwardPlan, launches: Mapping[str, HopperLaunch], grids: Sequence[Grid]
) -> list[tuple[str, str]]:
    """The portable kernel's, with the descriptors of queries before those of keys."""
    given = list(zip(plan.parameters, plan.types))
    first = next(i for i, (_, kind) in enumerate(given) if kind.startswith("desc:"))
    boxes = {grids[x.number].queries for x in launches.values()} - {None}
    queries = [
        (
            f"{descriptor_name('Q', (period, group))}{c.index}",
            f"desc:{period}:{group}:{c.width}:{ROWS}",
        )
        for period, group in sorted(b for b in boxes if b is not None)
        for c in plan.qk_chunks
    ]
    return [*given[:first], *queries, *given[first:]]


def _query_box(described: tuple[int, int] | None) -> QueryBox | None:
    if described is None:
        return None
    name = descriptor_name("Q", described)
    period, group = described
    if period == 1:
        return QueryBox(name, f"row + i * {ROWS}", str(ROWS))
    top = f"x1_first + i * {ROWS // group} - {floor_by('first_query', period)}"
    low = "x0" if group == 1 else "x0_first"
    return QueryBox(name, f"({top}).to(gl.int32), {low}", f"{ROWS // group}, {group}")


def _narrow(launch: LaunchPlan) -> tuple[str, ...]:
    blocks = {seg.block for cls in launch.classes for seg in cls.segments} - {"BLOCK_N"}
    return tuple(sorted(blocks))


def _staging(values: Chunk, queries: Sequence[Chunk]) -> int | None:
    """The chunk of queries whose shared memory an output chunk can pass through on its way to whole rows."""
    return next((c.index for c in queries if c.width == values.width), None)
