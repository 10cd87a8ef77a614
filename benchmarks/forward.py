"""Forward attention beside FlexAttention and SDPA: one process, interleaved, random data, medians.

    python benchmarks/forward.py [--cases NAME,NAME | plain | structured | long | dense] [--peers flex|quick|sdpa|cudnn|fa4|none,...]
                                 [--kernels all|portable|hopper] [--out FILE.json] [--host] [--keep]

For each case the schedules that the compiler proposes are compiled with a short list of configurations (``CONFIGS``),
checked against the float64 reference on short ragged inputs, and the fastest is measured beside the peers: 0.7 s idle,
6 ms warm-up, 30 ms measured, five rounds in turns, ratio of medians; the L2 cache is flushed before every launch; then each
back to back at the power limit.  The floor of a case is the larger of its visible operations at the rate of a matrix
product and its tensors at the speed of a copy, both measured in the same run.  Peers: ``flex`` in both of its modes; ``quick`` gives
it, instead of its own search of a minute a case, the configurations that this search had chosen before (torch_peers.py), and
the fastest of them on the real mask is measured in turns; ``sdpa`` where the mask is causal, or ``cudnn`` alone of it; ``fa4`` is FlashAttention-4, which must
be installed.  ``--keep`` adds lines to tuned/history.csv.  Setting up the mask costs sparsegen nothing; flex's is timed apart.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import turn
from beforehand import compile_many, gpu_here
from contender import Contender, compare, history_lines
from masks import LONG, STRUCTURED, sinks

from sparsegen.bench import flash4
from sparsegen.bench import torch_peers as peers
from sparsegen.bench.case import Case, Inputs
from sparsegen.bench.interleaved import in_turns
from sparsegen.codegen import LaunchConfig
from sparsegen.launch import Job
from sparsegen.paths import data_dir
from sparsegen.schedule.count import cells
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from sparsegen.tune import history
from sparsegen.tune.measure import CudaClock
from sparsegen.tune.winners import current_versions

SQUARE, SAME = (8, 8), (128, 128)
CASES: dict[str, tuple[Any, tuple[int, int], tuple[int, int], int]] = {
    # name: mask, (heads, kv_heads), (head_dim, value_dim), length
    "causal_16k": ("causal", (16, 16), (128, 128), 16384),
    "window_4096_32k_gqa": ({"window": {"size": 4096}}, (16, 4), (128, 128), 32768),
    "window_1024_64k": ({"window": {"size": 1024}}, (8, 8), (128, 128), 65536),
    "window_4096_64k": ({"window": {"size": 4096}}, (8, 8), (128, 128), 65536),
    "window_1024_sinks_4_64k": (sinks(1024, 4), (8, 8), (128, 128), 65536),
    "window_4096_sinks_64_128k": (sinks(4096, 64), (8, 8), (128, 128), 131072),
    "causal_d96_16k": ("causal", (16, 16), (96, 96), 16384),
    "causal_d192_128_16k": ("causal", (16, 16), (192, 128), 16384),
    "window_4096_sinks_64_64k": (sinks(4096, 64), (8, 8), (128, 128), 65536),
    # beside hand-written kernels
    "causal_2k": ("causal", (8, 8), (128, 128), 2048),
    "causal_4k": ("causal", (8, 8), (128, 128), 4096),
    "causal_8k": ("causal", (16, 16), (128, 128), 8192),
    "causal_32k": ("causal", (8, 8), (128, 128), 32768),
    "causal_16k_gqa": ("causal", (64, 8), (128, 128), 16384),
    "causal_16k_ragged": ("causal", (16, 16), (128, 128), 15384),
    "causal_d64_16k": ("causal", (16, 16), (64, 64), 16384),
    "causal_d256_16k": ("causal", (16, 16), (256, 256), 16384),
    "window_4096_64k_gqa": ({"window": {"size": 4096}}, (64, 8), (128, 128), 65536),
    "window_1024_64k_gqa": ({"window": {"size": 1024}}, (64, 8), (128, 128), 65536),
    "window_4096_64k_ragged": ({"window": {"size": 4096}}, (8, 8), (128, 128), 64536),
    "window_1024_64k_ragged": ({"window": {"size": 1024}}, (8, 8), (128, 128), 64536),
    **{f"{name}_32k": (mask, SQUARE, SAME, 32768) for name, mask in STRUCTURED.items()},
    **{f"{name}_128k": (mask, SQUARE, SAME, 131072) for name, mask in LONG.items()},
}
GROUPS = {
    "plain": [
        "causal_16k",
        *(f"window_{n}" for n in ("4096_32k_gqa", "1024_64k", "4096_64k", "1024_sinks_4_64k")),
        "window_4096_sinks_64_128k",
        *("causal_d96_16k", "causal_d192_128_16k"),
    ],
    "dense": [
        *(f"causal_{n}" for n in ("2k", "4k", "8k", "16k", "32k", "16k_gqa", "16k_ragged")),
        *(f"causal_{n}_16k" for n in ("d64", "d96", "d192_128", "d256")),
        *(f"window_{w}_64k{n}" for w in (1024, 4096) for n in ("", "_gqa", "_ragged")),
    ],
    "structured": [n for n in CASES if n.endswith("_32k")],
    "long": [f"{n}_128k" for n in LONG],
}
SMALL = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "STAGES": 3, "TMA": True}
LARGE = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "STAGES": 3, "TMA": True}
WARPS = {"KERNEL": "hopper", "BLOCK_M": 128, "BLOCK_N": 128, "STAGES": 3}
HALF = WARPS | {"BLOCK_M": 64, "BLOCK_N": 64}
# The best of 60 looked at for causal masks, windows, head_dim 96 to 192 and structured masks (docs/performance.md).
CONFIGS: tuple[dict[str, Any], ...] = (
    SMALL,
    SMALL | {"GROUP_HEADS": 1, "BLOCK_N": 32},
    LARGE,
    WARPS | {"GROUP_HEADS": 1},
    WARPS | {"STAGES": 2},
    WARPS | {"STAGES": 2, "GROUP_HEADS": 4},
    WARPS | {"STAGES": 2, "PERSISTENT": True},
    WARPS | {"STAGES": 2, "PERSISTENT": True, "GROUP_HEADS": 1},
    WARPS | {"BLOCK_N": 64, "PERSISTENT": True, "GROUP_HEADS": 1},
    WARPS | {"BLOCK_N": 64, "STAGES": 2},
    WARPS | {"BLOCK_N": 64, "STAGES": 4},
    WARPS | {"STAGES": 2, "LATE_VALUES": True, "GROUP_HEADS": 4},
    WARPS | {"LATE_VALUES": True, "GROUP_HEADS": 4},
    HALF | {"GROUP_HEADS": 1},
    HALF | {"STAGES": 2, "PERSISTENT": True, "GROUP_HEADS": 1},
)


def rates() -> dict[str, float]:
    """Operations per second of a large bf16 matrix product and bytes per second of a large copy."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    big = torch.empty(1 << 30, device="cuda", dtype=torch.int8)
    into = torch.empty_like(big)
    timed = in_turns(
        {"matmul": lambda: a @ b, "copy": lambda: into.copy_(big)},
        CudaClock(0),
        sustained=False,
    )
    return {
        "matmul": 2 * 8192**3 / timed["matmul"].us * 1e6,
        "copy": 2 * big.numel() / timed["copy"].us * 1e6,
    }


