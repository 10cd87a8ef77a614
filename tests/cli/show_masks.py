"""Masks of the tests of `show`."""

from __future__ import annotations

from typing import Any

from sparsegen import Pattern

MASKS: dict[str, Any] = {
    "full": "full",
    "causal": "causal",
    "window_sink": {
        "all_of": ["causal", {"any_of": [{"window": {"size": 9}}, {"sink": {"tokens": 3}}]}]
    },
    "strided": {
        "all_of": ["causal", {"any_of": [{"window": {"size": 4}}, {"strided": {"stride": 7}}]}]
    },
    "fixed": {
        "all_of": [
            "causal",
            {"any_of": [{"chunks": {"size": 8}}, {"columns": {"stride": 8, "width": 2}}]},
        ]
    },
    "global": {"any_of": [{"window": {"radius": 5}}, {"global": {"positions": [0, 17]}}]},
    "axial": {"axial": {"shape": [8, 8]}},
    "neighborhood": {"neighborhood": {"shape": [8, 8], "radius": [1, 2]}},
    "drawn": {
        "any_of": [
            {"window": {"radius": 3}},
            {"random_blocks": {"block": 8, "per_row": 2, "seed": 5}},
        ]
    },
    "not_drawn": {
        "all_of": ["causal", {"not": {"random_blocks": {"block": 8, "per_row": 3, "seed": 1}}}]
    },
    "predicate": {"predicate": "k <= q and (q * k) % 5 < 2"},
    # one branch with several alternatives that overlap
    "multi_dilated": {
        "all_of": [
            "causal",
            {"any_of": [{"dilated": {"size": 8, "dilation": d}} for d in (1, 2, 4)]},
        ]
    },
    "nothing": {"predicate": "k > q + 1000"},
}


def pattern_of(mask: Any, **more: Any) -> Pattern:
    return Pattern.from_dict({"name": "example", "mask": mask, **more})
