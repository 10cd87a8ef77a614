"""The kernel tests' cases, run on the GPU where there is one and through Triton's interpreter elsewhere.

A ``Case`` is one pattern, one set of dims and one call.  Outputs are poisoned with NaN, inputs are random, and the
judge is ``tune.accept``: no further from the float64 reference than eager attention in the same dtype may be.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsegen.codegen import KernelSource, LaunchConfig, load_template, render
from sparsegen.launch import Call, Interpreted, Job, Kernel, compile_many, variants
from sparsegen.launch.tables import random_table
from sparsegen.schedule.build import build
from sparsegen.schedule.tree import Schedule
from sparsegen.spec.gpu import current_gpu, find_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from sparsegen.spec.reference import reference
from sparsegen.tune.accept import within_tolerance
from sparsegen.tune.eager import eager_attention

ON_GPU = os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ACCEPTANCE = Path(__file__).parents[1] / "data" / "acceptance" / "patterns"
FOLDER = Path(tempfile.mkdtemp(prefix="sparsegen-kernels-"))


@dataclass(frozen=True)
class Case:
    """One comparison; ``mask`` is a node of the language or the name of an acceptance pattern."""

    name: str
    pattern: Pattern
    q_len: int
    kv_len: int
    batch: int = 1
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    value_dim: int = 16
    dtype: str = "float32"
    variant: str = "fast"
    size: float = 1.0  # factor on random inputs
    knobs: tuple[tuple[str, Any], ...] = field(default=())
    schedule: Schedule | None = None  # default: what the compiler picks

    def __str__(self) -> str:
        dims = (
            f"{self.head_dim}"
            if self.head_dim == self.value_dim
            else f"{self.head_dim}-{self.value_dim}"
        )
        return (
            f"{self.name}-{self.q_len}x{self.kv_len}-{self.dtype}-d{dims}-{self.variant}"
            + "".join(f"-{n}={v}" for n, v in self.knobs)
        )


def once(cases: Iterable[Case]) -> list[Any]:
    """Cases that run with one Triton: the same constructs at other lengths, in other masks."""
    return [pytest.param(case, marks=pytest.mark.one_triton) for case in cases]


def acceptance(name: str) -> Pattern:
    return Pattern.from_yaml(ACCEPTANCE / f"{name}.yaml")


def acceptance_names() -> list[str]:
    """Patterns of the acceptance set that depend on positions only."""
    return [p.stem for p in sorted(ACCEPTANCE.glob("*.yaml")) if Pattern.from_yaml(p).position_only]


def pattern_of(mask: Any, **settings: Any) -> Pattern:
    return Pattern.from_dict({"name": "case", "mask": mask, **settings})


@cache
def rendered(
    pattern: Pattern, head_dim: int, value_dim: int, dtype: str, schedule: Schedule | None = None
) -> KernelSource:
    problem = Problem(head_dim=head_dim, value_dim=value_dim, dtype=dtype)
    return render(pattern, schedule or build(pattern, problem), problem)


def source_of(case: Case) -> KernelSource:
    return rendered(case.pattern, case.head_dim, case.value_dim, case.dtype, case.schedule)


def config_of(case: Case) -> LaunchConfig:
    """Small tiles in the interpreter, so that short inputs have several; the template's own on a GPU."""
    problem = Problem(head_dim=case.head_dim, value_dim=case.value_dim, dtype=case.dtype)
    gpu = current_gpu() if ON_GPU else find_gpu("nvidia-h200")
    values = load_template().default(problem, gpu).as_dict()
    if not ON_GPU:
        values |= {"BLOCK_M": 32, "BLOCK_N": 16, "TMA": False}
    return LaunchConfig.of(values | dict(case.knobs))


_COMPILED: dict[Any, Kernel] = {}


