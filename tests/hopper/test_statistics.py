"""STATS, which the tensor cores subtract: LSE and delta as sums of bf16 numbers, exactly, and what a row without any has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparsegen.codegen.backward import KEYS, QUERIES
from tests.hopper.backward_runs import SMALL, gradients_of, kernel_of, saved_of
from tests.hopper.machine import Machine
from tests.hopper.registers import Value
from tests.hopper.runs import Run
from tests.hopper.small_patterns import MASKS, extras, pattern_of


def function(name: str, part: str, **settings: Any) -> Any:
    """A function of the warp-specialised text of queries or keys."""
    run = Run("causal", pattern_of(MASKS["causal"], **settings), 64, 64)
    special = kernel_of(run).sources[part].hopper
    assert special is not None
    return Machine(special.text)._text[name]


def eight_of(words: list[Value]) -> torch.Tensor:
    """[4, n]: the halves of two words of n rows, as a descriptor of bf16 reads them."""
    return torch.stack([w.data for w in words], 1).view(torch.bfloat16).T


def test_four_bf16_add_up_to_a_float32() -> None:
    """Also for numbers that are no bf16 and no sum of two, of any size and sign."""
    torch.manual_seed(0)
    x = torch.randn(4096) * 10.0 ** torch.randint(-20, 30, (4096,))
    x[:4] = torch.tensor([0.0, 2.0**127, -(2.0**127), 1 + 2.0**-23])
    words = function("halves", QUERIES)(Value(x))
    parts = eight_of(words)
    assert torch.equal(parts.double().sum(0), x.double())
    assert not parts[3].any() and (parts[2] != 0).float().mean() > 0.9  # all three are needed
    both = function("both_halves", QUERIES, null_key=True)
    again = both(words[0]) + both(words[1])
    assert torch.equal(again.data, x)


def test_left_operands() -> None:
    """-1 for the columns of one statistic, 0 for the other's and for those that no memory stands behind."""
    minus = function("minus", KEYS)
    stats = torch.randn(32, 16)
    for which in (0, 1):
        operand = minus(Value(8), which, 32).data
        assert operand.shape == (64, 16)
        wanted = -stats[:, 4 * which : 4 * which + 4].sum(1)
        torch.testing.assert_close(operand @ stats.T, wanted.expand(64, 32))


@pytest.mark.parametrize("scale", [0.3, -0.3, 0])
@pytest.mark.parametrize("settings", [{}, {"softcap": 2.0}], ids=["plain", "softcap"])
def test_what_is_stored(settings: dict[str, Any], scale: float) -> None:
    """LSE in the unit of what it is taken from; for rows that see nothing a number that leaves no weight, and delta 0."""
    pattern = pattern_of(MASKS["causal"], scale=scale, **settings)
    run = Run("causal", pattern, 40, 24, knobs=SMALL)  # the first 16 queries lie before the keys
    saved, _, _ = saved_of(run)
    kernel = kernel_of(run)
    gradients_of(kernel, run, saved, "q", **extras(pattern, 2, 1, 64, 64))
    (words,) = (t for t in kernel._memory.values() if t.ndim == 4 and t.shape[3] == 4)
    parts = words.contiguous().view(torch.bfloat16).double().unflatten(3, (2, 4)).sum(4)
    lse, delta = parts[..., 0], parts[..., 1]
    log2e = 1.4426950408889634
    unit = 1.0 if settings else (scale or 1e-30) * log2e
    seen = saved.lse != -torch.inf
    assert 0 < (~seen).sum() < seen.numel()
    torch.testing.assert_close(lse[seen] * unit, saved.lse[seen].double() * log2e, rtol=1e-6, atol=1e-6)  # fmt: skip
    assert torch.all(lse[~seen] * unit > 1e8 if scale else lse[~seen] > 1e30)
    assert not delta[~seen].any() and delta[seen].any()
