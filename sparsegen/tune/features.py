"""What is known of a problem without measuring it: the questions that the rule of a GPU may ask (``rule``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparsegen.tune.schedules import candidates_of

if TYPE_CHECKING:
    from sparsegen.spec.pattern import Pattern
    from sparsegen.spec.problem import Problem

Feature = str | int | float | bool

# Name → what it says.  Rules are trees over these; a rule that asks anything else is damaged.
MEANING = {
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

    Raises:
        UnsupportedError: there is no schedule.
    """
    from dataclasses import replace

    from sparsegen.codegen import render
    from sparsegen.schedule.count import cells

    at = (q_len, kv_len)
    if at not in problem.lengths:
        problem = replace(problem, lengths=(at,))
    schedule = candidates_of(pattern, problem)[0].schedule
    kv_heads = problem.kv_heads or problem.heads
    return {
        "specialised": render(pattern, schedule, problem, template).hopper is not None,
        "residues": "mod" in schedule.label,
        "boxes": "box" in schedule.label,
        "split": "split" in schedule.label,
        "row_keys": round(cells(schedule, q_len, kv_len) / q_len, 1),
        "head_dim": problem.head_dim,
        "q_len": q_len,
        "kv_len": kv_len,
        "group": problem.heads // kv_heads,
        "rows": problem.batch * problem.heads * q_len,
    }
