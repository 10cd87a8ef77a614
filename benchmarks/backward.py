"""Gradients of attention beside FlexAttention, SDPA and FlashAttention-4: interleaved, random data, medians.

    python benchmarks/backward.py [--cases NAME,NAME | causal | structured | all] [--peers all|tiles|quick|none]
                                  [--designs split,fused,stored] [--workspace BYTES] [--kernels all|portable|hopper] [--configs N]
                                  [--folder DIR] [--out FILE.json]
                                  [--keep] [--dry]

For each case the gradient kernels of the designs (docs/backward.md) are compiled on their candidate schedules with a short list of configurations
(``CONFIGS``), each alone is checked (room full of NaN before it; sampled rows in float64; the first configuration's
gradients) and timed, and the fastest of each design is measured beside the peers: 0.7 s idle, 6 ms warm-up, 30 ms measured, five
rounds in turns, ratio of medians, the L2 cache flushed before every launch and the host's time left out; then each back to
back at the power limit.  Times are of the backward pass alone, with all that it launches; peak memory is of forward and
backward together.  Operations are counted as five products a visible cell, whatever a kernel really does.

Everything is compiled first, on all cores, and flex's compiler is warmed beside it in processes of its own.  Measuring runs
in a child process with a watchdog: one that hangs or takes the GPU along is started again without the configuration
that it was at.  Results are written after every case.  ``--folder`` keeps binaries: a second run compiles nothing, nor does
one on another machine to which the folder was taken, with the same Triton.  ``--dry`` compiles for an H200, tells registers
and spills, and needs no GPU.  ``--keep`` adds lines to tuned/history.csv.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import json
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contender import history_lines
from gradient_contender import (
    PARTS,
    Choice,
    GradientContender,
    Samples,
    difference,
    facts_of,
    keep_facts,
    launcher,
    repeats,
    small,
    useless,
)
from masks import STRUCTURED

from sparsegen.bench.case import Case
from sparsegen.codegen.backward import QUERIES
from sparsegen.codegen.backward_planner import KEYS, STORED
from sparsegen.launch import Kernel, compile_many
from sparsegen.launch.module import write_modules
from sparsegen.paths import data_dir
from sparsegen.spec.gpu import current_gpu, find_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.tune import history
from sparsegen.tune.winners import current_versions

EIGHT, WIDE = (8, 8), (128, 128)
CASES: dict[str, tuple[Any, tuple[int, int], tuple[int, int], int]] = {
    # name: mask, (heads, kv_heads), (head_dim, value_dim), length
    "causal_16k": ("causal", (16, 16), WIDE, 16384),
    "causal_32k": ("causal", EIGHT, WIDE, 32768),
    "window_4096_64k": ({"window": {"size": 4096}}, EIGHT, WIDE, 65536),
    "causal_d64_16k": ("causal", (16, 16), (64, 64), 16384),
    "causal_d192_128_16k": ("causal", (16, 16), (192, 128), 16384),
    **{
        f"{name}_32k": (STRUCTURED[name], EIGHT, WIDE, 32768)
        for name in (
            *("chunks_8192", "prefix_2048", "window_1024_sinks_4", "longformer", "dilated"),
            *("fixed", "strided", "axial"),
        )
    },
}
GROUPS = {
    "all": list(CASES),
    "causal": [n for n in CASES if n.startswith(("causal", "window_4096"))],
    "structured": [n for n in CASES if not n.startswith(("causal", "window_4096"))],
}
SMALL = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4}
LARGE = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8}
# What plain Triton was fastest with in an experiment of ours (causal and window, head_dim 128), and steps around it.
CONFIGS: dict[str, list[dict[str, Any]]] = {
    QUERIES: [
        SMALL | {"STAGES": 2},
        LARGE | {"BLOCK_N": 128, "STAGES": 2},
        LARGE | {"STAGES": 3},
        SMALL | {"STAGES": 3},
        SMALL | {"BLOCK_N": 32, "STAGES": 3},
        SMALL | {"STAGES": 2, "GROUP_HEADS": 1},
        LARGE | {"STAGES": 3, "GROUP_HEADS": 1},
    ],
    KEYS: [
        LARGE | {"STAGES": 3},
        SMALL | {"STAGES": 2},
        LARGE | {"BLOCK_N": 32, "STAGES": 3},
        SMALL | {"BLOCK_N": 32, "STAGES": 3},
        LARGE | {"STAGES": 2, "GROUP_HEADS": 1},
        SMALL | {"STAGES": 2, "GROUP_HEADS": 1},
        SMALL | {"BLOCK_N": 32, "num_warps": 8, "STAGES": 3},
    ],
}
WATCH_S = 120  # of one step (a configuration, a peer's compiler, the final rounds) before the child is given up
WARMERS = 4  # processes that warm flex's compiler


def main() -> None:
    options = _options()
    names = [m for n in options.cases.split(",") if n for m in GROUPS.get(n, [n])]
    folder = Path(options.folder or tempfile.mkdtemp()).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    options.folder = str(folder)  # children are given it, too
    if options.child == "measure":
        return _measure(options, folder)
    if options.child:
        return _warm(names, int(options.child), options.peers)
    gpu = find_gpu("h200") if options.dry else _gpu()
    start = time.time()
    cases = [GradientContender(n, *CASES[n]) for n in names]
    wanted = ("portable", "hopper") if options.kernels == "all" else (options.kernels,)
    parts = [part for design in options.designs.split(",") for part in PARTS[design]]
    plan = [(made, _plan(made, gpu, folder, wanted, parts, options.configs)) for made in cases]
    (folder / "plan.pickle").write_bytes(pickle.dumps((gpu, plan)))
    print(f"schedules chosen in {time.time() - start:.0f} s", flush=True)
    flex = not options.dry and options.peers != "none"
    warmers = [_child(options, str(i)) for i in range(min(WARMERS, len(names)))] if flex else []
    _compile([(made, c, f) for made, (c, f) in plan], options.dry)
    if options.dry:
        print("a dry run: compiled for an H200, nothing was run")
        return
    for warmer in warmers:
        warmer.wait()
    print(f"ready after {time.time() - start:.0f} s", flush=True)
    _supervise(options, folder)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default="all")
    parser.add_argument(
        "--peers",
        choices=["all", "tiles", "quick", "none"],
        default="quick",
        help="flex as it is (quick), also with tiles of 64 x 64 (tiles), also max-autotune (all)",
    )
    parser.add_argument("--kernels", choices=["all", "portable", "hopper"], default="all")
    parser.add_argument("--designs", default="split,fused,stored", help="some of them")
    parser.add_argument(
        "--workspace", type=int, default=10 << 30, help="bytes of stored dS; 10 GiB if not given"
    )
    parser.add_argument(
        "--configs", type=int, default=99, help="of each text on a schedule, at most"
    )
    parser.add_argument("--folder", help="where binaries are kept; default: a temporary one")
    parser.add_argument("--out", default="backward.json")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def _gpu() -> Any:
    """The GPU here, asked in a process of its own: this one must not hold it."""
    code = "import pickle, sys; from sparsegen.spec.gpu import current_gpu; sys.stdout.buffer.write(pickle.dumps(current_gpu()))"
    found = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout
    gpu = pickle.loads(found)  # our own child's
    assert gpu is not None, "a GPU is needed; --dry needs none"
    return gpu


def _plan(
    made: GradientContender, gpu: Any, folder: Path, wanted: Any, parts: Any, most: int
) -> Any:
    """Configurations of the kernels, at most so many on each schedule, and the job of the forward kernel.

    The default of the queries stays whatever is asked for: its first launch prepares for all others.
    """
    count: dict[Any, int] = {}
    chosen: list[Choice] = []
    for c in made.choices(gpu, CONFIGS, folder):
        group = c.part, c.label, c.config["KERNEL"]
        count[group] = number = count.get(group, 0) + 1
        base = number == 1 and c.part == QUERIES and not any(x.part == QUERIES for x in chosen)
        if base or (c.part in parts and c.config["KERNEL"] in wanted and number <= most):
            chosen.append(c)
    return chosen, made.forward_job(gpu, folder)


def _compile(wanted: Any, tell: bool) -> None:
    start = time.time()
    jobs = {j.directory: j for _, choices, f in wanted for j in (f, *(c.job for c in choices))}
    new = [j for j in jobs.values() if facts_of(j) is None]
    compile_many(new, done=keep_facts)
    print(f"compiled {len(new)} of {len(jobs)} kernels in {time.time() - start:.0f} s", flush=True)
    for made, choices, _ in wanted if tell else ():
        print(f"== {made.name}")
        for c in choices:
            facts = facts_of(c.job)
            print(
                f"    {facts['registers']} registers, spills {facts['spill_bytes']}  {c} {useless(c.job)}"
            )


def _child(options: argparse.Namespace, what: str) -> subprocess.Popen[bytes]:
    given = [sys.executable, __file__, *sys.argv[1:], "--folder", options.folder, "--child", what]
    return subprocess.Popen(given, stderr=subprocess.DEVNULL if what.isdigit() else None)


def _warm(names: list[str], which: int, peers: str) -> None:
    """Compile flex for some of the cases: Inductor keeps what it made on disk, and the measuring child finds it there."""
    import gradient_peers
    import torch

    for name in names[which::WARMERS]:
        mask, heads, dims, length = CASES[name]
        pattern = Pattern.from_dict({"name": name, "mask": mask})
        shapes = [
            (heads[0], dims[0]),
            (heads[1], dims[0]),
            (heads[1], dims[1]),
            (heads[0], dims[1]),
        ]
        tensors = [
            torch.randn(1, h, length, d, device="cuda", dtype=torch.bfloat16) for h, d in shapes
        ]
        modes = gradient_peers.MODES[
            "quick" if peers == "all" else peers
        ]  # a search is no use alone
        gradient_peers.flex(pattern, *tensors, modes=modes, mask_time=False)


def _supervise(options: argparse.Namespace, folder: Path) -> None:
    """Run the measuring child until all cases are done; one that dies is started again without what it was at."""
    journal = folder / "journal.json"
    journal.write_text(json.dumps({"done": [], "skip": [], "at": None}))
    while True:
        code = _child(options, "measure").wait()
        if code == 0:
            return
        state = json.loads(journal.read_text())
        print(f"GAVE UP {state['at']}: the process ended with {code}", flush=True)
        if state["at"] is None or state["at"] in state["skip"]:
            return
        state["skip"].append(state["at"])
        journal.write_text(json.dumps(state))


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


def _measure(options: argparse.Namespace, folder: Path) -> None:
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
            made, choices, forward, clock, journal, options.peers, options.workspace
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

    def __init__(self, made: GradientContender, choices: list[Choice], forward: Any, clock: Any, journal: Journal, peers: str, workspace: int):  # fmt: skip
        import torch

        self.made, self.clock, self.journal, self.which = made, clock, journal, peers
        self.workspace = workspace
        self.choices = [c for c in choices if not self._left_out(c)]
        torch.manual_seed(0)
        module = write_modules(forward.directory.parent, forward.source)
        self.forward = Kernel(forward.source, forward.config, module, {"fast": forward.directory})
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
        times = in_turns({**mine, **peers}, self.clock)
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
                "mask_ms": getattr(peers.get(name), "mask_ms", 0.0),
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


if __name__ == "__main__":
    main()
