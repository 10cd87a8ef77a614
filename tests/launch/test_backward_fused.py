"""The fused gradient kernel around its text: variants, configurations, and that it compiles for sm_90."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from sparsegen.codegen import LaunchConfig
from sparsegen.codegen.backward import BackwardSource, beside
from sparsegen.codegen.backward_fused import (
    default_config,
    queries_parts,
    render_fused,
    shared_bytes,
    starts,
    unfit,
)
from sparsegen.launch import Job, Outcome, compile_many
from sparsegen.launch import signature as sig
from sparsegen.launch.backward_boxes import arguments, takes_all, view
from sparsegen.launch.binary import _resources, _tool, folder_of, read_metadata
from sparsegen.launch.kernel import Call
from sparsegen.launch.sass import listing_of
from sparsegen.schedule.transpose import transpose
from sparsegen.spec.gpu import find_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from tests.launch.hopper_gradients import (
    CAUSAL,
    H200,
    STREAMING,
    STRIDED,
    inner_loops,
    long,
    saved_of,
)


def source_of(pattern: Pattern, problem: Problem) -> BackwardSource:
    found = transpose(pattern, problem)
    return render_fused(pattern, found.schedule, problem, found.shift)


def config_of(problem: Problem, **knobs: Any) -> LaunchConfig:
    return LaunchConfig.of(default_config(problem, H200).as_dict() | knobs)


# ---------------------------------------------------------------------- launches and arguments
def test_launches_and_variants() -> None:
    """A band, sinks in chunks of the queries, the launch that adds those up, and the one that makes DQ."""
    source, config = source_of(STREAMING, long(64)), config_of(long(64))
    assert source.name == "fused" and len(source.grids) == 4
    assert source.hopper is not None and source.hopper.launches == (0, 1)
    assert sig.variants(source, config) == ("fast",)
    for launch in (0, 1):
        assert sig.unit(source, config, "fast", launch) == (source.hopper, config)
    for launch in (2, 3):
        assert sig.unit(source, config, "fast", launch) == (source, beside(source))


def test_arguments_have_descriptors_in_their_places() -> None:
    """SUMS is seen in boxes of 64 queries and of a consumer's columns."""
    problem = long(128)
    source, config = source_of(CAUSAL, problem), config_of(problem)
    moving = [n for n, kind in source.parameters if n in ("Q", "K", "V", "DO", "STATS", "DK", "DV", "SUMS", "DQ")]  # fmt: skip
    assert [n for n, _ in source.parameters][: len(moving)] == moving
    tensors = {n: torch.zeros(1, 2, 256, 128) for n in moving}
    values = {n: tensors.get(n, f"<{n}>") for n, _ in source.parameters}
    args = arguments(source, config, "fast", 0, values, moving)
    text = source.hopper
    assert text is not None
    given = dict(zip((n for n, _ in text.parameters), args, strict=True))
    assert given["SUMS_DESC0"] == view(tensors["SUMS"], 1, moving.index("SUMS"))
    kinds = sig.signature(source, config, "fast", 0)
    assert kinds["SUMS"] == "*fp32" and kinds["DQ"] == "*bf16"
    assert kinds["SUMS_DESC0"].startswith("tensordesc<fp32[1, 1, 64, 64],NVMMASharedLayout")


LENGTHS = torch.tensor([9], dtype=torch.int32)


def test_calls_that_it_takes() -> None:
    source, config, saved = source_of(STRIDED, long(64)), config_of(long(64)), saved_of()
    assert takes_all(source, config, saved, Call())
    for name in ("q_lengths", "kv_starts", "kv_lengths"):
        assert not takes_all(source, config, saved, Call(**{name: LENGTHS}))
    assert not takes_all(source, config, saved_of(130, 130), Call())  # no whole periods
    one = torch.zeros(1, 1, 1, 64).expand(1, 2, 256, 64)
    assert not takes_all(source, config, replace(saved, dout=one), Call())
    assert not takes_all(source, config, saved_of(0, 256), Call())


# ---------------------------------------------------------------------- configurations
UNFIT: list[tuple[dict[str, Any], Problem, str, str]] = [
    ({}, Problem(), "a100", "KERNEL=hopper needs sm_90, nvidia-a100 is another architecture"),
    ({}, Problem(dtype="float32"), "h200", "KERNEL=hopper takes bfloat16 or float16, not float32"),
    ({"BLOCK_M": 64}, Problem(), "h200", "BLOCK_M=64 is not one of [128]"),
    ({}, Problem(192, 128), "h200", "the fused kernel keeps sums and tiles of DK and DV in registers: 240 a thread, 224 at most"),
    ({"STAGES": 3}, Problem(), "h200", "tiles take 236544 bytes of shared memory, nvidia-h200 has 232448"),
]  # fmt: skip


