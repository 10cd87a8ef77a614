"""Gradients through the callable that users hold: equal to float64 autograd of the reference, or refused by name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sparsegen.errors import InputError, UnsupportedError
from sparsegen.spec.reference import reference
from tests.kernels.cases import ON_GPU, Case, tensors
from tests.kernels.cases import kernel_of as forward_of
from tests.kernels.gradients import extras_of, random_gradients
from tests.runtime.trained import (
    CALLS,
    GROUPS,
    LEARNED,
    PLAIN,
    RANDOM,
    TOP_LEFT,
    WIDE,
    attend_of,
    learned,
)

pytestmark = [
    pytest.mark.skipif(ON_GPU, reason="runs in the interpreter so far"),
    pytest.mark.one_triton,  # what torch does with kernels that tests/kernels runs
]


@pytest.fixture(autouse=True)
def kernels_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted kernels take CPU tensors."""
    monkeypatch.setattr("sparsegen.runtime.checks.DEVICE", "cpu")


WANTED = [(PLAIN, name) for name in CALLS] + [
    (LEARNED, "plain"), (LEARNED, "partial"), (LEARNED, "lengths"), (TOP_LEFT, "starts"),
    (RANDOM, "plain"), (WIDE, "plain"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "name"), WANTED, ids=lambda x: getattr(x, "name", x))
def test_gradients_equal_autograd_of_the_reference(case: Case, name: str) -> None:
    attend, _ = attend_of(case)
    leaves, extras = learned(case)
    given = CALLS[name]
    out, lse = attend(*leaves[:3], **given, **extras, return_lse=True)
    dout, dlse = random_gradients(case, *leaves[:3:2])
    got = torch.autograd.grad([out, lse], leaves, [dout, torch.where(lse.isinf(), 0.0, dlse)])
    right, right_lse = reference(case.pattern, *leaves[:3], **given, **extras)
    assert torch.allclose(out, right.float(), atol=1e-5)
    assert torch.allclose(lse, right_lse.float(), atol=1e-5)
    seen = torch.where(right_lse.isinf(), 0.0, right_lse)  # -inf has no gradient
    total = (right * dout.double()).sum() + (seen * dlse.double()).sum()
    want = torch.autograd.grad(total, leaves, allow_unused=True)
    assert sum(w is not None for w in want) >= 3
    for one, w in zip(got, want, strict=True):
        assert torch.allclose(one, torch.zeros_like(one) if w is None else w, atol=3e-5)


def test_without_lse_and_twice() -> None:
    attend, backward = attend_of(PLAIN)
    for _ in range(2):
        leaves, _ = learned(PLAIN)
        out = attend(*leaves)
        assert isinstance(out, torch.Tensor)
        out.square().sum().backward()
        assert all(t.grad is not None and t.grad.abs().max() > 0 for t in leaves)
    assert backward.asked == [["q", "k", "v"]] * 2


@pytest.mark.parametrize("asking", [["q"], ["v"], ["k", "v"], ["sink_logits"], ["null_v"]])
def test_only_what_requires_a_gradient_is_computed(asking: list[str]) -> None:
    attend, backward = attend_of(LEARNED)
    extras = extras_of(LEARNED)
    named = dict(zip("qkv", tensors(LEARNED))) | {"sink_logits": extras["sink_logits"]}
    named |= dict(zip(("null_k", "null_v"), extras["null_key"]))
    for name in asking:
        named[name].requires_grad_()
    attend(named["q"], named["k"], named["v"], **extras).sum().backward()
    assert backward.asked == [asking]
    assert [n for n, t in named.items() if t.grad is not None] == asking


def test_calls_without_gradients_do_not_come_here(monkeypatch: pytest.MonkeyPatch) -> None:
    attend, backward = attend_of(PLAIN)
    seen = []
    launch = lambda *given: seen.append(given)
    kernel = SimpleNamespace(source=forward_of(PLAIN).source, prepare=lambda *given: launch)
    monkeypatch.setattr(attend, "_kernels", dict.fromkeys(attend._kernels, kernel))
    q, k, v = tensors(PLAIN)
    assert attend(q, k, v).grad_fn is None and attend(q, k, v).grad_fn is None
    with torch.no_grad():
        assert attend(q.requires_grad_(), k, v).grad_fn is None
    assert len(seen) == 3 and not backward.asked


def test_nothing_to_attend() -> None:
    attend, backward = attend_of(PLAIN)
    q, k, v = (t.requires_grad_() for t in tensors(PLAIN))
    attend(q[:, :, :0], k, v).sum().backward()
    assert (k.grad == 0).all() and (q.grad == 0).all() and not backward.asked


def test_autocast_chooses_the_kernels() -> None:
    half = Case("half", PLAIN.pattern, 20, 24, **GROUPS, dtype="float16")
    attend, _ = attend_of(half)
    leaves = [t.float().requires_grad_() for t in tensors(half)]
    with torch.autocast("cpu", torch.float16):
        out = attend(*leaves)
    assert out.dtype == torch.float16
    out.float().sum().backward()
    assert all(t.grad is not None and t.grad.dtype == torch.float32 for t in leaves)


# ---- refusals ----

REFUSED = {
    "out": "out= takes no result that a gradient is wanted of: leave it out, or call under torch.no_grad()",
    "variant": "variant= names a forward kernel alone: leave it out where a gradient is wanted, "
    "or call under torch.no_grad()",
    "slopes": "alibi_slopes get no gradient: pass alibi_slopes.detach(), or use backend='reference'",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_is_never_dropped(what: str) -> None:
    attend, _ = attend_of(LEARNED)
    (q, k, v, *_), extras = learned(LEARNED)
    given = {"out": {"out": torch.empty_like(q)}, "variant": {"variant": "fast"}}.get(what, {})
    if what == "slopes":
        extras["alibi_slopes"].requires_grad_()
    with pytest.raises(UnsupportedError) as error:
        attend(q, k, v, **given, **extras)
    assert str(error.value) == REFUSED[what]


def test_an_attend_without_gradients_says_so() -> None:
    attend, _ = attend_of(PLAIN, backward=None)
    with pytest.raises(UnsupportedError) as error:
        attend(*learned(PLAIN)[0])
    assert str(error.value) == (
        "this callable of 'case' was made without gradients: call under torch.no_grad(), "
        "or make it with sparsegen.compile"
    )


def test_calls_are_checked_as_without_gradients() -> None:
    attend, _ = attend_of(LEARNED)
    (q, k, v, *_), extras = learned(LEARNED)
    with pytest.raises(TypeError, match="needs the keyword 'alibi_slopes'"):
        attend(q, k, v)
    with pytest.raises(InputError, match="k_start must be 0 or more"):
        attend(q, k, v, **extras, k_start=-1)
    with pytest.raises(InputError, match=r"kv_lengths must be int32 \[1\]"):
        attend(q, k, v, **extras, kv_lengths=torch.tensor([3]))
    with pytest.raises(InputError, match="q and k must have the same dim"):
        attend(q[..., :8], k, v, **extras)
    drawn, _ = attend_of(RANDOM)
    with pytest.raises(UnsupportedError, match="random_blocks has one table"):
        drawn(*learned(RANDOM)[0], kv_lengths=torch.tensor([3], dtype=torch.int32))


def test_tensors_on_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    attend, _ = attend_of(PLAIN)
    monkeypatch.undo()
    with pytest.raises(
        InputError, match="the compiled kernel runs on a GPU and the tensors are on cpu"
    ):
        attend(*learned(PLAIN)[0])
