"""Checking a candidate before it is timed: fresh random inputs, poisoned outputs, float64 as the judge."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparsegen.tune.accept import within_tolerance
from sparsegen.tune.eager import eager_attention

if TYPE_CHECKING:
    import torch

    from sparsegen.spec.pattern import Pattern
    from sparsegen.spec.problem import Problem

# kernel(q, k, v, out, lse, keywords): writes out [B, H, Sq, Dv] and lse [B, H, Sq]
Run = Callable[..., None]

_SAMPLED = 64  # rows that are compared where the whole is too long for a dense reference


@dataclass(frozen=True)
class Case:
    """Inputs of one check.

    ``rows`` are the query indexes that are compared, None for all.  ``keywords`` are for kernel, reference and eager
    alike.  ``watch``: compare the inputs with a copy afterwards (it costs their memory once more).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    keywords: Mapping[str, Any]
    rows: torch.Tensor | None = None
    watch: bool = True


def check(run: Run, case: Case, pattern: Pattern) -> str:
    """What is wrong with the kernel on this case, in one sentence; "" if nothing is.

    The outputs are filled with NaN first: a kernel that leaves a cell unwritten, or adds to what is there, cannot
    pass because another candidate has been there before.
    """
    import torch

    q, k, v = case.q, case.k, case.v
    out = torch.full((*q.shape[:3], v.shape[3]), math.nan, dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:3], math.nan, dtype=torch.float32, device=q.device)
    before = [t.clone() for t in (q, k, v)] if case.watch else []
    run(q, k, v, out, lse, case.keywords)
    for name, tensor, copy in zip("qkv", (q, k, v), before):
        if not torch.equal(tensor, copy):
            return f"{_size(case)}: the kernel changed its input {name}"
    unwritten = int((~out.isfinite()).sum()) + int(lse.isnan().sum())
    if unwritten:
        return f"{_size(case)}: {unwritten} output values are NaN or infinite"
    return _compare(case, pattern, out, lse)


def _compare(case: Case, pattern: Pattern, out: torch.Tensor, lse: torch.Tensor) -> str:
    from sparsegen.spec.reference import reference

    inputs = case.q, case.k, case.v
    wanted = reference(pattern, *inputs, rows=case.rows, **case.keywords)
    yard = eager_attention(pattern, *inputs, rows=case.rows, **case.keywords)
    if case.rows is not None:
        out, lse = out[:, :, case.rows], lse[:, :, case.rows]
    for name, got, want, eager in zip(("out", "lse"), (out, lse), wanted, yard):
        verdict = within_tolerance(got, want, eager)
        if not verdict:
            return f"{_size(case)}: {name}: {verdict.reason}"
    return ""


def fresh_inputs(
    pattern: Pattern,
    problem: Problem,
    q_len: int,
    kv_len: int,
    device: str,
    generator: torch.Generator,
    size: float = 1.0,
    batch: int | None = None,
) -> Case:
    """Random inputs for the problem at these lengths, all rows compared.

    ``size`` scales q: at 1 the weights are nearly even, at 5 few keys take all, which other roundings show.
    """
    import torch

    dtype = getattr(torch, problem.dtype)

    def draw(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype, device=device, generator=generator)

    batch = batch or problem.batch
    heads, kv_heads = problem.heads, problem.kv_heads
    keywords: dict[str, Any] = {}
    if pattern.alibi:
        powers = torch.arange(1, heads + 1, dtype=torch.float32, device=device)
        keywords["alibi_slopes"] = torch.exp2(-8.0 * powers / heads)
    if pattern.sink_logits:
        keywords["sink_logits"] = draw(heads, dtype=torch.float32)
    if pattern.null_key:
        null = draw(kv_heads, problem.head_dim), draw(kv_heads, problem.value_dim)
        keywords["null_key"] = null
    return Case(
        draw(batch, heads, q_len, problem.head_dim) * size,
        draw(batch, kv_heads, kv_len, problem.head_dim),
        draw(batch, kv_heads, kv_len, problem.value_dim),
        keywords,
    )


def sampled_rows(q_len: int, generator: torch.Generator) -> torch.Tensor | None:
    """Query rows that stand for all: both ends, the edges of tiles in between, and random ones; None for all."""
    import torch

    if q_len <= _SAMPLED:
        return None
    middle = q_len // 2 // 128 * 128
    ends = [
        0,
        1,
        63,
        64,
        127,
        128,
        middle - 1,
        middle,
        q_len - 129,
        q_len - 128,
        q_len - 2,
        q_len - 1,
    ]
    some = torch.randint(
        q_len, (_SAMPLED - len(ends),), generator=generator, device=generator.device
    )
    picked = torch.cat([torch.tensor(ends, device=generator.device), some])
    return picked[(picked >= 0) & (picked < q_len)].unique()


def small_lengths(q_len: int, kv_len: int) -> list[tuple[int, int, float]]:
    """(q_len, kv_len, size) of the dense checks: no tile divides them, q and k differ, one has a single query.

    Never longer than the problem's own lengths, for which alone the pattern is known to be defined.
    """
    ragged = ((129, 129, 1.0), (70, 201, 5.0), (1, 130, 1.0))
    found = [(min(q, q_len), min(kv, kv_len), size) for q, kv, size in ragged]
    return list(dict.fromkeys(found))


def _size(case: Case) -> str:
    return f"{case.q.shape[2]} queries, {case.k.shape[2]} keys"
