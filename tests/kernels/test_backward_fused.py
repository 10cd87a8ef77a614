"""The fused gradient kernel, and those with stored dS, on a GPU with sm_90: right in every run.

dQ of the fused kernel is a sum in any order; all else is the same to the bit.

Without one, tests/hopper runs its text and tests/launch compiles it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from sparsegen.codegen import backward, backward_fused, backward_stored
from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.launch.backward_kernel import BackwardKernel, Pair, Prepared, compile_pairs
from sparsegen.launch.kernel import Call
from sparsegen.schedule.build import build
from sparsegen.schedule.transpose import transpose
from sparsegen.spec.gpu import current_gpu
from tests.kernels.cases import Case, pattern_of, tensors
from tests.kernels.gradients import (
    FOLDER,
    _eager,
    expected,
    extras_of,
    judge,
    problem_of,
    random_gradients,
    sources,
)
from tests.kernels.gradients import _poisoned as poisoned

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs sm_90",
    ),
]
RERUNS = 20
WINDOW = {"window": {"size": 200}}
SINKS = {"all_of": ["causal", {"any_of": [WINDOW, {"sink": {"tokens": 4}}]}]}
STRIDED = {"all_of": ["causal", {"any_of": [WINDOW, {"strided": {"stride": 64}}]}]}
DILATED = {"all_of": ["causal", {"strided": {"stride": 4}}]}
GLOBAL = {"any_of": [{"window": {"radius": 90}}, {"global": {"tokens": 8}}]}
MASKS: dict[str, Any] = {"causal": "causal", "full": "full", "sinks": SINKS, "global": GLOBAL}
FEATURES: list[dict[str, Any]] = [
    {"softcap": 5.0},
    {"alibi": True},
    {"sink_logits": True, "null_key": True},
]


def case(name: str, mask: Any, q: int, k: int, settings: Any = None, **more: Any) -> Case:
    knobs = tuple(more.pop("knobs", {}).items())
    plain = {"head_dim": 128, "value_dim": 128, "dtype": "bfloat16", "batch": 2}
    pattern = pattern_of(mask, **(settings or {}))
    return Case(name, pattern, q, k, knobs=knobs, **(plain | more))


def _cases() -> list[Case]:
    pairs = [(700, 933), (1, 300), (513, 513), (933, 700)]
    out = [case(n, mask, q, k) for n, mask in MASKS.items() for q, k in pairs]
    out += [case("strided", STRIDED, q, k) for q, k in ((512, 1024), (700, 933))]
    out += [case("dilated", DILATED, 512, 1024)]
    for d, dv in ((64, 64), (96, 96), (128, 64), (80, 40), (32, 32)):
        for name in ("causal", "sinks"):
            out.append(case(name, MASKS[name], 300, 400, head_dim=d, value_dim=dv))
    some: list[dict[str, Any]] = [{"TEST_ALL": True}, {"GROUP_HEADS": 1}, {"HEAVY_FIRST": False}]
    out += [case("sinks", SINKS, 600, 700, heads=6, kv_heads=2, knobs=k) for k in some]
    out += [case("sinks", SINKS, 600, 700, head_dim=64, value_dim=64, knobs={"STAGES": 4})]
    out += [case("sinks", SINKS, 300, 400, s) for s in FEATURES]
    return out + [case("causal", "causal", 300, 400, dtype="float16", heads=8, kv_heads=1)]


ALL = _cases()
# masks whose transposed schedules have one segment, for dS is stored in whole boxes; knobs are those of the kernel of keys
STORED = [one for one in ALL if one.name in ("causal", "full")]
STORED += [
    case("window", WINDOW, *lengths, knobs=knobs)
    for lengths in ((700, 933), (1, 300), (933, 700))
    for knobs in ({}, {"BLOCK_M": 64, "STAGES": 2})
]
STORED += [case("-".join(s), "causal", 700, 933, s, knobs={"BLOCK_M": 64}) for s in FEATURES[:2]]
STORED += [case("two-sided", {"window": {"radius": 90}}, 700, 933)]
WORKSPACE = 3_000_000  # bytes of dS: some heads of these cases at a time


def _pair(one: Case) -> Pair:
    """The split kernels in their defaults, and the fused one."""
    problem, gpu = problem_of(one), current_gpu()
    assert gpu is not None
    found = transpose(one.pattern, problem)
    made = dict(sources(one.pattern, problem))
    configs = dict.fromkeys(made, backward.default_config(problem, gpu))
    covered = [
        c.schedule for c in found.candidates if not backward_fused.uncovered(c.schedule, problem)
    ]
    made["fused"] = backward_fused.render_fused(one.pattern, covered[0], problem, found.shift)
    own = backward_fused.default_config(problem, gpu).as_dict() | dict(one.knobs)
    configs["fused"] = LaunchConfig.of(own)
    return Pair(made, configs, Path(tempfile.mkdtemp(dir=FOLDER)))


def compiled(cases: list[Case], pair_of: Callable[[Case], Pair]) -> dict[Case, BackwardKernel]:
    """Kernels of all cases, compiled once for those that differ in lengths alone."""
    key = lambda one: (one.pattern, problem_of(one), one.knobs)
    alike = {key(one): one for one in cases}
    made = compile_pairs([pair_of(one) for one in alike.values()], current_gpu())
    found = dict(zip(alike, made))
    return {one: found[key(one)] for one in cases}


@pytest.fixture(scope="module")
def kernels() -> dict[Case, BackwardKernel]:
    return compiled(ALL, _pair)


def _stored_pair(one: Case) -> Pair:
    """The split kernels and dQ of stored dS in their defaults, and the kernel that stores it."""
    problem, gpu = problem_of(one), current_gpu()
    assert gpu is not None
    found = transpose(one.pattern, problem)
    made = dict(sources(one.pattern, problem))
    configs = dict.fromkeys(made, backward.default_config(problem, gpu))
    for part, schedule, shift in (
        ("keys", found.schedule, found.shift),
        ("queries", build(one.pattern, problem), 0),
    ):
        source = backward_stored.render_stored(one.pattern, schedule, problem, part, shift)
        made[source.name] = source
        own = backward_stored.default_config(problem, gpu, part).as_dict()
        configs[source.name] = LaunchConfig.of(own | dict(one.knobs) if part == "keys" else own)
    return Pair(made, configs, Path(tempfile.mkdtemp(dir=FOLDER)))


@pytest.fixture(scope="module")
def storing() -> dict[Case, BackwardKernel]:
    made = compiled(STORED, _stored_pair)
    for kernel in made.values():
        kernel.workspace = WORKSPACE
    return made


@pytest.mark.parametrize("one", ALL, ids=str)
def test_equals_autograd(one: Case, kernels: dict[Case, BackwardKernel]) -> None:
    q, k, v = tensors(one)
    dout, dlse = random_gradients(one, q, v)
    saved, want, extras = expected(one, q, k, v, dout, dlse, **extras_of(one))
    low = _eager(one, q, k, v, dout, dlse, extras)
    kernel = kernels[one]
    scale = one.head_dim**-0.5 if one.pattern.scale is None else one.pattern.scale
    call = Call(relative=int(one.pattern.align == "bottom_right"), scale=scale, **extras)
    whole = one.name not in ("strided", "dilated") or not (one.q_len % 64 or one.kv_len % 64)
    assert Prepared(kernel, saved, call, tuple("qkv"), "fast").fused == whole
    first: Any = None
    for i in range(RERUNS):
        with patch.object(torch.Tensor, "new_empty", poisoned):
            got = kernel(saved, call, tuple("qkv"), "fast")
        judge(one, got, want, low)
        first = first or got
        same = torch.equal(first.k, got.k) and torch.equal(first.v, got.v)
        assert same, f"run {i}: dK and dV have one order of sums, and are not the same to the bit"


@pytest.mark.parametrize("one", STORED, ids=str)
def test_stored_equals_autograd_and_itself(one: Case, storing: dict[Case, BackwardKernel]) -> None:
    q, k, v = tensors(one)
    dout, dlse = random_gradients(one, q, v)
    saved, want, extras = expected(one, q, k, v, dout, dlse, **extras_of(one))
    low = _eager(one, q, k, v, dout, dlse, extras)
    kernel = storing[one]
    scale = one.head_dim**-0.5 if one.pattern.scale is None else one.pattern.scale
    call = Call(relative=int(one.pattern.align == "bottom_right"), scale=scale, **extras)
    assert Prepared(kernel, saved, call, tuple("qkv"), "fast").workspace == WORKSPACE
    first: Any = None
    for i in range(RERUNS):
        with patch.object(torch.Tensor, "new_empty", poisoned):
            got = kernel(saved, call, tuple("qkv"), "fast")
        first = first or got
        judge(one, got, want, low)
        assert all(torch.equal(getattr(first, n), getattr(got, n)) for n in "qkv"), f"run {i}"
