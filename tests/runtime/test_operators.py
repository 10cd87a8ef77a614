"""The operators: opcheck, torch.compile, checkpointing, and gradients only of what asks for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend

from sparsegen.codegen.backward import QUERIES
from sparsegen.errors import InputError, UnsupportedError
from sparsegen.runtime.backward import Engine, attend, operators, register
from tests.kernels.cases import ON_GPU, Case, pattern_of, tensors
from tests.kernels.cases import kernel_of as forward_of
from tests.kernels.gradients import expected, extras_of, random_gradients
from tests.kernels.gradients import kernel_of as backward_of

pytestmark = [
    pytest.mark.skipif(ON_GPU, reason="runs in the interpreter so far"),
    pytest.mark.one_triton,  # what torch does with kernels that tests/kernels runs
]

SINKS = {"all_of": ["causal", {"any_of": [{"window": {"size": 8}}, {"sink": {"tokens": 2}}]}]}
SETTINGS = {"sink_logits": True, "null_key": True, "softcap": 4.0}
PLAIN = Case("plain", pattern_of(SINKS), 20, 24, heads=2, kv_heads=1)
LEARNED = Case("learned", pattern_of(SINKS, **SETTINGS), 20, 24, heads=2, kv_heads=1)
DRAWN = Case("drawn", pattern_of({"random_blocks": {"block": 8, "per_row": 1, "seed": 3}}), 20, 24)


class Counting:
    """The backward kernels, and which gradients were asked of them."""

    def __init__(self, case: Case):
        self.kernel, self.asked = backward_of(case), []

    def __call__(self, saved: Any, call: Any, wanted: Any) -> Any:
        self.asked.append(list(wanted))
        return self.kernel(saved, call, wanted)


def engine_of(case: Case) -> tuple[dict[str, Any], Counting]:
    """The case's kernels under its name, and the keywords of a call."""
    backward = Counting(case)
    register(case.name, Engine(forward_of(case), backward, backward.kernel.sources[QUERIES].tables))
    return {"engine": case.name, "scale": case.head_dim**-0.5}, backward


def inputs(case: Case) -> list[Any]:
    return [t.requires_grad_() for t in tensors(case)]


@pytest.mark.parametrize("case", [PLAIN, LEARNED, DRAWN], ids=lambda c: c.name)
def test_gradients_equal_autograd_of_the_reference(case: Case) -> None:
    given, _ = engine_of(case)
    q, k, v = inputs(case)
    extras = extras_of(case)
    leaves = [q, k, v]
    if "sink_logits" in extras:
        leaves += [extras["sink_logits"].requires_grad_(), *map(_leaf, extras["null_key"])]
    dout, dlse = random_gradients(case, q, v)
    out, lse = attend(q, k, v, **given, **extras)
    got = torch.autograd.grad([out, lse], leaves, [dout, torch.where(lse.isinf(), 0.0, dlse)])
    saved, want, _ = expected(case, q.detach(), k.detach(), v.detach(), dout, dlse, **extras)
    assert torch.allclose(out, saved.out, atol=1e-5)
    for one, right in zip(got, want, strict=True):
        assert torch.allclose(one.double(), right, atol=2e-5)


def _leaf(t: Any) -> Any:
    return t.requires_grad_()


@pytest.mark.parametrize(
    ("asking", "wanted"), [("q", ["q"]), ("v", ["v"]), ("kv", ["k", "v"]), ("qkv", ["q", "k", "v"])]
)
def test_only_what_requires_a_gradient_is_computed(asking: str, wanted: list[str]) -> None:
    given, backward = engine_of(PLAIN)
    named = dict(zip("qkv", tensors(PLAIN)))
    for name in asking:
        named[name].requires_grad_()
    out, _ = attend(*named.values(), **given)
    out.sum().backward()
    assert backward.asked == [wanted]
    assert [n for n, t in named.items() if t.grad is not None] == wanted


def test_no_gradient_asked_for_saves_nothing() -> None:
    given, backward = engine_of(PLAIN)
    out, lse = attend(*tensors(PLAIN), **given)
    assert out.grad_fn is None and lse.grad_fn is None and not backward.asked


def test_lse_alone_may_be_used() -> None:
    given, _ = engine_of(PLAIN)
    q, k, v = inputs(PLAIN)
    _, lse = attend(q, k, v, **given)
    lse.sum().backward()
    assert v.grad is not None and (v.grad == 0).all() and q.grad.abs().sum() > 0


def test_a_gradient_that_is_expanded() -> None:
    """sum() gives dO with strides 0."""
    given, _ = engine_of(PLAIN)
    q, k, v = inputs(PLAIN)
    out, _ = attend(q, k, v, **given)
    first = torch.autograd.grad(out.sum(), v, retain_graph=True)[0]
    again = torch.autograd.grad(out, v, torch.ones_like(out))[0]
    assert torch.equal(first, again)


def arguments(case: Case) -> tuple[Any, ...]:
    given, _ = engine_of(case)
    extras = extras_of(case)
    null = extras.get("null_key", (None, None))
    sinks = extras.get("sink_logits")
    learned = [None if t is None else t.requires_grad_() for t in (*null, sinks)]
    none = (None,) * 4
    return (*inputs(case), *learned, *none, given["engine"], 0, 0, 1, 1, given["scale"])


