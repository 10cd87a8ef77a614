"""The warp-specialised kernels of patterns, run again and again: right, the same to the bit, and never stuck.

    python benchmarks/barriers.py [PATTERN ...] [--repeats 100] [--stall 60] [--lengths 700x933,1x300]
    compute-sanitizer --tool racecheck --target-processes all --kernel-name kernel_substring=attend \\
        python benchmarks/barriers.py causal --repeats 1 --stall 300 --lengths 300x421

Every pattern (default: all shipped ones that have such a kernel) is compiled in a few configurations.  A child process then
runs each on ragged lengths, q_len != kv_len, outputs filled with NaN first: the first result is compared with the
float64 reference, the others with the first, bit by bit.  A kernel that does not end within ``--stall`` seconds is
killed with its process and named; the child starts again behind it.

The longest of ``LENGTHS`` has more query tiles than a GPU has multiprocessors, so that persistent programs go on to a
second one.  The race checker makes a kernel 10 to 100 times slower: give it few queries.  By FlashAttention's notes on
it (AI/RACECHECK_TMA_HAZARD.md) it knows nothing of what tensor descriptors write, so it judges the queries' place, through which
outputs leave.
"""

from __future__ import annotations

import argparse
import math
import pickle
import re
import selectors
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import turn
from beforehand import compile_many, gpu_here

from sparsegen.codegen import LaunchConfig, load_template, render
from sparsegen.errors import UnsupportedError
from sparsegen.launch import Job
from sparsegen.paths import data_dir
from sparsegen.schedule.build import candidates
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem

LARGE = {"KERNEL": "hopper", "BLOCK_M": 128, "BLOCK_N": 128, "STAGES": 2}
CONFIGS: tuple[dict[str, Any], ...] = (
    LARGE,
    LARGE | {"BLOCK_N": 64, "STAGES": 3, "PERSISTENT": True},
    LARGE | {"LATE_VALUES": True, "PERSISTENT": True},
    LARGE | {"BLOCK_M": 64, "BLOCK_N": 64, "GROUP_HEADS": 1},
)
LENGTHS = ((700, 933), (1, 300), (513, 513), (3000, 3333))


