"""The independent oracle's cases (``tests/data/acceptance``): patterns, lengths, run-time data and expected masks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parents[1] / "data" / "acceptance"


def cases() -> list[dict[str, Any]]:
    """Entries of expected.json: pattern (file name), q_len, kv_len, runtime, heads (cells, empty_rows, sha256, rows)."""
    return json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))


def case_id(case: dict[str, Any]) -> str:
    return f"{case['pattern'].removesuffix('.yaml')}-{case['q_len']}x{case['kv_len']}"


def runtime_of(case: dict[str, Any]) -> dict[str, Any]:
    """Keywords of the call; a ``block_mask`` descriptor becomes a bool array [1, 1, rows, cols]."""
    data = dict(case.get("runtime", {}))
    if "block_mask" in data:
        data["block_mask"] = drawn_mask(**data["block_mask"])
    return data


def drawn_mask(rows: int, cols: int, percent: int, seed: int) -> np.ndarray:
    """Cell (i, j) is set when splitmix64(seed*1000003 + i*4099 + j) % 100 < percent."""
    draw = [
        [splitmix64(seed * 1000003 + i * 4099 + j) % 100 < percent for j in range(cols)]
        for i in range(rows)
    ]
    return np.array(draw)[None, None]


def splitmix64(x: int) -> int:
    word = 2**64 - 1
    z = (x + 0x9E3779B97F4A7C15) & word
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & word
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & word
    return z ^ (z >> 31)
