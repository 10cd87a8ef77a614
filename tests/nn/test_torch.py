"""The layer among PyTorch's own: torch.compile, checkpointing, autocast, vmap, partial gradients, DDP and FSDP2."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters

from sparsegen.errors import InputError, UnsupportedError
from sparsegen.runtime import backward as operators
from tests.nn import interpreted
from tests.nn.dense import callable_of
from tests.nn.interpreted import (
    HEADS,
    LEARNED,
    ON_GPU,
    PLAIN,
    inputs,
    layer_of,
)

pytestmark = pytest.mark.skipif(ON_GPU, reason="runs in the interpreter")


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers find dense stand-ins for kernels, on CPU tensors."""
    monkeypatch.setattr("sparsegen.runtime.checks.DEVICE", "cpu")
    monkeypatch.setattr("sparsegen.nn.open_callable", callable_of)


# ---- torch.compile ----


class Counting:
    """A compiler backend that counts graphs, and operators in the newest."""

    def __init__(self) -> None:
        self.operators = 0
        torch._dynamo.reset()
        counters.clear()

    @property
    def graphs(self) -> int:
        return counters["stats"]["unique_graphs"]

    def __call__(self, graph: Any, example: Any) -> Any:
        self.operators = graph.code.count("sparsegen.attend(")
        return lookup_backend("aot_eager")(graph, example)


# CASES B05, shorter: batches and lengths change every step, one batch of 1 and one odd length among them
SHAPES = [(2, 32), (3, 25), (5, 40), (1, 17), (4, 33)]


@pytest.mark.parametrize("gradients", [True, False], ids=["gradients", "no_grad"])
@pytest.mark.parametrize("pattern", [PLAIN, LEARNED], ids=["plain", "learned"])
def test_torch_compile_of_the_layer(pattern: Any, gradients: bool) -> None:
    layer, backend = layer_of(pattern).prepare(), Counting()
    fast = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for again in range(2):
        for shape in SHAPES:
            x = inputs(*shape)
            with torch.set_grad_enabled(gradients):
                got, want = fast(x), layer(x)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
            if gradients:
                wanted = [layer.q_proj.weight, layer.v_proj.weight]
                grads = [torch.autograd.grad(t.square().sum(), wanted) for t in (got, want)]
                torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-3)
        assert backend.operators == 1
        graphs = backend.graphs if not again else graphs  # noqa: F821  set in the first pass
    assert backend.graphs == graphs <= 2


def test_torch_compile_with_its_default_shapes() -> None:
    """Static at first, dynamic from the second length on."""
    layer, backend = layer_of().prepare(), Counting()
    fast = torch.compile(layer, fullgraph=True, backend=backend)
    for length in (20, 24, 33, 40):
        x = inputs(2, length)
        torch.testing.assert_close(fast(x), layer(x))
    assert backend.graphs == 2


def test_torch_compile_of_calls_that_want_no_gradient() -> None:
    """The callable itself, whose gradients were never built."""
    problem = layer_of(LEARNED)._for_dtype(torch.float32)
    attend, backend = callable_of(LEARNED, problem, backward=False), Counting()
    sinks = torch.randn(HEADS, requires_grad=True)
    null = torch.randn(2, 16), torch.randn(2, 16)

    def both(q: Any, k: Any) -> Any:
        return attend(q * 2, k, k, sink_logits=sinks, null_key=null, return_lse=True)

    fast = torch.compile(both, fullgraph=True, dynamic=True, backend=backend)
    for length in (20, 24, 33):
        q, k = torch.randn(1, HEADS, length, 16), torch.randn(1, 2, length, 16)
        with torch.no_grad():
            got, want = fast(q, k), both(q, k)
        torch.testing.assert_close(got, want)
        assert got[0].grad_fn is None
    assert (backend.graphs, backend.operators) == (1, 1)
    assert not attend._training._made


def test_what_a_traced_call_refuses() -> None:
    attend = callable_of(PLAIN, layer_of()._for_dtype(torch.float32), backward=False)
    q, k = torch.randn(1, HEADS, 8, 16), torch.randn(1, 2, 8, 16)
    calls = {
        "out= is not traced": lambda q, k: attend(q, k, k, out=torch.empty_like(q)),
        "variant= is not traced": lambda q, k: attend(q, k, k, variant="fast"),
        "traces no build: call once": lambda q, k: attend(q.double(), k.double(), k.double()),
    }
    for message, call in calls.items():
        torch._dynamo.reset()
        with pytest.raises(Exception, match=message):
            torch.compile(call, fullgraph=True, backend="eager")(q, k)


def test_a_gradient_of_a_call_that_was_traced_for_none() -> None:
    attend = callable_of(PLAIN, layer_of()._for_dtype(torch.float32), backward=False)
    (made,) = attend._traced._made
    q, k = torch.randn(1, HEADS, 8, 16, requires_grad=True), torch.randn(1, 2, 8, 16)
    out, _ = operators.attend(q, k, k, engine=made.engine, scale=made.scale)
    with pytest.raises(InputError, match="traced for none"):
        out.sum().backward()


def test_torch_compile_before_prepare_names_it() -> None:
    torch._dynamo.reset()
    layer = layer_of()
    fast = torch.compile(layer, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"call prepare\(\) of this layer"):
        fast(inputs())
    layer.prepare()
    assert fast(inputs()).grad_fn is not None


