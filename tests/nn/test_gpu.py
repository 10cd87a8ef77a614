"""The layer on a GPU: compiled kernels, CUDA graphs (CASES B37), torch.compile (B05), DDP and FSDP2 in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from sparsegen.artifact.build import ensure
from sparsegen.artifact.compiler import Compiler
from sparsegen.artifact.gradients import GradientCompiler
from sparsegen.errors import InputError
from tests.nn import ranks
from tests.nn.interpreted import LEARNED, PLAIN, inputs, layer_of, pattern_of, twin_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
BF16 = torch.bfloat16


def on_gpu(pattern: Any, dtype: Any = BF16) -> Any:
    # without biases: that of keys has a gradient of rounding alone, which compares with nothing
    return layer_of(pattern, bias=False).to("cuda", dtype)


COLD = {"nothing is built": 40, "gradients are not built": 41, "another dtype": 42}


def window(size: int) -> Any:
    """A pattern of its own."""
    return pattern_of({"window": {"left": size, "right": 0}})


@pytest.fixture(scope="module", autouse=True)
def stored() -> None:
    """Artifacts of all that these tests launch, built at once: one after the other they take minutes of a GPU's time.

    On disk alone: every test still loads what it launches, and a capture still meets kernels that are not loaded.
    """
    layers = [(layer_of(p, bias=False), t) for p in (PLAIN, LEARNED) for t in (torch.float32, BF16)]
    layers += [(layer_of(window(size), bias=False), BF16) for size in COLD.values()]
    layers += [(layer_of(window(COLD["another dtype"]), bias=False), torch.float16)]
    layers += [(one, torch.float32) for one in ranks.Model("triton").layers]
    asked = [(one.pattern, one._for_dtype(dtype)) for one, dtype in layers]
    builders = (GradientCompiler(jobs=4), Compiler(jobs=3))
    with ThreadPoolExecutor(2 * len(asked)) as threads:
        made = [threads.submit(ensure, *a, builder=b) for b in builders for a in asked]
    for one in made:
        one.result()


def close(got: Any, want: Any, most: float = 0.01) -> bool:
    """Whether their relative L2 difference is at most that; a NaN is not."""
    gap = (got.float() - want.float()).norm()
    return bool(gap <= most * want.float().norm())


def step(layer: Any, x: Any) -> list[Any]:
    """The result, and the gradients of all parameters and of x."""
    out = layer(x)
    wanted = [x, *layer.parameters()]
    return [out, *torch.autograd.grad(out.float().square().sum(), wanted)]


@pytest.mark.parametrize("pattern", [PLAIN, LEARNED], ids=["plain", "learned"])
def test_equals_the_reference(pattern: Any) -> None:
    layer = on_gpu(pattern, torch.float32)
    x = inputs(2, 200).cuda().requires_grad_()
    twin = twin_of(layer, bias=False).cuda()
    for got, want in zip(step(layer, x), step(twin, x), strict=True):
        assert close(got, want, 1e-4)


def warmed(run: Any) -> None:
    """Some calls on a side stream, as PyTorch asks for before a capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)


@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("pattern", [PLAIN, LEARNED], ids=["plain", "learned"])
def test_graphs_replay_with_new_data(pattern: Any, gradients: bool) -> None:
    layer = on_gpu(pattern)
    x = inputs(2, 256).to("cuda", BF16).requires_grad_(gradients)

    def run() -> list[Any]:
        if gradients:
            return step(layer, x)
        with torch.no_grad():
            return [layer(x)]

    warmed(run)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for seed in (1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
            layer.q_proj.weight.mul_(1.1)
        for t in captured:
            t.detach().fill_(torch.nan)
        graph.replay()
        got = [t.detach().clone() for t in captured]
        for one, right in zip(got, run(), strict=True):
            assert close(one, right)


@pytest.mark.parametrize("what", COLD)
def test_a_cold_capture_is_one_error_and_the_next_one_works(what: str) -> None:
    layer = on_gpu(window(COLD[what]))  # no other test has loaded its kernels
    x = inputs(2, 128).to("cuda", BF16)
    torch.nn.functional.linear(x, layer.q_proj.weight)  # cuBLAS may not start inside a capture
    if what != "nothing is built":
        with torch.no_grad():
            layer(x)
    if what == "another dtype":
        layer, x = layer.half(), x.half()
        torch.nn.functional.linear(x, layer.q_proj.weight)
    torch.cuda.synchronize()
    refused = pytest.raises(InputError, match="a CUDA graph capture builds and loads nothing")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        layer(x)
    warmed(lambda: layer(x))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x)
    graph.replay()
    assert close(out, layer(x))


# CASES B05
SHAPES = [(2, 320), (3, 257), (5, 1024), (1, 17), (4, 333)]


@pytest.mark.parametrize("gradients", [True, False], ids=["gradients", "no_grad"])
def test_torch_compile_once_for_all_shapes(gradients: bool) -> None:
    torch._dynamo.reset()
    counters.clear()
    layer = on_gpu(LEARNED).prepare()
    fast = torch.compile(layer, fullgraph=True, dynamic=True)
    for _ in range(2):
        for shape in SHAPES:
            x = inputs(*shape).to("cuda", BF16).requires_grad_(gradients)
            with torch.set_grad_enabled(gradients):
                pairs = (
                    zip(step(fast, x), step(layer, x), strict=True)
                    if gradients
                    else [(fast(x), layer(x))]
                )
            for got, want in pairs:
                assert close(got, want, 0.05)
        graphs = counters["stats"]["unique_graphs"]
        assert graphs <= 2
    assert counters["stats"]["unique_graphs"] == graphs


def test_stored_kernels_serve_a_layer_that_may_not_build() -> None:
    x = inputs(2, 64).to("cuda", BF16)
    built = on_gpu(PLAIN).prepare()
    loaded = layer_of(PLAIN, bias=False, kernels="load").to("cuda", BF16).prepare()
    for one, right in zip(step(loaded, x.requires_grad_()), step(built, x), strict=True):
        assert torch.equal(one, right)


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_distributed_inside_one_gpu(mode: str, tmp_path: Path) -> None:
    """World size 1 with nccl: wrappers, streams and sharded parameters around the kernels."""
    script, root = Path(__file__).with_name("ranks.py"), str(Path(__file__).parents[2])
    words = [sys.executable, str(script), mode, "0", "1", str(tmp_path / "meet"), "triton"]
    paths = filter(None, (root, os.environ.get("PYTHONPATH")))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=400)
    assert "rank 0 of 1: 19 gradients equal" in done.stdout, done.stdout + done.stderr
