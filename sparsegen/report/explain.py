"""The candidate schedules side by side, and why the chosen one was chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sparsegen.report import words

if TYPE_CHECKING:
    from sparsegen.schedule.cost import Cost
    from sparsegen.schedule.search import Candidate


@dataclass(frozen=True)
class Line:
    """One candidate at the lengths looked at."""

    label: str
    cells: int  # visible ones of the head looked at
    computed: int  # of the same head
    cost: Cost  # of all heads of the problem
    measured: bool  # near enough to the best for a tuner to measure it

    @property
    def efficiency(self) -> float:
        """Visible share of the computed cells; 1 where nothing is computed."""
        return self.cells / self.computed if self.computed else 1.0

    def as_dict(self) -> dict[str, Any]:
        """One entry of ``candidates`` in ``show --json``."""
        return {
            "schedule": self.label,
            "cells": self.cells,
            "computed_cells": self.computed,
            "efficiency": self.efficiency,
            "bytes": self.cost.bytes,
            "state_bytes": self.cost.state_bytes,
            "workspace_bytes": self.cost.workspace_bytes,
            "sweeps": self.cost.sweeps,
            "launches": self.cost.launches,
            "predicted_ms": 1e3 * self.cost.seconds,
            "predicted_parts_ms": self.cost.parts(),
            "to_measure": self.measured,
        }


def lines_of(
    found: Sequence[Candidate],
    head: int,
    cells: int,
    lengths: tuple[int, int],
    tile: tuple[int, int],
) -> tuple[Line, ...]:
    """The candidates with what they cost at these lengths, in their order."""
    from sparsegen.schedule.cost import cost_of

    out = []
    for c in found:
        one = all_heads = cost_of(c.schedule, *lengths, tile, c.cost.sizes)
        if len(c.schedule.classes) > 1:
            own = replace(c.schedule, classes=(words.class_of(c.schedule, head),))
            one = cost_of(own, *lengths, tile)
        out.append(Line(c.schedule.label, cells, one.tile_cells, all_heads, c.to_measure))
    return tuple(out)


_HEAD = ("schedule", "computed", "visible", "bytes", "sweeps", "launches", "ms")
_PARTS = ("matmul", "longest_program", "copies", "later_sweeps", "launches")


def explain_text(lines: Sequence[Line], cells: int) -> str:
    """A table of the candidates, the chosen one first, and one sentence on why."""
    if not lines:
        return ""
    cost = lines[0].cost
    where = f"{cost.q_len:,} x {cost.kv_len:,} in {cost.tile[0]}x{cost.tile[1]} tiles"
    title = f"candidates for {where}, predicted for {cost.sizes}, {cells:,} cells visible a head"
    rows = [(*_HEAD, *(p.replace("_", " ") for p in _PARTS))]
    for line in lines:
        c, parts = line.cost, line.cost.parts()
        rows.append(
            (
                line.label + ("" if line.measured else " (not measured)"),
                f"{line.computed:,}",
                f"{100 * line.efficiency:.1f} %",
                f"{c.bytes:,}",
                str(c.sweeps),
                str(c.launches),
                f"{1e3 * c.seconds:.3f}",
                *(f"{parts[p]:.3f}" for p in _PARTS),
            )
        )
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    table = [
        "  " + "  ".join(x.rjust(w) if i else x.ljust(w) for i, (x, w) in enumerate(zip(r, widths, strict=True)))
        for r in rows
    ]  # fmt: skip
    return "\n".join([title, *(t.rstrip() for t in table), why(lines)])


def why(lines: Sequence[Line]) -> str:
    """Why the first candidate was chosen, against the next one and the plain one."""
    won, *others = lines
    if not others:
        return f"{won.label}: no other query tiling, key cuts or split of rows comes near it"
    other = next((x for x in others if x.label == "runs"), others[0])
    times = other.cost.seconds / max(won.cost.seconds, 1e-12)
    if times < 1.05:
        return (
            f"{won.label}: {other.label} is predicted to take {1e3 * other.cost.seconds:.3f} ms, "
            "no gain that the model could be trusted with"
        )
    reasons = []
    if other.computed > 1.02 * won.computed:
        reasons.append(
            f"{_share(won)} of its cells are visible instead of {_share(other)}, so it computes "
            f"{other.computed / max(won.computed, 1):.1f} times fewer"
        )
    saved = other.cost.waiting_seconds - won.cost.waiting_seconds
    if saved > 0.1 * (other.cost.seconds - won.cost.seconds):
        reasons.append(f"no long program is waited for ({1e3 * saved:.3f} ms less)")
    if not reasons:
        reasons.append("its tiles have less to test")
    paid = won.cost.state_seconds - other.cost.state_seconds
    price = f", for {1e3 * paid:.3f} ms of moving state" if paid > 0 else ""
    return (
        f"{won.label} is predicted {times:.1f} times as fast as {other.label}: "
        f"{' and '.join(reasons)}{price}"
    )


def _share(line: Line) -> str:
    return f"{100 * line.efficiency:.1f} %"
