"""From a pattern to its schedule: the cheapest one that the search finds, or the list of them."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

from sparsegen.errors import UnsupportedError
from sparsegen.schedule import search
from sparsegen.schedule.machine import Sizes
from sparsegen.schedule.prepare import Rules
from sparsegen.schedule.search import TILE, Candidate
from sparsegen.schedule.tree import Schedule


def build(pattern: Any, problem: Any = None, tile: tuple[int, int] = TILE) -> Schedule:
    """The schedule of a pattern; ``problem`` (or the pattern's own) tells which lengths and sizes it must serve.

    ``tile``: BLOCK_M and BLOCK_N that schedules are compared at.  Raises UnsupportedError, with the place in the
    pattern's file, where the mask needs run-time data.
    """
    return candidates(pattern, problem, tile)[0].schedule


def candidates(
    pattern: Any, problem: Any = None, tile: tuple[int, int] = TILE
) -> tuple[Candidate, ...]:
    """The schedules worth measuring, cheapest first, and the plain one."""
    refuse_run_time_data(pattern)
    problem = problem if problem is not None else pattern.problem
    lengths = problem.lengths if problem else ()
    grids = [prod(shape) for _, node in pattern.nodes() if (shape := node.grid()) is not None]
    return search.candidates(
        pattern.exprs,
        pattern.align,
        lengths,
        tile,
        most_keys=min(grids, default=None),
        sizes=Sizes.of(problem) if problem else None,
    )


def build_from_exprs(
    rules: Rules,
    align: str = "bottom_right",
    lengths: Iterable[tuple[int, int]] = (),
    tile: tuple[int, int] = TILE,
) -> Schedule:
    """The schedule of masks per group of heads: (inclusive head ranges, None = the rest, mask)."""
    return search.candidates(rules, align, lengths, tile)[0].schedule


def refuse_run_time_data(pattern: Any) -> None:
    """UnsupportedError, with the place in the pattern's file, where the mask needs run-time data."""
    for path, node in pattern.nodes():
        if node.decided_by_data:
            place, where = pattern.place(path), f"{path}: {node.keyword}"
            raise UnsupportedError(
                f"{where if place == path else f'{place}: {where}'} is decided by run-time data, "
                "which is not compiled yet; backend='reference' runs it"
            )
