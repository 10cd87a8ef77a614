"""Record an exhaustive grid of configurations of three problems on the GPU here, for `search_quality.py` to replay.

    python benchmarks/record_grid.py [--out benchmarks/records/grid.jsonl] [--seconds 180]
    python benchmarks/record_grid.py --compile-only      # on any machine, beforehand: binaries into --folder
    python benchmarks/record_grid.py --dry               # no GPU: every step but the kernels, synthetic times

Every valid configuration of the knobs in ``FIXED`` is compiled, checked against the
float64 reference and timed in turns with the template's default.  It stops cleanly after --seconds or Ctrl-C; the same
command goes on.  Problems are done one after the other, so that what there is time for is whole.
"""

from __future__ import annotations

import argparse

from recording_binaries import Plan
from recording_run import options, run
from synthetic_grid import SyntheticGauge

from sparsegen.spec.gpu import find_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from sparsegen.tune.features import features_of
from sparsegen.tune.recording import described
from sparsegen.tune.space import Space
from sparsegen.tune.target import KernelTarget

# (pattern, length): a dense triangle, a narrow band with sinks, residue classes on a grid.  Short, for many to fit in.
PROBLEMS = (("causal", 4096), ("streaming_llm", 8192), ("axial_image", 32768))
# Left out: the order of tiles, which these problems hardly feel, two of four ways to group heads, and late values, which
# are for other dims.  432 configurations stay at head_dim 128 and 480 at 64; what spills or is wrong is recorded as that.
FIXED = {"HEAVY_FIRST": True, "GROUP_HEADS": (1, 8), "LATE_VALUES": False}


def plan_of(name: str, length: int, gpu_name: str) -> Plan:
    """A problem and the whole grid of it, the configurations that a tuning begins with first."""
    pattern, gpu = Pattern.from_yaml(name), find_gpu(gpu_name)
    stated = pattern.problem or Problem()
    problem = Problem(
        head_dim=stated.head_dim,
        value_dim=stated.value_dim,
        heads=stated.heads,
        kv_heads=stated.kv_heads,
        dtype=stated.dtype,
        lengths=((length, length),),
    )
    target = KernelTarget.of(pattern, problem, gpu)
    recorded = described(target, features_of(pattern, problem, length, length), FIXED)
    grid = [c for c in Space(recorded.knobs).enumerate() if target.invalid(c) is None]
    first = [c for c in (target.default, *recorded.starts) if c in grid]
    return Plan(recorded, target, tuple(dict.fromkeys([*first, *grid])), target.default)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", type=int, nargs="*", default=[0, 1, 2], metavar="N")
    found = options(parser, lambda given: "grid")
    plans = [plan_of(*PROBLEMS[i], found.gpu) for i in found.problems]
    run(
        plans,
        found.out,
        found.folder,
        seconds=found.seconds,
        synthetic=SyntheticGauge() if found.dry else None,
        compile_only=found.compile_only,
    )


if __name__ == "__main__":
    main()
