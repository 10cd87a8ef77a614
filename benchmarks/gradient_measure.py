"""The measuring child of ``backward.py``: each case checked and timed on the GPU here, beside its peers, under a watchdog."""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from contender import history_lines
from gradient_contender import PARTS, Choice, GradientContender, launcher, useless
from gradient_judge import Samples, difference, repeats, small

from sparsegen.bench.case import Case
from sparsegen.codegen.backward import QUERIES
from sparsegen.codegen.backward_planner import STORED
from sparsegen.launch import Kernel
from sparsegen.paths import data_dir
from sparsegen.spec.gpu import current_gpu
from sparsegen.tune import history
from sparsegen.tune.measure import PUBLISHED
from sparsegen.tune.winners import current_versions

WATCH_S = 120  # of one step (a configuration, a peer's compiler, the final rounds) before the child is given up


class Journal:
    """What the measuring child is at, on disk, and the watchdog of that step."""

    def __init__(self, path: Path):
        self.path, self.state = path, json.loads(path.read_text())

    def at(self, case: str, step: str) -> None:
        self.state["at"] = f"{case}: {step}"
        self._write()
        faulthandler.dump_traceback_later(WATCH_S, exit=True)

    def skips(self, case: str, step: str) -> bool:
        return f"{case}: {step}" in self.state["skip"]

    def done(self, case: str) -> None:
        faulthandler.cancel_dump_traceback_later()
        self.state["done"].append(case)
        self.state["at"] = None
        self._write()

    def _write(self) -> None:
        self.path.write_text(json.dumps(self.state))


def measure(options: argparse.Namespace, folder: Path) -> None:
    """All cases of the plan in ``folder`` that are not done yet, each written when it is."""
    import torch

    from sparsegen.bench.clock import QueuedClock

    journal = Journal(folder / "journal.json")
    gpu, plan = pickle.loads((folder / "plan.pickle").read_bytes())  # our own parent's
    clock, out = QueuedClock(gpu.l2_bytes), Path(options.out)
    here = current_gpu()
    assert here == gpu, here
    results: dict[str, Any] = json.loads(out.read_text()) if journal.state["done"] else {}
    results |= {"versions": current_versions(), "gpu": gpu.name, "date": _now()}
    for made, (choices, forward) in plan:
        if made.name in journal.state["done"]:
            continue
        if journal.skips(made.name, "start") or journal.skips(made.name, "peers"):
            journal.done(made.name)
            continue
        journal.at(made.name, "start")
        results[made.name] = row = Measured(
            made, choices, forward, clock, journal, options.peers, options.workspace, options.idle
        ).row()
        out.write_text(json.dumps(results, indent=1))
        if options.keep and "sparsegen" in row["peers"]:
            facts = row, results["versions"], results["date"]
            lines = history_lines(made, gpu, *facts, direction="backward")
            history.append(data_dir("tuned") / "history.csv", lines)
        journal.done(made.name)
        torch.cuda.empty_cache()


