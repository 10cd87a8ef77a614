"""Tune every shipped pattern that compiles, one problem each, and keep the winners in tuned/.

python benchmarks/tune_shipped.py [--seconds 10] [--stop-after 300] [PATTERN ...]
"""

from __future__ import annotations

import argparse
import time

from sparsegen.errors import TuneError, UnsupportedError
from sparsegen.spec.gpu import current_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from sparsegen.spec.shipped import shipped_patterns
from sparsegen.tune.tuner import Budget
from sparsegen.tune.winners import keep, tune_pattern


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("patterns", nargs="*")
    parser.add_argument("--seconds", type=float, default=10.0, help="search time of each pattern")
    parser.add_argument(
        "--stop-after", type=float, default=1e9, help="start no pattern after this many seconds"
    )
    options = parser.parse_args()
    gpu = current_gpu()
    assert gpu is not None, "a GPU is needed"
    started = time.time()
    for name in options.patterns or sorted(shipped_patterns()):
        if time.time() - started > options.stop_after:
            print(f"{name}: no time left", flush=True)
            continue
        pattern = Pattern.from_yaml(name)
        problem = pattern.problem or Problem()
        begin = time.time()
        try:
            target, result = tune_pattern(
                pattern, problem, gpu, budget=Budget(100, options.seconds)
            )
        except UnsupportedError as error:
            print(f"{name}: {error}", flush=True)
            continue
        failed = sum(t.state == "fail" for t in result.trials)
        if result.time_us is None:
            print(f"{name}: nothing measured: {result.how}", flush=True)
            continue
        try:
            keep(target, result)
        except TuneError as error:  # said, and the next pattern's turn
            print(f"{name}: not kept: {error}", flush=True)
            continue
        print(
            f"{name} {target.q_len}x{target.kv_len}: {result.time_us:.1f} us, default {result.baseline_us:.1f} us, "
            f"noise {result.noise:.1%}, {result.complete} measured, {failed} failed, {time.time() - begin:.0f} s: {result.config}",
            flush=True,
        )


if __name__ == "__main__":
    main()
