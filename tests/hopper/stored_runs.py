"""Gradients with stored dS on the machine, by way of the real launch code, with the split kernels beside them."""

from __future__ import annotations

from functools import cache
from typing import Any

from sparsegen.codegen import backward, backward_stored
from sparsegen.codegen.backward import KEYS, QUERIES, BackwardSource
from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.schedule.build import build
from sparsegen.schedule.transpose import transpose
from sparsegen.schedule.tree import Schedule
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from tests.hopper.backward_runs import GradientsOnMachine, case_of, gradients_of, saved_of, sources
from tests.hopper.fused_runs import SPLIT
from tests.hopper.runs import GPU, Run
from tests.kernels.gradients import judge

ENOUGH = 1 << 30


@cache
def stored_sources(
    pattern: Pattern, problem: Problem, schedule: Schedule | None
) -> dict[str, BackwardSource]:
    found = transpose(pattern, problem)
    made = [
        backward_stored.render_stored(pattern, found.schedule, problem, KEYS, found.shift),
        backward_stored.render_stored(
            pattern, schedule or build(pattern, problem), problem, QUERIES
        ),
    ]
    return {source.name: source for source in made}


def stored_kernel_of(run: Run, workspace: int = ENOUGH) -> GradientsOnMachine:
    """All kernels of an artifact with stored dS."""
    problem = run.problem
    made = dict(sources(run.pattern, problem, run.schedule, None))
    plain = backward.default_config(problem, GPU).as_dict() | SPLIT
    configs = dict.fromkeys(made, LaunchConfig.of(plain))
    for name, source in stored_sources(run.pattern, problem, run.schedule).items():
        made[name] = source
        own = backward_stored.default_config(problem, GPU, source.part).as_dict()
        configs[name] = LaunchConfig.of(own | {"STAGES": 2, "BLOCK_N": 64} | dict(run.knobs))
    kernel = GradientsOnMachine(made, configs, run.seed, run.rounds)
    kernel.workspace = workspace
    return kernel


def compare_stored(
    run: Run, ran: tuple[str, str] = ("h", "h"), workspace: int = ENOUGH, **given: Any
) -> GradientsOnMachine:
    """All gradients against float64 autograd; ``ran``: texts of the launches of keys and of queries."""
    kernel = stored_kernel_of(run, workspace)
    saved, want, extras = saved_of(run, **given)
    got = gradients_of(kernel, run, saved, **extras)
    assert kernel.ran == {"queries": "p", "stored-keys": ran[0], "stored-queries": ran[1]}
    judge(case_of(run), got, want)
    return kernel
