"""Gradients of a call: the launches of the two backward kernels, planned once a layout, and run on tensors.

A ``Plan`` knows the order of the launches and what each of them takes; how one is run is the caller's: a loaded binary, or
the same text through Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparsegen.codegen.backward import KEYS, QUERIES, BackwardSource
from sparsegen.codegen.backward_planner import FUSED, STORED
from sparsegen.errors import InputError
from sparsegen.launch.backward_rooms import Room as Room
from sparsegen.launch.backward_stages import BlockRows, Stage, Stages
from sparsegen.launch.backward_stages import Saved as Saved
from sparsegen.launch.backward_stages import Step as Step
from sparsegen.launch.kernel import Call

if TYPE_CHECKING:
    import torch

# gradients that may be asked for; those of sinks and null key come with any of them
ALL = ("q", "k", "v")
# runs one launch of a pass: the step, its number in the plan, the pass's memory by name
Run = Callable[[Step, int, Mapping[str, Any]], None]
Make = Callable[[Saved, Room], Any]  # makes memory of a pass


@dataclass(frozen=True)
class Gradients:
    """Gradients in the shape and dtype of what they belong to; None where not asked for or not part of the pattern."""

    q: torch.Tensor | None = None
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    sink_logits: torch.Tensor | None = None
    null_key: tuple[torch.Tensor, torch.Tensor] | None = None


class Plan:
    """All launches of a backward pass on tensors of one layout and with one set of run-time arguments.

    ``sources`` by name; only what is ``wanted`` is computed.  Of keys and values one alone is, where there is a kernel
    that gives it alone ("keys-DK", "keys-DV").  ``fused``: one kernel gives all three gradients.
    ``workspace``: the kernels "stored-keys" and "stored-queries" do, with dS in so many bytes.  ``prepared``: the launches
    of queries are asked for and store STATS themselves.  The plan keeps ``call`` and with it the memory of its tensors.
    """

    def __init__(
        self,
        sources: Mapping[str, BackwardSource],
        block_rows: BlockRows,
        saved: Saved,
        call: Call,
        wanted: Collection[str] = ALL,
        fused: bool = False,
        workspace: int | None = None,
        prepared: bool = False,
    ):
        _check(sources, saved, call)
        stages, queries = Stages(block_rows, saved, call), sources[QUERIES]
        self.call, self._sizes = call, stages.sizes
        self._stages = [stages.prepare(queries, prepared)]
        if fused:
            self._stages.append(stages.fused(sources[FUSED]))
            return
        if workspace is not None:
            pair = sources[f"{STORED}-{KEYS}"], sources[f"{STORED}-{QUERIES}"]
            self._stages.append(stages.stored(*pair, workspace))
            return
        if "q" in wanted:
            self._stages.append(stages.queries(queries))
        names = tuple(f"D{x.upper()}" for x in "kv" if x in wanted)
        if names:
            alone = sources.get(f"{KEYS}-{names[0]}") if len(names) == 1 else None
            self._stages.append(stages.keys(alone or sources[KEYS], names))

    def run(self, saved: Saved, run: Run, make: Make | None = None) -> Gradients:
        """One pass: memory is made, every launch is run, results are cast and added up."""
        make = make or make_room
        memory: dict[str, Any] = {
            "Q": saved.q,
            "K": saved.k,
            "V": saved.v,
            "OUT": saved.out,
            "DO": saved.dout,
            "LSE": saved.lse,
            "DLSE": saved.lse if saved.dlse is None else saved.dlse,
        }
        first, *others = self._stages
        memory |= {name: make(saved, room) for name, room in first.rooms.items()}
        _steps(first, 0, memory, run)
        number, found = len(first.steps), dict[str, Any]()
        for stage in others:
            found |= _results(stage, number, memory, saved, run, make)
            number += len(stage.steps)
        sinks, null = self._learned(memory)
        return Gradients(found.get("DQ"), found.get("DK"), found.get("DV"), sinks, null)

    def _learned(self, memory: Mapping[str, Any]) -> tuple[Any, Any]:
        """Gradients of sink logits and null key from their parts."""
        s, call = self._sizes, self.call
        sinks = null = None
        if call.sink_logits is not None:
            sinks = memory["SINK_PARTS"].sum((0, 2)).to(call.sink_logits.dtype)
        if call.null_key is not None:
            parts = [memory[name] for name in ("NULL_K_PARTS", "NULL_V_PARTS")]
            group = (s.batch, s.kv_heads, s.heads // s.kv_heads, parts[0].shape[2])
            sums = [part.view(*group, -1).sum((0, 2, 3)) for part in parts]
            null = tuple(x.to(t.dtype) for x, t in zip(sums, call.null_key))
        return sinks, null


def _steps(stage: Stage, number: int, memory: Mapping[str, Any], run: Run) -> None:
    for i, step in enumerate(stage.steps, number):
        run(step, i, memory)


def _results(
    stage: Stage, number: int, memory: Mapping[str, Any], saved: Saved, run: Run, make: Make
) -> dict[str, Any]:
    """Run a stage in room of its own, all but the results of which is free afterwards."""
    made = {name: make(saved, room) for name, room in stage.rooms.items()}
    whole = {**memory, **made}
    parts = {name: whole[of][part] for name, (of, part) in stage.slices.items()}
    _steps(stage, number, {**whole, **parts}, run)
    return {name: made[name].to(saved.q.dtype) for name in stage.results}


def make_room(saved: Saved, room: Room) -> Any:
    """Memory of a pass: zeros where it has to be, else of any content."""
    new = saved.lse.new_zeros if room.zero else saved.lse.new_empty
    return new(room.shape, dtype=saved.lse.dtype if room.float32 else saved.q.dtype)


def _check(sources: Mapping[str, BackwardSource], saved: Saved, call: Call) -> None:
    shift = sources[KEYS].shift if KEYS in sources else 0
    q_rows, kv_rows = saved.q.shape[2], saved.k.shape[2]
    ragged = any(t is not None for t in (call.q_lengths, call.kv_starts, call.kv_lengths))
    first = call.q_start - q_rows + (0 if ragged else kv_rows) if call.relative else call.q_start
    if shift and first + shift < 0:
        raise InputError(
            f"the first query may lie at position {first}; gradients of keys reach back to -{shift}"
        )
