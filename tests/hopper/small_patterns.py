"""Small patterns whose schedules have everything that the warp-specialised text does, and extras for a call."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from sparsegen.schedule.build import candidates
from sparsegen.schedule.tree import HeadClass, Schedule, Sweep, Tiling
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from tests.kernels.schedules import schedule, some_keys


def pattern_of(mask: Any, **settings: Any) -> Pattern:
    return Pattern.from_dict({"name": "case", "mask": mask, **settings})


def causal_and(*parts: Any) -> Any:
    return {"all_of": ["causal", {"any_of": list(parts)}]}


def every(stride: int, chunk: int) -> Any:
    return {"all_of": [{"chunks": {"size": chunk}}, {"strided": {"stride": stride}}]}


WINDOW = {"window": {"size": 40}}
MASKS: dict[str, Any] = {
    "full": "full",
    "causal": "causal",
    "prefix": {"any_of": ["causal", {"prefix": {"tokens": 40}}]},
    "window": WINDOW,
    "two-sided": {"window": {"radius": 30}},
    "sinks": causal_and(WINDOW, {"sink": {"tokens": 4}}),
    "strided": causal_and({"window": {"size": 16}}, {"strided": {"stride": 16}}),
    "dilated": {"all_of": ["causal", {"strided": {"stride": 4}}]},
    "fixed": causal_and({"chunks": {"size": 16}}, {"columns": {"stride": 16, "width": 4}}),
    "axial": {"axial": {"shape": [16, 32]}},
    "longnet": causal_and({"chunks": {"size": 32}}, every(2, 64), every(6, 256)),
    "longformer": {"any_of": [{"window": {"radius": 20}}, {"global": {"tokens": 8}}]},
    "neighborhood": {"neighborhood": {"shape": [8, 8, 8], "radius": [2, 2, 3]}},
    "bigbird": {
        "any_of": [
            {"predicate": "abs(q // 16 - k // 16) <= 1"},
            {"global": {"tokens": 32}},
            {"random_blocks": {"block": 16, "per_row": 2, "seed": 1}},
        ]
    },
}
LONG = Problem(head_dim=16, value_dim=16, heads=2, kv_heads=1, dtype="float16", lengths=((32768, 32768),))  # fmt: skip


@cache
def schedules_of(name: str) -> dict[str, Schedule]:
    """The schedules that the search hands out for long inputs, by their labels."""
    return {c.schedule.label: c.schedule for c in candidates(pattern_of(MASKS[name]), LONG)}


def gathered_queries() -> tuple[Pattern, Schedule]:
    """Tiles of 3 digits of 12: no descriptor loads such queries, so that consumers gather them."""
    mask = "10 <= k and k <= 84"
    sweep = Sweep(Tiling((12,), (3,)), (some_keys(10, 84),))
    return pattern_of({"predicate": mask}), schedule(HeadClass(None, (sweep,), mask))


def extras(pattern: Pattern, heads: int, kv_heads: int, dim: int, value_dim: int) -> dict[str, Any]:
    """Random ALiBi slopes, sink logits and null key, as far as the pattern asks for them."""
    g = torch.Generator().manual_seed(5)
    out: dict[str, Any] = {}
    if pattern.alibi:
        out["alibi_slopes"] = 0.1 * torch.randn(heads, generator=g).abs()
    if pattern.sink_logits:
        out["sink_logits"] = torch.randn(heads, generator=g)
    if pattern.null_key:
        dims = (dim, value_dim)
        out["null_key"] = tuple(torch.randn(kv_heads, d, generator=g) for d in dims)
    return out
