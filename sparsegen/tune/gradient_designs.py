"""Which design gives the gradients: what a caller allows, what a problem has, and what was measured.

split   dQ in one kernel, dK and dV in another: the same to the bit from run to run, always there
fused   all three in one kernel, whose sums of dQ come in no fixed order: where ``deterministic=False`` allows it
stored  dS is kept between the two kernels: where a workspace is given
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sparsegen.codegen.backward_planner import FUSED, KEYS, QUERIES, STORED
from sparsegen.paths import data_dir
from sparsegen.schedule.machine import H200
from sparsegen.tune import store
from sparsegen.tune.gradient_target import part_candidates

if TYPE_CHECKING:
    from sparsegen.schedule.search import Candidate
    from sparsegen.spec.gpu import Gpu
    from sparsegen.spec.pattern import Pattern
    from sparsegen.spec.problem import Problem

SPLIT = "split"
SPLIT_PARTS = (QUERIES, KEYS)
STORES = (f"{STORED}-{KEYS}", f"{STORED}-{QUERIES}")  # kernels of the stored design
# Causal 16k H16, stored against split (H200, 2026-11-30): 4,629 and 5,250 µs with 128 columns, 3,305 and 3,213 with 64.
# What lies between was not measured.
LEAST_STORED = 128


def why_not_fused(pattern: Pattern, problem: Problem, gpu: Gpu) -> str | None:
    """Why the fused kernel cannot give the gradients of a problem on a GPU, in one sentence, or None."""
    from sparsegen.codegen import backward_fused
    from sparsegen.tune.gradient_target import transposed_of

    default = backward_fused.default_config(problem, gpu)
    if (why := backward_fused.unfit(default, problem, gpu)) is not None:
        return why
    if part_candidates(pattern, problem, FUSED):
        return None
    best = transposed_of(pattern, problem).schedule
    why = backward_fused.uncovered(best, problem)
    return why or "the problem's lengths are no whole periods of its schedules"


def why_not_stored(pattern: Pattern, problem: Problem, gpu: Gpu) -> str | None:
    """Why dS is not stored for a problem on a GPU, in one sentence, or None."""
    from sparsegen.codegen import backward_stored

    for part in (KEYS, QUERIES):
        default = backward_stored.default_config(problem, gpu, part)
        if (why := backward_stored.unfit(default, problem, gpu, part)) is not None:
            return why
    if problem.head_dim < LEAST_STORED:
        return f"for head_dim below {LEAST_STORED} the split kernels are as fast"
    for best, part in zip(stored_candidates(pattern, problem), SPLIT_PARTS):
        if (why := backward_stored.uncovered(pattern, best.schedule, problem, part)) is not None:
            return why
    return None


def stored_candidates(pattern: Pattern, problem: Problem) -> tuple[Candidate, Candidate]:
    """The schedules of queries and of keys that dS is stored over: the best ones alone, since others visit more tiles than
    the two products are that it saves."""
    queries, keys = (part_candidates(pattern, problem, part)[0] for part in SPLIT_PARTS)
    return queries, keys


def parts(pattern: Pattern, problem: Problem, gpu: Gpu, deterministic: bool) -> tuple[str, ...]:
    """The kernels to tune, or to look up, for a problem: the split ones, and the fused one where it is allowed and can be."""
    if deterministic or why_not_fused(pattern, problem, gpu) is not None:
        return SPLIT_PARTS
    return (*SPLIT_PARTS, FUSED)


def fused_is_chosen(times: Mapping[str, float | None], problem: Problem) -> tuple[bool, str]:
    """Whether the fused design is, by the times of the parts in µs, and why.

    Every time has the launch in it that prepares a pass; of the two of the split design one is too many and is taken
    off as predicted.  Where a time is missing the split design is chosen, though it has seven products a tile in place
    of five: on an H200 the fused one was faster for wide bands of one segment (causal, windows of 4,096, chunks), and slower
    for all other masks that were measured (docs/performance.md).
    """
    measured = {part: times.get(part) for part in (*SPLIT_PARTS, FUSED)}
    queries, keys, fused = (measured[part] for part in (QUERIES, KEYS, FUSED))
    if queries is None or keys is None or fused is None:
        return False, "split: fused is allowed, and not all was measured"
    split = queries + keys - preparing_us(problem)
    said = f"fused {fused:.1f} µs, split {split:.1f} µs"
    return (
        (True, said) if fused < split else (False, said.replace("fused", "split, since fused", 1))
    )


def preparing_us(problem: Problem) -> float:
    """The launch that prepares, as memory's speed has it: OUT and dO are read, 20 bytes a row besides."""
    q_len, _ = problem.lengths[0]
    element = 4 if problem.dtype == "float32" else 2
    rows = (problem.batch or 1) * problem.heads * q_len
    return rows * (2 * problem.value_dim * element + 20) / H200.bandwidth * 1e6


def recorded_us(
    pattern: Pattern, problem: Problem, gpu: Gpu, template: str, root: Path | None = None
) -> float | None:
    """The time of a kernel's row in ``tuned/`` for this very problem and GPU type, or None."""
    wanted = store.Measured.of(problem, *problem.lengths[0])
    rows = store.read(root or data_dir("tuned"), gpu.name, pattern.name)
    found = [r for r in rows if r.template == template and r.problem == wanted]
    return found[0].time_us if found else None
