"""Schedules × the backward template → the source texts of the two gradient kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from sparsegen.codegen import backward_hopper
from sparsegen.codegen.backward_hopper import hopper_plan
from sparsegen.codegen.backward_plan import BackwardPlan, HopperBackwardPlan
from sparsegen.codegen.backward_planner import (
    FUSED,
    KEYS,
    OUTPUTS,
    QUERIES,
    adds_up,
    gradient_launches,
    make_backward_plan,
)
from sparsegen.codegen.grids import Grid
from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.codegen.planner import chunks
from sparsegen.codegen.source import KernelSource, render_text
from sparsegen.codegen.template import Template, load_template
from sparsegen.schedule.tree import Schedule
from sparsegen.spec.gpu import Gpu, find_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem

SPLIT = "split"  # the design of this module: dQ in one kernel, dK and dV in another


@dataclass(frozen=True)
class BackwardSource(KernelSource):
    """A rendered gradient kernel.

    ``part``: "queries" (its first launch prepares delta, for both) or "keys", over whose schedule it runs.  ``outputs``: the gradients that it gives.  ``shift``: what the schedule adds to
    positions of queries.  ``sums``: gradients are summed in float32 over several launches, and cast by the caller.
    """

    part: str = QUERIES
    outputs: tuple[str, ...] = OUTPUTS[QUERIES]
    shift: int = 0
    sums: bool = False
    walks: bool = False
    # launches that store STATS of their rows, so that a pass that has them all needs no launch that prepares
    prepares: tuple[int, ...] = ()
    design: str = SPLIT  # or another design's name, see ``backward_fused``

    @property
    def name(self) -> str:
        """What it is called among the kernels of a problem: its part, and what it gives where that is not all."""
        if self.design == FUSED:
            return FUSED
        if self.design != SPLIT:
            return f"{self.design}-{self.part}"
        return self.part if self.outputs == OUTPUTS[self.part] else f"{self.part}-{self.outputs[0]}"


def render_backward(
    pattern: Pattern,
    schedule: Schedule,
    problem: Problem,
    part: str = QUERIES,
    shift: int = 0,
    outputs: tuple[str, ...] | None = None,
) -> BackwardSource:
    """Render one of the two kernels: of queries from the pattern's schedule, of keys from the transposed one.

    ``outputs``: ("DK",) or ("DV",) renders a kernel of keys that gives this one alone.
    """
    outputs = outputs or OUTPUTS[part]
    which = load_template("backward")
    entry = f"{which.entry}_{part}"
    knobs = tuple(x for x in which.constexprs if x not in backward_hopper.OWN_KNOBS)
    plan = make_backward_plan(
        pattern, schedule, problem, part, outputs, shift, which.name, entry, knobs
    )
    found = gradient_launches(schedule, part)
    before = (Grid(),) if part == QUERIES else ()  # the launch that prepares
    text: Any = plan
    source = BackwardSource(
        template=which.name,
        text=render_text(which, "kernel.py.jinja", plan=text),
        entry=entry,
        dtype=problem.dtype,
        head_dim=problem.head_dim,
        value_dim=problem.value_dim,
        parameters=tuple(zip(plan.parameters, plan.types)),
        constexprs=plan.constexprs,
        tables=plan.tables,
        grids=(*before, *(x.grid for x in found)),
        position_limit=schedule.position_limit,
        max_position=schedule.max_position,
        min_position=schedule.min_position,
        part=part,
        outputs=outputs,
        shift=shift,
        sums=adds_up(found),
        walks=plan.walks,
        launches=tuple(range(len(plan.launches))),
    )
    narrow = make_backward_plan(
        pattern,
        schedule,
        problem,
        part,
        outputs,
        shift,
        which.name,
        entry,
        knobs,
        backward_hopper.NARROW,
    )
    special = hopper_plan(narrow, source.grids, problem.dtype, source.sums)
    if special is not None:
        special = replace(special, prepares=backward_hopper.preparing(narrow, special))
    return replace(source, hopper=_hopper(source, which, narrow, special)) if special else source


def _hopper(
    source: BackwardSource, which: Template, plan: BackwardPlan, special: HopperBackwardPlan
) -> BackwardSource:
    """The same launches, as far as the warp-specialised text does them."""
    text = render_text(
        which,
        "hopper.py.jinja",
        plan=plan,
        hopper=special,
        gluon=backward_hopper.gluon,
        corner_of=partial(backward_hopper.corner_of, part=plan.part),
    )
    return replace(
        source,
        text=text,
        entry=special.entry,
        parameters=tuple(zip(special.parameters, special.types)),
        constexprs=special.constexprs,
        launches=tuple(launch.number for launch in special.launches.values()),
        prepares=special.prepares,
    )


# BLOCK_M, BLOCK_N, num_warps, largest first
LADDER = ((128, 64, 8), (64, 64, 4), (64, 32, 8), (64, 32, 4), (32, 32, 4), (32, 16, 4))
MOST_SUMS = 128  # registers of a thread that hold sums of gradients


def default_config(problem: Problem, gpu: Gpu) -> LaunchConfig:
    """What is launched where nothing was measured: the largest tiles whose sums stay in registers and that fit.

    In an experiment with plain Triton (bf16, head_dim 128, one H200, 2026-11) the largest were the fastest.
    """
    values = {k.name: k.default for k in load_template("backward").knobs}
    found = [LaunchConfig.of(values | dict(zip(_TILES, tiles))) for tiles in LADDER]
    if problem.dtype == "float32":
        return found[
            -1
        ]  # IEEE float32 dots run on the plain units and keep whole tiles in registers
    fits = (c for c in found if unfit(c, problem, gpu) is None and _sums(c, problem) <= MOST_SUMS)
    return next(fits, found[-1])


_TILES = ("BLOCK_M", "BLOCK_N", "num_warps")
_ALL = (*OUTPUTS.values(), ("DK",), ("DV",))


def unfit(
    config: LaunchConfig, problem: Problem, gpu: Gpu, outputs: tuple[str, ...] | None = None
) -> str | None:
    """Why this configuration cannot work for the problem on the GPU, or None.

    ``outputs``: for the kernel that gives these gradients, see ``BackwardSource``; None: for each of them.
    """
    v = config.as_dict()
    for knob in load_template("backward").knobs:
        if v.get(knob.name) not in knob.choices:
            return f"{knob.name}={v.get(knob.name)} is not one of {list(knob.choices)}"
    if v["KERNEL"] == "hopper":
        found = (
            backward_hopper.unfit(v, problem, gpu, x) for x in ([outputs] if outputs else _ALL)
        )
        return next((said for said in found if said is not None), None)
    if v["num_warps"] == 8 and v["BLOCK_M"] == 32:
        return "8 warps need 64 rows: fewer leave warps without rows of their own"
    needed = shared_bytes(config, problem, gpu)
    if needed > gpu.shared_bytes:
        return f"tiles take {needed} bytes of shared memory, {gpu.name} has {gpu.shared_bytes}"
    return None


def starts(
    problem: Problem, gpu: Gpu, outputs: tuple[str, ...] = OUTPUTS[KEYS]
) -> tuple[LaunchConfig, ...]:
    """Configurations to measure first for the kernel that gives ``outputs``: the default, then warp-specialised ones."""
    default = default_config(problem, gpu)
    special = backward_hopper.starts(default.as_dict(), problem, gpu, outputs)
    return (default, *map(LaunchConfig.of, special))


def beside(source: KernelSource) -> LaunchConfig:
    """What a portable launch beside warp-specialised ones is compiled with: the default of their architecture."""
    return _beside(source.head_dim, source.value_dim, source.dtype)


@cache
def _beside(head_dim: int, value_dim: int, dtype: str) -> LaunchConfig:
    return default_config(Problem(head_dim, value_dim, dtype=dtype), find_gpu("h200"))


def shared_bytes(config: LaunchConfig, problem: Problem, gpu: Gpu) -> int:
    """Shared memory of a portable program at most, read off what Triton 3.9 makes of both kernels (2026-11-30).

    The stages of the tiles that are visited, two tensors in all; beside them, where matrix instructions read both
    operands from there (sm_90 and newer, 2-byte types), the program's own tiles, else one of them; p or dS on its way
    to another layout; LSE and delta, 16 bytes a row.
    """
    v = config.as_dict()
    rows, visited, stages = int(v["BLOCK_M"]), int(v["BLOCK_N"]), int(v["STAGES"])
    element = 4 if problem.dtype == "float32" else 2
    columns, widest = problem.head_dim + problem.value_dim, max(problem.head_dim, problem.value_dim)
    if gpu.backend != "cuda":
        return (stages - 1) * visited * columns * element + 2 * rows * visited * element
    staged = stages * visited * (columns * element + 16)
    arch = gpu.arch if isinstance(gpu.arch, int) else 0
    if element == 2 and arch >= 90:
        between = rows * visited * (4 if arch >= 100 else 2)
        return staged + rows * columns * element + between
    return staged + rows * widest * element + rows * visited * element


def _sums(config: LaunchConfig, problem: Problem) -> int:
    """Registers of a thread for dK and dV; dQ takes fewer."""
    columns = sum(c.width for d in (problem.head_dim, problem.value_dim) for c in chunks(d))
    return int(config["BLOCK_M"]) * columns // (32 * int(config["num_warps"]))


__all__ = [
    "KEYS",
    "QUERIES",
    "SPLIT",
    "BackwardSource",
    "beside",
    "default_config",
    "render_backward",
    "shared_bytes",
    "starts",
    "unfit",
]
