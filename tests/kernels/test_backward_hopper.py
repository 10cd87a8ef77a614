"""The warp-specialised gradient kernels on a GPU with sm_90: right, and the same to the bit from run to run.

Without one, tests/hopper runs their text and tests/launch compiles it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sparsegen.launch import signature as sig
from sparsegen.launch.backward_boxes import variant_of
from sparsegen.launch.kernel import Call
from tests.kernels.cases import Case, acceptance, pattern_of, tensors
from tests.kernels.gradients import (
    _eager,
    compile_all,
    expected,
    extras_of,
    flat,
    judge,
    kernel_of,
    random_gradients,
    run,
)
from tests.kernels.hopper_masks import FEATURES, GLOBAL, NEEDS_SM_90, RERUNS, SINKS, STRIDED

pytestmark = NEEDS_SM_90
MASKS: dict[str, Any] = {"causal": "causal", "full": "full", "sinks": SINKS, "global": GLOBAL}
LARGE = {"KERNEL": "hopper", "num_warps": 4, "BLOCK_M": 128, "BLOCK_N": 64, "STAGES": 2}


def case(name: str, mask: Any, q: int, k: int, settings: Any = None, **more: Any) -> Case:
    knobs = tuple((LARGE | more.pop("knobs", {})).items())
    plain = {"head_dim": 128, "value_dim": 128, "dtype": "bfloat16", "batch": 2}
    pattern = pattern_of(mask, **(settings or {}))
    return Case(name, pattern, q, k, knobs=knobs, **(plain | more))


def _cases() -> list[Case]:
    pairs = [(700, 933), (1, 300), (513, 513), (933, 700)]
    out = [case(n, mask, q, k) for n, mask in MASKS.items() for q, k in pairs]
    out += [case("strided", STRIDED, q, k) for q, k in ((512, 1024), (700, 933))]
    dims = [(64, 64, {}), (96, 96, {}), (192, 128, {"BLOCK_N": 32}), (80, 40, {})]
    for d, dv, knobs in dims:
        for name in ("causal", "sinks"):
            out.append(case(name, MASKS[name], 300, 400, head_dim=d, value_dim=dv, knobs=knobs))
    some = [{"BLOCK_M": 64}, {"STAGES": 3}, {"TEST_ALL": True}, {"BLOCK_N": 32, "STAGES": 4}]
    out += [case("sinks", SINKS, 600, 700, heads=6, kv_heads=2, knobs=k) for k in some]
    out += [case("sinks", SINKS, 300, 400, s) for s in FEATURES]
    return out + [case("causal", "causal", 300, 400, dtype="float16", heads=8, kv_heads=1)]


ALL = _cases()


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    compile_all([(one, None) for one in ALL])


@pytest.mark.parametrize("one", ALL, ids=str)
def test_equals_autograd_and_itself(one: Case) -> None:
    q, k, v = tensors(one)
    dout, dlse = random_gradients(one, q, v)
    saved, want, extras = expected(one, q, k, v, dout, dlse, **extras_of(one))
    got = run(one, saved, **extras)
    judge(one, got, want, _eager(one, q, k, v, dout, dlse, extras))
    for i in range(RERUNS):
        again = run(one, saved, **extras)
        same = [torch.equal(a, b) for a, b in zip(flat(got), flat(again), strict=True)]
        assert all(same), f"run {i} differs from the first"
    kernel, call = kernel_of(one), Call(relative=1)
    for name in ("queries", "keys"):
        source, config = kernel.sources[name], kernel.configs[name]
        taken = [
            launch
            for launch in range(len(source.grids))
            if sig.unit(source, config, "fast", launch)[1]["KERNEL"] == "hopper"
            and variant_of(source, config, "fast", launch, saved, call) == "fast"
        ]
        assert taken, f"{name}: all launches went to the portable kernel"


@pytest.mark.parametrize("name", ["sliding_window", "longformer"])
def test_acceptance_patterns(name: str) -> None:
    """Patterns of the acceptance set beside those written here."""
    one = replace(case(name, "causal", 600, 600), pattern=acceptance(name))
    q, k, v = tensors(one)
    dout, dlse = random_gradients(one, q, v)
    saved, want, extras = expected(one, q, k, v, dout, dlse, **extras_of(one))
    judge(one, run(one, saved, **extras), want, _eager(one, q, k, v, dout, dlse, extras))
