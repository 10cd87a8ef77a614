"""Cold start and host time of a loaded artifact beside compiled FlexAttention with warm Inductor caches.

    python benchmarks/cold_start.py [--runs 7] [--length 2048] [--out FILE.json]

Cold start: fresh processes in turns, from after `import torch`, the start of CUDA and the making of q, k, v, to the first
synchronised result.  One run of each kind fills its caches first (Inductor's, Triton's, Python's byte code; the artifact), in
one folder of this benchmark.  `total` is the whole process.  Host time: one process, calls in turns on tiny inputs, nothing
waited for.  Both kinds give the same result, which is checked.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HEADS, HEAD_DIM = 8, 128
TINY = 128  # queries and keys where the host's time is measured
HOST_ROUNDS, HOST_CALLS = 9, 200
KINDS = ("sparsegen", "flex")


def inputs(length: int) -> list[Any]:
    """q, k, v [1, HEADS, length, HEAD_DIM] in bfloat16, the same in every process."""
    import torch

    g = torch.Generator("cuda").manual_seed(0)
    shape = (1, HEADS, length, HEAD_DIM)
    return [torch.randn(shape, generator=g, device="cuda", dtype=torch.bfloat16) for _ in range(3)]


def loaded() -> Any:
    """The stored artifact of plain causal attention; builds nothing."""
    import sparsegen

    return sparsegen.load("causal", sparsegen.Problem(head_dim=HEAD_DIM, heads=HEADS))


def compiled_flex(length: int) -> Any:
    """The same in flex: its block mask, and the compiled function."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device="cuda")
    attend = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: attend(q, k, v, block_mask=mask)


def child(kind: str, length: int) -> dict[str, Any]:
    """One cold start, in this process; seconds."""
    import torch

    torch.zeros(1, device="cuda")
    q, k, v = inputs(length)
    torch.cuda.synchronize()
    start = time.perf_counter()
    attend = loaded() if kind == "sparsegen" else compiled_flex(length)
    ready = time.perf_counter()
    out = attend(q, k, v)
    torch.cuda.synchronize()
    done = time.perf_counter()
    found = {"seconds": done - start, "prepare": ready - start, "first_call": done - ready}
    found["sum"] = out.float().abs().sum().item()
    if kind == "sparsegen":
        found["triton_imported"] = "triton" in sys.modules
    else:
        # a hit of the outer cache asks the inner one no more
        counters = torch._dynamo.utils.counters
        hits = {"aot_autograd": "autograd_cache_hit", "inductor": "fxgraph_cache_hit"}
        found["cache_hits"] = {name: counters[of][name] for of, name in hits.items()}
    return found


def cold_starts(folder: Path, runs: int, length: int) -> dict[str, Any]:
    """Runs of both kinds in turns, the first of each left out."""
    env = environment(folder)
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for _ in range(runs + 1):
        for kind in KINDS:
            start = time.perf_counter()
            words = [sys.executable, __file__, "--child", kind, "--length", str(length)]
            done = subprocess.run(words, env=env, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr)
            one = json.loads(done.stdout.splitlines()[-1])
            found[kind].append(one | {"total": time.perf_counter() - start})
    sums = [one["sum"] for kind in KINDS for one in found[kind]]
    assert max(sums) - min(sums) < 1e-3 * max(sums), f"the two kinds give other results: {sums}"
    out: dict[str, Any] = {
        kind: {
            name: statistics.median(one[name] for one in found[kind][1:])
            for name in ("seconds", "prepare", "first_call", "total")
        }
        for kind in KINDS
    }
    out["ratio"] = out["sparsegen"]["seconds"] / out["flex"]["seconds"]
    out["triton_imported"] = any(one["triton_imported"] for one in found["sparsegen"])
    out["flex_cache_hits"] = [one["cache_hits"] for one in found["flex"]]
    out["first_runs"] = {kind: found[kind][0]["seconds"] for kind in KINDS}
    return out


def environment(folder: Path) -> dict[str, str]:
    """Caches of everything in one folder, byte code too."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    places = {
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "TRITON_CACHE_DIR": "triton",
        "SPARSEGEN_CACHE": "sparsegen",
        "PYTHONPYCACHEPREFIX": "bytecode",
    }
    env |= {name: str(folder / place) for name, place in places.items()}
    return env | {"TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}


def host_times() -> dict[str, float]:
    """Median host microseconds of one call on tiny inputs."""
    import torch

    q, k, v = inputs(TINY)
    launches = {"sparsegen": loaded(), "flex": compiled_flex(TINY)}
    times: dict[str, list[float]] = {name: [] for name in launches}
    for launch in launches.values():
        for _ in range(50):
            launch(q, k, v)
    for _ in range(HOST_ROUNDS):
        for name, launch in launches.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(HOST_CALLS):
                launch(q, k, v)
            times[name].append((time.perf_counter() - start) / HOST_CALLS * 1e6)
    torch.cuda.synchronize()
    found = {name: statistics.median(t) for name, t in times.items()}
    return found | {"ratio": found["sparsegen"] / found["flex"]}


def warm(folder: Path) -> None:
    """Build the artifact for the GPU here, in a process of its own."""
    code = (
        "import sparsegen; "
        f"sparsegen.compile('causal', sparsegen.Problem(head_dim={HEAD_DIM}, heads={HEADS}), tune='off')"
    )
    subprocess.run([sys.executable, "-c", code], env=environment(folder), check=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--out", default="cold_start.json")
    parser.add_argument("--child", choices=[*KINDS, "host"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        one = host_times() if options.child == "host" else child(options.child, options.length)
        print(json.dumps(one))
        return
    with tempfile.TemporaryDirectory(prefix="sparsegen-cold-") as name:
        folder = Path(name)
        warm(folder)
        words = [sys.executable, __file__, "--child", "host"]
        done = subprocess.run(
            words, env=environment(folder), check=True, stdout=subprocess.PIPE, text=True
        )
        results = {
            "host_us": json.loads(done.stdout.splitlines()[-1]),
            "cold_start_s": cold_starts(folder, options.runs, options.length),
        }
    print(json.dumps(results, indent=1))
    Path(options.out).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
