"""Backward kernels compiled for GPU types that are not here, in child processes: resources, and what does not fit."""

from __future__ import annotations

import ast
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from sparsegen.codegen.backward import (
    KEYS,
    QUERIES,
    BackwardSource,
    default_config,
    render_backward,
    shared_bytes,
    unfit,
)
from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.launch import Job, Outcome, compile_many
from sparsegen.launch.binary import _tool
from sparsegen.launch.sass import listing_of
from sparsegen.launch.signature import signature
from sparsegen.schedule.build import build
from sparsegen.schedule.transpose import transpose
from sparsegen.spec.gpu import all_gpus, find_gpu
from sparsegen.spec.problem import Problem
from tests.kernels.cases import pattern_of
from tests.launch.hopper_gradients import loop_lengths

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")

PARTS = (QUERIES, KEYS)
LONG = ((32768, 32768),)
H200 = find_gpu("h200")
MASKS: dict[str, Any] = {
    "causal": "causal",
    "sinks": {
        "all_of": ["causal", {"any_of": [{"window": {"size": 1024}}, {"sink": {"tokens": 4}}]}]
    },
    "strided": {
        "all_of": ["causal", {"any_of": [{"window": {"size": 128}}, {"strided": {"stride": 128}}]}]
    },
}
FEATURES = {"softcap": 5.0, "alibi": True, "sink_logits": True, "null_key": True}
# Sums of dK and dV of 128 columns take half of all registers; what is spilled beside them, in bytes a thread.
SPILLS = {("causal", KEYS): 256, ("sinks", KEYS): 640, ("strided", KEYS): 768, ("all", KEYS): 512}


def source_of(mask: Any, problem: Problem, part: str, **settings: Any) -> BackwardSource:
    pattern = pattern_of(mask, **settings)
    if part == QUERIES:
        return render_backward(pattern, build(pattern, problem), problem)
    found = transpose(pattern, problem)
    return render_backward(pattern, found.schedule, problem, KEYS, found.shift)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Outcome]:
    """All that these tests look at, compiled at once."""
    root, jobs = tmp_path_factory.mktemp("binaries"), {}

    def add(name: str, part: str, source: BackwardSource, gpu: Any, variant: str = "fast") -> None:
        problem = Problem(source.head_dim, source.value_dim, dtype=source.dtype)
        config = default_config(problem, gpu)
        jobs[name, part] = Job(source, config, variant, gpu, root / f"{name}-{part}")

    main, small = Problem(lengths=LONG), Problem(head_dim=32, dtype="float16")
    for part in PARTS:
        for name, mask in MASKS.items():
            add(name, part, source_of(mask, main, part), H200)
        add("all", part, source_of(MASKS["causal"], main, part, **FEATURES), H200)
        add("general", part, source_of(MASKS["causal"], main, part), H200, "general")
        wide = Problem(head_dim=192, value_dim=128)
        add("192-128", part, source_of("causal", wide, part), H200)
        add("a10g", part, source_of("causal", main, part), find_gpu("a10g"))
        add("mi300x", part, source_of("causal", small, part), find_gpu("mi300x"))
    return dict(zip(jobs, compile_many(list(jobs.values()))))


NAMES = ["causal", "sinks", "strided", "all", "general", "192-128", "a10g", "mi300x"]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", NAMES)
def test_resources(name: str, part: str, outcomes: dict[tuple[str, str], Outcome]) -> None:
    outcome = outcomes[name, part]
    assert outcome.error == "" and outcome.binary is not None
    binary, gpu = outcome.binary, outcome.job.gpu
    source = outcome.job.source
    problem = Problem(source.head_dim, source.value_dim, dtype=source.dtype)
    assert 0 < binary.shared_bytes <= gpu.shared_bytes
    if outcome.job.variant == "fast":  # what the default was chosen by
        assert binary.shared_bytes <= shared_bytes(outcome.job.config, problem, gpu)
    if gpu.backend == "cuda":
        assert binary.registers <= 255
        most = SPILLS.get((name, part), 384 if name == "a10g" else 128)
        assert binary.spill_bytes <= most, f"{name} {part}: {binary.spill_bytes} bytes spilled"


def test_statistics_are_added_up_once_a_row(outcomes: dict[tuple[str, str], Outcome]) -> None:
    """514 instructions a tile where LSE and delta were float32 (Triton 3.6), 821 where each thread adds up those of its columns."""
    folder = outcomes["causal", KEYS].job.directory
    (cubin,) = folder.rglob("*.cubin")
    lengths = loop_lengths(listing_of(cubin, _tool("nvdisasm")))
    assert lengths and max(lengths) < 700, lengths


@pytest.mark.parametrize("part", PARTS)
def test_the_fast_variant_loads_16_bytes_at_once(
    part: str, outcomes: dict[tuple[str, str], Outcome]
) -> None:
    """Every tile that is visited goes into shared memory by asynchronous copies of 16 bytes."""
    binary = outcomes["causal", part].binary
    assert binary is not None
    texts = [p.read_text() for p in Path(binary.directory).rglob("*.ptx")]
    sweeps = [t for t in texts if "wgmma" in t]
    assert sweeps and all("cp.async.cg.shared.global" in t for t in sweeps)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", MASKS)
def test_arguments_are_in_the_order_of_the_kernel(name: str, part: str) -> None:
    """A binary is launched with its arguments by place."""
    source = source_of(MASKS[name], Problem(lengths=LONG), part, **FEATURES)
    kernels = [n for n in ast.parse(source.text).body if getattr(n, "name", "") == source.entry]
    (kernel,) = kernels
    assert isinstance(kernel, ast.FunctionDef)
    names = [a.arg for a in kernel.args.args]
    assert names == [*(n for n, _ in source.parameters), *source.constexprs]
    config = default_config(Problem(), H200)
    for launch in range(len(source.grids)):
        assert list(signature(source, config, "fast", launch)) == names


# ---------------------------------------------------------------------- what fits
@pytest.mark.parametrize("gpu", all_gpus(), ids=lambda g: g.name)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_the_default_fits_every_gpu(gpu: Any, dtype: str, dims: tuple[int, int]) -> None:
    problem = Problem(*dims, dtype=dtype)
    assert unfit(default_config(problem, gpu), problem, gpu) is None


def test_what_does_not_fit_is_said_in_one_sentence() -> None:
    problem = Problem(head_dim=256)
    values = default_config(problem, H200).as_dict()
    large = LaunchConfig.of(values | {"BLOCK_M": 128, "BLOCK_N": 128, "STAGES": 4})
    assert unfit(large, problem, H200) == (
        "tiles take 696320 bytes of shared memory, nvidia-h200 has 232448"
    )
    small = replace(H200, shared_bytes=70_000)
    assert unfit(default_config(problem, small), problem, small) is None
    odd = LaunchConfig.of(values | {"BLOCK_M": 48})
    assert unfit(odd, problem, H200) == "BLOCK_M=48 is not one of [32, 64, 128]"
