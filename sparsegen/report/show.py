"""``sparsegen show``: what a pattern looks like, what it costs, and why."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsegen.errors import InputError, UnsupportedError
from sparsegen.report import coverage, sampling, words
from sparsegen.report.coverage import Grid
from sparsegen.report.explain import Line, explain_text, lines_of
from sparsegen.report.runtime_data import read_runtime
from sparsegen.schedule.tree import HeadClass, Schedule
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from sparsegen.spec.run_data import check_keywords

if TYPE_CHECKING:
    from sparsegen.report.memory import Memory
    from sparsegen.schedule.search import Candidate

TILE = (128, 64)  # that compiled schedules are chosen for, see ``schedule.search``
TEXT_SIZE = (32, 64)  # rows and columns of characters; a character is about twice as high as wide
PNG_SIZE = (384, 384)  # blocks of the picture


@dataclass(frozen=True)
class Counts:
    """Cells of one head.  ``exact`` is False where ``cells`` is an estimate from some rows (and ``computed``, for masks
    that no schedule takes)."""

    cells: int
    computed: int
    exact: bool

    @property
    def efficiency(self) -> float:
        """Visible share of the computed cells; 1 where nothing is computed."""
        return self.cells / self.computed if self.computed else 1.0


@dataclass(frozen=True)
class Look:
    """One head of a pattern at one pair of lengths, seen with one tile size.

    ``schedule`` and ``head_class`` are None where the schedule cannot take the pattern; ``refusal`` then says why.
    """

    pattern: Pattern
    q_len: int
    kv_len: int
    tile: tuple[int, int]
    head: int
    runtime: dict[str, Any]
    schedule: Schedule | None
    head_class: HeadClass | None
    refusal: str
    counts: Counts
    candidates: tuple[Line, ...] = ()  # schedules that were compared, the chosen one first

    @property
    def density(self) -> float:
        """Visible share of all q_len x kv_len cells."""
        return self.counts.cells / (self.q_len * self.kv_len)

    def grid(self, size: tuple[int, int]) -> Grid:
        """Visible share of blocks, at most ``size`` = (rows, columns) of them."""
        if self.schedule is None or self.head_class is None:
            return sampling.grid_of_mask(
                self.pattern, self.q_len, self.kv_len, size, self.head, self.runtime
            )
        return coverage.of_schedule(self.schedule, self.head_class, self.q_len, self.kv_len, size)

    @cached_property
    def branches(self) -> list[dict[str, Any]]:
        """Disjoint branches in the order of the kernel's loops, as JSON values."""
        return [] if self.head_class is None else words.branches(self.head_class, self.tile[0])

    @cached_property
    def gradients(self) -> Memory | str:
        """What training with the pattern's problem holds at these lengths; or why no gradient kernel can be made."""
        from sparsegen.report.memory import memory_of

        if self.schedule is None:
            return self.refusal
        problem = problem_at(self.pattern, self.q_len, self.kv_len)
        try:
            return memory_of(self.pattern, problem, self.schedule, self.tile)
        except UnsupportedError as error:
            return str(error)

    def _gradients_dict(self) -> dict[str, Any]:
        found = self.gradients
        if isinstance(found, str):
            return {"unsupported": found}
        return {**found.as_dict(), "unsupported": None}

    def as_dict(self) -> dict[str, Any]:
        """The object of ``show --json``."""
        return {
            "pattern": self.pattern.name,
            "summary": self.pattern.summary,
            "q_len": self.q_len,
            "kv_len": self.kv_len,
            "align": self.pattern.align,
            "head": self.head,
            "tile": list(self.tile),
            "density": self.density,
            "cells": self.counts.cells,
            "cells_exact": self.counts.exact,
            "computed_cells": self.counts.computed,
            "efficiency": self.counts.efficiency,
            "branches": self.branches,
            "schedule": None if self.schedule is None else self.schedule.label,
            "candidates": [line.as_dict() for line in self.candidates],
            "predicted_for": str(self.candidates[0].cost.sizes) if self.candidates else None,
            "gradients": self._gradients_dict(),
            "unsupported": self.refusal or None,
        }

    def text(self, *, explain: bool = False) -> str:
        """For a person: picture, numbers, branches in words; ``explain`` adds forms, tests and notes."""
        from sparsegen.report.art import draw

        parts = [self._title(), draw(self.grid(TEXT_SIZE)), self._numbers()]
        if self.head_class is not None and self.schedule is not None:
            parts.append(words.describe(self.head_class, self.tile[0], explain=explain))
            if explain:
                parts.append(explain_text(self.candidates, self.counts.cells))
            if explain and self.schedule.notes:
                parts.append("notes\n" + "\n".join(f"  {note}" for note in self.schedule.notes))
        if self.refusal:
            parts.append(f"no kernel yet: {self.refusal}")
        return "\n\n".join(parts)

    def save_png(self, path: Path) -> None:
        """Draw the pattern into ``path``, every branch in its colour."""
        from sparsegen.report.picture import save_png

        title = (
            f"{self.pattern.name}: {self.q_len:,} x {self.kv_len:,}, "
            f"{_percent(self.density)} visible"
        )
        save_png(self.grid(PNG_SIZE), title, path, self._legend())

    def _legend(self) -> dict[str, str]:
        """How the tiles of every branch lie, by its name."""
        out = {}
        for branch in self.branches:
            out[branch["name"]] = branch["tiling"] + (", keys split" if branch["split"] else "")
        return out

    def _title(self) -> str:
        summary = f": {self.pattern.summary}" if self.pattern.summary else ""
        where = f"head {self.head}, " if len(self.pattern.rules) > 1 else ""
        return (
            f"{self.pattern.name}{summary}\n"
            f"{where}{self.q_len:,} queries x {self.kv_len:,} keys, aligned {self.pattern.align}"
        )

    def _numbers(self) -> str:
        about = "" if self.counts.exact else "about "
        m, n = self.tile
        near = (
            "" if self.schedule is not None else about
        )  # a schedule's tiles are counted, not sampled
        lines = [
            f"visible   {about}{self.counts.cells:,} cells, {_percent(self.density)} of all",
            f"computed  {near}{self.counts.computed:,} cells in {m}x{n} tiles, "
            f"{_percent(self.counts.efficiency)} of them visible",
        ]
        if self.schedule is not None and self.candidates:
            cost = self.candidates[0].cost
            lines.append(f"schedule  {self.schedule.label}")
            if cost.state_bytes:
                lines.append(
                    f"state     {cost.state_bytes:,} bytes moved by later sweeps ({cost.sizes})"
                )
            if cost.workspace_bytes:
                lines.append(
                    f"workspace {cost.workspace_bytes:,} bytes of partial states ({cost.sizes})"
                )
            found = self.gradients
            lines += [f"gradients none: {found}"] if isinstance(found, str) else found.lines()
        return "\n".join(lines)


