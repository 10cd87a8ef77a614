"""The float64 reference refuses what the compiled callable refuses: a call that it takes is one that a kernel takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparsegen.errors import InputError, UnsupportedError
from sparsegen.runtime.attend import ReferenceAttend
from sparsegen.spec.reference import reference
from tests.runtime.calls import pattern_of

SHAPE = (1, 2, 8, 16)
NO_OUT = (
    "out= takes no result that a gradient is wanted of: leave it out, or call under torch.no_grad()"
)


def leaf() -> Any:
    return torch.randn(SHAPE, requires_grad=True)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "sink_logits", "out"])
def test_out_takes_no_result_with_a_gradient(wanted: str) -> None:
    learned = wanted == "sink_logits"
    attend = ReferenceAttend(pattern_of(sink_logits=learned))
    given = {name: torch.randn(SHAPE) for name in ("q", "k", "v")}
    given |= {"out": torch.full(SHAPE, 7.0)}
    given |= {"sink_logits": torch.randn(2)} if learned else {}
    given[wanted].requires_grad_()
    with pytest.raises(UnsupportedError) as error:
        attend(**given)
    assert str(error.value) == NO_OUT and (given["out"] == 7.0).all()
    with torch.no_grad():
        assert attend(**given) is given["out"]
    del given["out"]
    assert torch.equal(attend(**given), attend(**given)) and attend(**given).shape == SHAPE


def test_out_is_looked_at_before_anything_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsegen.spec.reference.reference", None)
    q = torch.randn(SHAPE)
    with pytest.raises(InputError, match="^out must be torch.float32"):
        ReferenceAttend(pattern_of())(q, q, q, out=q.double())


@pytest.mark.parametrize("name", ["q_start", "k_start"])
@pytest.mark.parametrize("value", [3.0, True, "3", torch.tensor(3), 2**31 + 1], ids=repr)
def test_starts_are_integers(name: str, value: Any) -> None:
    """``3.0`` would round quietly, and ``True`` is a flag in the wrong place."""
    q, pattern = torch.randn(SHAPE), pattern_of()
    calls = (
        lambda: ReferenceAttend(pattern)(q, q, q, **{name: value}),
        lambda: reference(pattern, q, q, q, **{name: value}),
        lambda: pattern.dense_mask(8, 8, **{name: value}),
    )
    for call in calls:
        with pytest.raises(InputError, match=f"^{name} must be an integer from -2147483648 to"):
            call()
