"""Gradients through the callable that users hold: equal to float64 autograd of the reference, or refused by name."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend

from sparsegen.errors import InputError, UnsupportedError
from sparsegen.runtime.attend import Attend
from sparsegen.spec.fields import LIMIT
from sparsegen.spec.problem import Problem
from sparsegen.spec.reference import reference
from tests.kernels.cases import ON_GPU, Case, pattern_of, tensors
from tests.kernels.cases import kernel_of as forward_of
from tests.kernels.gradients import extras_of, random_gradients
from tests.kernels.gradients import kernel_of as backward_of

pytestmark = pytest.mark.skipif(ON_GPU, reason="runs in the interpreter so far")

SINKS = {"all_of": ["causal", {"any_of": [{"window": {"size": 8}}, {"sink": {"tokens": 2}}]}]}
SETTINGS = {"sink_logits": True, "null_key": True, "softcap": 4.0, "alibi": True}
DRAWN = {"any_of": ["causal", {"random_blocks": {"block": 8, "per_row": 1, "seed": 3}}]}
GROUPS = {"heads": 4, "kv_heads": 2}
PLAIN = Case("plain", pattern_of(SINKS), 20, 24, **GROUPS)
LEARNED = Case("learned", pattern_of(SINKS, **SETTINGS), 20, 24, **GROUPS)
TOP_LEFT = Case("top-left", pattern_of(SINKS, align="top_left"), 20, 24, **GROUPS)
RANDOM = Case("random", pattern_of(DRAWN), 20, 24, **GROUPS)
WIDE = Case("wide", pattern_of("causal", scale=0.5), 20, 24, **GROUPS, value_dim=32)


@pytest.fixture(autouse=True)
def kernels_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted kernels take CPU tensors."""
    monkeypatch.setattr("sparsegen.runtime.checks.DEVICE", "cpu")


class Counting:
    """The gradient kernels of a case, and which gradients were asked of them."""

    def __init__(self, case: Case):
        self.kernel = backward_of(case)
        self.sources, self.configs, self.asked = self.kernel.sources, self.kernel.configs, []

    def __call__(self, saved: Any, call: Any, wanted: Any) -> Any:
        self.asked.append(list(wanted))
        return self.kernel(saved, call, wanted)


def problem_of(case: Case, **more: Any) -> Problem:
    dims = {n: getattr(case, n) for n in ("head_dim", "value_dim", "heads", "kv_heads", "dtype")}
    return Problem(**dims, **more)


def attend_of(case: Case, **more: Any) -> tuple[Attend, Counting]:
    """A callable over interpreted kernels; ``more``: other arguments of ``Attend``."""
    backward = Counting(case)
    given = {"backward": backward} | more
    return Attend(case.pattern, problem_of(case), forward_of(case), **given), backward


def learned(case: Case) -> tuple[list[Any], dict[str, Any]]:
    """What gets a gradient: q, k, v, and what the extras hold of it."""
    leaves, extras = list(tensors(case)), extras_of(case)
    if "sink_logits" in extras:
        leaves += [extras["sink_logits"], *extras["null_key"]]
    return [t.requires_grad_() for t in leaves], extras


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "starts": {"q_start": 9, "k_start": 3},
    "keys from 5 on": {"k_start": 5},
    "before zero": {"q_start": -4},
    "partial": {"partial": True},
    "lengths": {
        "q_lengths": torch.tensor([11], dtype=torch.int32),
        "kv_starts": torch.tensor([2], dtype=torch.int32),
        "kv_lengths": torch.tensor([17], dtype=torch.int32),
    },
}
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


# ---- torch.compile ----


@pytest.mark.parametrize("case", [PLAIN, LEARNED], ids=lambda c: c.name)
def test_torch_compile_without_a_graph_break_and_once_for_all_lengths(case: Case) -> None:
    attend, _ = attend_of(case)
    compiled: list[int] = []

    def backend(graph: Any, example: Any) -> Any:
        compiled.append(graph.code.count("sparsegen.attend("))
        return lookup_backend("aot_eager")(graph, example)

    def layer(q: Any, k: Any, v: Any, extras: Any) -> Any:
        return attend(q * 2, k, v, **extras).sum(-1)

    fast = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    extras, first = extras_of(case), 0
    for length in (20, 24, 33):
        leaves = [torch.randn(1, h, length, 16, requires_grad=True) for h in (4, 2, 2)]
        got = torch.autograd.grad(fast(*leaves, extras).sum(), leaves)
        want = torch.autograd.grad(layer(*leaves, extras).sum(), leaves)
        for one, right in zip(got, want):
            assert torch.allclose(one, right, atol=1e-6)
        first = first or len(compiled)
    assert compiled[-1] == 1 and len(compiled) == first


