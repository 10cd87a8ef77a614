"""A gradient kernel's plans and its template → its texts, in one record: the same for every design."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from sparsegen.codegen import backward_hopper
from sparsegen.codegen.backward import BackwardSource
from sparsegen.codegen.backward_plan import BackwardPlan, HopperBackwardPlan
from sparsegen.codegen.backward_planner import adds_up, gradient_launches
from sparsegen.codegen.grids import Grid
from sparsegen.codegen.source import render_text
from sparsegen.codegen.template import Template
from sparsegen.schedule.tree import Schedule
from sparsegen.spec.problem import Problem


def gradient_source(
    which: Template,
    schedule: Schedule,
    problem: Problem,
    plan: BackwardPlan,
    grids: Sequence[Grid],
    design: str,
    special: HopperBackwardPlan,
    **given: Any,
) -> BackwardSource:
    """Render both texts of a kernel.

    ``plan``: made of ``schedule``; ``grids``: of its launches, in order.  ``special``: what the warp-specialised text is
    given besides.  ``given``: what else that text is given, by name.
    """
    portable: Any = plan
    source = BackwardSource(
        template=which.name,
        text=render_text(which, "kernel.py.jinja", plan=portable),
        entry=plan.entry,
        dtype=problem.dtype,
        head_dim=problem.head_dim,
        value_dim=problem.value_dim,
        parameters=tuple(zip(plan.parameters, plan.types)),
        constexprs=plan.constexprs,
        tables=plan.tables,
        grids=tuple(grids),
        position_limit=schedule.position_limit,
        max_position=schedule.max_position,
        min_position=schedule.min_position,
        part=plan.part,
        outputs=plan.outputs,
        shift=plan.shift,
        sums=adds_up(gradient_launches(schedule, plan.part)),
        walks=plan.walks,
        launches=tuple(range(len(plan.launches))),
        design=design,
    )
    text = render_text(
        which,
        "hopper.py.jinja",
        plan=plan,
        hopper=special,
        gluon=backward_hopper.gluon,
        corner_of=partial(backward_hopper.corner_of, part=plan.part),
        **given,
    )
    warp = replace(
        source,
        text=text,
        entry=special.entry,
        parameters=tuple(zip(special.parameters, special.types)),
        constexprs=special.constexprs,
        launches=tuple(launch.number for launch in special.launches.values()),
    )
    return replace(source, hopper=warp)
