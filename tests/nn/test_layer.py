"""``SparseAttention`` as a module: what it computes, what it keeps, what it refuses."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import sparsegen
from sparsegen.errors import InputError, SpecError, UnsupportedError
from sparsegen.nn import SparseAttention, open_callable
from tests.nn import dense
from tests.nn.interpreted import (
    HEADS,
    KV_HEADS,
    LEARNED,
    ON_GPU,
    PLAIN,
    WIDTH,
    callable_of,
    inputs,
    layer_of,
    pattern_of,
    twin_of,
)

PROJECTIONS = [f"{p}_proj.{t}" for p in ("q", "k", "v", "out") for t in ("weight", "bias")]
ALIBI = pattern_of("causal", alibi=True)
SLOPES = [0.5, 0.3, 0.2, 0.1]

on_cpu = pytest.mark.skipif(ON_GPU, reason="runs in the interpreter")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Layers find interpreted kernels, which take CPU tensors; what they asked for."""
    asked: list[Any] = []

    def opened(pattern: Any, problem: Any, *more: Any) -> Any:
        asked.append((pattern, problem, *more))
        return callable_of(pattern, problem)

    monkeypatch.setattr("sparsegen.runtime.checks.DEVICE", "cpu")
    monkeypatch.setattr("sparsegen.nn.open_callable", opened)
    return asked


# ---- what it computes ----


