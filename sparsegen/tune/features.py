"""What is known of a problem without measuring it: the questions that the rule of a GPU may ask (``rule``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparsegen.schedule.tree import Schedule
    from sparsegen.spec.pattern import Pattern
    from sparsegen.spec.problem import Problem

Feature = str | int | float | bool

# Name → what it says.  Rules are trees over these; a rule that asks anything else is damaged.
MEANING = {
    "pattern": "the pattern's name",
    "specialised": "the warp-specialised kernel does launches of the schedule",
    "residues": "tiles lie on residue classes (strided, dilated, axial)",
    "boxes": "tiles are boxes of a grid",
    "split": "rows are split over several programs",
    "row_keys": "keys that a row sees, on average",
    "head_dim": "columns of queries and keys",
    "q_len": "queries",
    "kv_len": "keys",
    "group": "query heads that share a key head",
    "rows": "query rows in all: batch x heads x q_len",
}


def features_of(
    pattern: Pattern, problem: Problem, q_len: int, kv_len: int, template: str = "forward"
) -> dict[str, Feature]:
    """The features of a pattern that depends on positions only, for the schedule that is predicted best.

    ``template``: "forward", or a gradient kernel's: that of keys has the schedule of the transposed mask.

    Raises:
        UnsupportedError: there is no schedule.
    """
    from dataclasses import replace

    from sparsegen.schedule.count import cells
    from sparsegen.tune.schedules import candidates_of

    at = (q_len, kv_len)
    if at not in problem.lengths:
        problem = replace(problem, lengths=(at,))
    seen = cells(candidates_of(pattern, problem)[0].schedule, q_len, kv_len)
    schedule, specialised = _launched(pattern, problem, template)
    kv_heads = problem.kv_heads or problem.heads
    return {
        "pattern": pattern.name,
        "specialised": specialised,
        "residues": "mod" in schedule.label,
        "boxes": "box" in schedule.label,
        "split": "split" in schedule.label,
        "row_keys": round(seen / q_len, 1),
        "head_dim": problem.head_dim,
        "q_len": q_len,
        "kv_len": kv_len,
        "group": problem.heads // kv_heads,
        "rows": problem.batch * problem.heads * q_len,
    }


def _launched(pattern: Pattern, problem: Problem, template: str) -> tuple[Schedule, bool]:
    """The best prediction for a template's kernel, and whether a warp-specialised one does launches of it."""
    from sparsegen.codegen import render
    from sparsegen.codegen.gradient_template import PARTS, part_of
    from sparsegen.tune.schedules import candidates_of

    part = part_of(template)
    if part is None:
        schedule = candidates_of(pattern, problem)[0].schedule
        return schedule, render(pattern, schedule, problem, template).hopper is not None
    from sparsegen.codegen.backward import QUERIES, render_backward
    from sparsegen.tune.gradient_target import part_candidates, transposed_of

    if part not in PARTS:  # the fused kernel, which has some of the schedules of keys, or none
        found = part_candidates(pattern, problem, part)
        return (found[0].schedule if found else transposed_of(pattern, problem).schedule), bool(
            found
        )
    schedule = part_candidates(pattern, problem, part)[0].schedule
    shift = 0 if part == QUERIES else transposed_of(pattern, problem).shift
    return schedule, render_backward(pattern, schedule, problem, part, shift).hopper is not None
