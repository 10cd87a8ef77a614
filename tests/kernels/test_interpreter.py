"""The interpreter without the work that it throws away gives the same bits as Triton's own (``tests/interpreter.py``)."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from tests import interpreter
from tests.kernels import gradients
from tests.kernels.cases import ON_GPU, Case, pattern_of, run, tensors
from tests.kernels.schedules import made

pytestmark = pytest.mark.skipif(ON_GPU, reason="kernels run on the GPU")

EVERY = {"softcap": 2.0, "alibi": True, "sink_logits": True, "null_key": True}
DRAWN = {"all_of": ["causal", {"random_blocks": {"block": 8, "per_row": 2, "seed": 1}}]}


def _cases() -> list[Case]:
    pattern, schedule = made("split rows", **EVERY)
    return [
        Case("drawn", pattern_of(DRAWN, **EVERY), 33, 50, variant="general"),
        Case(
            "split rows", pattern, 5, 310, heads=2, kv_heads=1, schedule=schedule, dtype="float16"
        ),
    ]


@pytest.mark.parametrize("case", _cases(), ids=str)
def test_the_same_bits(case: Case) -> None:
    q, k, v = tensors(case)
    extras = gradients.extras_of(case)
    saved, _, extras = gradients.expected(
        case, q, k, v, *gradients.random_gradients(case, q, v), **extras
    )

    def results() -> list[Any]:
        found = gradients.flat(gradients.run(case, saved, **extras))
        return [*run(case, q, k, v, **extras), *found]

    quick = results()
    with interpreter.plain():
        plain = results()
    assert len(quick) == len(plain) == 8
    assert all(torch.equal(a, b) for a, b in zip(quick, plain))


def test_it_is_quick_here_and_put_back() -> None:
    found = sys.modules[interpreter.MODULE]
    assert not found.interpreter_builder.options.sanitize_overflow
    assert not found.interpreter_builder.options.debug, "then what it finds would be said"
    before = found._patch_lang
    with interpreter.plain():
        assert found.interpreter_builder.options.sanitize_overflow
        assert found._patch_lang is not before
        assert found._patch_lang.__module__ == interpreter.MODULE
    assert found._patch_lang is before


def test_triton_is_put_back_after_a_kernel_that_fails() -> None:
    """And the next kernel has its functions replaced again."""
    import triton.language as tl

    plain = tl.load
    case = Case("causal", pattern_of("causal"), 20, 20, heads=1, kv_heads=1)
    q, k, v = tensors(case)
    with pytest.raises(Exception, match="nothing"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[interpreter.MODULE].InterpreterBuilder, "create_dot", fails)
        run(case, q, k, v)
    assert tl.load is plain
    out, _ = run(case, q, k, v)
    assert not out.isnan().any() and tl.load is plain


def fails(*_: Any) -> None:
    raise RuntimeError("nothing works")