def by_hand(layer: SparseAttention, query: Any, key: Any, value: Any) -> Any:
    """The same from torch's parts, keys repeated for their group of heads."""
    split = lambda x, h: x.view(*x.shape[:2], h, -1).transpose(1, 2)
    q = split(layer.q_proj(query), HEADS)
    k, v = (
        split(p(x), KV_HEADS).repeat_interleave(HEADS // KV_HEADS, 1)
        for p, x in ((layer.k_proj, key), (layer.v_proj, value))
    )
    mask = layer.pattern.dense_mask(query.shape[1], key.shape[1])
    out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return layer.out_proj(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("given", [1, 2, 3])
def test_equals_the_parts_of_torch(given: int) -> None:
    """Self-attention, keys that are values, and three tensors; more keys than queries."""
    layer = layer_of(backend="reference")
    x, y, z = inputs(2, 20), inputs(2, 27), inputs(2, 27) * 2
    tensors = {1: (x,), 2: (x, y), 3: (x, y, z)}[given]
    query, key, value = {1: (x, x, x), 2: (x, y, y), 3: (x, y, z)}[given]
    torch.testing.assert_close(layer(*tensors), by_hand(layer, query, key, value))


@on_cpu
@pytest.mark.parametrize("pattern", [PLAIN, LEARNED], ids=["plain", "learned"])
def test_kernels_equal_the_reference(pattern: Any, kernels: list[Any]) -> None:
    layer, x = layer_of(pattern), inputs()
    twin, y = twin_of(layer), x.clone().requires_grad_()
    x.requires_grad_()
    for one, t in ((layer, x), (twin, y)):
        one(t).square().sum().backward()
    torch.testing.assert_close(layer(x), twin(x))
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-4)
    for (name, p), (_, right) in zip(layer.named_parameters(), twin.named_parameters()):
        assert p.grad is not None and (p.grad.abs().max() > 1e-4 or name == "k_proj.bias"), name
        torch.testing.assert_close(p.grad, right.grad, rtol=1e-3, atol=2e-4, msg=name)


@on_cpu
def test_without_gradients_and_on_call_keywords(kernels: list[Any]) -> None:
    layer, x = layer_of(), inputs()
    twin = twin_of(layer)
    lengths = torch.tensor([24, 13], dtype=torch.int32)
    with torch.no_grad():
        for given in ({}, {"q_start": 3}, {"kv_lengths": lengths, "q_lengths": lengths}):
            torch.testing.assert_close(layer(x, **given), twin(x, **given))


def test_the_pattern_gives_scale_and_run_time_data() -> None:
    padded = pattern_of({"all_of": ["causal", "key_padding"]}, scale=0.1)
    layer, x = layer_of(padded, backend="reference"), inputs()
    lengths = torch.tensor([24, 10], dtype=torch.int32)
    got = layer(x, kv_lengths=lengths, q_start=0)
    short = layer(x[1:, :10], kv_lengths=lengths[1:], q_start=0)
    torch.testing.assert_close(got[1, :10], short[0])
    layer.pattern = pattern_of({"all_of": ["causal", "key_padding"]}, scale=0.2)
    layer._callables.clear()
    assert not torch.allclose(layer(x, kv_lengths=lengths, q_start=0), got)


def test_alibi_slopes_stay_exact() -> None:
    made = layer_of(ALIBI, alibi_slopes=SLOPES, backend="reference")
    want = torch.tensor(SLOPES)
    assert torch.equal(made.bfloat16().alibi_slopes, want)
    assert made.q_proj.weight.dtype == torch.bfloat16 and "alibi_slopes" not in made.state_dict()
    empty = layer_of(ALIBI, alibi_slopes=SLOPES, device="meta").to_empty(device="cpu")
    assert torch.equal(empty.alibi_slopes, want)
    layer, x = layer_of(ALIBI, alibi_slopes=SLOPES, backend="reference"), inputs()
    other = layer_of(ALIBI, alibi_slopes=SLOPES[::-1], backend="reference")
    assert not torch.allclose(layer(x), other(x))


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH // HEADS)
        self.shapes: list[Any] = []

    def forward(self, q: Any, k: Any) -> Any:
        self.shapes.append((q.shape, k.shape))
        return self.norm(q.float()), self.norm(k.float())


def test_the_rotary_hook() -> None:
    hook = Rotary()
    layer = layer_of(rotary=hook, backend="reference", dtype=torch.bfloat16)
    out = layer(inputs().bfloat16())
    assert out.dtype == torch.bfloat16 and "rotary.norm.weight" in layer.state_dict()
    assert hook.shapes == [((2, HEADS, 24, 16), (2, KV_HEADS, 24, 16))]
    scaled = layer_of(rotary=lambda q, k: (q * 0, k), backend="reference")
    x = inputs()
    values = scaled.v_proj(x).view(2, 24, KV_HEADS, 16).repeat_interleave(2, 2)
    first = scaled.out_proj(values[:, :2].mean(1).flatten(1))  # q = 0: the mean of what is seen
    torch.testing.assert_close(scaled(x)[:, 1], first)


# ---- what it keeps ----


@pytest.mark.parametrize(
    ("pattern", "more"), [(PLAIN, []), (LEARNED, ["sink_logits", "null_k", "null_v"])]
)
def test_state_dict(pattern: Any, more: list[str]) -> None:
    layer = layer_of(pattern, backend="reference")
    assert set(layer.state_dict()) == {*PROJECTIONS, *more}
    assert {n: tuple(p.shape) for n, p in layer.named_parameters() if n in more} == {
        n: (HEADS,) if n == "sink_logits" else (KV_HEADS, 16) for n in more
    }
    bare = SparseAttention(WIDTH, HEADS, pattern, bias=False, head_dim=32, backend="reference")
    assert bare.out_proj.weight.shape == (WIDTH, HEADS * 32) and bare.q_proj.bias is None
    assert all((bare.state_dict()[n] == 0).all() for n in more)


def test_copies_and_pickles_go_without_kernels() -> None:
    layer, x = layer_of(LEARNED, backend="reference"), inputs()
    out = layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert layer._callables and not other._callables
        assert torch.equal(other(x), out)


def test_repr() -> None:
    assert repr(layer_of()).splitlines()[:2] == [
        "SparseAttention(",
        "  64, num_heads=4, num_kv_heads=2, head_dim=16, pattern='case', backend='triton'",
    ]
    assert sparsegen.nn.SparseAttention is SparseAttention


def test_kernels_are_asked_for_once_and_by_dtype(kernels: list[Any]) -> None:
    layer = layer_of(tune="quick", kernels="load", lengths=[64, (1, 64)])
    assert not kernels
    for dtype in (torch.float32, torch.float32, torch.float16):
        layer.prepare(dtype)
    (pattern, problem, *rest), (_, half, *_) = kernels
    assert pattern is PLAIN and rest == ["load", "quick", None, True, None]
    assert (problem.head_dim, problem.heads, problem.kv_heads) == (16, HEADS, KV_HEADS)
    assert problem.lengths == ((64, 64), (1, 64))
    assert (problem.dtype, half.dtype) == ("float32", "float16")


def test_layers_that_are_alike_share_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def opened(name: str) -> Any:
        def make(pattern: Any, problem: Any, **given: Any) -> Any:
            made.append((name, given))
            return dense.callable_of(pattern, problem)

        return make

    for name in ("compile", "load"):
        monkeypatch.setattr(f"sparsegen.nn.{name}", opened(name))
    open_callable.cache_clear()
    layers = [layer_of(), layer_of(), layer_of(LEARNED), layer_of(kernels="load")]
    layers.append(layer_of(deterministic=False))
    for layer in layers:
        layer.prepare(backward=False)
    found = [layer._callables[torch.float32] for layer in layers]
    open_callable.cache_clear()
    assert found[0] is found[1] and len(set(map(id, found))) == 4
    plain = {"store": None, "deterministic": True, "workspace": None}
    built, loaded = {"tune": "off", "passes": ("forward",), **plain}, plain
    assert made[:3] == [("compile", built), ("compile", built), ("load", loaded)]
    assert made[3:] == [("compile", built | {"deterministic": False})]


@on_cpu
def test_prepare_brings_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    later = lambda *asked: dense.callable_of(*asked, backward=False)
    monkeypatch.setattr("sparsegen.nn.open_callable", later)
    layer = layer_of().prepare(backward=False)
    training = layer._callables[torch.float32]._training
    assert not training._made
    assert layer.prepare() is layer and len(training._made) == 1
    layer.prepare()
    assert len(training._made) == 1


# ---- what it refuses ----

REFUSED = [
    (
        {"dropout": 0.1},
        UnsupportedError,
        "dropout of attention weights is not supported, got dropout=0.1: "
        "use 0.0, and nn.Dropout on the output",
    ),
    (
        {"backend": "cpu"},
        InputError,
        "backend must be one of triton, reference, got 'cpu'",
    ),
    ({"kernels": "guess"}, InputError, "kernels must be one of compile, load, got 'guess'"),
    (
        {"embed_dim": 66},
        InputError,
        "embed_dim must be a multiple of num_heads, got 66 and 4; or give head_dim",
    ),
    (
        {"num_kv_heads": 3},
        InputError,
        "SparseAttention: heads must be a multiple of kv_heads, got 4 and 3",
    ),
    (
        {"alibi_slopes": SLOPES},
        InputError,
        "pattern 'case' takes no alibi_slopes, one number a head",
    ),
    (
        {"pattern": ALIBI},
        InputError,
        "pattern 'case' needs alibi_slopes, one number a head",
    ),
    (
        {"pattern": ALIBI, "alibi_slopes": [0.5]},
        InputError,
        "alibi_slopes must be 4 finite numbers, one a head, got [0.5]",
    ),
    (
        {"pattern": ALIBI, "alibi_slopes": "abcd"},
        InputError,
        "alibi_slopes must be 4 finite numbers, one a head, got 'abcd'",
    ),
    (
        {"pattern": ALIBI, "alibi_slopes": [0.5, 0.3, 0.2, float("nan")]},
        InputError,
        "alibi_slopes must be 4 finite numbers, one a head, got [0.5, 0.3, 0.2, nan]",
    ),
    ({"embed_dim": "64"}, InputError, "embed_dim must be an integer, 1 or more, got '64'"),
    ({"num_heads": 4.0}, InputError, "num_heads must be an integer, 1 or more, got 4.0"),
    ({"num_heads": 0}, InputError, "num_heads must be an integer, 1 or more, got 0"),
    ({"tune": "always"}, InputError, "tune must be one of off, quick, full, got 'always'"),
    ({"deterministic": 0}, InputError, "deterministic must be True or False, got 0"),
    ({"workspace": -1}, InputError, "workspace must be a number of bytes, 1 or more, got -1"),
    ({"store": "kernels"}, InputError, "store must be a sparsegen.Store, got str"),
    ({"rotary": "yes"}, InputError, "rotary must be called with q and k, got str"),
    (
        {"lengths": 64},
        InputError,
        "SparseAttention: lengths must be a list of lengths from 1 to 2147483648, each one number or [q_len, kv_len], "
        "got 64",
    ),
]


@pytest.mark.parametrize(("given", "kind", "message"), REFUSED, ids=[str(r[0]) for r in REFUSED])
def test_refusals_of_arguments(given: Any, kind: Any, message: str) -> None:
    wanted = {"embed_dim": WIDTH, "num_heads": HEADS, "pattern": PLAIN} | given
    with pytest.raises(kind) as error:
        SparseAttention(**wanted)
    assert str(error.value) == message


def test_refusals_of_calls() -> None:
    layer = layer_of(backend="reference")
    with pytest.raises(InputError, match=r"query must be \[batch, length, 64\], got \[24, 64\]"):
        layer(inputs()[0])
    with pytest.raises(InputError, match=r"value must be \[batch, length, 64\], got \[2, 24, 8\]"):
        layer(inputs(), inputs(), inputs()[..., :8])
    with pytest.raises(InputError, match=r"query must be \[batch, length, 64\], got ndarray"):
        layer(inputs().numpy())
    with pytest.raises(TypeError, match="SparseAttention takes no 'return_lse'"):
        layer(inputs(), return_lse=True)
    with pytest.raises(TypeError, match="nonsense"):
        layer(inputs(), nonsense=1)
    with pytest.raises(SpecError):
        SparseAttention(WIDTH, HEADS, "no_such_pattern_anywhere")


def test_nothing_falls_back_to_the_reference() -> None:
    with pytest.raises(InputError) as error:
        layer_of()(inputs())
    assert str(error.value) == (
        "compiled kernels run on a GPU and the tensors are on cpu; "
        "SparseAttention(..., backend='reference') runs on any device"
    )


def test_a_dtype_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="no kernel takes these tensors: dtype .*bfloat16"):
        layer_of().double().prepare()
    layer = layer_of(backend="reference").double()
    assert layer(inputs().double()).dtype == torch.float64


@on_cpu
def test_capture_builds_nothing(monkeypatch: pytest.MonkeyPatch, kernels: list[Any]) -> None:
    """On tensors and a stream that only claim it: no GPU is here."""
    layer, x = layer_of(), inputs()
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    with pytest.raises(InputError) as error:
        layer(x)
    assert not kernels and str(error.value) == (
        "the kernels of 'case' are not built yet, and a CUDA graph capture builds and loads nothing: "
        "make one such call before the capture"
    )
    bare = dense.callable_of(PLAIN, layer._for_dtype(torch.float32), backward=False)
    q, k = torch.randn(1, HEADS, 8, 16, requires_grad=True), torch.randn(1, KV_HEADS, 8, 16)
    with pytest.raises(InputError, match="the gradients of 'case' are not built yet, and a CUDA"):
        bare(q, k, k)
