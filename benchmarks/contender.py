"""One case of a benchmark: its schedules and configurations compiled, checked, and the fastest of them found."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from sparsegen.bench.interleaved import in_turns
from sparsegen.codegen import KernelSource, LaunchConfig, load_template, render
from sparsegen.launch import Call, Job, Kernel
from sparsegen.launch.tables import random_table
from sparsegen.schedule import build as schedules
from sparsegen.schedule.count import cells
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from sparsegen.spec.reference import reference
from sparsegen.tune import history
from sparsegen.tune.accept import within_tolerance
from sparsegen.tune.eager import eager_attention
from sparsegen.tune.measure import CudaClock, Turns

FINALISTS = Turns(rounds=3, idle_s=0.1)
SPILLED = 128  # bytes; a configuration with more is not run
CHECKED = (700, 933)  # ragged lengths, q_len != kv_len

Launch = Callable[[], Any]


class Contender:
    """A mask at one problem: the text of its candidate schedules, inputs, and the launches of configurations."""

    def __init__(
        self,
        name: str,
        mask: Any,
        length: int,
        heads: tuple[int, int] = (8, 8),
        dims: tuple[int, int] = (128, 128),
    ):
        self.name, self.length = name, length
        self.pattern = Pattern.from_dict({"name": name, "mask": mask})
        self.problem = Problem(
            head_dim=dims[0],
            value_dim=dims[1],
            heads=heads[0],
            kv_heads=heads[1],
            lengths=((length, length),),
        )
        found = schedules.candidates(self.pattern, self.problem)
        self.schedules = {c.schedule.label: c.schedule for c in found if c.to_measure}
        self.sources: dict[str, KernelSource] = {
            label: render(self.pattern, s, self.problem) for label, s in self.schedules.items()
        }
        self.cells = cells(found[0].schedule, length, length)
        self.flop = 2 * sum(dims) * self.cells * heads[0]

    @property
    def bytes_once(self) -> int:
        """Bytes of q, k, v, out and lse, each moved once."""
        p, n = self.problem, self.length
        row = 2 * (p.head_dim + p.value_dim)
        return n * (p.heads * (row + 4) + p.kv_heads * row)

    def jobs(self, gpu: Any, configs: Sequence[dict[str, Any]], folder: Path) -> list[Job]:
        """Every schedule in every configuration that the template takes."""
        template = load_template()
        default = template.default(self.problem, gpu).as_dict()
        valid = [LaunchConfig.of(default | c) for c in configs]
        valid = [c for c in valid if template.invalid(c, self.problem, gpu) is None]
        out = []
        for i, source in enumerate(self.sources.values()):
            for j, config in enumerate(valid):
                if config["KERNEL"] == "hopper" and source.hopper is None:
                    continue
                place = folder / self.name / f"{i}-{j}" / "fast"
                out.append(Job(source, config, "fast", gpu, place))
        return out

    def tensors(self, q_len: int, kv_len: int) -> tuple[Any, Any, Any]:
        """Random q, k, v."""
        p = self.problem
        shapes = (
            (p.heads, q_len, p.head_dim),
            (p.kv_heads, kv_len, p.head_dim),
            (p.kv_heads, kv_len, p.value_dim),
        )
        return tuple(torch.randn(1, *s, device="cuda", dtype=torch.bfloat16) for s in shapes)  # type: ignore[return-value]

    def launcher(self, kernel: Kernel, q: Any, k: Any, v: Any) -> Launch:
        """A call of the kernel on these tensors that returns OUT, which starts as NaN."""
        out = torch.full((*q.shape[:3], v.shape[3]), float("nan"), device="cuda", dtype=q.dtype)
        lse = torch.full(q.shape[:3], float("nan"), device="cuda")
        first = k.shape[2] - q.shape[2]
        tables = [
            random_table(t, first, q.shape[2], k.shape[2], "cuda") for t in kernel.source.tables
        ]
        call = Call(scale=self.problem.head_dim**-0.5, tables=tables)
        prepared = kernel.prepare(q, k, v, out, call)

        def launch() -> Any:
            prepared(q, k, v, out, lse, "fast")
            return out

        return launch

    def fastest(
        self, outcomes: Sequence[Any], gpu: Any, clock: CudaClock, inputs: Any
    ) -> tuple[Kernel, str]:
        """The fastest right (schedule, configuration): the best three of a quick look, timed in turns."""
        whole = math.lcm(*(p for source in self.sources.values() for p in source.periods))
        small = self.tensors(*(-(-n // whole) * whole for n in CHECKED))  # as "fast" takes them
        want, _ = reference(self.pattern, *small)
        low, _ = eager_attention(self.pattern, *small)
        right: dict[str, tuple[float, Kernel]] = {}
        labels = {id(source): label for label, source in self.sources.items()}
        for outcome in outcomes:
            b, job = outcome.binary, outcome.job
            name = f"{labels[id(job.source)]}: {job.config}"
            if b is None or b.shared_bytes > gpu.shared_bytes or b.spill_bytes > SPILLED:
                why = outcome.error if b is None else f"{b.shared_bytes} B, spills {b.spill_bytes}"
                print(f"    left out {name}: {why}", flush=True)
                continue
            kernel = Kernel(job.source, job.config, {"fast": job.directory})
            verdict = within_tolerance(self.launcher(kernel, *small)(), want, low)
            if not verdict:
                print(f"    WRONG {name}: {verdict.reason}", flush=True)
                continue
            us = statistics.median(clock.times_us(self.launcher(kernel, *inputs), 3, 10))
            rate = self.flop / us / 1e6
            print(f"    {us:8.1f} us {rate:4.0f} TF/s {b.registers} registers {name}", flush=True)
            right[name] = us, kernel
        assert right, f"{self.name}: no configuration works"
        best = sorted(right, key=lambda c: right[c][0])[:3]
        launches = {c: self.launcher(right[c][1], *inputs) for c in best}
        final = in_turns(launches, clock, FINALISTS, sustained=False)
        chosen = min(final, key=lambda c: final[c].us)
        return right[chosen][1], chosen


def compare(
    made: Contender, kernel: Kernel, config: str, clock: CudaClock, inputs: Any, peers: Any
) -> dict[str, Any]:
    """Time the kernel and its peers in turns and compare their outputs; ``peers``: name → launch."""
    launches = {"sparsegen": made.launcher(kernel, *inputs), **peers}
    out = launches["sparsegen"]()
    times = in_turns(launches, clock)
    own = times["sparsegen"]
    row: dict[str, Any] = {"config": config, "cells": made.cells, "peers": {}}
    for name, t in times.items():
        other = launches[name]()
        error = ((out.float() - other.float()).norm() / other.float().norm()).item()
        r = row["peers"][name] = {
            "us": t.us,
            "spread_us": t.spread_us,
            "tflops": made.flop / t.us / 1e6,
            "ratio": t.us / own.us,
            "sustained_us": t.sustained_us,
            "sustained_ratio": t.sustained_us / own.sustained_us,
            "difference": error,
            "mask_ms": getattr(launches[name], "mask_ms", 0.0),
        }
        print(
            f"  {name:18s} {t.us:9.1f} us ±{t.spread_us:6.1f} {r['tflops']:5.0f} TF/s  x{r['ratio']:.3f}  "
            f"sustained x{r['sustained_ratio']:.3f}  differs {error:.1e}  mask {r['mask_ms']:.1f} ms",
            flush=True,
        )
    return row


def history_lines(
    made: Any,
    gpu: Any,
    row: dict[str, Any],
    versions: dict[str, Any],
    date: str,
    direction: str = "forward",
) -> list[history.Entry]:
    """What tuned/history.csv records of a comparison; ``made`` has a name, a problem and a length."""
    p, own = made.problem, row["peers"]["sparsegen"]
    problem = (
        f"B1 H{p.heads}:{p.kv_heads} D{p.head_dim}:{p.value_dim} {p.dtype} "
        f"{made.length}x{made.length}"
    )
    return [
        history.Entry(
            date=date,
            commit=versions["sparsegen"],
            gpu=gpu.name,
            driver=versions["driver"],
            torch=versions["torch"],
            triton=versions["triton"],
            pattern=made.name,
            problem=problem,
            config=f"{direction}: {row['config']}",
            median_us=round(own["us"], 3),
            spread_us=round(own["spread_us"], 3),
            baseline=name,
            baseline_us=round(peer["us"], 3),
        )
        for name, peer in row["peers"].items()
        if name != "sparsegen"
    ]
