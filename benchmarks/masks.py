"""The masks that the benchmarks of this folder share, by name."""

from __future__ import annotations

from typing import Any


def sinks(window: int, tokens: int) -> dict[str, Any]:
    return {
        "all_of": [
            "causal",
            {"any_of": [{"window": {"size": window}}, {"sink": {"tokens": tokens}}]},
        ]
    }


def causal_and(*terms: Any) -> dict[str, Any]:
    return {"all_of": ["causal", {"any_of": list(terms)}]}


STRUCTURED: dict[str, Any] = {
    "axial": {"axial": {"shape": [256, 128]}},
    "strided": causal_and({"window": {"size": 128}}, {"strided": {"stride": 128}}),
    "fixed": causal_and({"chunks": {"size": 128}}, {"columns": {"stride": 128, "width": 8}}),
    "dilated": {"dilated": {"size": 128, "dilation": 8}},
    "longformer": {"any_of": [{"window": {"radius": 256}}, {"global": {"tokens": 64}}]},
    "neighborhood": {"neighborhood": {"shape": [128, 256], "radius": [8, 8]}},
    "window_1024_sinks_4": sinks(1024, 4),
    "chunks_8192": {"all_of": ["causal", {"chunks": {"size": 8192}}]},
    "prefix_2048": {"any_of": ["causal", {"prefix": {"tokens": 2048}}]},
}
# The same at 131,072 tokens; grids grow in their first axis.
LONG = STRUCTURED | {
    "axial": {"axial": {"shape": [1024, 128]}},
    "neighborhood": {"neighborhood": {"shape": [512, 256], "radius": [8, 8]}},
}