@pytest.mark.parametrize(("knobs", "problem", "gpu", "said"), UNFIT)
def test_unfit(knobs: dict[str, Any], problem: Problem, gpu: str, said: str) -> None:
    assert unfit(config_of(problem, **knobs), problem, find_gpu(gpu)) == said


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (96, 96), (80, 40), (32, 32)], ids=str)
def test_starts(dims: tuple[int, int]) -> None:
    problem = Problem(*dims)
    found = starts(problem, H200)
    assert found[0] == default_config(problem, H200) and len(set(found)) == len(found)
    assert all(unfit(c, problem, H200) is None for c in found)
    assert starts(problem, find_gpu("a100")) == ()


def test_parts_of_the_columns() -> None:
    """Half of a chunk is whole units of 128 bytes of K; narrower chunks are not cut."""
    parts = [[(x.first, x.width, x.halves) for x in queries_parts(d)] for d in (64, 96, 128, 192)]
    assert parts == [
        [(0, 64, False)],
        [(0, 64, False), (64, 32, False)],
        [(0, 64, True)],
        [(0, 64, True), (128, 64, False)],
    ]


# ---------------------------------------------------------------------- compiled for sm_90
# (pattern, problem, knobs, bytes spilled at most, with Triton 3.6 and with 3.9)
KERNELS: dict[str, tuple[Pattern, Problem, dict[str, Any], int]] = {
    "causal 128": (CAUSAL, long(), {}, 176),
    "causal 128, all tested": (CAUSAL, long(), {"TEST_ALL": True}, 144),
    "causal 64": (CAUSAL, long(64), {"STAGES": 3}, 16),
    "causal 96": (CAUSAL, long(96, dtype="float16"), {}, 176),
    "sinks 128": (STREAMING, long(), {}, 208),
    "strided 128": (STRIDED, long(dtype="float16"), {}, 208),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    root, jobs = tmp_path_factory.mktemp("fused"), {}
    for name, (pattern, problem, knobs, _) in KERNELS.items():
        config = config_of(problem, **knobs)
        assert unfit(config, problem, H200) is None
        folder = root / name.replace(" ", "_")
        jobs[name] = Job(source_of(pattern, problem), config, "fast", H200, folder)
    return dict(zip(jobs, compile_many(list(jobs.values()))))


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("name", KERNELS)
def test_compiled(name: str, outcomes: dict[str, Outcome]) -> None:
    """No more spills and shared memory than promised, boxes that are added, and products that run side by side."""
    outcome, (_, problem, _, most) = outcomes[name], KERNELS[name]
    assert outcome.error == "" and outcome.binary is not None
    source, config = outcome.job.source, outcome.job.config
    assert source.hopper is not None
    promised = shared_bytes(config.as_dict(), problem)
    for launch in source.hopper.launches:
        folder = folder_of(source, outcome.binary.directory, launch)
        entry = source.hopper.entry
        taken = read_metadata(folder, entry)["shared"]
        assert promised - 1024 < taken <= promised <= H200.shared_bytes
        ptx = (folder / f"{entry}.ptx").read_text()
        assert ptx.count("cp.reduce.async.bulk.tensor") >= 4  # two places in each of two consumers
        _, spills = _resources(folder, entry)
        assert spills is not None and spills <= most
        listing = listing_of(folder / f"{entry}.cubin", _tool("nvdisasm"))
        loops = inner_loops(listing)
        assert loops
        for products, waits in loops:
            assert waits <= 16 < products, f"{waits} WARPGROUP beside {products} HGMMA"
        early = beside_queries(listing, queries_products(problem.head_dim))
        assert early >= 0.75, f"{early} of the exponentials stand beside the products for dQ"


def queries_products(head_dim: int) -> int:
    """Asynchronous products for dQ that are under way while the scores of the next tile are waited for."""
    return sum(2 if x.halves else 1 for x in queries_parts(head_dim))


def beside_queries(listing: str, products: int) -> float:
    """Share of the exponentials that stand between a wait for scores, with the products for dQ behind them, and the next wait."""
    kinds = re.findall(r"MUFU\.EX2|WARPGROUP\.DEPBAR\.LE gsb0, 0x[0-9a-f]+", listing)
    early, behind = 0, False
    for kind in kinds:
        behind = kind.endswith(f" 0x{products:x}") or (behind and kind.startswith("MUFU"))
        early += behind and kind.startswith("MUFU")
    return early / sum(kind.startswith("MUFU") for kind in kinds)
