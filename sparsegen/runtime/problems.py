"""The problem that the tensors of a call pose, and which of it a kernel is built for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sparsegen.errors import InputError, SpecError
from sparsegen.spec.fields import LIMIT
from sparsegen.spec.problem import Problem


def problem_of(like: Problem, q: Any, k: Any, v: Any) -> Problem:
    """The problem of a call: its dims and dtype, the lengths of the problem that was asked for."""
    try:
        return replace(
            like,
            head_dim=q.shape[3],
            value_dim=v.shape[3],
            heads=q.shape[1],
            kv_heads=k.shape[1],
            dtype=str(q.dtype).removeprefix("torch."),
        )
    except SpecError as error:
        mistake = error.mistakes[0]
        raise InputError(
            f"no kernel takes these tensors: {mistake.path} {mistake.message}"
        ) from None


def reaching(problem: Problem, q_len: int, kv_len: int) -> Problem:
    """The same for calls of every length, these ones first."""
    return replace(problem, lengths=((max(1, q_len), max(1, kv_len)), (LIMIT, LIMIT)))


def dims_of(problem: Problem) -> tuple[Any, ...]:
    """All of a problem that a kernel is built for, but for its lengths."""
    return problem.head_dim, problem.value_dim, problem.heads, problem.kv_heads, problem.dtype


def described(problem: Problem) -> str:
    """The same in words."""
    value = "" if problem.value_dim == problem.head_dim else f", value_dim {problem.value_dim}"
    return f"{problem.dtype}, head_dim {problem.head_dim}{value}, heads {problem.heads}:{problem.kv_heads}"