PROVEN = Case("proven", pattern_of({"window": {"left": 40, "right": 0}}), 20, 24, **GROUPS)
GRID = Case("grid", pattern_of({"axial": {"shape": [4, 6]}}), 20, 24, **GROUPS)


@pytest.mark.parametrize(
    ("case", "name"),
    [(PLAIN, "starts"), (PLAIN, "lengths"), (RANDOM, "plain"), (GRID, "plain"), (PROVEN, "plain")],
    ids=lambda x: getattr(x, "name", x),
)
def test_torch_compile_traces_every_check(case: Case, name: str) -> None:
    """Positions, per-batch lengths, tables, grids, and a call within what its kernels are proven for."""
    attend, _ = attend_of(case)
    if case is PROVEN:
        (made,) = attend._training._made
        source = SimpleNamespace(max_position=100, min_position=-100)
        attend._training._made = [replace(made, proofs=(source,))]  # type: ignore[arg-type]
    layer = lambda q, k, v: attend(q, k, v, **CALLS[name])
    fast = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    leaves, _ = learned(case)
    got = torch.autograd.grad(fast(*leaves).square().sum(), leaves)
    want = torch.autograd.grad(layer(*leaves).square().sum(), leaves)
    for one, right in zip(got, want):
        assert torch.allclose(one, right, atol=1e-6)


def test_torch_compile_builds_nothing() -> None:
    attend, _ = attend_of(PLAIN, backward=None, gradients=lambda problem: backward_of(PLAIN))
    layer = torch.compile(lambda q, k, v: attend(q, k, v), fullgraph=True, backend="eager")
    leaves, _ = learned(PLAIN)
    with pytest.raises(Exception, match="torch.compile traces no build: name passes="):
        layer(*leaves)
    attend(*leaves)
    assert layer(*leaves).grad_fn is not None


def test_autocast_chooses_the_kernels() -> None:
    half = Case("half", PLAIN.pattern, 20, 24, **GROUPS, dtype="float16")
    attend, _ = attend_of(half)
    leaves = [t.float().requires_grad_() for t in tensors(half)]
    with torch.autocast("cpu", torch.float16):
        out = attend(*leaves)
    assert out.dtype == torch.float16
    out.float().sum().backward()
    assert all(t.grad is not None and t.grad.dtype == torch.float32 for t in leaves)


# ---- kernels that are not here yet ----


def test_kernels_come_at_the_first_call_that_needs_them() -> None:
    asked: list[Problem] = []

    def gradients(problem: Problem) -> Any:
        asked.append(problem)
        return backward_of(PLAIN)

    attend, _ = attend_of(PLAIN, backward=None, gradients=gradients)
    leaves, _ = learned(PLAIN)
    for _ in range(2):
        attend(*leaves).sum().backward()
    assert asked == [problem_of(PLAIN)]


def test_other_dims_are_built_in_both_directions() -> None:
    asked: list[tuple[str, Problem]] = []
    other = Case("other", PLAIN.pattern, 20, 24, heads=2, kv_heads=2)

    def rebuild(problem: Problem) -> Any:
        asked.append(("forward", problem))
        return forward_of(other)

    def gradients(problem: Problem) -> Any:
        asked.append(("backward", problem))
        return backward_of(other)

    attend, _ = attend_of(PLAIN, rebuild=rebuild, gradients=gradients)
    for case in (other, PLAIN, other):
        leaves, _ = learned(case)
        attend(*leaves).sum().backward()
    assert asked == [("forward", problem_of(other)), ("backward", problem_of(other))]
    loaded, _ = attend_of(PLAIN)
    with pytest.raises(InputError, match="this artifact was built for float32, head_dim 16, heads"):
        loaded(*learned(other)[0])


def test_a_call_beyond_the_proofs_gets_kernels_for_every_length() -> None:
    """A window that no call of the problem exceeds is no window in its kernels."""
    pattern = pattern_of({"window": {"left": 40, "right": 0}})
    short, long = problem_of(PLAIN, lengths=((32, 32),)), Case("long", pattern, 60, 60, **GROUPS)
    built = backward_of(long)
    asked: list[Problem] = []

    def gradients(problem: Problem) -> Any:
        asked.append(problem)
        return built

    proven = SimpleNamespace(
        source=SimpleNamespace(max_position=40, min_position=0, digest="", tables=()), config=""
    )
    few = SimpleNamespace(sources={"queries": proven.source}, configs={"queries": ""})
    attend = Attend(pattern, short, proven, lambda problem: forward_of(long), gradients, few)  # type: ignore[arg-type]
    leaves, _ = learned(long)
    out = attend(*leaves)
    assert torch.allclose(out, reference(pattern, *leaves)[0].float(), atol=1e-5)
    assert [p.lengths for p in asked] == [((60, 60), (LIMIT, LIMIT))]
    attend(*leaves)
    assert len(asked) == 1


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