def compile_all(cases: list[Case]) -> None:
    """Compile what the cases need in parallel: a GPU session does this once, before its first test."""
    wanted = {}
    for case in cases:
        source, config = source_of(case), config_of(case)
        if (source.digest, config) not in _COMPILED:
            wanted[source.digest, config] = source
    jobs = []
    for i, ((_, config), source) in enumerate(wanted.items()):
        folder = FOLDER / f"{len(_COMPILED)}-{i}"
        jobs += [
            Job(source, config, variant, current_gpu(), folder / variant)
            for variant in variants(source, config)
        ]
    for outcome in compile_many(jobs):
        job = outcome.job
        assert outcome.binary is not None, outcome.error
        folders = {v: job.directory.parent / v for v in variants(job.source, job.config)}
        _COMPILED[job.source.digest, job.config] = Kernel(job.source, job.config, folders)


@cache
def _interpreted(source: KernelSource, config: LaunchConfig) -> Interpreted:
    return Interpreted(source, config, FOLDER / f"{source.digest[:12]}.py")


def kernel_of(case: Case) -> Kernel | Interpreted:
    source, config = source_of(case), config_of(case)
    if not ON_GPU:
        return _interpreted(source, config)
    if (source.digest, config) not in _COMPILED:
        compile_all([case])
    return _COMPILED[source.digest, config]


def tensors(case: Case, seed: int = 0) -> tuple[Any, Any, Any]:
    """Random q, k, v [B, H, S, D]."""
    g = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> Any:
        return (case.size * torch.randn(*shape, generator=g)).to(DTYPES[case.dtype]).to(DEVICE)

    return (
        make(case.batch, case.heads, case.q_len, case.head_dim),
        make(case.batch, case.kv_heads, case.kv_len, case.head_dim),
        make(case.batch, case.kv_heads, case.kv_len, case.value_dim),
    )


def run(case: Case, q: Any, k: Any, v: Any, **call: Any) -> tuple[Any, Any]:
    """Output and LSE of the kernel, both poisoned with NaN first."""
    out = torch.full((*q.shape[:3], v.shape[3]), math.nan, dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:3], math.nan, device=q.device)
    fn = kernel_of(case)
    pattern = case.pattern
    scale = q.shape[3] ** -0.5 if pattern.scale is None else pattern.scale
    given = {"relative": int(pattern.align == "bottom_right"), "scale": scale} | call
    first = given.get("q_start", 0) + (k.shape[2] - q.shape[2] if given["relative"] else 0)
    given["tables"] = [
        random_table(t, first, q.shape[2], k.shape[2], q.device) for t in fn.source.tables
    ]
    fn(q, k, v, out, lse, Call(**given), case.variant)
    return out, lse


def compare(case: Case, seed: int = 0, **extras: Any) -> None:
    """Kernel against reference; ``extras``: alibi_slopes, sink_logits, null_key."""
    q, k, v = tensors(case, seed)
    out, lse = run(case, q, k, v, **extras)
    judge(case, q, k, v, out, lse, **extras)


def judge(case: Case, q: Any, k: Any, v: Any, out: Any, lse: Any, **extras: Any) -> None:
    want, want_lse = reference(case.pattern, q, k, v, **extras)
    low, low_lse = eager_attention(case.pattern, q, k, v, **extras)
    verdict = within_tolerance(out, want, low)
    assert verdict, f"{case}: {verdict}"
    verdict = within_tolerance(lse, want_lse, low_lse)
    assert verdict, f"{case}: LSE {verdict}"
    assert (out[torch.isinf(want_lse)] == 0).all()


def extras_of(case: Case) -> dict[str, Any]:
    """Random ALiBi slopes, sink logits and null key, as far as the pattern asks for them."""
    g = torch.Generator().manual_seed(5)
    make = lambda *s: torch.randn(*s, generator=g)
    out: dict = {}
    if case.pattern.alibi:
        out["alibi_slopes"] = (0.1 * make(case.heads).abs()).to(DEVICE)
    if case.pattern.sink_logits:
        out["sink_logits"] = make(case.heads).to(DEVICE)
    if case.pattern.null_key:
        out["null_key"] = (
            make(case.kv_heads, case.head_dim).to(DEVICE),
            make(case.kv_heads, case.value_dim).to(DEVICE),
        )
    return out
