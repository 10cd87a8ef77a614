"""Gradients of the kernel tests' cases, and their judge: float64 autograd of the reference.

The backward kernels get the reference's own outputs, rounded as a forward kernel rounds them, so that a fault is theirs.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from sparsegen.codegen.backward import (
    KEYS,
    QUERIES,
    BackwardSource,
    default_config,
    render_backward,
)
from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.launch.backward import Gradients, Saved
from sparsegen.launch.backward_kernel import (
    BackwardKernel,
    InterpretedBackward,
    Pair,
    compile_pairs,
)
from sparsegen.launch.kernel import Call
from sparsegen.launch.tables import random_table
from sparsegen.schedule.build import build
from sparsegen.schedule.transpose import Transposed, transpose
from sparsegen.schedule.tree import Schedule
from sparsegen.spec.gpu import current_gpu, find_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from sparsegen.spec.reference import reference
from sparsegen.tune.accept import within_tolerance
from sparsegen.tune.eager import eager_attention
from tests.kernels.cases import DEVICE, DTYPES, ON_GPU, Case, tensors

FOLDER = Path(tempfile.mkdtemp(prefix="sparsegen-gradients-"))
EXACT = 2e-6  # of float32: relative L2, and of the largest value
LEARNED = ("sink_logits", "null_key")


def problem_of(case: Case) -> Problem:
    return Problem(head_dim=case.head_dim, value_dim=case.value_dim, dtype=case.dtype)


@cache
def sources(
    pattern: Pattern,
    problem: Problem,
    schedule: Schedule | None = None,
    turned: Schedule | None = None,
    alone: bool = False,
) -> dict[str, BackwardSource]:
    """The kernels by name; ``turned``: another transposed schedule than the cheapest.

    ``alone``: kernels that give dK or dV alone, too.
    """
    found: Transposed = transpose(pattern, problem)
    columns = turned or found.schedule
    made = [render_backward(pattern, schedule or build(pattern, problem), problem)]
    made += [
        render_backward(pattern, columns, problem, KEYS, found.shift, outputs)
        for outputs in (("DK", "DV"), *((("DK",), ("DV",)) if alone else ()))
    ]
    return {source.name: source for source in made}


_KERNELS: dict[Any, BackwardKernel | InterpretedBackward] = {}
Turned = Schedule | None  # another transposed schedule than the cheapest


def _key(case: Case, turned: Turned, alone: bool = False) -> Any:
    return case.pattern, problem_of(case), case.schedule, turned, case.knobs, alone


def _pair(case: Case, turned: Turned, alone: bool = False) -> Pair:
    problem = problem_of(case)
    made = sources(case.pattern, problem, case.schedule, turned, alone)
    values = default_config(problem, current_gpu() if ON_GPU else find_gpu("h200")).as_dict()
    if not ON_GPU:  # small tiles, so that short inputs have several
        values |= {"BLOCK_M": 32, "BLOCK_N": 16, "num_warps": 4}
    configs = dict.fromkeys(made, LaunchConfig.of(values | dict(case.knobs)))
    return Pair(made, configs, Path(tempfile.mkdtemp(dir=FOLDER)))


def compile_all(cases: Iterable[tuple[Case, Turned]], alone: bool = False) -> None:
    """Compile what the cases need in parallel: a GPU session does this once, before its first test."""
    wanted = {_key(case, turned, alone): (case, turned, alone) for case, turned in cases}
    wanted = {key: x for key, x in wanted.items() if key not in _KERNELS}
    pairs = [_pair(*x) for x in wanted.values()]
    _KERNELS.update(zip(wanted, compile_pairs(pairs, current_gpu())))


def kernel_of(
    case: Case, turned: Turned = None, alone: bool = False
) -> BackwardKernel | InterpretedBackward:
    key = _key(case, turned, alone)
    if key not in _KERNELS and ON_GPU:
        compile_all([(case, turned)], alone)
    elif key not in _KERNELS:
        pair = _pair(case, turned, alone)
        _KERNELS[key] = InterpretedBackward(pair.sources, pair.configs, pair.folder)
    return _KERNELS[key]


def extras_of(case: Case) -> dict[str, Any]:
    """Slopes, sinks and null key, as far as the pattern asks for them, in the dtypes that a kernel takes."""
    g = torch.Generator().manual_seed(5)
    make = lambda *s: torch.randn(*s, generator=g).to(DEVICE)
    dtype, out = DTYPES[case.dtype], {}
    if case.pattern.alibi:
        out["alibi_slopes"] = 0.1 * make(case.heads).abs()
    if case.pattern.sink_logits:
        out["sink_logits"] = make(case.heads)
    if case.pattern.null_key:
        null = make(case.kv_heads, case.head_dim), make(case.kv_heads, case.value_dim)
        out["null_key"] = tuple(t.to(dtype) for t in null)
    return out


def leaves(q: Any, k: Any, v: Any, extras: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """All that gets a gradient, as leaves in the order of ``flat``, and the extras made of them."""
    fresh = lambda t: t.detach().clone().requires_grad_()
    extras = {n: t for n, t in extras.items() if t is not None}
    for name in LEARNED:
        if name in extras:
            given = extras[name]
            extras[name] = tuple(map(fresh, given)) if isinstance(given, tuple) else fresh(given)
    out = [fresh(q), fresh(k), fresh(v)]
    out += [extras["sink_logits"]] if "sink_logits" in extras else []
    out += list(extras.get("null_key", ()))
    return out, extras


def flat(g: Gradients) -> list[Any]:
    out = [g.q, g.k, g.v]
    out += [g.sink_logits] if g.sink_logits is not None else []
    return out + list(g.null_key or ())


def names(g: Gradients) -> list[str]:
    sinks = ["sink_logits"] if g.sink_logits is not None else []
    return ["q", "k", "v", *sinks, *(["null_k", "null_v"] if g.null_key else [])]


def expected(
    case: Case, q: Any, k: Any, v: Any, dout: Any, dlse: Any, **given: Any
) -> tuple[Saved, list[Any], dict[str, Any]]:
    """What the forward pass saves, and the gradients in float64."""
    found, extras = leaves(q, k, v, given)
    out, lse = reference(case.pattern, *found[:3], **extras)
    seen = torch.where(lse.isinf(), 0.0, lse)  # -inf has no gradient
    total = (out * dout.double()).sum() + (seen * dlse.double()).sum()
    want = torch.autograd.grad(total, found, allow_unused=True)
    want = [torch.zeros_like(x) if w is None else w for w, x in zip(want, found)]
    saved = Saved(q, k, v, out.detach().to(q.dtype), lse.detach().float(), dout, dlse)
    return saved, [w.double() for w in want], {n: detached(t) for n, t in extras.items()}


def detached(t: Any) -> Any:
    return tuple(x.detach() for x in t) if isinstance(t, tuple) else t.detach()


def run(
    case: Case,
    saved: Saved,
    turned: Turned = None,
    wanted: Any = "qkv",
    alone: bool = False,
    **given: Any,
) -> Gradients:
    kernel = kernel_of(case, turned, alone)
    pattern, q_len, kv_len = case.pattern, saved.q.shape[2], saved.k.shape[2]
    scale = saved.q.shape[3] ** -0.5 if pattern.scale is None else pattern.scale
    call = {"relative": int(pattern.align == "bottom_right"), "scale": scale} | given
    first = call.get("q_start", 0) + (kv_len - q_len if call["relative"] else 0)
    tables = kernel.sources[KEYS].tables or kernel.sources[QUERIES].tables
    call["tables"] = [random_table(t, first, q_len, kv_len, DEVICE) for t in tables]
    with patch.object(torch.Tensor, "new_empty", _poisoned):
        return kernel(saved, Call(**call), tuple(wanted), case.variant)


_ROOM = torch.Tensor.new_empty


def _poisoned(like: Any, *size: Any, **more: Any) -> Any:
    """Room that a kernel has to fill: NaN where it does not."""
    room = _ROOM(like, *size, **more)
    return room.fill_(math.nan) if room.is_floating_point() else room


def random_gradients(case: Case, q: Any, v: Any) -> tuple[Any, Any]:
    g = torch.Generator().manual_seed(9)
    dout = torch.randn(*q.shape[:3], v.shape[3], generator=g).to(q)
    return dout, torch.randn(*q.shape[:3], generator=g).to(q.device)


def compare(case: Case, turned: Schedule | None = None, **given: Any) -> Gradients:
    """Kernels against float64 autograd; ``given``: keywords of the call."""
    q, k, v = tensors(case)
    dout, dlse = random_gradients(case, q, v)
    saved, want, extras = expected(case, q, k, v, dout, dlse, **given)
    got = run(case, saved, turned, **extras)
    low = None if case.dtype == "float32" else _eager(case, q, k, v, dout, dlse, extras)
    judge(case, got, want, low)
    return got


def judge(case: Case, got: Gradients, want: list[Any], low: list[Any] | None = None) -> None:
    for i, (name, one, right) in enumerate(zip(names(got), flat(got), want, strict=True)):
        assert one.shape == right.shape and not one.isnan().any(), f"{case}: d{name} has holes"
        if low is not None:
            verdict = within_tolerance(one, right, low[i])
            assert verdict, f"{case}: d{name} {verdict}"
            continue
        wrong, size = (one.double() - right).abs(), float(right.abs().max())
        most = EXACT * max(size, 1.0) * (1 + math.log2(max(case.q_len, case.kv_len)))
        assert not wrong.numel() or float(wrong.max()) <= most, (
            f"{case}: d{name} is off by {float(wrong.max()):.3g}, of {size:.3g}; allowed {most:.3g}"
        )


def _eager(
    case: Case, q: Any, k: Any, v: Any, dout: Any, dlse: Any, extras: dict[str, Any]
) -> list[Any]:
    found, extras = leaves(q, k, v, extras)
    out, lse = eager_attention(case.pattern, *found[:3], **extras)
    total = [(out, dout), (lse, dlse)]
    return list(torch.autograd.grad([t for t, _ in total], found, [g for _, g in total]))
