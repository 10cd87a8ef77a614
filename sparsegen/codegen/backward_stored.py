"""Gradients with dS stored: the kernel of keys keeps dS, that of queries multiplies it with K.  Only for sm_90."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sparsegen.codegen import backward_hopper, hopper
from sparsegen.codegen.backward import BackwardSource
from sparsegen.codegen.backward_hopper import covers, hopper_plan
from sparsegen.codegen.backward_plan import BackwardPlan, GradientLaunch, HopperBackwardPlan
from sparsegen.codegen.backward_planner import (
    KEYS,
    OUTPUTS,
    QUERIES,
    STORED,
    adds_up,
    gradient_launches,
    make_backward_plan,
)
from sparsegen.codegen.backward_source import gradient_source
from sparsegen.codegen.grids import Grid
from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.codegen.plan import SegmentPlan
from sparsegen.codegen.planner import chunks
from sparsegen.codegen.segments import descriptor_name
from sparsegen.codegen.template import load_template
from sparsegen.codegen.text import lines_of
from sparsegen.errors import UnsupportedError
from sparsegen.schedule.tree import Schedule
from sparsegen.spec.gpu import Gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem

TEMPLATE = "backward_stored"
DS = "DS"  # [B, H, queries, keys] in the dtype of q, see ``launch.backward_shares``
RUNS = (1, 1)  # the only view of rows that boxes of dS have
OTHER_ROWS = "dS is stored in boxes of runs; this schedule has other rows"
SHARED_BOXES = "dS is stored in whole boxes, and several segments would have cells of one box"
VISITED = 64  # queries that a tile of keys visits
# Tiles of dQ begin at a multiple of so many keys, counted from the call's first one, which is the first of a row of DS:
# ``launch.backward_boxes.takes_all`` leaves others to the split kernels.  The last coordinate of a box has to be a multiple of
# 16 bytes, loaded or stored; 32 bytes are what L2 keeps together.
SECTOR = 16


# ---- configurations ----


def default_config(problem: Problem, gpu: Gpu, part: str) -> LaunchConfig:
    """What is launched where nothing was measured: the largest tiles and then most stages that fit."""
    values = {k.name: k.default for k in load_template(TEMPLATE).knobs}
    tiles = (128, 64) if part == QUERIES else (VISITED,)
    found = [LaunchConfig.of(values | {"BLOCK_N": n, "STAGES": s}) for n in tiles for s in (3, 2)]
    return next((c for c in found if unfit(c, problem, gpu, part) is None), found[-1])


def unfit(config: LaunchConfig, problem: Problem, gpu: Gpu, part: str) -> str | None:
    """Why this configuration cannot work for the kernel of ``part`` and the problem on the GPU, or None."""
    v = config.as_dict()
    for knob in load_template(TEMPLATE).knobs:
        if v.get(knob.name) not in knob.choices:
            return f"{knob.name}={v.get(knob.name)} is not one of {list(knob.choices)}"
    if (reason := hopper.unavailable(problem, gpu)) is not None:
        return reason
    if part == KEYS:
        if v["BLOCK_N"] != VISITED:
            return f"the kernel that stores dS visits {VISITED} queries: BLOCK_N is {VISITED}"
        taken = backward_hopper.registers(v, problem, OUTPUTS[KEYS])
        if taken > backward_hopper.MOST_REGISTERS:
            return (
                f"the kernel that stores dS keeps sums and tiles of DK and DV in registers: {taken} a thread, "
                f"{backward_hopper.MOST_REGISTERS} at most"
            )
    needed = shared_bytes(v, problem, part)
    if needed > gpu.shared_bytes:
        return f"tiles take {needed} bytes of shared memory, {gpu.name} has {gpu.shared_bytes}"
    return None


def starts(problem: Problem, gpu: Gpu, part: str) -> tuple[LaunchConfig, ...]:
    """Configurations to measure first: the default, one consumer, testing masks everywhere, smaller tiles."""
    default = default_config(problem, gpu, part)
    steps: list[dict[str, Any]] = [{}, {"BLOCK_M": 64, "BLOCK_N": 64, "STAGES": 2}]
    steps += [{"TEST_ALL": True}, {"STAGES": 2}]
    steps += [{"BLOCK_N": 64, "STAGES": 4}] if part == QUERIES else []
    found = [LaunchConfig.of(default.as_dict() | step) for step in steps]
    return tuple(dict.fromkeys(c for c in found if unfit(c, problem, gpu, part) is None))


def shared_bytes(knobs: Mapping[str, Any], problem: Problem, part: str) -> int:
    """Shared memory of a program: of keys that of the split kernel and a consumer's boxes of dS, one or two; of queries the
    rings and room for dQ."""
    rows, visited = int(knobs["BLOCK_M"]), int(knobs["BLOCK_N"])
    if part == KEYS:
        own = backward_hopper.shared_bytes(knobs, problem, OUTPUTS[KEYS])
        return own + rows // hopper.ROWS * rows * visited * 2
    columns = sum(c.width for c in chunks(problem.head_dim))
    return 2 * (rows * columns + int(knobs["STAGES"]) * visited * (columns + rows)) + 1024


# ---- the texts ----


def uncovered(pattern: Pattern, schedule: Schedule, problem: Problem, part: str) -> str | None:
    """Why the kernel of ``part`` cannot run over a schedule (for keys a transposed one) of a pattern, or None."""
    if problem.dtype not in hopper.DTYPES:
        return f"stored dS takes {' or '.join(hopper.DTYPES)}, not {problem.dtype}"
    if pattern.null_key:
        return "stored dS has none of the null key"
    if len(schedule.classes) > 1:
        return "stored dS is for patterns with one mask for all heads"
    if part == KEYS and sum(len(w.segments) for c in schedule.classes for w in c.sweeps) > 1:
        return SHARED_BOXES
    for x in gradient_launches(schedule, part):
        own = x.grid.queries, x.grid.described
        if not x.grid.combine and own != (RUNS, (RUNS,)):
            return OTHER_ROWS
    plan, grids = _plan(pattern, schedule, problem, part, 0)
    boxed = all(covers(x, g) for x, g in zip(plan.launches, grids) if x.kind == "sweep")
    return None if boxed else OTHER_ROWS


def render_stored(
    pattern: Pattern, schedule: Schedule, problem: Problem, part: str, shift: int = 0
) -> BackwardSource:
    """Render one of the two kernels: "keys" over a transposed schedule, "queries" over one of the pattern.

    UnsupportedError for what ``uncovered`` says.
    """
    which = load_template(TEMPLATE)
    if (why := uncovered(pattern, schedule, problem, part)) is not None:
        raise UnsupportedError(f"{pattern.name}, schedule {schedule.label}: {why}")
    plan, grids = _plan(pattern, schedule, problem, part, shift)
    sums = adds_up(gradient_launches(schedule, part))
    special = hopper_plan(plan, grids, problem.dtype, sums)
    assert special is not None  # it covers every sweep
    special = _with_ds(plan, special)
    return gradient_source(which, schedule, problem, plan, grids, STORED, special)


def _plan(
    pattern: Pattern, schedule: Schedule, problem: Problem, part: str, shift: int
) -> tuple[BackwardPlan, tuple[Grid, ...]]:
    """That of a split kernel with tiles of one size, without its launch that prepares, and DS among its tensors."""
    which = load_template(TEMPLATE)
    knobs = tuple(x for x in which.constexprs if x not in backward_hopper.OWN_KNOBS)
    made = make_backward_plan(
        pattern,
        schedule,
        problem,
        part,
        OUTPUTS[part],
        shift,
        which.name,
        f"{which.entry}_{part}",
        knobs,
        narrow=0,
    )
    given = list(zip(made.parameters, made.types))
    if part == QUERIES:  # its other parameters are those of the launch that prepares
        unused = (
            "V",
            "OUT",
            "LSE",
            "DLSE",
            "STATS",
            "SINK_PARTS",
            "has_dlse",
            "SINK_LOGITS",
            "joins",
        )
        given = [x for x in given if x[0] not in unused and not x[0].startswith(_UNUSED_STRIDES)]
    first = next(i for i, (_, kind) in enumerate(given) if kind == "stride")
    given.insert(first, (DS, "*data"))
    parameters, types = zip(*given)
    constexprs = [x for x in made.constexprs if x not in ("SWEEP", "PERSISTENT")]
    grids = tuple(x.grid for x in gradient_launches(schedule, part))
    launches = tuple(x for x in made.launches if x.kind != "prepare")
    plan = replace(
        made,
        launches=tuple(map(_on_sectors, launches)) if part == QUERIES else launches,
        parameters=parameters,
        types=types,
        constexprs=(*constexprs, "SWEEP", "PERSISTENT"),
        parameter_lines=(
            *lines_of(parameters),
            *lines_of(f"{c}: tl.constexpr" for c in constexprs),
        ),
        argument_lines=(*lines_of(parameters), *lines_of(constexprs)),
    )
    return plan, grids


_UNUSED_STRIDES = ("stride_v", "stride_o")


def _on_sectors(launch: GradientLaunch) -> GradientLaunch:
    """A launch over queries whose tiles of keys begin where boxes of dS may."""
    classes = (replace(c, segments=tuple(map(_on_sector, c.segments))) for c in launch.classes)
    return replace(launch, classes=tuple(classes))


def _on_sector(seg: SegmentPlan) -> SegmentPlan:
    """A segment that begins up to 15 keys earlier.  Masks hide these: the first tile is one at an edge if it has any."""
    if seg.lo == "k_first":
        return seg
    lo, n, loop = f"({seg.lo})", seg.block, seg.loop
    if not seg.row_lo:  # else the tiles at edges test it row by row
        loop = replace(loop, mask=f"(k_pos[None, :] >= {lo}) & {loop.mask}")
    body_lo = seg.body_lo
    if body_lo == "lo":
        body_lo = f"lo + tl.cdiv(tl.maximum({lo} - lo, 0), {n}) * {n}"
        loop = replace(loop, edge=f"(j < body_lo) | ({loop.edge})")
    start = f"k_first + ({lo} - k_first) // {SECTOR} * {SECTOR}"
    return replace(seg, lo=start, body_lo=body_lo, loop=loop)


def _with_ds(plan: BackwardPlan, special: HopperBackwardPlan) -> HopperBackwardPlan:
    """The plan with boxes of DS: visited queries and 64 keys of a consumer, or 64 queries of one and visited keys."""
    name = f"{descriptor_name(DS, RUNS)}0"
    given = [(n, k) for n, k in zip(special.parameters, special.types)]
    if plan.part == KEYS:
        box = (name, f"desc:1:1:{hopper.ROWS}")
        shared = _shared(special) + ["ds_smem"]
    else:
        box = (name, f"desc:1:1:0:{hopper.ROWS}")
        given = [(n, k) for n, k in given if not (k.startswith("desc:") and n[0] != "K")]
        numbers = [c.index for c in plan.qk_chunks]
        shared = [f"{x}_smem{i}" for i in numbers for x in ("k", "stage")]
        shared += ["ds_smem", "ready", "empty"]
    first = next(i for i, (_, kind) in enumerate(given) if kind == "stride")
    parameters, types = zip(*given[:first], box, *given[first:])
    constexprs = (*(c for c in special.constexprs if c != "SWEEP"), "SWEEP")
    typed = [f"{c}: gl.constexpr" for c in constexprs]
    return replace(
        special,
        parameters=parameters,
        types=types,
        constexprs=constexprs,
        parameter_lines=lines_of([*parameters, *typed]),
        inner_parameter_lines=lines_of([*shared, *parameters, *typed]),
        inner_argument_lines=lines_of([*shared, *parameters, *constexprs]),
    )


def _shared(special: HopperBackwardPlan) -> list[str]:
    names = [
        x.strip() for line in special.inner_argument_lines for x in line.split(",") if x.strip()
    ]
    return names[: len(names) - len(special.parameters) - len(special.constexprs)]


__all__ = [
    "DS",
    "TEMPLATE",
    "default_config",
    "render_stored",
    "shared_bytes",
    "starts",
    "uncovered",
    "unfit",
]
