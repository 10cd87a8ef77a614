"""Calls with gradients whose kernels are traced by ``torch.compile``, or are not here yet and are built."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend

from sparsegen.errors import InputError
from sparsegen.runtime.attend import Attend
from sparsegen.spec.fields import LIMIT
from sparsegen.spec.problem import Problem
from sparsegen.spec.reference import reference
from tests.kernels.cases import ON_GPU, Case, pattern_of
from tests.kernels.cases import kernel_of as forward_of
from tests.kernels.gradients import extras_of
from tests.kernels.gradients import kernel_of as backward_of
from tests.runtime.trained import (
    CALLS,
    GROUPS,
    LEARNED,
    PLAIN,
    RANDOM,
    attend_of,
    learned,
    problem_of,
)

pytestmark = [
    pytest.mark.skipif(ON_GPU, reason="runs in the interpreter so far"),
    pytest.mark.one_triton,  # what torch does with kernels that tests/kernels runs
]


@pytest.fixture(autouse=True)
def kernels_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted kernels take CPU tensors."""
    monkeypatch.setattr("sparsegen.runtime.checks.DEVICE", "cpu")


# ---- torch.compile ----


@pytest.mark.parametrize("case", [PLAIN, LEARNED], ids=lambda c: c.name)
def test_torch_compile_without_a_graph_break_and_once_for_all_lengths(case: Case) -> None:
    attend, _ = attend_of(case)
    compiled: list[int] = []

    def backend(graph: Any, example: Any) -> Any:
        compiled.append(graph.code.count("sparsegen.attend("))
        return lookup_backend("aot_eager")(graph, example)

    def layer(q: Any, k: Any, v: Any, extras: Any) -> Any:
        return attend(q * 2, k, v, **extras).sum(-1)

    fast = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    extras, first = extras_of(case), 0
    for length in (20, 24, 33):
        leaves = [torch.randn(1, h, length, 16, requires_grad=True) for h in (4, 2, 2)]
        got = torch.autograd.grad(fast(*leaves, extras).sum(), leaves)
        want = torch.autograd.grad(layer(*leaves, extras).sum(), leaves)
        for one, right in zip(got, want):
            assert torch.allclose(one, right, atol=1e-6)
        first = first or len(compiled)
    assert compiled[-1] == 1 and len(compiled) == first


PROVEN = Case("proven", pattern_of({"window": {"left": 40, "right": 0}}), 20, 24, **GROUPS)
GRID = Case("grid", pattern_of({"axial": {"shape": [4, 6]}}), 20, 24, **GROUPS)


@pytest.mark.parametrize(
    ("case", "name"),
    [(PLAIN, "starts"), (PLAIN, "lengths"), (RANDOM, "plain"), (GRID, "plain"), (PROVEN, "plain")],
    ids=lambda x: getattr(x, "name", x),
)
def test_torch_compile_traces_every_check(case: Case, name: str) -> None:
    """Positions, per-batch lengths, tables, grids, and a call within what its kernels are proven for."""
    attend, _ = attend_of(case)
    if case is PROVEN:
        (made,) = attend._training._made
        source = SimpleNamespace(max_position=100, min_position=-100)
        attend._training._made = [replace(made, proofs=(source,))]  # type: ignore[arg-type]
    layer = lambda q, k, v: attend(q, k, v, **CALLS[name])
    fast = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    leaves, _ = learned(case)
    got = torch.autograd.grad(fast(*leaves).square().sum(), leaves)
    want = torch.autograd.grad(layer(*leaves).square().sum(), leaves)
    for one, right in zip(got, want):
        assert torch.allclose(one, right, atol=1e-6)


def test_torch_compile_builds_nothing() -> None:
    attend, _ = attend_of(PLAIN, backward=None, gradients=lambda problem: backward_of(PLAIN))
    layer = torch.compile(lambda q, k, v: attend(q, k, v), fullgraph=True, backend="eager")
    leaves, _ = learned(PLAIN)
    with pytest.raises(Exception, match="torch.compile traces no build: name passes="):
        layer(*leaves)
    attend(*leaves)
    assert layer(*leaves).grad_fn is not None


# ---- kernels that are not here yet ----


def test_kernels_come_at_the_first_call_that_needs_them() -> None:
    asked: list[Problem] = []

    def gradients(problem: Problem) -> Any:
        asked.append(problem)
        return backward_of(PLAIN)

    attend, _ = attend_of(PLAIN, backward=None, gradients=gradients)
    leaves, _ = learned(PLAIN)
    for _ in range(2):
        attend(*leaves).sum().backward()
    assert asked == [problem_of(PLAIN)]


def test_other_dims_are_built_in_both_directions() -> None:
    asked: list[tuple[str, Problem]] = []
    other = Case("other", PLAIN.pattern, 20, 24, heads=2, kv_heads=2)

    def rebuild(problem: Problem) -> Any:
        asked.append(("forward", problem))
        return forward_of(other)

    def gradients(problem: Problem) -> Any:
        asked.append(("backward", problem))
        return backward_of(other)

    attend, _ = attend_of(PLAIN, rebuild=rebuild, gradients=gradients)
    for case in (other, PLAIN, other):
        leaves, _ = learned(case)
        attend(*leaves).sum().backward()
    assert asked == [("forward", problem_of(other)), ("backward", problem_of(other))]
    loaded, _ = attend_of(PLAIN)
    with pytest.raises(InputError, match="this artifact was built for float32, head_dim 16, heads"):
        loaded(*learned(other)[0])


def test_a_call_beyond_the_proofs_gets_kernels_for_every_length() -> None:
    """A window that no call of the problem exceeds is no window in its kernels."""
    pattern = pattern_of({"window": {"left": 40, "right": 0}})
    short, long = problem_of(PLAIN, lengths=((32, 32),)), Case("long", pattern, 60, 60, **GROUPS)
    built = backward_of(long)
    asked: list[Problem] = []

    def gradients(problem: Problem) -> Any:
        asked.append(problem)
        return built

    proven = SimpleNamespace(
        source=SimpleNamespace(max_position=40, min_position=0, digest="", tables=()), config=""
    )
    few = SimpleNamespace(sources={"queries": proven.source}, configs={"queries": ""})
    attend = Attend(pattern, short, proven, lambda problem: forward_of(long), gradients, few)  # type: ignore[arg-type]
    leaves, _ = learned(long)
    out = attend(*leaves)
    assert torch.allclose(out, reference(pattern, *leaves)[0].float(), atol=1e-5)
    assert [p.lengths for p in asked] == [((60, 60), (LIMIT, LIMIT))]
    attend(*leaves)
    assert len(asked) == 1
