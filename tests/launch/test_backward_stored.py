"""Gradients with stored dS around their texts: configurations, shares of the heads, and that they compile for sm_90."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from sparsegen.codegen.backward import KEYS, QUERIES, BackwardSource
from sparsegen.codegen.backward_stored import (
    default_config,
    render_stored,
    shared_bytes,
    starts,
    unfit,
)
from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.errors import InputError
from sparsegen.launch import Job, compile_many
from sparsegen.launch import signature as sig
from sparsegen.launch.backward_shares import Share, head_bytes, row_elements, shares
from sparsegen.launch.binary import _resources, _tool, folder_of, read_metadata
from sparsegen.launch.sass import listing_of
from sparsegen.launch.sizes import Sizes
from sparsegen.schedule.build import build
from sparsegen.schedule.transpose import transpose
from sparsegen.spec.gpu import find_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from tests.launch.hopper_gradients import CAUSAL, H200, STREAMING, inner_loops, long

MISTRAL = Pattern.from_yaml("mistral_window_4096")


def source_of(pattern: Pattern, problem: Problem, part: str) -> BackwardSource:
    if part == QUERIES:
        return render_stored(pattern, build(pattern, problem), problem, part)
    found = transpose(pattern, problem)
    return render_stored(pattern, found.schedule, problem, part, found.shift)


# ---------------------------------------------------------------------- shares
def sizes(batch: int, heads: int, kv_heads: int, q_rows: int, kv_rows: int) -> Sizes:
    q, k = torch.zeros(batch, heads, q_rows, 8), torch.zeros(batch, kv_heads, kv_rows, 8)
    return Sizes.of(q, k, k)


def test_shares_hold_all_heads_once_and_no_more_bytes_than_given() -> None:
    s = sizes(3, 12, 6, 100, 90)
    one = head_bytes(s)
    assert one == 2 * 100 * row_elements(90) * 2 == 2 * 100 * 128 * 2
    for most in (1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 18, 100):
        found = shares(s, most * one + one - 1)
        taken = [(b, h) for x in found for b in range(x.entry, x.entry + x.entries) for h in range(x.first, x.last)]  # fmt: skip
        assert sorted(taken) == [(b, h) for b in range(3) for h in range(6)]
        assert all(x.entries * (x.last - x.first) <= most for x in found)
        assert all(x.entries == 1 or x.last - x.first == 6 for x in found)  # memory without gaps
    assert shares(s, 4 * one) == [Share(b, 1, h, h + 3) for b in range(3) for h in (0, 3)]
    with pytest.raises(InputError, match=f"take {one} bytes a key head; give so much, or leave"):
        shares(s, one - 1)


# ---------------------------------------------------------------------- configurations
UNFIT: list[tuple[dict[str, Any], Problem, str, str]] = [
    ({"BLOCK_N": 128}, Problem(), KEYS, "the kernel that stores dS visits 64 queries: BLOCK_N is 64"),
    ({}, Problem(192, 128), KEYS, "the kernel that stores dS keeps sums and tiles of DK and DV in registers: 240 a thread, 224 at most"),
    ({"BLOCK_N": 128, "STAGES": 4}, Problem(), QUERIES, "tiles take 295936 bytes of shared memory, nvidia-h200 has 232448"),
    ({}, Problem(dtype="float32"), QUERIES, "KERNEL=hopper takes bfloat16 or float16, not float32"),
]  # fmt: skip


@pytest.mark.parametrize(("knobs", "problem", "part", "said"), UNFIT)
def test_unfit(knobs: dict[str, Any], problem: Problem, part: str, said: str) -> None:
    config = LaunchConfig.of(default_config(problem, H200, part).as_dict() | knobs)
    assert unfit(config, problem, H200, part) == said


@pytest.mark.parametrize("part", [KEYS, QUERIES])
def test_starts(part: str) -> None:
    for dims in ((64, 64), (128, 128), (96, 96), (80, 40)):
        problem = Problem(*dims)
        found = starts(problem, H200, part)
        assert found[0] == default_config(problem, H200, part)
        assert {c["BLOCK_M"] for c in found} == {64, 128}
        assert all(unfit(c, problem, H200, part) is None for c in found)
        assert starts(problem, find_gpu("a100"), part) == ()


BOXES = [(KEYS, 64, "1, 1, 64, 64"), (QUERIES, 128, "1, 1, 64, 128"), (QUERIES, 64, "1, 1, 64, 64")]


@pytest.mark.parametrize(("part", "visited", "box"), BOXES)
def test_boxes_of_dS(part: str, visited: int, box: str) -> None:
    """[queries, keys]: 64 of the tile's own side, and those that are visited."""
    problem = long(128)
    source, config = source_of(CAUSAL, problem, part), default_config(problem, H200, part)
    assert config["BLOCK_N"] == (64 if part == KEYS else 128)
    assert sig.variants(source, config) == ("fast",)
    config = LaunchConfig.of(config.as_dict() | {"BLOCK_N": visited})
    kinds = sig.signature(source, config, "fast", 0)
    assert kinds["DS_DESC0"].startswith(f"tensordesc<bf16[{box}],")