class Measured:
    """One case on the GPU here."""

    def __init__(self, made: GradientContender, choices: list[Choice], forward: Any, clock: Any, journal: Journal, peers: str, workspace: int, idle_s: float):  # fmt: skip
        import torch

        self.made, self.clock, self.journal, self.which = made, clock, journal, peers
        self.workspace, self.turns = workspace, replace(PUBLISHED, idle_s=idle_s)
        self.choices = [c for c in choices if not self._left_out(c)]
        torch.manual_seed(0)
        self.forward = Kernel(forward.source, forward.config, {"fast": forward.directory})
        self.saved, self.call = made.saved(made.length, made.length, self.forward)
        share = made.cells / made.length**2
        print(f"== {made.name}: {share:.4f} of the cells are visible", flush=True)

    def row(self) -> dict[str, Any]:
        made, step = self.made, self._step
        samples = self._samples()
        base = next(c for c in self.choices if c.part == QUERIES)
        chosen: dict[str, list[Choice]] = {}
        for design, parts in PARTS.items():
            mine = {part: [c for c in self.choices if c.part == part] for part in parts}
            if not all(mine.values()):
                continue  # not asked for, or no kernel does it
            given = (self.saved, self.call), samples, self.clock, step, self.workspace
            # the other kernel of a pass with stored dS, until the best one of it is found
            best = {p: some[0] for p, some in mine.items()} if design == STORED else {}
            for part, some in mine.items():
                best[part] = made.fastest(part, some, (base, *best.values()), *given)
            chosen[design] = list(best.values())
            print(f"    chosen {'; '.join(map(str, chosen[design]))}", flush=True)
        kernels = {}
        for design, best_of in chosen.items():
            named = "sparsegen" if design == "split" else f"sparsegen {design}"
            used = {c.part: c for c in (base, *best_of)}.values()
            kernels[named] = made.kernel(*used, workspace=self.workspace)
        row: dict[str, Any] = {
            "config": "; ".join(map(str, next(iter(chosen.values())))),
            "configs": {design: "; ".join(map(str, best)) for design, best in chosen.items()},
            "cells": made.cells,
            "wrong": {},
            "repeats": {},
        }
        for named, kernel in kernels.items():
            step(f"all gradients, {named}")
            wrong = row["wrong"][named] = small(made, self.forward, kernel)
            if wrong:
                print(f"  WRONG on short inputs, {named}: {wrong}", flush=True)
            launch = launcher(kernel, self.saved, self.call, ("q", "k", "v"))
            row["repeats"][named] = repeats(launch)
            print(
                f"  {named}: the same to the bit a second time: {row['repeats'][named]}", flush=True
            )
        step("peers")
        peers = self._peers()
        step("final rounds")
        return row | {"peers": self._compare(kernels, peers)}

    def _left_out(self, c: Choice) -> bool:
        why = useless(c.job) or (
            "given up before" if self.journal.skips(self.made.name, str(c)) else ""
        )
        if why:
            print(f"    left out {c}: {why}", flush=True)
        return bool(why)

    def _step(self, step: str) -> None:
        self.journal.at(self.made.name, step)

    def _samples(self) -> Samples:
        """Rows of gradients in float64; OUT and LSE of the same rows are judged first, since they come from us too."""
        import torch

        from sparsegen.spec.reference import reference
        from sparsegen.tune.check import sampled_rows

        made, s = self.made, self.saved
        make = torch.Generator("cuda").manual_seed(1)
        rows, keys = (sampled_rows(made.length, make) for _ in range(2))
        out, lse = reference(made.pattern, s.q, s.k, s.v, rows=rows)
        off = difference(s.out[:, :, rows], out), difference(s.lse[:, :, rows], lse)
        assert off[0] < 1e-2 and off[1] < 1e-5, f"the forward kernel is wrong: {off}"
        return Samples(made.pattern, s, made.problem.head_dim**-0.5, rows, keys)

    def _peers(self) -> dict[str, Any]:
        import gradient_peers

        if self.which == "none":
            return {}
        made, s = self.made, self.saved
        given = (s.q, s.k, s.v, s.dout)
        modes = gradient_peers.MODES[self.which]
        found = dict(gradient_peers.flex(made.pattern, *given, modes=modes))
        if made.name.startswith("causal"):
            found |= gradient_peers.sdpa(*given)
        return found | gradient_peers.flash4(Case(made.pattern, made.problem), *given)

    def _compare(self, kernels: dict[str, Any], peers: dict[str, Any]) -> dict[str, Any]:
        from sparsegen.bench.interleaved import in_turns

        made = self.made
        given = self.saved, self.call, ("q", "k", "v")
        mine = {n: launcher(kernel, *given) for n, kernel in kernels.items()}
        base, *_ = mine
        own = mine[base]()
        first = (own.q, own.k, own.v)
        apart = {n: [difference(a, b) for a, b in zip(first, p())] for n, p in peers.items()}
        for name, launch in list(mine.items())[1:]:
            got = launch()
            apart[name] = [difference(a, b) for a, b in zip(first, (got.q, got.k, got.v))]
        peaks = {n: self._peak(self._whole(kernel, n)) for n, kernel in kernels.items()}
        peaks |= {n: self._peak(p.whole) for n, p in peers.items()}
        times = in_turns({**mine, **peers}, self.clock, self.turns)
        us = times[base].us
        rows = {}
        for name, t in times.items():
            rows[name] = r = {
                "us": t.us,
                "spread_us": t.spread_us,
                "tflops": made.flop / t.us / 1e6,
                "ratio": t.us / us,
                "sustained_us": t.sustained_us,
                "sustained_ratio": t.sustained_us / times[base].sustained_us,
                "differences": apart.get(name, []),
                "peak_bytes": peaks[name],
                "beyond_results": peaks[name] - self._results(),
            }
            worst = max(r["differences"], default=0.0)
            print(
                f"  {name:20s} {t.us:9.1f} us ±{t.spread_us:6.1f} {r['tflops']:5.0f} TF/s  x{r['ratio']:.3f}  "
                f"sustained x{r['sustained_ratio']:.3f}  differs {worst:.1e}  peak {r['peak_bytes'] / 2**20:.0f} MiB, "
                f"{r['beyond_results'] / 2**20:.0f} beyond results",
                flush=True,
            )
        return rows

    def _whole(self, kernel: Any, name: str) -> Callable[[], Any]:
        """Forward and backward as a training step calls them: through the operators and autograd."""
        import torch
        from gradient_peers import leaves_of

        from sparsegen.runtime import backward as operators

        s, made = self.saved, self.made
        engine = operators.Engine(self.forward, kernel, self.forward.source.tables)
        named = f"benchmark {made.name} {name}"
        operators.register(named, engine)
        leaves = leaves_of(s.q, s.k, s.v)

        def run() -> Any:
            out, _ = operators.attend(*leaves, engine=named, scale=made.problem.head_dim**-0.5)
            return torch.autograd.grad(out, leaves, s.dout)

        return run

    def _peak(self, run: Callable[[], Any]) -> int:
        """Most bytes that were held beyond what was before."""
        import torch

        run()  # what is kept from a first call on is not the call's
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def _results(self) -> int:
        """Bytes of OUT, LSE and the three gradients."""
        s = self.saved
        return sum(t.numel() * t.element_size() for t in (s.out, s.lse, s.q, s.k, s.v))


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
