"""Shared by the tests of the warp-specialised gradient kernels: patterns, problems, and what the machine code shows."""

from __future__ import annotations

import re
from typing import Any

import torch

from sparsegen.launch.backward import Saved
from sparsegen.spec.gpu import find_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem

H200 = find_gpu("h200")
CAUSAL = Pattern.from_dict({"name": "causal", "mask": "causal"})
STREAMING = Pattern.from_yaml("streaming_llm")
STRIDED = Pattern.from_yaml("sparse_transformer_strided")
LONG = ((32768, 32768),)


def long(head_dim: int = 128, value_dim: int | None = None, **more: Any) -> Problem:
    return Problem(head_dim, value_dim or head_dim, lengths=LONG, **more)


def saved_of(q_rows: int = 256, kv_rows: int = 256) -> Saved:
    q, k = torch.zeros(1, 2, q_rows, 64), torch.zeros(1, 2, kv_rows, 64)
    return Saved(q, k, k.clone(), q.clone(), q[..., 0].clone(), q.clone())


def inner_loops(listing: str) -> list[tuple[int, int]]:
    """(instructions of products, WARPGROUP instructions) of every innermost loop with products."""
    return [
        tuple(sum(w in line for line in loop) for w in ("HGMMA", "WARPGROUP"))
        for loop in _loops(listing)
    ]  # type: ignore[misc]


def loop_lengths(listing: str) -> list[int]:
    """All instructions of every innermost loop with products."""
    instruction = re.compile(r"/\*[0-9a-f]{4,}\*/ +\S")
    return [sum(bool(instruction.search(line)) for line in loop) for loop in _loops(listing)]


def _loops(listing: str) -> list[list[str]]:
    """Lines of every innermost loop with products."""
    lines = listing.splitlines()
    labels = {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"(\.L\w+):", line))}
    ends = [
        (labels.get(m[1], i), i)
        for i, x in enumerate(lines)
        if (m := re.search(r"BRA.*\((\.L\w+)\)", x))
    ]
    loops = [(a, b) for a, b in ends if a < b]
    inner = [x for x in loops if not any(y != x and x[0] <= y[0] and y[1] <= x[1] for y in loops)]
    found = [lines[a:b] for a, b in inner]
    return [loop for loop in found if any("HGMMA" in line for line in loop)]