@pytest.mark.parametrize(("kv_rows", "elements"), [(1, 64), (64, 64), (65, 128), (4096, 4096)])
def test_rows_of_dS_are_whole_boxes(kv_rows: int, elements: int) -> None:
    assert row_elements(kv_rows) == elements


# ---------------------------------------------------------------------- compiled for sm_90
ALONE = {"BLOCK_M": 64, "STAGES": 2}
# (pattern, problem, part, knobs, bytes spilled at most, with Triton 3.6 and with 3.9)
KERNELS: dict[str, tuple[Pattern, Problem, str, dict[str, Any], int]] = {
    "keys causal 128": (CAUSAL, long(), KEYS, {}, 80),
    "keys causal 128, one consumer": (CAUSAL, long(), KEYS, ALONE, 88),
    "keys causal 128, all tested": (CAUSAL, long(), KEYS, {"TEST_ALL": True}, 48),
    "keys causal 96": (CAUSAL, long(96), KEYS, {}, 16),
    "keys causal 64": (CAUSAL, long(64), KEYS, {}, 0),
    "keys window 128": (MISTRAL, long(), KEYS, {}, 88),
    "dQ causal 128": (CAUSAL, long(), QUERIES, {}, 0),
    "dQ causal 128, one consumer": (CAUSAL, long(), QUERIES, ALONE, 0),
    "dQ causal 192": (CAUSAL, long(192, 128), QUERIES, {}, 0),
    "dQ sinks 128": (STREAMING, long(dtype="float16"), QUERIES, {}, 0),
}
WAITS = {KEYS: 13, QUERIES: 3}  # WARPGROUP instructions of a loop at most
TURNED = "stmatrix.sync.aligned.m8n8.x4.trans.shared"  # 64 keys × 64 queries of a warpgroup: four


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_compiled(tmp_path_factory: pytest.TempPathFactory) -> None:
    """No more spills and shared memory than promised, and products that run side by side."""
    root, jobs = tmp_path_factory.mktemp("stored"), {}
    for name, (pattern, problem, part, knobs, _) in KERNELS.items():
        source, default = source_of(pattern, problem, part), default_config(problem, H200, part)
        config = LaunchConfig.of(default.as_dict() | knobs)
        assert unfit(config, problem, H200, part) is None
        jobs[name] = Job(source, config, "fast", H200, root / name.replace(" ", "_"))
    for name, outcome in zip(jobs, compile_many(list(jobs.values()))):
        assert outcome.binary is not None, f"{name}: {outcome.error}"
        source, (_, problem, part, knobs, most) = jobs[name].source, KERNELS[name]
        assert source.hopper is not None
        promised = shared_bytes(jobs[name].config.as_dict(), problem, part)
        for launch in source.hopper.launches:
            folder, entry = folder_of(source, outcome.binary.directory, launch), source.hopper.entry
            taken = read_metadata(folder, entry)["shared"]
            assert taken <= promised <= H200.shared_bytes
            _, spills = _resources(folder, entry)
            assert spills is not None and spills <= most, f"{name}: {spills}"
            loops = inner_loops(listing_of(folder / f"{entry}.cubin", _tool("nvdisasm")))
            assert loops and all(waits <= WAITS[part] for _, waits in loops), f"{name}: {loops}"
            turned = (folder / f"{entry}.ptx").read_text().count(TURNED)  # once a consumer
            assert turned == (4 * jobs[name].config["BLOCK_M"] // 64 if part == KEYS else 0)
