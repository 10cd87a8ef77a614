"""Key tiles that a query tile visits, in numbers: the rule of ``tree`` that kernels, counts and ``verify`` share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsegen.schedule.forms import Lin, value
from sparsegen.schedule.tree import Segment


@dataclass(frozen=True)
class Visit:
    """Key ranges of a segment, one entry per query tile (int64 arrays); ``last < first`` where it is empty."""

    first: np.ndarray  # tile_lo
    last: np.ndarray  # tile_hi
    body_first: np.ndarray  # first key of the full span
    body: np.ndarray  # key tiles of the full span; 0: no full part on this tile

    def tiles(self, block_n: int) -> dict[str, np.ndarray]:
        """Key tiles per query tile of "head", "full", "tail" and "whole" (whole: where there is no full part)."""
        full = self.body > 0
        rest = self.body_first + self.body * block_n
        none = np.zeros_like(self.body)
        return {
            "head": np.where(full, (self.body_first - self.first) // block_n, none),
            "full": self.body,
            "tail": np.where(full, np.maximum(-((rest - self.last - 1) // block_n), 0), none),
            "whole": np.where(
                full, none, np.maximum(-((self.first - self.last - 1) // block_n), 0)
            ),
        }


def visit(segment: Segment, env: Mapping[str, Any], block_n: int) -> Visit:
    """``env``: q_first, q_last, k_first, k_last, q_len, kv_len as ints or arrays over query tiles."""
    shape = np.broadcast_shapes(*(np.shape(env[n]) for n in ("q_first", "q_last")))

    def wide(form: Lin) -> np.ndarray:
        return np.broadcast_to(np.asarray(value(form, env), dtype=np.int64), shape)

    first, last = wide(segment.tile_lo), wide(segment.tile_hi)
    for form in segment.live:
        last = np.where(wide(form) < 0, first - 1, last)
    if segment.full_lo is None or segment.full_hi is None:
        return Visit(first, last, first, np.zeros(shape, np.int64))
    body_first = first - (first - wide(segment.full_lo)) // block_n * block_n
    body = np.maximum((wide(segment.full_hi) + 1 - body_first) // block_n, 0)
    body = np.where(last < first, 0, body)
    for group in segment.guards:
        held = np.logical_or.reduce([wide(form) >= 0 for form in group])
        body = np.where(held, body, 0)
    return Visit(first, last, body_first, body)


def query_tiles(
    q_start: int, q_len: int, block_m: int, k_start: int, kv_len: int
) -> dict[str, Any]:
    """The environment of ``visit`` for all query tiles of a call: positions of their rows, keys of the call."""
    first = q_start + np.arange(0, q_len, block_m, dtype=np.int64)
    last = np.minimum(first + block_m, q_start + q_len) - 1
    return {
        "q_first": first,
        "q_last": last,
        "k_first": k_start,
        "k_last": k_start + kv_len - 1,
        "q_len": q_len,
        "kv_len": kv_len,
    }
