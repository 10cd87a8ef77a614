"""Record the times of a few good configurations on many problems, for `sparsegen tune --cover`.

    python benchmarks/record_cover.py [--out benchmarks/records/cover.jsonl] [--seconds 240]
    python benchmarks/record_cover.py --kernel queries      # gradients; and --kernel keys: a recording and a rule each
    sparsegen tune --cover benchmarks/records/cover.jsonl --keep

Every shipped pattern that depends on positions only, at lengths, heads and batches around its own problem; each pair is
checked against the float64 reference once and timed in turns with the template's default.  The first problem of every
pattern comes first, and a problem that was begun is finished, so a recording that is out of time gives a rule of what
is in it.  Stops and goes on like `record_grid.py`, which explains --compile-only and --dry too.  What a problem cannot
run is written down as that.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from prepared import compile_preparing, prepared
from recording_binaries import Plan
from recording_run import options, run
from synthetic_grid import SyntheticGauge

from sparsegen.errors import UnsupportedError
from sparsegen.spec.gpu import Gpu, find_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from sparsegen.spec.shipped import shipped_patterns
from sparsegen.tune.features import features_of
from sparsegen.tune.gradient_target import GradientTarget
from sparsegen.tune.recording import described
from sparsegen.tune.space import Space
from sparsegen.tune.target import KernelTarget

HOPPER = {"KERNEL": "hopper", "BLOCK_M": 128, "BLOCK_N": 128, "GROUP_HEADS": 1}
HALF = {"KERNEL": "hopper", "BLOCK_M": 64, "BLOCK_N": 64, "STAGES": 2, "GROUP_HEADS": 1}
SMALL = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "STAGES": 3, "TMA": True}
LARGE = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "STAGES": 3, "TMA": True}
CANDIDATES: tuple[dict[str, Any], ...] = (
    {},  # the template's default, whatever it is for the problem
    HOPPER | {"STAGES": 3},
    HOPPER | {"STAGES": 2},
    HOPPER | {"STAGES": 2, "GROUP_HEADS": 8},
    HOPPER | {"STAGES": 2, "PERSISTENT": True},
    HOPPER | {"BLOCK_N": 64, "STAGES": 3},
    HOPPER | {"BLOCK_N": 64, "STAGES": 2, "GROUP_HEADS": 8},  # the only large one for head_dim 256
    HOPPER | {"BLOCK_N": 64, "STAGES": 2, "PERSISTENT": True},
    HALF,
    HALF | {"PERSISTENT": True},
    SMALL | {"GROUP_HEADS": 1},
    SMALL | {"PERSISTENT": True},
    SMALL | {"BLOCK_N": 32},
    SMALL | {"TMA": False, "STAGES": 2},
    LARGE,
    LARGE | {"GROUP_HEADS": 1, "STAGES": 2},
)
WARPS = {"KERNEL": "hopper", "BLOCK_M": 128, "BLOCK_N": 64, "STAGES": 3}
PLAIN = {"KERNEL": "portable", "BLOCK_M": 64, "num_warps": 4}
GRADIENTS: tuple[
    dict[str, Any], ...
] = (  # of both kernels; what one of them cannot have costs it nothing
    {},
    WARPS,
    WARPS | {"TEST_ALL": True},
    WARPS | {"BLOCK_N": 128, "STAGES": 2},
    WARPS | {"BLOCK_N": 32},
    WARPS | {"BLOCK_M": 64, "STAGES": 2},
    PLAIN | {"BLOCK_N": 64, "STAGES": 2},
    PLAIN | {"BLOCK_N": 32, "STAGES": 3},
)
FORWARD, QUERIES, KEYS = KINDS = ("forward", "queries", "keys")
FINISH_S = 20.0  # after --seconds, for the problem that was begun
LONGEST = 33_000  # tokens of a recorded problem: longer ones tell the same and take long


def problems_of(stated: Problem) -> Iterator[Problem]:
    """The pattern's own problem (no longer than ``LONGEST``), half of it with fewer heads, two sequences of a quarter; then
    half of it, all of it with fewer heads, and four sequences of an eighth: what is best may change on the way.
    """
    q_len, kv_len = stated.lengths[-1]
    while max(q_len, kv_len) > LONGEST:
        q_len, kv_len = q_len // 2, kv_len // 2
    heads, kv_heads = stated.heads, stated.kv_heads
    fewer = (heads // 2, max(kv_heads // 2, 1)) if heads % 2 == 0 else (heads, kv_heads)
    whole = heads, kv_heads
    made = [
        (*whole, 1, 1),
        (*fewer, 1, 2),
        (*whole, 2, 4),
        (*whole, 1, 2),
        (*fewer, 1, 1),
        (*whole, 4, 8),
    ]
    for h, hkv, batch, part in made:
        if h % hkv == 0:
            yield Problem(
                head_dim=stated.head_dim,
                value_dim=stated.value_dim,
                heads=h,
                kv_heads=hkv,
                batch=batch,
                dtype=stated.dtype,
                lengths=((q_len // part, kv_len // part),),
            )


def plan_of(pattern: Pattern, problem: Problem, gpu: Gpu, kernel: str = FORWARD) -> Plan:
    """One problem with every candidate that can run, on the schedule that is predicted best.

    That schedule alone: the rule is for problems where none was measured.
    """
    asked = pattern, problem, gpu
    target: KernelTarget
    if kernel == FORWARD:
        target = KernelTarget.of(*asked)
    else:
        target = GradientTarget.for_part(*asked, kernel)
    features = features_of(pattern, problem, target.q_len, target.kv_len, target.template.name)
    plain, space = target.template.default(problem, gpu).as_dict(), Space(target.template.knobs)
    changes = CANDIDATES if kernel == FORWARD else GRADIENTS
    configs = [space.canonical(plain | change) for change in changes]
    only = replace(target, sources=target.sources[:1])
    anchor = space.canonical(plain)
    return Plan(described(only, features, {}), only, tuple(dict.fromkeys(configs)), anchor)


def plans_of(names: Sequence[str], gpu: Gpu, kernel: str = FORWARD) -> list[Plan]:
    """All problems, the first of every pattern first; patterns that need data at run time are named and left out."""
    rounds: dict[int, list[Plan]] = {}
    for name in names:
        pattern = Pattern.from_yaml(name)
        try:
            for i, problem in enumerate(dict.fromkeys(problems_of(pattern.problem or Problem()))):
                rounds.setdefault(i, []).append(plan_of(pattern, problem, gpu, kernel))
        except UnsupportedError as error:
            print(f"{name}: left out: {error}", flush=True)
    return [plan for number in sorted(rounds) for plan in rounds[number]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("patterns", nargs="*", help="shipped names; default: all")
    parser.add_argument("--kernel", choices=KINDS, default=FORWARD)
    found = options(parser, lambda given: "cover" + f"-{given.kernel}" * (given.kernel != FORWARD))
    names = found.patterns or sorted(shipped_patterns())
    plans = plans_of(names, find_gpu(found.gpu), found.kernel)
    if found.kernel == KEYS and not found.dry:
        compile_preparing([p.target for p in plans], found.folder)
        plans = [replace(p, target=prepared(p.target, found.folder)) for p in plans]
    run(
        plans,
        found.out,
        found.folder,
        seconds=found.seconds,
        synthetic=SyntheticGauge() if found.dry else None,
        compile_only=found.compile_only,
        finish_s=FINISH_S,
    )


if __name__ == "__main__":
    main()
