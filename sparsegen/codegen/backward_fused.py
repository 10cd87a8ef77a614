"""The fused gradient kernel: dK and dV over key tiles, and dQ added up in memory on the way.  Only for sm_90."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sparsegen.codegen import backward_hopper, hopper
from sparsegen.codegen.backward import BackwardSource
from sparsegen.codegen.backward_hopper import covers, hopper_plan
from sparsegen.codegen.backward_plan import (
    BackwardPlan,
    FusedPlan,
    GradientLaunch,
    HopperBackwardPlan,
    QueriesPart,
)
from sparsegen.codegen.backward_planner import (
    FUSED,
    KEYS,
    OUTPUTS,
    adds_up,
    gradient_launches,
    make_backward_plan,
)
from sparsegen.codegen.backward_source import gradient_source
from sparsegen.codegen.grids import Grid
from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.codegen.planner import chunks
from sparsegen.codegen.segments import descriptor_name
from sparsegen.codegen.template import load_template
from sparsegen.codegen.text import lines_of
from sparsegen.errors import UnsupportedError
from sparsegen.schedule.tree import Schedule
from sparsegen.spec.gpu import Gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem

TEMPLATE = "backward_fused"
SUMS = "SUMS"  # dQ without the scale, float32
CONSUMERS = 2
# A product reads columns of K from shared memory that lies in units of 128 bytes: half a chunk is whole ones of them.
HALVED = 128


# ---- configurations ----


def default_config(problem: Problem, gpu: Gpu) -> LaunchConfig:
    """What is launched where nothing was measured: as many tiles in flight as fit, three at most."""
    values = {k.name: k.default for k in load_template(TEMPLATE).knobs}
    found = [LaunchConfig.of(values | {"STAGES": stages}) for stages in (3, 2)]
    return next((c for c in found if unfit(c, problem, gpu) is None), found[-1])


def unfit(config: LaunchConfig, problem: Problem, gpu: Gpu) -> str | None:
    """Why this configuration cannot work for the problem on the GPU, or None."""
    v = config.as_dict()
    for knob in load_template(TEMPLATE).knobs:
        if v.get(knob.name) not in knob.choices:
            return f"{knob.name}={v.get(knob.name)} is not one of {list(knob.choices)}"
    if (reason := hopper.unavailable(problem, gpu)) is not None:
        return reason
    taken = backward_hopper.registers(v, problem, OUTPUTS[KEYS])
    if taken > backward_hopper.MOST_REGISTERS:
        return (
            f"the fused kernel keeps sums and tiles of DK and DV in registers: {taken} a thread, "
            f"{backward_hopper.MOST_REGISTERS} at most"
        )
    needed = shared_bytes(v, problem)
    if needed > gpu.shared_bytes:
        return f"tiles take {needed} bytes of shared memory, {gpu.name} has {gpu.shared_bytes}"
    return None


def starts(problem: Problem, gpu: Gpu) -> tuple[LaunchConfig, ...]:
    """Configurations to measure first: the default, one head after the other, fewer tiles in flight, no loop of full tiles."""
    default = default_config(problem, gpu)
    steps: list[dict[str, Any]] = [{}, {"GROUP_HEADS": 1}, {"STAGES": 2}, {"TEST_ALL": True}]
    found = [LaunchConfig.of(default.as_dict() | step) for step in steps]
    fits = [c for c in found if unfit(c, problem, gpu) is None]
    return tuple(dict.fromkeys(fits))


def shared_bytes(knobs: Mapping[str, Any], problem: Problem) -> int:
    """Shared memory of a program: that of the kernel of keys, dS of two tiles, and dQ on its way to memory."""
    rows, visited = int(knobs["BLOCK_M"]), int(knobs["BLOCK_N"])
    own = backward_hopper.shared_bytes(knobs, problem, OUTPUTS[KEYS])
    columns = sum(x.width for x in queries_parts(problem.head_dim))
    return own + 2 * rows * visited * 2 + CONSUMERS * visited * columns * 4


def queries_parts(head_dim: int) -> tuple[QueriesPart, ...]:
    """What each consumer gives of a tile's dQ: half of the columns of a wide chunk, the keys' share of a narrow one."""
    out = []
    for c in chunks(head_dim):
        halves = c.width >= HALVED
        out.append(
            QueriesPart(c.index, c.first, c.width // CONSUMERS if halves else c.width, halves)
        )
    return tuple(out)


# ---- the text ----


def uncovered(schedule: Schedule, problem: Problem) -> str | None:
    """Why the fused kernel cannot run over a transposed schedule, or None."""
    if problem.dtype not in hopper.DTYPES:
        return f"the fused kernel takes {' or '.join(hopper.DTYPES)}, not {problem.dtype}"
    plan, grids = _plan(Pattern.from_dict({"name": "any", "mask": "full"}), schedule, problem, 0)
    return _uncovered(plan, grids)


def _uncovered(plan: BackwardPlan, grids: Sequence[Grid]) -> str | None:
    odd = [
        x.function
        for x, grid in zip(plan.launches, grids, strict=True)
        if x.kind == "sweep" and not covers(x, grid)
    ]
    if odd:
        return (
            f"rows of its launches {', '.join(odd)} come in no boxes that a tensor descriptor has"
        )
    return None


def render_fused(
    pattern: Pattern, schedule: Schedule, problem: Problem, shift: int = 0
) -> BackwardSource:
    """Render the kernel over a transposed ``schedule``, moved by ``shift``.

    UnsupportedError for a schedule that it cannot run over, see ``uncovered``, and for a dtype that it does not take.
    """
    which = load_template(TEMPLATE)
    plan, grids = _plan(pattern, schedule, problem, shift)
    why = _uncovered(plan, grids)
    sums = adds_up(gradient_launches(schedule, KEYS))
    special = None if why else hopper_plan(plan, grids, problem.dtype, sums)
    if special is None:
        why = why or f"the fused kernel takes {' or '.join(hopper.DTYPES)}, not {problem.dtype}"
        raise UnsupportedError(f"{pattern.name}, schedule {schedule.label}: {why}")
    special, fused = _with_queries(plan, special, grids)
    return gradient_source(which, schedule, problem, plan, grids, FUSED, special, fused=fused)


def _plan(
    pattern: Pattern, schedule: Schedule, problem: Problem, shift: int
) -> tuple[BackwardPlan, tuple[Grid, ...]]:
    """That of the kernel of keys with tiles of one size, and the launch that turns SUMS into DQ behind all others."""
    which = load_template(TEMPLATE)
    knobs = tuple(x for x in which.constexprs if x not in backward_hopper.OWN_KNOBS)
    made = make_backward_plan(
        pattern,
        schedule,
        problem,
        KEYS,
        OUTPUTS[KEYS],
        shift,
        which.name,
        which.entry,
        knobs,
        narrow=0,
    )
    given = list(zip(made.parameters, made.types))
    first = next(i for i, (_, kind) in enumerate(given) if kind == "stride")
    given[first:first] = [(SUMS, "*fp32"), ("DQ", "*data")]
    if pattern.null_key:
        given += [("NULL_K", "*data"), ("NULL_V", "*data"), ("joins", "i32")]
    parameters, types = zip(*given)
    constexprs = [x for x in made.constexprs if x not in ("SWEEP", "PERSISTENT")]
    plan = replace(
        made,
        title=made.title.replace("keys and values", "queries, keys and values"),
        launches=(*made.launches, _finish()),
        parameters=parameters,
        types=types,
        constexprs=(*constexprs, "SWEEP", "PERSISTENT"),
        parameter_lines=(
            *lines_of(parameters),
            *lines_of(f"{c}: tl.constexpr" for c in constexprs),
        ),
        argument_lines=(*lines_of(parameters), *lines_of(constexprs)),
    )
    return plan, (*(x.grid for x in gradient_launches(schedule, KEYS)), Grid())


def _finish() -> GradientLaunch:
    return GradientLaunch(
        kind="finish",
        function="finish",
        summary="One query tile of one head: DQ in its dtype, with the scale and what the null key adds.",
        chained=False,
        heads=(),
        rows=None,
        classes=(),
        some="",
        split=None,
        cut=False,
    )


def _with_queries(
    plan: BackwardPlan, special: HopperBackwardPlan, grids: Sequence[Grid]
) -> tuple[HopperBackwardPlan, FusedPlan]:
    """The plan of the kernel of keys with what dQ needs: descriptors of SUMS, room for dS and dQ, two barriers."""
    parts = queries_parts(plan.head_dim)
    used = [grids[x.number] for x in special.launches.values()]
    added = [
        (f"{descriptor_name(SUMS, view)}{x.index}", f"desc:{view[0]}:{view[1]}:{x.width}")
        for view in sorted({view for grid in used for view in grid.described})
        for x in parts
    ]
    given = list(zip(special.parameters, special.types))
    first = next(i for i, (_, kind) in enumerate(given) if kind == "stride")
    parameters, types = zip(*given[:first], *added, *given[first:])
    room = ["ds_smem", *(f"dq_smem{x.index}" for x in parts)]
    room += ["ds_ready", "own_done"] if any(x.halves for x in parts) else []
    constexprs = special.constexprs
    typed = [f"{c}: gl.constexpr" for c in constexprs]
    shared = [*_shared(special), *room]
    plan_with = replace(
        special,
        parameters=parameters,
        types=types,
        parameter_lines=lines_of([*parameters, *typed]),
        inner_parameter_lines=lines_of([*shared, *parameters, *typed]),
        inner_argument_lines=lines_of([*shared, *parameters, *constexprs]),
    )
    products = sum(2 if x.halves else 1 for x in parts)
    return plan_with, FusedPlan(parts, products, tuple(f"dq{x.index}" for x in parts))


def _shared(special: HopperBackwardPlan) -> list[str]:
    """Names of the shared memory of a partition, in the order in which it takes them."""
    names = [
        x.strip() for line in special.inner_argument_lines for x in line.split(",") if x.strip()
    ]
    return names[: len(names) - len(special.parameters) - len(special.constexprs)]


__all__ = [
    "FUSED",
    "SUMS",
    "TEMPLATE",
    "default_config",
    "queries_parts",
    "render_fused",
    "shared_bytes",
    "starts",
    "uncovered",
    "unfit",
]
