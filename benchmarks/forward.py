"""Forward attention beside FlexAttention and SDPA: one process, interleaved, random data, medians.

    python benchmarks/forward.py [--cases NAME,NAME] [--out FILE.json] [--host] [--keep]

For each case the kernel is compiled with a short list of configurations (``CONFIGS``), checked against the float64
reference on short ragged inputs, and the fastest is measured beside the peers: 0.7 s idle, 6 ms warm-up, 30 ms
measured, five rounds in turns, ratio of medians; the L2 cache is flushed before every launch; then each back to back
at the power limit.  ``--keep`` adds lines to tuned/history.csv.  Setting up the mask costs sparsegen nothing; flex's is timed apart.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import peers
import torch
from interleaved import in_turns

from sparsegen.codegen import KernelSource, LaunchConfig, load_template, render
from sparsegen.launch import Call, Job, Kernel, compile_many
from sparsegen.launch.tables import random_table
from sparsegen.paths import data_dir
from sparsegen.schedule.build import build
from sparsegen.schedule.count import cells
from sparsegen.spec.gpu import current_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from sparsegen.tune import history
from sparsegen.tune.accept import within_tolerance
from sparsegen.tune.eager import eager_attention
from sparsegen.tune.measure import CudaClock, Turns
from sparsegen.tune.winners import current_versions


def sinks(window: int, tokens: int) -> dict[str, Any]:
    return {
        "all_of": [
            "causal",
            {"any_of": [{"window": {"size": window}}, {"sink": {"tokens": tokens}}]},
        ]
    }


CASES: dict[str, tuple[Any, tuple[int, int], tuple[int, int], int]] = {
    # name: mask, (heads, kv_heads), (head_dim, value_dim), length
    "causal_16k": ("causal", (16, 16), (128, 128), 16384),
    "window_4096_32k_gqa": ({"window": {"size": 4096}}, (16, 4), (128, 128), 32768),
    "window_1024_sinks_4_64k": (sinks(1024, 4), (8, 8), (128, 128), 65536),
    "window_4096_sinks_64_128k": (sinks(4096, 64), (8, 8), (128, 128), 131072),
    "causal_d96_16k": ("causal", (16, 16), (96, 96), 16384),
    "causal_d192_128_16k": ("causal", (16, 16), (192, 128), 16384),
}
SMALL = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "STAGES": 3, "EDGE_STAGES": 2, "TMA": True}
LARGE = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "STAGES": 3, "EDGE_STAGES": 2, "TMA": True}
CONFIGS: tuple[dict[str, Any], ...] = (
    SMALL,
    SMALL | {"TMA": False},
    SMALL | {"EDGE_STAGES": 3},
    SMALL | {"GROUP_HEADS": 1},
    SMALL | {"GROUP_HEADS": 16},
    SMALL | {"STAGES": 2},
    SMALL | {"BLOCK_N": 32},
    SMALL | {"BLOCK_N": 32, "STAGES": 4},
    SMALL | {"BLOCK_N": 128, "STAGES": 2},
    SMALL | {"PERSISTENT": True},
    SMALL | {"HEAVY_FIRST": False},
    SMALL | {"GROUP_HEADS": 1, "EDGE_STAGES": 3},
    SMALL | {"GROUP_HEADS": 1, "PERSISTENT": True},
    SMALL | {"GROUP_HEADS": 1, "HEAVY_FIRST": False},
    LARGE,
    LARGE | {"GROUP_HEADS": 1},
    LARGE | {"TMA": False},
    LARGE | {"STAGES": 2},
    LARGE | {"BLOCK_N": 128, "STAGES": 2},
    LARGE | {"BLOCK_N": 128, "TMA": False},
    LARGE | {"num_warps": 4, "STAGES": 2},
)


class Made:
    """One case: kernel text, inputs, and the launches of its configurations."""

    def __init__(self, name: str):
        mask, (h, h_kv), (d, dv), self.length = CASES[name]
        self.name = name
        self.pattern = Pattern.from_dict({"name": name, "mask": mask})
        lengths = ((self.length, self.length),)
        self.problem = Problem(head_dim=d, value_dim=dv, heads=h, kv_heads=h_kv, lengths=lengths)
        schedule = build(self.pattern, self.problem)
        self.source: KernelSource = render(self.pattern, schedule, self.problem)
        self.cells = cells(schedule, self.length, self.length)
        self.flop = 2 * (d + dv) * self.cells * h

    def configs(self, gpu: Any) -> list[LaunchConfig]:
        template = load_template()
        default = template.default(self.problem, gpu).as_dict()
        all_of_them = [LaunchConfig.of(default | c) for c in CONFIGS]
        return [c for c in all_of_them if template.invalid(c, self.problem, gpu) is None]

    def tensors(self, q_len: int, kv_len: int) -> tuple[Any, Any, Any]:
        p = self.problem
        shapes = (
            (p.heads, q_len, p.head_dim),
            (p.kv_heads, kv_len, p.head_dim),
            (p.kv_heads, kv_len, p.value_dim),
        )
        return tuple(torch.randn(1, *s, device="cuda", dtype=torch.bfloat16) for s in shapes)  # type: ignore[return-value]

    def launch(self, kernel: Kernel, q: Any, k: Any, v: Any) -> Any:
        out = torch.empty((*q.shape[:3], v.shape[3]), device="cuda", dtype=q.dtype)
        lse = torch.empty(q.shape[:3], device="cuda")
        first = k.shape[2] - q.shape[2]
        tables = [
            random_table(t, first, q.shape[2], k.shape[2], "cuda") for t in self.source.tables
        ]
        kernel(q, k, v, out, lse, Call(scale=self.problem.head_dim**-0.5, tables=tables), "fast")
        return out, lse


FINALISTS = Turns(rounds=3, idle_s=0.1)


def fastest(
    made: Made, outcomes: list[Any], gpu: Any, clock: CudaClock, inputs: Any
) -> tuple[Kernel, str]:
    """The fastest configuration that is right: the best three of a quick look, timed in turns."""
    small = made.tensors(700, 933)
    from sparsegen.spec.reference import reference

    want, _ = reference(made.pattern, *small)
    low, _ = eager_attention(made.pattern, *small)
    right: dict[str, tuple[float, Kernel]] = {}
    for outcome in outcomes:
        b = outcome.binary
        if b is None or b.shared_bytes > gpu.shared_bytes or b.spill_bytes > 64:
            continue
        module = outcome.job.directory.parent / "kernel.py"
        module.write_text(made.source.text)
        kernel = Kernel(made.source, outcome.job.config, module, {"fast": outcome.job.directory})
        out, _ = made.launch(kernel, *small)
        verdict = within_tolerance(out, want, low)
        if not verdict:
            print(f"    WRONG {outcome.job.config}: {verdict.reason}", flush=True)
            continue
        us = statistics.median(clock.times_us(lambda k=kernel: made.launch(k, *inputs), 3, 10))  # type: ignore[misc]
        print(
            f"    {us:8.1f} us {made.flop / us / 1e6:4.0f} TF/s  {b.registers} registers  {outcome.job.config}",
            flush=True,
        )
        right[str(outcome.job.config)] = us, kernel
    assert right, f"{made.name}: no configuration works"
    best = sorted(right, key=lambda c: right[c][0])[:3]
    launches = {c: lambda k=right[c][1]: made.launch(k, *inputs) for c in best}  # type: ignore[misc]
    final = in_turns(launches, clock, FINALISTS, sustained=False)
    chosen = min(final, key=lambda c: final[c].us)
    return right[chosen][1], chosen


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
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--out", default="forward.json")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--host", action="store_true", help="also measure the host time of a call")
    options = parser.parse_args()
    names = [n for n in options.cases.split(",") if n]
    gpu = current_gpu()
    assert gpu is not None, "a GPU is needed"
    clock = CudaClock(gpu.l2_bytes)
    folder = Path(tempfile.mkdtemp())
    cases = [Made(name) for name in names]
    jobs, owner = [], []
    for made in cases:
        for i, config in enumerate(made.configs(gpu)):
            jobs.append(Job(made.source, config, "fast", gpu, folder / made.name / str(i) / "fast"))
            owner.append(made.name)
    start = time.time()
    outcomes = compile_many(jobs)
    print(f"compiled {len(jobs)} kernels in {time.time() - start:.0f} s", flush=True)
    results: dict[str, Any] = {"versions": current_versions(), "gpu": gpu.name, "date": _now()}
    if options.host:
        results["host_us"] = host_times(clock)
        print("host time of a call, us:", results["host_us"], flush=True)
    for made in cases:
        inputs = made.tensors(made.length, made.length)
        print(
            f"== {made.name}: {made.cells / made.length**2:.4f} of the cells are visible",
            flush=True,
        )
        mine = [o for o, n in zip(outcomes, owner) if n == made.name]
        kernel, config = fastest(made, mine, gpu, clock, inputs)
        launches = {"sparsegen": lambda k=kernel, m=made, x=inputs: m.launch(k, *x)}
        launches |= peers.flex(made.pattern, *inputs)
        if made.pattern.name.startswith("causal"):
            launches |= peers.sdpa(*inputs)
        out = made.launch(kernel, *inputs)[0]
        times = in_turns(launches, clock)
        own = times["sparsegen"]
        row: dict[str, Any] = {"config": config, "cells": made.cells, "peers": {}}
        for name, t in times.items():
            error = 0.0
            if name != "sparsegen":
                other = launches[name]()
                error = ((out.float() - other.float()).norm() / other.float().norm()).item()
            row["peers"][name] = {
                "us": t.us,
                "spread_us": t.spread_us,
                "tflops": made.flop / t.us / 1e6,
                "ratio": t.us / own.us,
                "sustained_us": t.sustained_us,
                "sustained_ratio": t.sustained_us / own.sustained_us,
                "difference": error,
                "mask_ms": getattr(launches[name], "mask_ms", 0.0),
            }
            r = row["peers"][name]
            print(
                f"  {name:18s} {t.us:9.1f} us ±{t.spread_us:6.1f} {r['tflops']:5.0f} TF/s  x{r['ratio']:.3f}  "
                f"sustained x{r['sustained_ratio']:.3f}  differs {error:.1e}  mask {r['mask_ms']:.1f} ms",
                flush=True,
            )
        results[made.name] = row
        Path(options.out).write_text(json.dumps(results, indent=1))
        if options.keep:
            history.append(data_dir("tuned") / "history.csv", _lines(made, gpu, row, results))
    Path(options.out).write_text(json.dumps(results, indent=1))


def _lines(
    made: Made, gpu: Any, row: dict[str, Any], results: dict[str, Any]
) -> list[history.Entry]:
    p, own, v = made.problem, row["peers"]["sparsegen"], results["versions"]
    problem = f"B1 H{p.heads}:{p.kv_heads} D{p.head_dim}:{p.value_dim} {p.dtype} {made.length}x{made.length}"
    return [
        history.Entry(
            date=results["date"],
            commit=v["sparsegen"],
            gpu=gpu.name,
            driver=v["driver"],
            torch=v["torch"],
            triton=v["triton"],
            pattern=made.name,
            problem=problem,
            config=f"forward: {row['config']}",
            median_us=round(own["us"], 3),
            spread_us=round(own["spread_us"], 3),
            baseline=name,
            baseline_us=round(peer["us"], 3),
        )
        for name, peer in row["peers"].items()
        if name != "sparsegen"
    ]


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


if __name__ == "__main__":
    main()
