"""Masks as text for peers: what they read is what the pattern means."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparsegen.bench.case import Case
from sparsegen.bench.flash4 import mask_text
from sparsegen.bench.mask_text import cute_text, plain, python_text
from sparsegen.bench.torch_peers import mask_mod
from sparsegen.spec import expr as ex
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.shipped import shipped_patterns
from tests.bench.standin import Vector, vector

POSITION_ONLY = [n for n in shipped_patterns() if Pattern.from_yaml(n).position_only]
LENGTHS = [(300, 300), (97, 300), (300, 97)]
PREDICATES = [
    "min(q, 40) >= k",
    "max(k, 10, q - 20) <= q",
    "not (q < k) and not (k % 3 == 1 or q_len < 5)",
    "abs(q - k) * 2 <= kv_len // 4",
    "q_len > 10",
    "q_len > 10000",
    "(q - k) // 7 % 3 == 1",
    "-(q - 5) < k",
    "min(abs(q - k), 30) < 30",
]


def seen_by_torch(pattern: Pattern, q_len: int, kv_len: int, heads: int = 8) -> Any:
    """Bool [heads, q_len, kv_len], evaluated under vmap as flex evaluates it."""
    from torch.nn.attention.flex_attention import create_mask

    mod = mask_mod(pattern, q_len, kv_len, heads, "cpu")
    return create_mask(mod, None, heads, q_len, kv_len, device="cpu")[0]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", POSITION_ONLY)
def test_shipped_masks_for_flex(name: str, lengths: tuple[int, int]) -> None:
    pattern = Pattern.from_yaml(name)
    want = pattern.dense_mask(*lengths)
    assert torch.equal(seen_by_torch(pattern, *lengths, heads=2), want.expand(2, -1, -1))


@pytest.mark.parametrize("text", PREDICATES)
def test_predicates_for_flex(text: str) -> None:
    for align in ("bottom_right", "top_left"):
        pattern = Pattern.from_dict({"mask": {"predicate": text}, "align": align})
        for lengths in ((50, 80), (80, 50)):
            want = pattern.dense_mask(*lengths)
            assert torch.equal(seen_by_torch(pattern, *lengths, heads=1), want), (align, lengths)


def test_rules_per_head_for_flex() -> None:
    rules = [
        {"heads": [0, "2-3"], "mask": {"window": {"size": 5}}},
        {"heads": "rest", "mask": "causal"},
    ]
    pattern = Pattern.from_dict({"heads": rules})
    assert torch.equal(seen_by_torch(pattern, 30, 40, 6), pattern.dense_mask(30, 40, heads=6))


def seen_by_cute(pattern: Pattern, q_len: int, kv_len: int) -> Any:
    """Bool [q_len, kv_len] of the text for CuTe, where division rounds towards zero."""
    case = Case.of(pattern, (q_len, kv_len))
    q = vector(torch.arange(q_len)[:, None] + case.offset)
    k = vector(torch.arange(kv_len)[None])
    scope = {"number": vector, "where": torch.where, "q": q, "k": k}
    out = eval(mask_text(case), scope)
    return out.as_subclass(torch.Tensor).expand(q_len, kv_len)


@pytest.mark.parametrize("name", [n for n in POSITION_ONLY if n != "bigbird"])
def test_shipped_masks_for_cute(name: str) -> None:
    pattern = Pattern.from_yaml(name)
    for lengths in LENGTHS:
        assert torch.equal(seen_by_cute(pattern, *lengths), pattern.dense_mask(*lengths)[0])


@pytest.mark.parametrize("text", PREDICATES)
def test_predicates_for_cute(text: str) -> None:
    pattern = Pattern.from_dict({"mask": {"predicate": text}})
    for lengths in ((50, 80), (80, 50)):
        assert torch.equal(seen_by_cute(pattern, *lengths), pattern.dense_mask(*lengths)[0])


def test_the_stand_in_rounds_as_a_machine_does() -> None:
    """Otherwise the tests above would prove nothing about floors."""
    assert (vector(-7) // vector(2)).item() == -3 and (vector(-7) % vector(3)).item() == -1
    assert isinstance(vector(1) // vector(1), Vector)


def test_positive_dividends_cost_nothing() -> None:
    k_block = ex.Mod(ex.K, ex.Const(4))
    assert cute_text(k_block) == "(k % number(4))"
    assert "+" in cute_text(ex.Mod(ex.Sub(ex.Q, ex.K), ex.Const(4)))
    assert "+" in cute_text(ex.Mod(ex.Q, ex.Const(4)), q_from_zero=False)


def test_plain_takes_out_what_torch_cannot_say() -> None:
    """``~True`` is -2 and a minimum of a tensor and a number is an error."""
    lengths = {"q_len": 4, "kv_len": 4}
    short = ex.Compare("<", ex.Q_LEN, ex.Const(9))
    assert plain(ex.Not(short), lengths) == ex.FALSE
    assert plain(ex.And((short, ex.Compare("<", ex.Q, ex.K))), lengths) == ex.Compare(
        "<", ex.Q, ex.K
    )
    assert plain(ex.Not(ex.Compare("==", ex.Q, ex.K)), {}) == ex.Compare("!=", ex.Q, ex.K)
    least = ex.Min((ex.Const(3), ex.Q, ex.Const(5)))
    assert python_text(plain(least, {})) == "torch.clamp(q, max=3)"


def test_terms_of_data_are_refused() -> None:
    pattern = Pattern.from_yaml("bigbird")
    with pytest.raises(TypeError, match="random_blocks"):
        mask_text(Case.of(pattern, (256, 256)))
    with pytest.raises(TypeError, match="documents"):
        mask_mod(Pattern.from_yaml("packed_documents"), 8, 8, 1, "cpu")
