"""Which design gives the gradients: what a caller allows, what a problem has, and what was measured.

split   dQ in one kernel, dK and dV in another: the same to the bit from run to run, always there
fused   all three in one kernel, whose sums of dQ come in no fixed order: where ``deterministic=False`` allows it
stored  dS is kept between the two kernels: where a workspace is given; not offered yet
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sparsegen.codegen.backward_planner import FUSED, KEYS, QUERIES, STORED
from sparsegen.errors import UnsupportedError
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
# None offers them.  An H200 stopped on ragged lengths (2026-11-30): boxes of dS began inside 16 bytes.  With dS laid out anew
# the kernels are right on the CPU machine of tests/hopper, which now knows that rule, and compile; no GPU has run them since.
NOT_OFFERED: str | None = (
    "workspace is not offered yet: no GPU has run the kernels with stored dS since a fault on ragged lengths was mended; leave "
    "it out"
)
SPLIT_PARTS = (QUERIES, KEYS)
STORES = (f"{STORED}-{KEYS}", f"{STORED}-{QUERIES}")  # kernels of the stored design


def refuse_stored() -> None:
    """``UnsupportedError`` while workspaces are not offered."""
    if NOT_OFFERED is not None:
        raise UnsupportedError(NOT_OFFERED)


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
    """The same of the kernels with stored dS."""
    from sparsegen.codegen import backward_stored

    for part in (KEYS, QUERIES):
        default = backward_stored.default_config(problem, gpu, part)
        if (why := backward_stored.unfit(default, problem, gpu, part)) is not None:
            return why
    queries, keys = (
        [c.schedule for c in part_candidates(pattern, problem, part)] for part in SPLIT_PARTS
    )
    return backward_stored.parts_uncovered(pattern, queries, keys, problem)


def stored_candidates(pattern: Pattern, problem: Problem) -> tuple[Candidate, Candidate]:
    """The best schedules of queries and of keys that dS can be stored over; there are, see ``why_not_stored``."""
    from sparsegen.codegen.backward_stored import uncovered

    queries, keys = (
        next(
            c
            for c in part_candidates(pattern, problem, part)
            if uncovered(pattern, c.schedule, problem, part) is None
        )
        for part in SPLIT_PARTS
    )
    return queries, keys


def parts(pattern: Pattern, problem: Problem, gpu: Gpu, deterministic: bool) -> tuple[str, ...]:
    """The kernels to tune, or to look up, for a problem: the split ones, and the fused one where it is allowed and can be."""
    if deterministic or why_not_fused(pattern, problem, gpu) is not None:
        return SPLIT_PARTS
    return (*SPLIT_PARTS, FUSED)


def fused_is_chosen(times: Mapping[str, float | None], problem: Problem) -> tuple[bool, str]:
    """Whether the fused design is, by the times of the parts in µs, and why.

    Every time has the launch in it that prepares a pass; of the two of the split design one is too many and is taken
    off as predicted.  Where a time is missing the split design is chosen: on an H200 it was faster for three masks of
    four (docs/performance.md), though it has seven products a tile in place of five.
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
