"""Layers over kernels in Triton's interpreter: what ``open_callable`` gives where there is no GPU."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import torch

from sparsegen.nn import SparseAttention
from sparsegen.runtime.attend import Attend
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from tests.kernels.cases import ON_GPU, Case, pattern_of
from tests.kernels.cases import kernel_of as forward_of
from tests.kernels.gradients import kernel_of as backward_of

WIDTH, HEADS, KV_HEADS = 64, 4, 2
SINKS = {"all_of": ["causal", {"any_of": [{"window": {"size": 8}}, {"sink": {"tokens": 2}}]}]}
PLAIN = pattern_of(SINKS)
LEARNED = pattern_of(SINKS, sink_logits=True, null_key=True, softcap=4.0)


class Forward:
    """The interpreted forward kernel with the ``prepare`` of a compiled one."""

    def __init__(self, case: Case):
        self._kernel = forward_of(case)
        self.source, self.config = self._kernel.source, self._kernel.config

    def __call__(self, *tensors_and_call: Any) -> Any:
        return self._kernel(*tensors_and_call)

    def prepare(self, q: Any, k: Any, v: Any, out: Any, call: Any) -> Any:
        def launch(q: Any, k: Any, v: Any, out: Any, lse: Any, variant: Any = None) -> None:
            self._kernel(q, k, v, out.fill_(torch.nan), lse, call)

        return launch


def callable_of(pattern: Pattern, problem: Problem, *asked: Any, seen: Any = None) -> Attend:
    """An ``Attend`` of the problem; ``seen`` counts the launches of each backward kernel by its name."""
    names = ("head_dim", "value_dim", "heads", "kv_heads", "dtype")
    case = Case("layer", pattern, 24, 24, **{n: getattr(problem, n) for n in names})
    backward = backward_of(case, alone=True)
    if seen is not None:
        backward = copy.copy(backward)
        backward._functions = {n: counted(n, f, seen) for n, f in backward._functions.items()}
    return Attend(pattern, problem, Forward(case), backward=backward)


def counted(name: str, function: Any, seen: Counter[str]) -> Any:
    """A kernel in the interpreter that counts its launches; launchers look at the name of its type."""

    class InterpretedFunction:
        def __getitem__(self, programs: Any) -> Any:
            seen[name] += 1
            return function[programs]

    return InterpretedFunction()


def layer_of(pattern: Any = PLAIN, **more: Any) -> SparseAttention:
    torch.manual_seed(0)
    layer = SparseAttention(WIDTH, HEADS, pattern, num_kv_heads=KV_HEADS, **more)
    with torch.no_grad():  # zeros would hide a mistake
        for name in ("sink_logits", "null_k", "null_v"):
            if hasattr(layer, name):
                getattr(layer, name).normal_()
    return layer


def twin_of(layer: SparseAttention, **more: Any) -> SparseAttention:
    """The same layer on the reference."""
    twin = layer_of(layer.pattern, backend="reference", **more)
    twin.load_state_dict(layer.state_dict())
    return twin.to(layer.q_proj.weight.dtype)


def inputs(batch: int = 2, length: int = 24) -> Any:
    g = torch.Generator().manual_seed(batch * 1000 + length)
    return torch.randn(batch, length, WIDTH, generator=g)


__all__ = ["ON_GPU", "pattern_of"]  # handed on