def host_times(clock: CudaClock) -> dict[str, float]:
    """Host microseconds of one call on tiny inputs, nothing waited for: sparsegen's public callable and compiled flex."""
    import sparsegen

    pattern = Pattern.from_dict({"name": "tiny", "mask": "causal"})
    attend = sparsegen.compile(pattern, Problem(head_dim=64, heads=2), tune="off")
    q, k, v = (torch.randn(1, 2, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    launches = {"sparsegen": lambda: attend(q, k, v)} | {
        "flex": peers.flex(pattern, q, k, v)["flex"]
    }
    times: dict[str, list[float]] = {n: [] for n in launches}
    for launch in launches.values():
        for _ in range(50):
            launch()
    for _ in range(9):
        for name, launch in launches.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(200):
                launch()
            times[name].append((time.perf_counter() - start) / 200 * 1e6)
            torch.cuda.synchronize()
    return {n: statistics.median(t) for n, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default="plain")
    parser.add_argument(
        "--peers", default="flex,sdpa", help="flex, quick, sdpa, cudnn, fa4; or none"
    )
    parser.add_argument("--kernels", choices=["all", "portable", "hopper"], default="all")
    parser.add_argument("--out", default="forward.json")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--host", action="store_true", help="also measure the host time of a call")
    options = parser.parse_args()
    names = [m for n in options.cases.split(",") if n for m in GROUPS.get(n, [n])]
    which = set(options.peers.split(","))
    if unknown := which - {"flex", "quick", "sdpa", "cudnn", "fa4", "none"}:
        parser.error(f"--peers: no such peer: {', '.join(sorted(unknown))}")
    gpu = gpu_here()
    assert gpu is not None, "a GPU is needed"
    folder = Path(tempfile.mkdtemp())
    start = time.time()
    cases = []
    for name in names:
        mask, heads, dims, length = CASES[name]
        cases.append(Contender(name, mask, length, heads, dims))
    wanted = ("portable", "hopper") if options.kernels == "all" else (options.kernels,)
    configs = [c for c in CONFIGS if c.get("KERNEL", "portable") in wanted]
    jobs = [(made, job) for made in cases for job in made.jobs(gpu, configs, folder)]
    first = {_binary(job): job for _, job in reversed(jobs)}  # cases of one text share binaries
    print(f"schedules chosen in {time.time() - start:.0f} s", flush=True)
    start = time.time()
    done = dict(zip(first, compile_many(list(first.values()))))
    outcomes = [
        replace(made, job=replace(made.job, source=job.source))
        for _, job in jobs
        for made in [done[_binary(job)]]
    ]
    print(f"compiled {len(first)} kernels in {time.time() - start:.0f} s", flush=True)
    results: dict[str, Any] = {"versions": current_versions(), "gpu": gpu.name, "date": _now()}
    turn.take()
    clock = CudaClock(gpu.l2_bytes)
    results["rates"] = rates()
    print("rates:", results["rates"], flush=True)
    if options.host:
        results["host_us"] = host_times(clock)
        print("host time of a call, us:", results["host_us"], flush=True)
    for made in cases:
        mine = [o for o, (m, _) in zip(outcomes, jobs) if m is made]
        results[made.name] = row = _one(made, mine, gpu, clock, results["rates"], which)
        Path(options.out).write_text(json.dumps(results, indent=1))
        if options.keep:
            lines = history_lines(made, gpu, row, results["versions"], results["date"])
            history.append(data_dir("tuned") / "history.csv", lines)
    Path(options.out).write_text(json.dumps(results, indent=1))


def _one(
    made: Contender,
    outcomes: list[Any],
    gpu: Any,
    clock: CudaClock,
    rate: dict[str, float],
    which: set[str],
) -> dict[str, Any]:
    """One case: the fastest configuration beside the peers, and how far from its floor."""
    inputs = made.tensors(made.length, made.length)
    share = made.cells / made.length**2
    print(f"== {made.name}: {share:.4f} of the cells are visible", flush=True)
    kernel, config = made.fastest(outcomes, gpu, clock, inputs)
    others: dict[str, Any] = {}
    if "flex" in which:
        others |= peers.flex(made.pattern, *inputs)
    elif "quick" in which:
        modes = peers.quick_modes(made.problem.head_dim)
        compiled = made.length > 65536  # uncompiled, the mask takes length squared bytes and more
        found = peers.flex(made.pattern, *inputs, modes=modes, mask_time=compiled)
        looks = {n: statistics.median(clock.times_us(x, 3, 20)) for n, x in found.items()}
        print("    flex:", {n: round(us, 1) for n, us in looks.items()}, flush=True)
        fastest = min(looks, key=lambda n: looks[n])
        others[fastest] = found[fastest]
    if which & {"sdpa", "cudnn"} and made.name.startswith("causal"):
        found = peers.sdpa(*inputs)
        others |= {n: x for n, x in found.items() if "sdpa" in which or n == "cudnn"}
    if "fa4" in which:
        others |= fa4(made, inputs)
    row = compare(made, kernel, config, clock, inputs, others)
    floor = {
        "matmul": 1e6 * made.flop / rate["matmul"],
        "memory": 1e6 * made.bytes_once / rate["copy"],
    }
    own = row["peers"]["sparsegen"]["us"]
    row["floor_us"] = floor
    worst = max(floor, key=lambda f: floor[f])
    print(
        f"  floor {floor[worst]:.1f} us ({worst}): {floor[worst] / own:.2f} of it reached",
        flush=True,
    )
    if made.name.endswith("_32k") and not any(n.grid() for _, n in made.pattern.nodes()):
        row["longer"] = _longer(made, kernel, clock, own)
    return row


def fa4(made: Contender, inputs: Any) -> dict[str, Any]:
    """FlashAttention-4 on these tensors, by name; nothing, and why, where it refuses the case."""
    try:
        launch = flash4.launch_of(Case(made.pattern, made.problem), Inputs(*inputs, {}))[0]
        launch()
    except Exception as error:  # a compiler of its own, which may refuse a case in any way
        peers.printed("fa4", str(error))
        return {}
    return {"fa4": launch}


def _longer(made: Contender, kernel: Any, clock: CudaClock, own_us: float) -> dict[str, Any]:
    """The same kernel at four times the length: how its time grows with the visible cells."""
    length = 4 * made.length
    launch = made.launcher(kernel, *made.tensors(length, length))
    us = statistics.median(clock.times_us(launch, 6, 60))
    visible = cells(next(iter(made.schedules.values())), length, length)
    by_cells = math.log(us / own_us) / math.log(visible / made.cells)
    by_length = math.log(us / own_us, 4)
    print(f"  at {length}: {us:.1f} us, cells^{by_cells:.2f}, length^{by_length:.2f}", flush=True)
    return {"length": length, "us": us, "cells": visible, "exponent": by_length}


def _binary(job: Job) -> tuple[str, LaunchConfig]:
    return job.source.digest, job.config


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


if __name__ == "__main__":
    main()