def look(
    pattern: str | Path | Pattern,
    lengths: tuple[int, int],
    tile: tuple[int, int] = TILE,
    *,
    runtime: Path | dict[str, Any] | None = None,
    head: int = 0,
) -> Look:
    """Look at one head of a pattern for ``lengths`` = (q_len, kv_len) and ``tile`` = (BLOCK_M, BLOCK_N).

    The schedule is the one chosen for these lengths and this tile.

    ``runtime``: a file (see ``read_runtime``) or the keywords themselves, for patterns with run-time nodes.  Raises
    ``InputError`` where such data is missing, unknown or does not fit, or no rule names the head.
    """
    if not isinstance(pattern, Pattern):
        pattern = Pattern.from_yaml(pattern)
    data = read_runtime(runtime) if isinstance(runtime, Path) else dict(runtime or {})
    q_len, kv_len = lengths
    _check(pattern, q_len, kv_len, head, data)
    found, refusal = _candidates(pattern, q_len, kv_len, tile)
    if not found:
        counts = Counts(*sampling.count_mask(pattern, q_len, kv_len, tile, head, data))
        return Look(pattern, q_len, kv_len, tile, head, data, None, None, refusal, counts)
    from sparsegen.schedule.count import count

    schedule = found[0].schedule
    head_class = words.class_of(schedule, head)
    visible = count(replace(schedule, classes=(head_class,)), q_len, kv_len)
    lines = lines_of(found, head, visible.cells, (q_len, kv_len), tile)
    counts = Counts(visible.cells, lines[0].computed, visible.exact)
    return Look(pattern, q_len, kv_len, tile, head, data, schedule, head_class, "", counts, lines)


def _check(pattern: Pattern, q_len: int, kv_len: int, head: int, runtime: dict[str, Any]) -> None:
    """``InputError`` where the head, the lengths or the run-time data do not fit the pattern."""
    if pattern.problem is not None and head >= pattern.problem.heads:
        raise InputError(
            f"{pattern.name} is for {pattern.problem.heads} heads; head {head} is none of them"
        )
    pattern.check_lengths(q_len, kv_len)
    try:
        check_keywords(pattern, runtime, () if pattern.position_only else ("block_scores",))
        if not pattern.position_only:  # one row is enough for the pattern to object to its data
            next(sampling.mask_rows(pattern, np.zeros(1, np.int64), q_len, kv_len, head, runtime))
    except TypeError as error:
        raise InputError(f"{error}; run-time data comes with --runtime FILE") from error


def problem_at(pattern: Pattern, q_len: int, kv_len: int) -> Problem:
    """The pattern's problem at these lengths."""
    return replace(pattern.problem or Problem(), lengths=((q_len, kv_len),))


def _candidates(
    pattern: Pattern, q_len: int, kv_len: int, tile: tuple[int, int]
) -> tuple[tuple[Candidate, ...], str]:
    """The schedules for these lengths and this tile, or none and why."""
    from sparsegen.schedule.build import candidates

    try:
        return candidates(pattern, problem_at(pattern, q_len, kv_len), tile), ""
    except UnsupportedError as error:
        return (), str(error)


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %" if share >= 0.001 or share == 0 else f"{100 * share:.2g} %"
