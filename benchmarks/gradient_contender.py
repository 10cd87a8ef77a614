"""One case of the benchmark of gradients: kernels in several configurations, checked, the fastest of each found."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradient_judge import difference

from sparsegen.bench.interleaved import in_turns
from sparsegen.codegen import (
    KernelSource,
    LaunchConfig,
    backward_fused,
    backward_stored,
    load_template,
    render,
)
from sparsegen.codegen import backward as codegen
from sparsegen.codegen.backward import KEYS, QUERIES, BackwardSource, render_backward
from sparsegen.codegen.backward_fused import FUSED, render_fused, uncovered
from sparsegen.codegen.backward_planner import STORED
from sparsegen.codegen.backward_stored import render_stored
from sparsegen.errors import SparsegenError
from sparsegen.launch import Call, Job, Kernel
from sparsegen.launch.backward import Saved
from sparsegen.launch.backward_kernel import BackwardKernel
from sparsegen.launch.tables import random_table
from sparsegen.schedule import build as schedules
from sparsegen.schedule.count import cells
from sparsegen.schedule.transpose import transpose
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from sparsegen.tune.gradient_check import full_of_nan
from sparsegen.tune.measure import Clock, Turns
from sparsegen.tune.space import Space

FINALISTS = Turns(rounds=3, idle_s=0.1)
SPILLED = 1024  # bytes; a configuration with more is not run
LIMIT = (
    1e-2  # relative L2 of bf16 gradients, beyond which one is wrong; right ones have 2e-3 to 3e-3
)
STORES = (f"{STORED}-{KEYS}", f"{STORED}-{QUERIES}")  # one pass has both
WHOLE = dict.fromkeys((FUSED, *STORES), ("q", "k", "v"))
GIVES = {QUERIES: ("q",), KEYS: ("k", "v"), **WHOLE}
PARTS = {"split": (QUERIES, KEYS), FUSED: (FUSED,), STORED: STORES}  # kernels of a design

Launch = Callable[..., Any]


@dataclass(frozen=True)
class Choice:
    """A configuration of one kernel on one of its schedules, and the folder of its binaries."""

    part: str
    label: str
    config: LaunchConfig
    job: Job

    def __str__(self) -> str:
        return f"{self.part} on {self.label}: {self.config}"


class GradientContender:
    """A mask at one problem: the texts of all kernels on their candidate schedules, inputs, launches."""

    def __init__(
        self,
        name: str,
        mask: Any,
        heads: tuple[int, int],
        dims: tuple[int, int],
        length: int,
        schedules_each: int = 2,
    ):
        self.name, self.length = name, length
        self.pattern = Pattern.from_dict({"name": name, "mask": mask})
        self.problem = p = Problem(
            head_dim=dims[0],
            value_dim=dims[1],
            heads=heads[0],
            kv_heads=heads[1],
            lengths=((length, length),),
        )
        found, turned = schedules.candidates(self.pattern, p), transpose(self.pattern, p)
        first = lambda some: [c.schedule for c in some if c.to_measure][:schedules_each]
        covered = [c for c in turned.candidates if uncovered(c.schedule, p) is None]
        self.forward = render(self.pattern, found[0].schedule, p)
        self.sources: dict[str, dict[str, BackwardSource]] = {
            QUERIES: {s.label: render_backward(self.pattern, s, p) for s in first(found)},
            KEYS: {
                s.label: render_backward(self.pattern, s, p, KEYS, turned.shift)
                for s in first(turned.candidates)
            },
            FUSED: {
                s.label: render_fused(self.pattern, s, p, turned.shift) for s in first(covered)
            },
            **dict(zip(STORES, self._stored(found, turned))),
        }
        self.cells = cells(found[0].schedule, length, length)
        # five products a visible cell: S, dQ and dK over head_dim, dP and dV over value_dim
        self.flop = 2 * (3 * dims[0] + 2 * dims[1]) * self.cells * heads[0]

    def _stored(self, found: Any, turned: Any) -> list[dict[str, BackwardSource]]:
        """Kernels with stored dS on the best schedules that both can run over; none where there is no such pair."""
        p, out = self.problem, []
        for candidates, part in ((turned.candidates, KEYS), (found, QUERIES)):
            shift = turned.shift if part == KEYS else 0
            covered = (
                c.schedule
                for c in candidates
                if backward_stored.uncovered(self.pattern, c.schedule, p, part) is None
            )
            best = next(covered, None)
            if best is None:
                return [{}, {}]
            out.append({best.label: render_stored(self.pattern, best, p, part, shift)})
        return out

    # ---- what is compiled ----

    def choices(
        self, gpu: Any, configs: Mapping[str, Sequence[dict[str, Any]]], folder: Path
    ) -> list[Choice]:
        """The default and ``configs`` of each kernel on its best schedule; on its others the first four of them."""
        out = []
        for part, sources in self.sources.items():
            for i, (label, source) in enumerate(sources.items()):
                found = self._configs(source, gpu, configs.get(part, ()))
                for config in found[: len(found) if i == 0 else 4]:
                    job = Job(source, config, "fast", gpu, place(folder, source, config, gpu))
                    out.append(Choice(part, label, config, job))
        return out

    def _configs(
        self, source: BackwardSource, gpu: Any, more: Sequence[dict[str, Any]]
    ) -> list[LaunchConfig]:
        """Those of a source that can work: the default, starts, then ``more``."""
        p, space = self.problem, Space(load_template(source.template).knobs)
        if source.design == FUSED:
            made = [backward_fused.default_config(p, gpu), *backward_fused.starts(p, gpu)]
            given = [c.as_dict() for c in made]
            unfit = lambda c: backward_fused.unfit(c, p, gpu)
        elif source.design == STORED:
            made = [backward_stored.default_config(p, gpu, source.part)]
            made += backward_stored.starts(p, gpu, source.part)
            given = [c.as_dict() for c in made]
            unfit = lambda c: backward_stored.unfit(c, p, gpu, source.part)
        else:
            default = codegen.default_config(p, gpu).as_dict()
            starts = [c.as_dict() for c in codegen.starts(p, gpu, source.outputs)]
            given = [default | c for c in ({}, *starts, *more)]
            unfit = lambda c: codegen.unfit(c, p, gpu, source.outputs)
        found = dict.fromkeys(map(space.canonical, given))
        special = source.hopper is not None
        return [c for c in found if not unfit(c) and (special or c["KERNEL"] == "portable")]

    def forward_job(self, gpu: Any, folder: Path) -> Job:
        """The forward kernel in its default configuration: it gives OUT and LSE, and its part of the peak memory."""
        config = load_template().default(self.problem, gpu)
        return Job(self.forward, config, "fast", gpu, place(folder, self.forward, config, gpu))

    # ---- what is run ----

    def saved(self, q_len: int, kv_len: int, forward: Kernel) -> tuple[Saved, Call]:
        """Random inputs, what the forward kernel makes of them, and a random gradient of its output."""
        import torch

        p = self.problem
        shapes = (
            (p.heads, q_len, p.head_dim),
            (p.kv_heads, kv_len, p.head_dim),
            (p.kv_heads, kv_len, p.value_dim),
            (p.heads, q_len, p.value_dim),
        )
        q, k, v, dout = (torch.randn(1, *s, device="cuda", dtype=torch.bfloat16) for s in shapes)
        out, lse = torch.empty_like(dout), torch.empty(q.shape[:3], device="cuda")
        call = self.call(q_len, kv_len)
        forward(q, k, v, out, lse, call)
        return Saved(q, k, v, out, lse, dout), call

    def call(self, q_len: int, kv_len: int) -> Call:
        """The run-time arguments of both directions."""
        first, drawn = kv_len - q_len, self.forward.tables
        tables = [random_table(t, first, q_len, kv_len, "cuda") for t in drawn]
        return Call(scale=self.problem.head_dim**-0.5, tables=tables)

    def kernel(self, *chosen: Choice, workspace: int) -> BackwardKernel:
        """Kernels in these configurations; that of the queries may be given for its first launch alone."""
        return BackwardKernel(
            {c.part: c.job.source for c in chosen},  # type: ignore[misc]
            {c.part: c.config for c in chosen},
            {c.part: {"fast": c.job.directory} for c in chosen},
            workspace,
        )

    def fastest(
        self, part: str, choices: Sequence[Choice], beside: Sequence[Choice], given: Any, samples: Any,
        clock: Clock, before: Callable[[str], None], workspace: int,
    ) -> Choice:  # fmt: skip
        """The fastest right configuration of one kernel: the best three of a quick look, timed in turns.

        ``beside``: kernels that a pass has besides: that of the queries, whose first launch prepares for all.  ``samples``: rows of gradients in
        float64.  ``before`` is told each configuration ahead of its first launch.
        """
        saved, call = given
        right: dict[Choice, tuple[float, Launch]] = {}
        first: dict[str, Any] = {}
        for c in choices:
            before(str(c))
            kernels = {x.part: x for x in (*beside, c)}.values()
            kernel = self.kernel(*kernels, workspace=workspace)
            launch = launcher(kernel, saved, call, GIVES[part])
            try:
                made = launch(full_of_nan)
            except SparsegenError as error:  # said, and the next one's turn
                print(f"    FAILED {c}: {type(error).__name__} {error}", flush=True)
                continue
            got = {name: getattr(made, name) for name in GIVES[part]}
            first = first or got
            wrong = max(samples.difference(n, t) for n, t in got.items())
            apart = max(difference(t, first[n]) for n, t in got.items())
            if not (wrong < LIMIT and apart < LIMIT):
                said = f"{wrong:.1e} from float64, {apart:.1e} from the first"
                print(f"    WRONG {c}: {said}", flush=True)
                continue
            us = statistics.median(clock.times_us(launch, 2, 12))
            facts = facts_of(c.job)
            assert facts is not None
            said = f"{facts['registers']} registers, spills {facts['spill_bytes']}"
            print(f"    {us:8.1f} us  {said}  {c}", flush=True)
            right[c] = us, launch
        assert right, f"{self.name}: no configuration of {part} works"
        best = sorted(right, key=lambda c: right[c][0])[:3]
        final = in_turns({str(c): right[c][1] for c in best}, clock, FINALISTS, sustained=False)
        return min(best, key=lambda c: final[str(c)].us)


def launcher(kernel: BackwardKernel, saved: Saved, call: Call, wanted: Sequence[str]) -> Launch:
    """A call of the fast variant on these tensors that returns the gradients; ``make`` as of ``BackwardKernel``."""
    return lambda make=None: kernel(saved, call, wanted, "fast", make)


# ---- binaries on disk, found again by what they are made from ----


def place(folder: Path, source: KernelSource, config: LaunchConfig, gpu: Any) -> Path:
    """The folder of a binary: another run with the same ``folder`` compiles it no more."""
    import triton

    named = f"{source.digest} {config} {gpu.name} {triton.__version__}"
    return folder / "kernels" / hashlib.sha256(named.encode()).hexdigest()[:20] / "fast"


def facts_of(job: Job) -> dict[str, Any] | None:
    """What the compiler said of a job, None if it was not compiled yet."""
    path = job.directory.with_name("facts.json")
    return json.loads(path.read_text()) if path.exists() else None


def keep_facts(outcome: Any) -> None:
    """Beside a binary: registers, spills and shared memory, or the compiler's complaint."""
    b, names = outcome.binary, ("registers", "spill_bytes", "shared_bytes")
    facts = {n: getattr(b, n) for n in names} if b is not None else dict.fromkeys(names)
    path = outcome.job.directory.with_name("facts.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts | {"error": outcome.error, "seconds": outcome.seconds}))


def useless(job: Job) -> str:
    """Why a compiled configuration is not run, or ""."""
    facts = facts_of(job)
    assert facts is not None, job.directory
    if facts["error"]:
        return f"does not compile: {facts['error']}"
    if facts["shared_bytes"] > job.gpu.shared_bytes:
        return f"{facts['shared_bytes']} bytes of shared memory"
    return f"spills {facts['spill_bytes']} bytes" if facts["spill_bytes"] > SPILLED else ""
