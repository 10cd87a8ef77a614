"""``compile`` and ``load`` on a machine without a GPU, the reference as a callable, and refusals that name their line."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import sparsegen
from sparsegen.artifact.build import ensure
from sparsegen.codegen import render
from sparsegen.errors import CacheMiss, InputError, ToolchainError, UnsupportedError
from sparsegen.launch import Binary, CompileError, Job, Outcome
from sparsegen.schedule.build import build
from sparsegen.spec.gpu import current_gpu, find_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from sparsegen.spec.run_data import integers
from tests.spec.random_patterns import random_mask

H200 = find_gpu("h200")
NO_GPU = current_gpu() is None


def counting(q_len: int, kv_len: int) -> list[torch.Tensor]:
    """Q = 0 and V[j] = j: every output is the mean of the visible positions."""
    values = torch.arange(float(kv_len))[None, None, :, None]
    return [torch.zeros(1, 1, q_len, 4), torch.randn(1, 1, kv_len, 4), values]


# ---------------------------------------------------------------------- the reference as a callable
def test_reference_runs_every_node_on_any_device() -> None:
    """Packed documents, restarted positions, block masks: what no template compiles yet (CASES B21)."""
    attend = sparsegen.compile("packed_documents", backend="reference")
    assert repr(attend) == "<sparsegen.ReferenceAttend 'packed_documents'>"
    out = attend(*counting(7, 7), cu_seqlens=[0, 3, 7])
    assert out[0, 0, [3, 6], 0].tolist() == [3.0, 4.5]
    blocks = Pattern.from_dict({"name": "b", "mask": {"block_mask": {"block": [4, 4]}}})
    mask = torch.tensor([[True, False], [False, False]])[None, None]
    out, lse = sparsegen.compile(blocks, backend="reference")(
        *counting(8, 8), block_mask=mask, return_lse=True
    )
    assert out.flatten().tolist() == [1.5] * 4 + [0.0] * 4
    assert (lse[0, 0, 4:] == -math.inf).all() and lse.dtype == torch.float32


def test_reference_keeps_dtype_and_out_and_has_gradients() -> None:
    attend = sparsegen.compile("causal", backend="reference")
    q, k, v = (torch.randn(2, 2, 6, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    got = attend(q, k, v)
    assert got.dtype == torch.bfloat16
    got.float().square().sum().backward()
    assert all(t.grad is not None and t.grad.abs().max() > 0 for t in (q, k, v))
    out = torch.empty(2, 2, 6, 8, dtype=torch.bfloat16)
    with torch.no_grad():
        assert attend(q, k, v, out=out) is out and out.equal(got)


def test_reference_leaves_sinks_out_of_partial_results() -> None:
    pattern = Pattern.from_dict({"name": "s", "mask": "causal", "sink_logits": True})
    attend = sparsegen.compile(pattern, backend="reference")
    sinks = torch.zeros(1)
    whole = attend(*counting(3, 3), sink_logits=sinks)
    assert whole[0, 0, 2, 0].item() == pytest.approx(3 / 4)  # weight 1/(i + 2)
    part, lse = attend(*counting(3, 3), sink_logits=sinks, partial=True, return_lse=True)
    assert part[0, 0, 2, 0].item() == pytest.approx(1.0)
    merged, _ = sparsegen.merge([(part, lse)], sink_logits=sinks)
    assert torch.allclose(merged, whole, atol=1e-6)


@pytest.mark.parametrize("name", ["cu_seqlens", "scale", "rows", "nonsense"])
def test_reference_takes_the_keywords_of_a_call_only(name: str) -> None:
    attend = sparsegen.compile("causal", backend="reference")
    with pytest.raises(TypeError, match=f"unknown keyword '{name}'"):
        attend(*counting(3, 3), **{name: [0]})
    with pytest.raises(TypeError, match="missing keyword cu_seqlens or document_ids"):
        sparsegen.compile("packed_documents", backend="reference")(*counting(3, 3))


def test_reference_checks_tensors_as_a_kernel_would() -> None:
    """A model that runs on the reference runs on the kernel too."""
    attend = sparsegen.compile("causal", backend="reference")
    q, k, v = counting(4, 4)
    with pytest.raises(InputError, match="the last dim of k must be contiguous"):
        attend(q, torch.randn(1, 1, 4, 8)[..., ::2], v)
    with pytest.raises(InputError, match="must have one dtype"):
        attend(q.half(), k, v)
    allowed = "bfloat16, float16, float32 or float64"
    with pytest.raises(InputError, match=f"^q must be {allowed}, got int32$"):
        attend(q.int(), k.int(), v.int())
    with pytest.raises(
        InputError, match=f"^k must be a torch.Tensor of {allowed}, got numpy.ndarray$"
    ):
        attend(q, k.numpy(), v)
    with pytest.raises(
        InputError, match=r"^out must be a torch.Tensor \[1, 1, 4, 1\], got ndarray$"
    ):
        attend(q, k, v, out=v.numpy())
    assert attend(q.double(), k.double(), v.double()).dtype == torch.float64
    with pytest.raises(InputError, match=r"out must be torch.float32 \[1, 1, 4, 1\] on cpu"):
        attend(q, k, v, out=torch.empty(1, 1, 4, 4))


@pytest.mark.parametrize("value", [[0, 3], torch.tensor([0, 3])], ids=["list", "tensor"])
def test_a_fault_of_the_device_is_not_blamed_on_the_data(
    value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sticky CUDA error surfaces wherever data are next touched: it must keep its own words."""

    def fail(*given: Any, **more: Any) -> Any:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.Tensor, "to", fail)
    with pytest.raises(RuntimeError, match="illegal memory access") as error:
        integers("cu_seqlens", value, "cpu")
    assert not isinstance(error.value, InputError)
    monkeypatch.setattr(torch, "as_tensor", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        integers("cu_seqlens", [0, 3], "cpu")


# ---------------------------------------------------------------------- compile and load
def test_unknown_settings() -> None:
    with pytest.raises(InputError, match=r"^backend must be one of triton, reference, got 'cuda'$"):
        sparsegen.compile("causal", backend="cuda")
    with pytest.raises(InputError, match=r"^tune must be one of off, quick, full, got 'max'$"):
        sparsegen.compile("causal", tune="max")


@pytest.mark.skipif(not NO_GPU, reason="there is a GPU here")
@pytest.mark.parametrize("call", [sparsegen.compile, sparsegen.load])
def test_without_a_gpu_is_one_sentence(call: Any, cache: Path) -> None:
    """The first call says what is missing; it does not fail deep in a driver (CASES B12, B18)."""
    with pytest.raises(ToolchainError) as error:
        call("causal")
    said = str(error.value)
    assert said.startswith("no GPU here: ") and "backend='reference'" in said and "\n" not in said


def test_a_gpu_is_a_type_or_its_name(cache: Path) -> None:
    """Every name that ``--gpu`` takes; what is neither is one sentence."""
    for name in ("h200", "nvidia-h200", "sm_90", H200):
        with pytest.raises(CacheMiss, match="^causal: no artifact under key"):
            sparsegen.load("causal", gpu=name)
    for call in (sparsegen.compile, sparsegen.load):
        with pytest.raises(
            InputError, match=r"^unknown GPU 'h300' \(did you mean 'h200'\?\); known: "
        ):
            call("causal", gpu="h300")
        with pytest.raises(
            InputError, match=r"^gpu must be a name such as 'h200' or a sparsegen.Gpu, got int$"
        ):
            call("causal", gpu=90)
        with pytest.raises(InputError, match=r"^problem must be a sparsegen.Problem, got dict$"):
            call("causal", {"head_dim": 64}, gpu="h200")


@pytest.mark.skipif(not NO_GPU, reason="there is a GPU here")
def test_compile_for_a_gpu_that_is_not_here(cache: Path) -> None:
    """It cannot be measured; untuned it is cross-compiled, and ``load`` finds it under the same name."""
    with pytest.raises(InputError) as error:
        sparsegen.compile("causal", gpu="a100")
    assert str(error.value) == (
        "tune='quick' measures on the GPU here and there is none: for nvidia-a100 say tune='off' (--tune off), "
        "which takes the configuration on record"
    )
    with pytest.raises(InputError, match=r"^backend='reference' builds for no GPU type"):
        sparsegen.compile("causal", gpu="a100", backend="reference")
    built = sparsegen.compile("causal", gpu="a100", tune="off", passes=("forward",))
    assert repr(sparsegen.load("causal", gpu="a100")) == repr(built)


def test_load_from_an_empty_store_is_a_miss(cache: Path) -> None:
    with pytest.raises(CacheMiss) as error:
        sparsegen.load("causal", gpu=H200)
    first, _, rest = str(error.value).partition(" in ")
    assert first.startswith("causal: no artifact under key ")
    assert rest == f"{cache}/artifacts: the store is empty"
    assert not cache.exists()  # looking makes nothing


def test_load_never_builds_for_another_problem(cache: Path) -> None:
    for problem in (Problem(head_dim=64), Problem(dtype="float32"), Problem(heads=2)):
        with pytest.raises(CacheMiss):
            sparsegen.load("causal", problem, gpu=H200)


def test_a_kernel_that_does_not_fit_is_one_error_and_no_artifact(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Need and limit by name when it is built, not OutOfResources at the first launch (CASES B04)."""

    def compile_many(jobs: list[Job], workers: int | None = None) -> list[Outcome]:
        needs = {"fast": 90_000, "pointers": 90_000, "general": 102_528}
        return [
            Outcome(j, Binary(j.variant, "attend_forward", j.directory, (), 64, 0, needs[j.variant]), "", 1)
            for j in jobs
        ]  # fmt: skip

    monkeypatch.setattr("sparsegen.launch.compile_many", compile_many)
    with pytest.raises(CompileError) as error:
        ensure(Pattern.from_yaml("causal"), Problem(), find_gpu("l4"))
    said = "causal (general) for nvidia-l4 needs 102528 bytes of shared memory a program, nvidia-l4 has 101376; it was"
    assert str(error.value).startswith(said)
    assert not list((cache / "artifacts").glob("causal*"))


# ---------------------------------------------------------------------- never dense by stealth
RUN_TIME = {
    "documents": "documents",
    "documents: {positions: relative}": "documents",
    "key_padding": "key_padding",
    "prefix: {tokens: runtime}": "prefix",
    "block_mask: {block: [128, 64]}": "block_mask",
    "block_list: {block: [128, 64]}": "block_list",
    "top_blocks: {block: 64, count: 3, score: mean}": "top_blocks",
}


@pytest.mark.parametrize("node", RUN_TIME)
def test_what_is_not_compiled_names_its_line(node: str, cache: Path) -> None:
    """Every way to a kernel refuses it by file, line and column; none drops it (CASES B38)."""
    text = f"name: p\nmask:\n  all_of:\n    - causal\n    - {node}\n"
    pattern = Pattern.from_yaml_text(text, file="some/p.yaml")
    message = (
        f"some/p.yaml:5:7: mask.all_of[1]: {RUN_TIME[node]} is decided by run-time data, "
        "which is not compiled yet; backend='reference' runs it"
    )
    ways = [
        lambda: build(pattern),
        lambda: ensure(pattern, Problem(), H200),
        lambda: sparsegen.load(pattern, gpu=H200),
    ]
    if not NO_GPU:
        ways.append(lambda: sparsegen.compile(pattern))
    for way in ways:
        with pytest.raises(UnsupportedError) as error:
            way()
        assert str(error.value) == message


def test_the_line_of_a_rule_and_of_a_dict() -> None:
    rules = "heads:\n- heads: [0]\n  mask: causal\n- heads: rest\n  mask: {any_of: [causal, documents]}\n"
    with pytest.raises(
        UnsupportedError, match=r"^r.yaml:5:27: heads\[1\].mask.any_of\[1\]: documents"
    ):
        build(Pattern.from_yaml_text(rules, file="r.yaml"))
    with pytest.raises(
        UnsupportedError, match="^mask.not: key_padding is decided by run-time data"
    ):
        build(Pattern.from_dict({"mask": {"not": "key_padding"}}))


@pytest.mark.parametrize("name", ["packed_documents", "block_mask", "moba"])
def test_shipped_run_time_patterns_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"^{name}:\d+:\d+: mask"):
        build(Pattern.from_yaml(name))


@pytest.mark.parametrize("seed", range(25))
def test_a_pattern_renders_or_is_refused_by_the_node_that_needs_data(seed: int) -> None:
    mask = random_mask(random.Random(f"refused {seed}"), 2)
    pattern = Pattern.from_dict({"name": "p", "mask": mask})
    needing = [(path, node) for path, node in pattern.nodes() if node.decided_by_data]
    if needing:
        path, node = needing[0]
        with pytest.raises(
            UnsupportedError, match=f"^{re.escape(path)}: {node.keyword} is decided"
        ):
            build(pattern)
    else:
        assert "def attend_forward" in render(pattern, build(pattern), Problem(head_dim=16)).text
