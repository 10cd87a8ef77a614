"""Tensor descriptors of a backward launch: which calls they can serve, and the arguments with them in their places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparsegen.codegen.backward import QUERIES, BackwardSource
from sparsegen.codegen.grids import Grid
from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.launch import signature as sig
from sparsegen.launch.backward import Saved
from sparsegen.launch.kernel import Call, strides_of
from sparsegen.launch.packing import View

GUARD = "no zero strides, at least one query and one key, and no per-batch lengths of the rows that it visits"
FUSED_GUARD = "all gradients wanted, no zero strides, whole periods, no per-batch lengths, no use_deterministic_algorithms"

STORED_GUARD = "a workspace given, all gradients wanted, no zero strides, no per-batch lengths"


def variant_of(
    source: BackwardSource, config: LaunchConfig, chosen: str, launch: int, saved: Saved, call: Call
) -> str:
    """The variant whose binary does a launch of a call that runs as ``chosen``.

    Where descriptors cannot view the call's tensors, a launch of the fast variant is the one that goes by pointers.
    """
    if chosen == sig.GENERAL or not sig.by_boxes(config):
        return sig.GENERAL if chosen == sig.GENERAL else sig.FAST
    special = sig.unit(source, config, chosen, launch)[1]["KERNEL"] == sig.HOPPER
    if special and not viewable(source, source.grids[launch], saved, call):
        return sig.POINTERS
    return chosen


def takes_all(source: BackwardSource, config: LaunchConfig, saved: Saved, call: Call) -> bool:
    """Whether the fused kernel can do a fast call: descriptors view what every launch reads.

    A product for dQ takes all keys of a tile, so that no other rows may be among them.
    """
    if any(t is not None for t in (call.q_lengths, call.kv_starts, call.kv_lengths)):
        return False
    launches = range(len(source.grids))
    return all(variant_of(source, config, sig.FAST, i, saved, call) == sig.FAST for i in launches)


def viewable(source: BackwardSource, grid: Grid, saved: Saved, call: Call) -> bool:
    """Whether descriptors can view what a warp-specialised launch reads, and read nothing that is no row of the call.

    Rows of a tile may be anything behind the last one, they spoil themselves alone; visited ones may not.
    """
    tensors = (saved.q, saved.k, saved.v, saved.dout)
    if any(s <= 0 for t in tensors for s in strides_of(t)) or not all(t.shape[2] for t in tensors):
        return False
    own, seen = [grid.queries] if grid.queries else [], [*grid.described]
    if source.part == QUERIES:
        ragged, queries, keys = call.kv_lengths, own, seen
    else:
        ragged, queries, keys = call.q_lengths, seen, own
    if ragged is not None:
        return False
    q_rows, kv_rows = saved.q.shape[2], saved.k.shape[2]
    return all(_whole_queries(x[0], q_rows, kv_rows, call) for x in queries) and all(
        _whole_keys(x[0], kv_rows, call) for x in keys
    )


def _whole_keys(period: int, kv_rows: int, call: Call) -> bool:
    """Whether the keys are whole periods; as ``kernel.whole_periods``."""
    if period == 1:
        return True
    return call.kv_starts is None and not (kv_rows % period or call.k_start % period)


def _whole_queries(period: int, q_rows: int, kv_rows: int, call: Call) -> bool:
    """The same of the queries; as ``kernel.whole_queries``."""
    if period == 1:
        return True
    own = (call.q_lengths, call.kv_starts, call.kv_lengths)
    if call.relative and any(t is not None for t in own):
        return False
    first = call.q_start + (kv_rows - q_rows if call.relative else 0)
    return not (q_rows % period or first % period)


def arguments(
    source: BackwardSource,
    config: LaunchConfig,
    variant: str,
    launch: int,
    values: Mapping[str, Any],
    moving: Sequence[str],
) -> list[Any]:
    """Arguments of the text that a launch is compiled from, in its order; ``values``: the portable one's by name.

    ``moving``: the tensors whose addresses a call brings, in the order in which it does.
    """
    text, _ = sig.unit(source, config, variant, launch)
    fixed = sig.constants(source, config, variant, launch)
    out: list[Any] = []
    for name, kind in text.parameters:
        found = sig.described(kind)
        if found is None:
            out.append(values[name])
        else:
            tensor = values[sig.tensor_of(name)]
            moves = moving.index(sig.tensor_of(name))
            halves = sig.ELEMENTS.get(sig.tensor_of(name)) == "bf16"  # two to a number
            out.append(None if name in fixed else view(tensor, found[0], moves, 1 + halves))
    return out


def view(t: Any, period: int, moves: int, parts: int = 1) -> View:
    """A tensor [B, H, rows, columns] as descriptors see it; rows as [periods, row in it] where they have a period.

    ``moves``: number of its address in a call.  ``parts``: elements for the descriptor in one of the tensor.
    """
    shape = [*t.shape[:3], t.shape[3] * parts]
    strides = [*(n * parts for n in strides_of(t)), 1]
    if period > 1:
        shape[2:3] = [shape[2] // period, period]
        strides[2:3] = [strides[2] * period, strides[2]]
    return View(None, tuple(shape), tuple(strides), moves)