def test_opcheck_of_a_forward_kernel_alone() -> None:
    attend = callable_of(PLAIN, layer_of()._for_dtype(torch.float32), backward=False)
    (made,) = attend._traced._made
    q, k = torch.randn(1, HEADS, 8, 16), torch.randn(1, 2, 8, 16)
    given = (q, k, k, *(None,) * 7, made.engine, 0, 0, 1, 1, made.scale)
    torch.library.opcheck(operators.operators(), given)


# ---- checkpointing, autocast, vmap ----


def test_activation_checkpointing() -> None:
    from torch.utils.checkpoint import checkpoint

    layer, x = layer_of(LEARNED), inputs()
    wanted = list(layer.parameters())
    plain = torch.autograd.grad(layer(x).square().sum(), wanted)
    again = checkpoint(layer, x, use_reentrant=False).square().sum()
    for one, right in zip(torch.autograd.grad(again, wanted), plain, strict=True):
        assert torch.equal(one, right)


@pytest.mark.parametrize("gradients", [True, False], ids=["gradients", "no_grad"])
def test_autocast(gradients: bool) -> None:
    """float32 parameters, float16 kernels; the hook's float32 goes back to float16."""
    hook = lambda q, k: (q.float(), k.float())
    layer, x = layer_of(LEARNED, rotary=hook), inputs()
    want = layer(x)
    with torch.autocast("cpu", torch.float16), torch.set_grad_enabled(gradients):
        out = layer(x)
    assert out.dtype == torch.float16 and set(layer._callables) == {torch.float32, torch.float16}
    torch.testing.assert_close(out.float(), want, rtol=0.02, atol=0.01)
    if gradients:
        out.float().square().sum().backward()
        assert all(p.grad is not None and p.grad.dtype == p.dtype for p in layer.parameters())


def test_autocast_of_a_call_without_gradients() -> None:
    """As with gradients: the kernels of autocast's dtype, whatever the tensors have."""
    problem = layer_of()._for_dtype(torch.float16)
    attend = callable_of(PLAIN, problem)
    q, k = torch.randn(1, HEADS, 8, 16), torch.randn(1, 2, 8, 16)
    with torch.autocast("cpu", torch.float16):
        plain, learned = attend(q, k, k), attend(q.requires_grad_(), k, k)
    assert plain.dtype == torch.float16 and torch.equal(plain, learned)


@pytest.mark.parametrize("gradients", [True, False], ids=["gradients", "no_grad"])
def test_vmap_is_refused_by_name(gradients: bool) -> None:
    layer = layer_of().prepare()
    with torch.set_grad_enabled(gradients), pytest.raises(UnsupportedError) as error:
        torch.func.vmap(layer)(inputs()[None])
    assert str(error.value) == (
        "torch.func.vmap over sparsegen's attention is not supported: "
        "q, k and v have a batch dimension for it"
    )


def test_derivatives_of_torch_func_are_refused_by_name() -> None:
    layer = layer_of()
    with pytest.raises(UnsupportedError) as error:
        torch.func.grad(lambda x: layer(x).square().sum())(inputs())
    assert str(error.value) == (
        "torch.func's derivatives of sparsegen's attention are not supported: "
        "use torch.autograd.grad or backward()"
    )


# ---- partial gradients ----


class Adapted(nn.Module):
    """A frozen projection and a trained one of low rank beside it."""

    def __init__(self, base: nn.Linear, rank: int = 4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Any) -> Any:
        return self.base(x) + self.up(self.down(x))


# the first launch of the queries makes what every gradient needs: alone it computes no dQ
LAUNCHED = {
    ("q_proj",): {"queries": 2},
    ("v_proj",): {"queries": 1, "keys-DV": 1},
    ("k_proj",): {"queries": 1, "keys-DK": 1},
    ("q_proj", "v_proj"): {"queries": 2, "keys-DV": 1},
    ("k_proj", "v_proj"): {"queries": 1, "keys": 1},
    ("out_proj",): {},
}


def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Layers find interpreted kernels; the launches of gradients by the kernel's name."""
    seen: Counter[str] = Counter()
    opened = partial(interpreted.callable_of, seen=seen)
    monkeypatch.setattr("sparsegen.nn.open_callable", opened)
    return seen


@pytest.mark.parametrize("adapted", LAUNCHED, ids="+".join)
def test_adapters_launch_only_what_they_need(
    adapted: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, seen = layer_of().requires_grad_(False), launches(monkeypatch)
    for name in adapted:
        setattr(layer, name, Adapted(getattr(layer, name)))
    layer(inputs(1, 20)).square().sum().backward()
    assert seen == LAUNCHED[adapted]
    trained = {n for n, p in layer.named_parameters() if p.grad is not None}
    assert trained == {f"{name}.{part}.weight" for name in adapted for part in ("down", "up")}


def test_a_layer_inside_a_model_needs_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter of an earlier layer: gradients pass through all of the next."""
    first, second = layer_of().requires_grad_(False), layer_of().requires_grad_(False)
    first.v_proj, seen = Adapted(first.v_proj), launches(monkeypatch)
    second(first(inputs(1, 20))).square().sum().backward()
    assert seen == {"queries": 3, "keys": 1, "keys-DV": 1}


# ---- several processes ----


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_two_processes_give_the_gradients_of_one(mode: str, tmp_path: Path) -> None:
    script = Path(__file__).with_name("ranks.py")
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                str(script),
                mode,
                str(rank),
                "2",
                str(tmp_path / "meet"),
                "reference",
            ],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=280)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for rank, (text, process) in enumerate(zip(said, ranks)):
        assert f"rank {rank} of 2: 19 gradients equal" in text and process.returncode == 0, text
