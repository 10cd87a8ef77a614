"""Gradients of attention beside FlexAttention, SDPA and FlashAttention-4: interleaved, random data, medians.

    python benchmarks/backward.py [--cases NAME,NAME | causal | structured | all] [--peers all|tiles|quick|none]
                                  [--designs split,fused,stored] [--workspace BYTES] [--kernels all|portable|hopper] [--configs N]
                                  [--idle SECONDS] [--folder DIR] [--out FILE.json]
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
import json
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import turn
from beforehand import compile_many, compiles_only, gpu_here
from gradient_contender import (
    PARTS,
    Choice,
    GradientContender,
    facts_of,
    keep_facts,
    useless,
)
from gradient_measure import measure
from masks import STRUCTURED

from sparsegen.codegen.backward import QUERIES
from sparsegen.codegen.backward_planner import KEYS
from sparsegen.spec.gpu import find_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.tune.measure import PUBLISHED

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
WARMERS = 4  # processes that warm flex's compiler


def main() -> None:
    options = _options()
    names = [m for n in options.cases.split(",") if n for m in GROUPS.get(n, [n])]
    folder = Path(options.folder or tempfile.mkdtemp()).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    options.folder = str(folder)  # children are given it, too
    if options.child == "measure":
        return measure(options, folder)
    if options.child:
        return _warm(names, int(options.child), options.peers)
    gpu = find_gpu("h200") if options.dry else gpu_here() if compiles_only() else _gpu()
    start = time.time()
    cases = [GradientContender(n, *CASES[n]) for n in names]
    wanted = ("portable", "hopper") if options.kernels == "all" else (options.kernels,)
    parts = [part for design in options.designs.split(",") for part in PARTS[design]]
    plan = [(made, _plan(made, gpu, folder, wanted, parts, options.configs)) for made in cases]
    (folder / "plan.pickle").write_bytes(pickle.dumps((gpu, plan)))
    print(f"schedules chosen in {time.time() - start:.0f} s", flush=True)
    flex = options.peers != "none" and not (options.dry or compiles_only())
    jobs = [(made, c, f) for made, (c, f) in plan]
    if flex and turn.is_asked():  # flex's compiler runs what it makes
        _compile(jobs, False)
        turn.take()
    warmers = [_child(options, str(i)) for i in range(min(WARMERS, len(names)))] if flex else []
    _compile(jobs, options.dry)
    if options.dry:
        print("a dry run: compiled for an H200, nothing was run")
        return
    for warmer in warmers:
        warmer.wait()
    print(f"ready after {time.time() - start:.0f} s", flush=True)
    turn.take()
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
    parser.add_argument(
        "--idle", type=float, default=PUBLISHED.idle_s, help="seconds before each turn, to cool"
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
        gradient_peers.flex(pattern, *tensors, modes=modes)


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


if __name__ == "__main__":
    main()
