"""The warp-specialised forward kernel on a GPU with sm_90: right, and the same to the bit from run to run.

Without one, tests/hopper runs its text and tests/launch compiles it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparsegen.launch import signature as sig
from tests.kernels.cases import (
    Case,
    compare,
    compile_all,
    extras_of,
    kernel_of,
    pattern_of,
    run,
    tensors,
)
from tests.kernels.hopper_masks import (
    FEATURES,
    GLOBAL,
    NEEDS_SM_90,
    RERUNS,
    SINKS,
    STRIDED,
    WINDOW,
)

pytestmark = NEEDS_SM_90
DILATED = {"dilated": {"size": 40, "dilation": 8}}
MASKS: dict[str, Any] = {
    "causal": "causal", "full": "full", "window": WINDOW, "sinks": SINKS, "global": GLOBAL,
}  # fmt: skip
LARGE = {"KERNEL": "hopper", "num_warps": 4, "BLOCK_M": 128, "BLOCK_N": 128, "STAGES": 2}
PERSISTENT = {"PERSISTENT": True, "GROUP_HEADS": 1}


def case(name: str, mask: Any, q: int, k: int, settings: Any = None, **more: Any) -> Case:
    knobs = tuple((LARGE | more.pop("knobs", {})).items())
    plain = {"head_dim": 128, "value_dim": 128, "dtype": "bfloat16", "batch": 2}
    return Case(name, pattern_of(mask, **(settings or {})), q, k, knobs=knobs, **(plain | more))


def _cases() -> list[Case]:
    pairs = [(700, 933), (1, 300), (513, 513), (933, 700)]
    out = [case(n, mask, q, k) for n, mask in MASKS.items() for q, k in pairs]
    periods = {"strided": STRIDED, "dilated": DILATED}
    out += [case(n, mask, 512, 1024) for n, mask in periods.items()]
    # more query tiles than multiprocessors: a persistent program goes on, and its queries' place is used again
    many = [(n, MASKS[n], 3000, 3333) for n in MASKS] + [
        (n, m, 3072, 4096) for n, m in periods.items()
    ]
    for n, mask, q, k in many:
        for knobs in ({}, {"BLOCK_M": 64, "BLOCK_N": 64}):
            out.append(case(n, mask, q, k, heads=8, kv_heads=2, knobs=PERSISTENT | knobs))
    dims = [
        (64, 64, {}),
        (96, 96, {}),
        (192, 128, {"LATE_VALUES": True}),
        (256, 256, {"BLOCK_N": 64}),
        (80, 40, {}),
    ]
    for d, dv, knobs in dims:
        for name in ("causal", "sinks"):
            out.append(case(name, MASKS[name], 300, 400, head_dim=d, value_dim=dv, knobs=knobs))
    some = [
        {"BLOCK_N": 64, "STAGES": 3},
        {"LATE_VALUES": True},
        {"GROUP_HEADS": 16},
        {"HEAVY_FIRST": False},
    ]
    out += [case("sinks", SINKS, 600, 700, heads=6, kv_heads=2, knobs=k) for k in some]
    out += [case("sinks", SINKS, 300, 400, s) for s in FEATURES]
    return out + [case("causal", "causal", 300, 400, dtype="float16", heads=8, kv_heads=1)]


ALL = _cases()


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    compile_all(ALL)


@pytest.mark.parametrize("one", ALL, ids=str)
def test_equals_the_reference_and_itself(one: Case) -> None:
    extras = extras_of(one)
    compare(one, **extras)
    q, k, v = tensors(one)
    first = run(one, q, k, v, **extras)
    for i in range(RERUNS):
        again = run(one, q, k, v, **extras)
        assert all(map(torch.equal, first, again)), f"run {i} differs from the first"
    source, config = kernel_of(one).source, dict(one.knobs)
    launched = [
        sig.unit(source, kernel_of(one).config, "fast", i)[1]["KERNEL"]
        for i in range(len(source.grids))
    ]
    assert "hopper" in launched and config["KERNEL"] == "hopper"


@pytest.mark.parametrize("size", [5.0, 10.0])
def test_large_scores(size: float) -> None:
    """Scores of several hundred (CASES B31)."""
    compare(case("causal", "causal", 300, 400, size=size))
