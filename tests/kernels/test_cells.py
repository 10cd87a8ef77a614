"""The cells that kernels compute are those that ``schedule.count`` says: elements of q·k counted in the interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsegen.codegen.segments import NARROW
from sparsegen.launch import Call
from sparsegen.schedule.build import candidates
from sparsegen.schedule.count import computed_cells
from sparsegen.spec.pattern import Pattern
from tests.kernels.cases import ON_GPU, Case, config_of, kernel_of
from tests.kernels.schedules import SWEEPS, made, per_head

pytestmark = [
    pytest.mark.skipif(ON_GPU, reason="counts in the interpreter"),
    pytest.mark.one_triton,  # which cells a kernel computes is in its text
]

ROOT = Path(__file__).parents[2]
SHIPPED = [
    p.stem for p in sorted((ROOT / "patterns").glob("*.yaml")) if Pattern.from_yaml(p).position_only
]
LENGTHS = [(257, 257), (140, 333), (300, 201)]
HEAD_DIM = 128  # more columns than any key tile has keys, which tells q·k from p·v


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Elements of every q·k."""
    from triton.runtime.interpreter import InterpreterBuilder

    cells: list[int] = []
    dot = InterpreterBuilder.create_dot

    def counting(self, a, b, *rest):  # type: ignore[no-untyped-def]
        if a.data.shape[1] == HEAD_DIM:
            cells.append(a.data.shape[0] * b.data.shape[1])
        return dot(self, a, b, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", counting)
    yield cells


def check(case: Case, cells: list[int], heads: int = 1, lengths: Any = LENGTHS) -> None:
    """One head of every class."""
    config = config_of(case).as_dict()
    blocks = {"block_m": config["BLOCK_M"], "block_n": config["BLOCK_N"], "narrow_block": NARROW}
    for q_len, kv_len in lengths:
        cells.clear()
        q, k, v = (
            torch.zeros(1, heads, n, d)
            for n, d in ((q_len, HEAD_DIM), (kv_len, HEAD_DIM), (kv_len, 16))
        )
        out, lse = torch.empty(1, heads, q_len, 16), torch.empty(1, heads, q_len)
        relative = int(case.pattern.align == "bottom_right")
        kernel_of(case)(q, k, v, out, lse, Call(relative=relative), case.variant)
        assert sum(cells) == computed_cells(case.schedule, q_len, kv_len, **blocks), (q_len, kv_len)


def case_of(name: str, pattern: Pattern, schedule: object, **knobs: int) -> Case:
    dims = {"head_dim": HEAD_DIM, "value_dim": 16, "knobs": tuple(knobs.items())}
    return Case(name, pattern, 1, 1, schedule=schedule, **dims)


@pytest.mark.parametrize("name", list(SWEEPS))
def test_schedules_by_hand(name: str, counted: list[int]) -> None:
    pattern, schedule = made(name)
    check(case_of(name, pattern, schedule), counted)


def test_heads_of_their_own(counted: list[int]) -> None:
    """Four classes: heads 0, 1 and 3 stand for three of them, 2 for the strided ones."""
    _, schedule = per_head()
    renamed = tuple(
        replace(c, heads=None if c.heads is None else c.heads[:1]) for c in schedule.classes
    )
    schedule = replace(schedule, classes=renamed)
    check(case_of("heads", per_head()[0], schedule), counted, heads=4)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_patterns(name: str, counted: list[int]) -> None:
    """The schedule that is chosen, and at one length the others that are measured; of large grids, most of whose tiles a
    short call leaves empty, the chosen one alone, at one length.  Their steps of small tiles take long; the schedules by
    hand have such, at every length."""
    pattern = replace(Pattern.from_yaml(name), alibi=False, sink_logits=False, null_key=False)
    tiles = {"BLOCK_M": 64, "BLOCK_N": 32}  # a quarter of the steps
    large = any(node.grid() is not None for _, node in pattern.nodes())
    for i, candidate in enumerate(candidates(pattern)[: 1 if large else None]):
        schedule = candidate.schedule
        if any(s.table for c in schedule.classes for w in c.sweeps for s in w.segments):
            continue  # how many blocks of a table fall to a tile is drawn
        case = case_of(name, pattern, schedule, **tiles)
        lengths = LENGTHS[1:2] if i or large else LENGTHS
        check(case, counted, heads=len(schedule.classes), lengths=lengths)