def lengths_of(text: str) -> tuple[tuple[int, int], ...]:
    """Pairs of queries and keys: 700x933,1x300."""
    pairs = tuple(re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", pair.strip()) for pair in text.split(","))
    if not all(pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of pairs like 700x933,1x300")
    return tuple((int(m[1]), int(m[2])) for m in pairs if m)


def jobs_of(pattern: Pattern, folder: Path) -> list[tuple[Pattern, Problem, Job]]:
    """Every schedule of the pattern that has such a kernel, in every configuration that fits."""
    gpu = gpu_here()
    assert gpu is not None, "a GPU is needed"
    base = pattern.problem or Problem()
    problem = Problem(
        head_dim=base.head_dim, value_dim=base.value_dim, heads=4, kv_heads=2, dtype=base.dtype
    )
    template, out = load_template(), []
    if pattern.runtime_names:
        return []
    try:
        found = [c for c in candidates(pattern, problem) if c.to_measure]
    except UnsupportedError as error:
        print(f"{pattern.name}: {error}", flush=True)
        return []
    for i, candidate in enumerate(found):
        source = render(pattern, candidate.schedule, problem)
        if source.hopper is None:
            print(f"{pattern.name} {candidate.schedule.label}: no such kernel", flush=True)
            continue
        for j, knobs in enumerate(CONFIGS):
            config = LaunchConfig.of(template.default(problem, gpu).as_dict() | knobs)
            if template.invalid(config, problem, gpu) is None:
                place = folder / pattern.name / f"{i}-{j}" / "fast"
                out.append((pattern, problem, Job(source, config, "fast", gpu, place)))
    return out


def run(
    pattern: Pattern,
    problem: Problem,
    job: Job,
    repeats: int,
    lengths: tuple[tuple[int, int], ...],
) -> str:
    """What is wrong with one kernel; "" if nothing is."""
    import torch

    from sparsegen.launch import Call, Kernel
    from sparsegen.launch.tables import random_table
    from sparsegen.tune.check import check, fresh_inputs

    kernel = Kernel(job.source, job.config, {"fast": job.directory})
    generator = torch.Generator("cuda").manual_seed(0)
    scale = problem.head_dim**-0.5 if pattern.scale is None else pattern.scale
    relative = int(pattern.align == "bottom_right")
    whole = math.lcm(*job.source.periods)
    for q_len, kv_len in lengths:
        # whole periods, as "fast" takes them
        q_len, kv_len = (-(-n // whole) * whole for n in (q_len, kv_len))
        case = fresh_inputs(pattern, problem, q_len, kv_len, "cuda", generator, batch=2)
        first = kv_len - q_len if relative else 0
        tables = [random_table(t, first, q_len, kv_len, "cuda") for t in job.source.tables]
        call = Call(relative=relative, scale=scale, tables=tables, **case.keywords)

        def attend(q: Any, k: Any, v: Any, out: Any, lse: Any, _: Any, call: Call = call) -> None:
            kernel(q, k, v, out, lse, call, "fast")

        if wrong := check(attend, case, pattern):
            return wrong
        first = None
        for i in range(repeats):
            out = torch.full((*case.q.shape[:3], case.v.shape[3]), math.nan, device="cuda")
            out = out.to(case.q.dtype)
            lse = torch.full(case.q.shape[:3], math.nan, device="cuda")
            attend(case.q, case.k, case.v, out, lse, None)
            if first is None:
                first = out, lse
            elif not (torch.equal(out, first[0]) and torch.equal(lse, first[1])):
                return f"{q_len} queries, {kv_len} keys: run {i} differs from the first"
    return ""


def child(folder: Path, start: int, repeats: int) -> None:
    """Run the kernels from number ``start`` on, one line before and one after each."""
    work, lengths = pickle.loads((folder / "work").read_bytes())  # written by our own parent
    for i, (pattern, problem, job) in enumerate(work[start:], start):
        print(f"begin {i}", flush=True)
        print(f"end {i} {run(pattern, problem, job, repeats, lengths)}", flush=True)


def watched(folder: Path, work: list[Any], repeats: int, stall_s: float) -> list[str]:
    """Run all work in children; what is wrong, one sentence a kernel."""
    wrong, at = [], 0
    while at < len(work):
        command = [sys.executable, __file__, "--child", str(folder), "--start", str(at)]
        process = subprocess.Popen(
            [*command, "--repeats", str(repeats)], stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert process.stdout is not None
        waiting = selectors.DefaultSelector()
        waiting.register(process.stdout, selectors.EVENT_READ)
        verdict = "its process died"
        while True:
            if not waiting.select(stall_s):
                verdict = f"no end in {stall_s:.0f} s"
                break
            line = process.stdout.readline()
            if not line:
                break
            word, _, rest = line.partition(" ")
            if word == "end":
                number, _, said = rest.partition(" ")
                if said.strip():
                    wrong.append(_named(work[int(number)], said.strip()))
                at = int(number) + 1
        process.kill()
        process.wait()
        if at < len(work):
            wrong.append(_named(work[at], verdict))
            at += 1
    return wrong


def _named(work: Any, what: str) -> str:
    pattern, _, job = work
    line = f"{pattern.name}: {job.config}: {what}"
    print(f"WRONG {line}", flush=True)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("patterns", nargs="*")
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--stall", type=float, default=60.0)
    parser.add_argument("--lengths", type=lengths_of, default=LENGTHS, help="of queries and keys")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--start", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(Path(options.child), options.start, options.repeats)
    names = options.patterns or sorted(p.stem for p in data_dir("patterns").glob("*.yaml"))
    folder = Path(tempfile.mkdtemp())
    work = [w for name in names for w in jobs_of(Pattern.from_yaml(name), folder)]
    outcomes = compile_many([job for _, _, job in work])
    fine = []
    for w, outcome in zip(work, outcomes):
        if outcome.binary is None:
            print(f"does not compile: {w[0].name} {w[2].config}: {outcome.error}", flush=True)
        elif outcome.binary.shared_bytes > w[2].gpu.shared_bytes:
            print(f"does not fit: {w[0].name} {w[2].config}", flush=True)
        else:
            fine.append(w)
    (folder / "work").write_bytes(pickle.dumps((fine, options.lengths)))
    turn.take()
    wrong = watched(folder, fine, options.repeats, options.stall)
    print(f"{len(fine)} kernels, {options.repeats} runs each: {len(wrong)} wrong", flush=True)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
