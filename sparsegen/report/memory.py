"""What forward and backward hold at most, in bytes, from the sizes that launches ask for themselves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparsegen.launch.backward_rooms import Room
    from sparsegen.launch.sizes import Sizes
    from sparsegen.schedule.tree import Schedule
    from sparsegen.spec.pattern import Pattern
    from sparsegen.spec.problem import Problem

# what room is for, in the words of docs/backward.md
GRADIENTS, STATISTICS, SUMS = "gradients", "LSE and delta", "float32 sums"
PARTIALS, LEARNED = "partial sums", "parts of sinks and null key"


@dataclass(frozen=True)
class Memory:
    """One forward and one backward pass, deterministic, all gradients wanted.

    ``at_peak``: bytes by kind at the moment when most is held.  ``forward``: bytes while the forward pass runs, before
    there are gradients.  ``schedules``: that of dQ, and that of dK and dV.
    """

    schedules: tuple[str, str]
    problem: str
    forward: int
    at_peak: dict[str, int]

    @property
    def peak(self) -> int:
        """Bytes that are held at most; the forward pass holds less."""
        return sum(self.at_peak.values())

    def as_dict(self) -> dict[str, Any]:
        """``gradients`` of ``show --json``."""
        dq, dkv = self.schedules
        return {
            "schedule": f"dQ {dq}; dK, dV {dkv}",
            "for": self.problem,
            "forward_bytes": self.forward,
            "peak_bytes": self.peak,
            "peak_parts_bytes": self.at_peak,
        }

    def lines(self) -> list[str]:
        """For a person."""
        dq, dkv = self.schedules
        parts = [f"{kind} {n:,}" for kind, n in self.at_peak.items() if n]
        return [
            f"gradients dQ over {dq}; dK and dV over {dkv}",
            f"memory    {self.peak:,} bytes at most in forward and backward ({self.problem}):",
            f"          {', '.join(parts)}",
        ]


def memory_of(
    pattern: Pattern, problem: Problem, schedule: Schedule, tile: tuple[int, int]
) -> Memory:
    """Of a problem at its first lengths; ``schedule``: that of its queries, chosen for ``tile``.

    UnsupportedError: why there are no gradients.
    """
    from sparsegen.artifact.gradient_texts import check_draws
    from sparsegen.codegen.grids import launches_of
    from sparsegen.codegen.planner import chunks
    from sparsegen.codegen.terms import tables_of
    from sparsegen.launch.sizes import Sizes
    from sparsegen.schedule.machine import Sizes as Dims
    from sparsegen.schedule.transpose import transpose

    for columns in (problem.head_dim, problem.value_dim):
        chunks(columns)  # or why no kernel has so many
    keys = transpose(pattern, problem, tile).schedule
    check_draws(pattern, (tables_of(schedule), tables_of(keys)))
    (q_len, kv_len), item = problem.lengths[0], 4 if problem.dtype == "float32" else 2
    s = Sizes(problem.batch, problem.heads, problem.kv_heads, q_len, kv_len, problem.value_dim)
    queries, k_rows = s.batch * s.heads * q_len, s.batch * s.kv_heads * kv_len
    rows = problem.head_dim + problem.value_dim
    held = {
        "inputs": item * (queries * problem.head_dim + k_rows * rows),
        "outputs and LSE": queries * (item * problem.value_dim + 4),
    }
    forward = sum(held.values()) + 4 * sum(s.partials(x.grid for x in launches_of(schedule)))
    stages = _stages(pattern, problem, s, schedule, keys)
    held[GRADIENTS] = queries * problem.value_dim * item  # of the outputs
    return Memory(
        (schedule.label, keys.label),
        f"{Dims.of(problem)}, batch {problem.batch}",
        forward,
        _at_peak(held, *stages, item),
    )


def _stages(
    pattern: Pattern, problem: Problem, s: Sizes, schedule: Schedule, keys: Schedule
) -> tuple[dict[str, Room], list[dict[str, Room]]]:
    """Room that stays for the whole pass, and that of each stage: dQ, then dK and dV (``launch.backward.Plan``)."""
    from sparsegen.codegen.backward import default_config
    from sparsegen.codegen.backward_planner import (
        KEYS,
        OUTPUTS,
        QUERIES,
        adds_up,
        gradient_launches,
    )
    from sparsegen.launch.backward_rooms import prepared, summed
    from sparsegen.spec.gpu import find_gpu

    block = int(default_config(problem, find_gpu("h200"))["BLOCK_M"])
    null = (problem.head_dim, problem.value_dim) if pattern.null_key else ()
    shape = (s.batch, s.heads, s.q_rows)
    first = prepared(shape, -(-s.q_rows // block), pattern.sink_logits, null)
    columns = {"DQ": problem.head_dim, "DK": problem.head_dim, "DV": problem.value_dim}
    stages = []
    for part, one, rows, other in (
        (QUERIES, schedule, shape, s.kv_rows),
        (KEYS, keys, (s.batch, s.kv_heads, s.kv_rows), s.q_rows),
    ):
        launches = gradient_launches(one, part)
        outputs = {name: columns[name] for name in OUTPUTS[part]}
        grids = [x.grid for x in launches]
        stages.append(summed(outputs, grids, rows, other, adds_up(launches))[0])
    return first, stages


def _at_peak(
    held: dict[str, int], first: dict[str, Room], stages: list[dict[str, Room]], item: int
) -> dict[str, int]:
    """Bytes by kind in the stage that holds most: behind it its room is free, but for gradients in their own dtype."""
    held = held | dict.fromkeys((STATISTICS, SUMS, PARTIALS, LEARNED), 0)
    for name, room in first.items():
        held[STATISTICS if name == "STATS" else LEARNED] += room.bytes(item)
    moments = []
    for stage in stages:
        now = dict(held)
        for name, room in stage.items():
            if name.startswith("PARTIAL_"):
                now[PARTIALS] += room.bytes(item)
                continue
            cast = room.float32 and item != 4  # both are there for a moment
            now[SUMS] += room.bytes(item) * cast
            own = replace(room, float32=False).bytes(item)
            now[GRADIENTS] += own
            held[GRADIENTS] += own
        moments.append(now)
    return max(moments, key=lambda now: sum(now.values()))
