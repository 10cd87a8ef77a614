"""Gradients over all dims, dtypes, scales of the inputs and groups of heads (CASES B27, B31), each at least once.

On a GPU also every position-only pattern of the acceptance set in half precision, and the warp-specialised kernels
wherever a configuration of theirs fits.  In the interpreter the same cases are smaller, and bfloat16 is left out.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from sparsegen.codegen.backward import unfit
from sparsegen.codegen.backward_planner import OUTPUTS
from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.codegen.template import load_template
from sparsegen.spec.gpu import current_gpu, find_gpu
from sparsegen.spec.problem import Problem
from tests.kernels.cases import ON_GPU, Case, acceptance, acceptance_names, pattern_of
from tests.kernels.gradients import compare, compile_all, extras_of

DIMS = (32, 64, 80, 96, 128, 192, 256)
SIZES = (1.0, 5.0, 10.0)
GROUPS = ((8, 2), (8, 1), (6, 3), (12, 2))
HALVES = ("float16", "bfloat16") if ON_GPU else ("float16",)
SINKS = {"all_of": ["causal", {"any_of": [{"window": {"size": 40}}, {"sink": {"tokens": 4}}]}]}
WINDOW = {"all_of": ["causal", {"window": {"size": 70}}]}
EVEN_HEADS = [
    {"heads": "0-1", "mask": {"all_of": ["causal", {"window": {"size": 20}}]}},
    {"heads": "rest", "mask": WINDOW},
]
SM_90 = ON_GPU and torch.cuda.get_device_capability() == (9, 0)
TILES = ((128, 64, 2), (128, 32, 2), (64, 64, 2), (64, 32, 2))  # BLOCK_M, BLOCK_N, STAGES


def special(problem: Problem) -> tuple[tuple[str, Any], ...]:
    """Knobs of the largest warp-specialised tiles that fit both kernels; none where none do."""
    plain = {k.name: k.default for k in load_template("backward").knobs}
    for rows, visited, stages in TILES:
        tiles = {"BLOCK_M": rows, "BLOCK_N": visited, "STAGES": stages}
        knobs = {"KERNEL": "hopper", "num_warps": 4, **tiles}
        config, gpu = LaunchConfig.of(plain | knobs), current_gpu() or find_gpu("h200")
        if all(unfit(config, problem, gpu, outputs) is None for outputs in OUTPUTS.values()):
            return tuple(knobs.items())
    return ()


def _dims() -> list[Case]:
    """Every dim in every dtype, each with another scale and group of heads."""
    out = []
    lengths = (300, 413) if ON_GPU else (37, 50)
    for i, d in enumerate(DIMS):
        for j, dtype in enumerate((*HALVES, "float32")):
            heads, kv_heads = GROUPS[(i + j) % 4] if ON_GPU else (2, 1)
            size = 1.0 if dtype == "float32" else SIZES[(i + j) % 3]
            given = {"heads": heads, "kv_heads": kv_heads, "dtype": dtype, "size": size}
            one = Case(f"x{size:g}", pattern_of(SINKS), *lengths, head_dim=d, value_dim=d, **given)
            out.append(one)
            knobs = special(Problem(head_dim=d, dtype=dtype)) if SM_90 else ()
            out += [replace(one, knobs=knobs)] if knobs and dtype != "float32" else []
    return out


def _groups() -> list[Case]:
    """Other dims of values, groups of heads, one rule for all of them or several (B27)."""
    shared = pattern_of(WINDOW)
    several = type(shared).from_dict({"name": "case", "heads": EVEN_HEADS})
    pairs = ((64, 64), (64, 128), (128, 64)) if ON_GPU else ((16, 32),)
    lengths, dtype = ((200, 200), "bfloat16") if ON_GPU else ((30, 41), "float32")
    return [
        Case(name, pattern, *lengths, 1, *group, d, dv, dtype)
        for name, pattern in (("shared", shared), ("several", several))
        for group in ((*GROUPS, (8, 8)) if ON_GPU else ((12, 2), (6, 3)))
        for d, dv in pairs
    ]


def _acceptance() -> list[Case]:
    """Each pattern with the next dim, dtype and scale."""
    out = []
    for i, name in enumerate(acceptance_names()):
        d, heads = DIMS[i % 5], (6, 2) if name == "per_head" else (4, 2)
        given = {"dtype": HALVES[i % 2], "size": SIZES[i % 3]}
        pattern = acceptance(name)
        cells = [math.prod(grid) for _, node in pattern.nodes() if (grid := node.grid())]
        q, k = (min(n, *cells, 288) for n in ((288, 288), (160, 245), (245, 160))[i % 3])
        out.append(Case(name, pattern, q, k, 1, *heads, d, d, **given))
    return out


ALL = _dims() + _groups() + (_acceptance() if ON_GPU else [])


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    if ON_GPU:
        compile_all([(case, None) for case in ALL])


@pytest.mark.one_triton  # of dims, dtypes and groups each kind is in test_backward.py, too
@pytest.mark.parametrize("case", ALL, ids=lambda c: f"{c}-h{c.heads}-{c.kv_heads}")
def test_equals_autograd(case: Case) -> None:
    compare(case, **extras_of(case))


def test_the_list_is_whole() -> None:
    """Every dim, dtype, scale and group of the list above is in some case."""
    halves = [c for c in ALL if c.dtype != "float32"]
    assert {c.head_dim for c in halves} >= set(DIMS)
    assert {c.size for c in halves} >= set(SIZES)
    assert {c.dtype for c in ALL} == {*HALVES, "float32"}
    if ON_GPU:
        assert {(c.heads, c.kv_heads) for c in ALL} >= set(GROUPS)
