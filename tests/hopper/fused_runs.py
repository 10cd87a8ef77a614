"""The fused gradient kernel on the machine, by way of the real launch code, with the split ones beside it."""

from __future__ import annotations

from functools import cache
from typing import Any

from sparsegen.codegen import backward, backward_fused
from sparsegen.codegen.backward import BackwardSource
from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.schedule.transpose import transpose
from sparsegen.schedule.tree import Schedule
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from tests.hopper.backward_runs import GradientsOnMachine, case_of, gradients_of, saved_of, sources
from tests.hopper.runs import GPU, Run
from tests.kernels.gradients import judge

SPLIT: dict[str, Any] = {"KERNEL": "hopper", "BLOCK_M": 128, "BLOCK_N": 32, "STAGES": 2}


@cache
def fused_source(pattern: Pattern, problem: Problem, turned: Schedule | None) -> BackwardSource:
    found = transpose(pattern, problem)
    return backward_fused.render_fused(pattern, turned or found.schedule, problem, found.shift)


def fused_kernel_of(run: Run, turned: Schedule | None = None) -> GradientsOnMachine:
    """All kernels of an artifact that may be fused; ``turned``: the fused one's schedule."""
    problem = run.problem
    made = dict(sources(run.pattern, problem, run.schedule, None))
    plain = backward.default_config(problem, GPU).as_dict() | SPLIT
    configs = dict.fromkeys(made, LaunchConfig.of(plain))
    made["fused"] = fused_source(run.pattern, problem, turned)
    values = backward_fused.default_config(problem, GPU).as_dict() | {"STAGES": 2}
    configs["fused"] = LaunchConfig.of(values | dict(run.knobs))
    return GradientsOnMachine(made, configs, run.seed, run.rounds)


def compare_fused(
    run: Run, ran: str = "hp", turned: Schedule | None = None, **given: Any
) -> GradientsOnMachine:
    """All gradients of the fused kernel against float64 autograd; ``ran``: texts of its launches."""
    kernel = fused_kernel_of(run, turned)
    saved, want, extras = saved_of(run, **given)
    got = gradients_of(kernel, run, saved, **extras)
    assert kernel.ran == {"queries": "p", "fused": ran}
    judge(case_of(run), got, want)
    return kernel