@pytest.mark.parametrize("case", [PLAIN, LEARNED], ids=lambda c: c.name)
def test_opcheck(case: Case) -> None:
    torch.library.opcheck(operators(), arguments(case))


# CASES B41: how a leaf [1, H, S, D] lies in memory
LAYOUTS = {
    "rows first": lambda h, s: torch.randn(1, s, h, 16).permute(0, 2, 1, 3),
    "no batch": lambda h, s: torch.randn(s, h, 16).permute(1, 0, 2)[None],
    "part of a wide row": lambda h, s: torch.randn(1, s, h, 3, 16)[:, :, :, 1].transpose(1, 2),
}


@pytest.mark.parametrize("length", [16, 24, 33])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_leaves_of_any_layout(layout: str, length: int) -> None:
    """Eager, compiled and reference gradients agree, and fake tensors have the strides of real ones."""
    given, _ = engine_of(PLAIN)
    torch.manual_seed(length)
    q, k, v = (LAYOUTS[layout](h, length).requires_grad_() for h in (2, 1, 1))
    dout = torch.randn(1, 2, 16, length).transpose(2, 3)  # as a transpose of OUT gives it
    compiled = torch.compile(lambda *t: attend(*t, **given)[0], fullgraph=True, backend="aot_eager")
    eager = torch.autograd.grad(attend(q, k, v, **given)[0], (q, k, v), dout)
    traced = torch.autograd.grad(compiled(q, k, v), (q, k, v), dout)
    none = torch.zeros(1, 2, length)
    plain = [t.detach() for t in (q, k, v)]
    _, want, _ = expected(PLAIN, *plain, dout, none)
    for one, other, right in zip(eager, traced, want, strict=True):
        assert torch.equal(one, other) and torch.allclose(one.double(), right, atol=2e-5)
    rest = arguments(PLAIN)[3:]
    torch.library.opcheck(operators(), (q, k, v, *rest))


def test_zeros_give_keys_no_gradient() -> None:
    """Memory that a kernel leaves as it was would show (B41)."""
    given, _ = engine_of(PLAIN)
    q, k, v = (torch.zeros(1, h, 33, 16, requires_grad=True) for h in (2, 1, 1))
    attend(q, k, v, **given)[0].sum().backward()
    assert (k.grad == 0).all() and (q.grad == 0).all() and (v.grad != 0).any()


def test_torch_compile_without_a_graph_break_and_once_for_all_lengths() -> None:
    given, _ = engine_of(PLAIN)
    compiled = []

    def backend(graph: Any, example: Any) -> Any:
        compiled.append(graph.code.count("sparsegen.attend("))
        return lookup_backend("aot_eager")(graph, example)

    @torch.compile(fullgraph=True, dynamic=True, backend=backend)
    def layer(q: Any, k: Any, v: Any) -> Any:
        out, _ = attend(q * 2, k, v, **given)
        return out.sum(-1)

    first = 0
    for length in (20, 24, 33):
        q, k, v = (torch.randn(1, h, length, 16, requires_grad=True) for h in (2, 1, 1))
        layer(q, k, v).sum().backward()
        plain = torch.autograd.grad(attend(q * 2, k, v, **given)[0].sum(), [q, k, v])
        for leaf, right in zip((q, k, v), plain):
            assert torch.allclose(leaf.grad, right, atol=1e-6)
        first = first or len(
            compiled
        )  # PyTorch may trace once more for a float that it meets as a number
    assert compiled[-1] == 1 and len(compiled) == first


def test_activation_checkpointing() -> None:
    from torch.utils.checkpoint import checkpoint

    given, _ = engine_of(PLAIN)
    q, k, v = inputs(PLAIN)
    layer = lambda q, k, v: attend(q, k, v, **given)[0].square().sum()
    plain = torch.autograd.grad(layer(q, k, v), [q, k, v])
    again = torch.autograd.grad(checkpoint(layer, q, k, v, use_reentrant=False), [q, k, v])
    for a, b in zip(plain, again):
        assert torch.equal(a, b)


def test_autocast_casts_to_its_dtype() -> None:
    case = Case("half", PLAIN.pattern, 20, 24, heads=2, kv_heads=1, dtype="float16")
    given, _ = engine_of(case)
    q, k, v = (t.float().requires_grad_() for t in tensors(case))
    with torch.autocast("cpu", torch.float16):
        out, _ = attend(q, k, v, **given)
    assert out.dtype == torch.float16
    out.float().sum().backward()
    assert q.grad is not None and q.grad.dtype == torch.float32


def test_refusals() -> None:
    q, k, v = tensors(PLAIN)
    with pytest.raises(InputError, match="no kernels are registered under 'nobody'"):
        attend(q, k, v, engine="nobody", scale=1.0)
    given, _ = engine_of(PLAIN)
    with pytest.raises(UnsupportedError, match="vmap"):
        torch.func.vmap(lambda q: attend(q, k, v, **given)[0])(q[None])
