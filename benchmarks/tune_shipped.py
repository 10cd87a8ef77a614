"""Tune every shipped pattern that compiles, one problem each, and keep the winners in tuned/.

    python benchmarks/tune_shipped.py [--passes forward|backward] [--trials 8] [--seconds 10] [--stop-after 300] [PATTERN ...]

``--passes backward`` tunes both gradient kernels of each pattern, one after the other.  A row is written as soon as its
pattern is done; ``--stop-after`` starts no further one.
Each pattern is tuned by the tuner itself: its study, its checks, its interleaved rounds, its noise.  To make the most of
a GPU that is there for minutes, the kernels of the first ``--trials`` configurations (``STARTS``, on every candidate
schedule) are compiled beforehand for all patterns at once, and all candidates run in this process: one that raises an
error is a failed trial, one that crashes the GPU ends the run, where `sparsegen tune` would lose only a worker.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import turn
from beforehand import compile_many, gpu_here
from prepared import compile_preparing, prepared

from sparsegen.codegen import LaunchConfig
from sparsegen.codegen.gradient_template import PARTS
from sparsegen.errors import TuneError, UnsupportedError
from sparsegen.launch import Job
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from sparsegen.spec.shipped import shipped_patterns
from sparsegen.tune.candidates import Compiled
from sparsegen.tune.gradient_target import GradientTarget
from sparsegen.tune.lane import Outcome
from sparsegen.tune.measure import SEARCH, Turns, measure
from sparsegen.tune.prune import CompileResult, too_much
from sparsegen.tune.schedules import joined
from sparsegen.tune.space import Space
from sparsegen.tune.target import KernelTarget
from sparsegen.tune.tuner import Budget, tune
from sparsegen.tune.winners import keep

SMALL = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "STAGES": 3, "TMA": True}
LARGE = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "STAGES": 3, "TMA": True}
WARPS = {"KERNEL": "hopper", "BLOCK_M": 128, "BLOCK_N": 128, "STAGES": 3}
HALF = {"KERNEL": "hopper", "BLOCK_M": 64, "BLOCK_N": 64, "STAGES": 2}
STARTS: tuple[dict[str, Any], ...] = (
    WARPS | {"STAGES": 2, "GROUP_HEADS": 4},
    WARPS | {"STAGES": 2, "PERSISTENT": True, "GROUP_HEADS": 1},
    HALF | {"PERSISTENT": True, "GROUP_HEADS": 1},
    SMALL | {"GROUP_HEADS": 1},
    WARPS | {"BLOCK_N": 64, "GROUP_HEADS": 4},
    WARPS | {"BLOCK_N": 64, "STAGES": 2},
    SMALL | {"TMA": False, "STAGES": 2},  # keys that are gathered
    LARGE,
    WARPS | {"GROUP_HEADS": 1},
)


GRADIENTS: tuple[dict[str, Any], ...] = (  # of both kernels, beside what the template suggests
    {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "STAGES": 2},
    {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "STAGES": 3},
    {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "STAGES": 2},
    {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4, "STAGES": 3},
)


def starts(target: KernelTarget) -> list[LaunchConfig]:
    """The template's default and what is tried first on every candidate schedule, as the study writes it; valid ones only."""
    space = Space(target.knobs)
    plain = target.template.default(target.problem, target.gpu).as_dict()
    gradients = isinstance(target, GradientTarget)
    wanted = [
        joined(LaunchConfig.of(plain | change), label, target.labels)
        for change in ({}, *(GRADIENTS if gradients else STARTS))
        for label in target.labels
    ]
    if gradients:
        n = len(target.labels)
        wanted = [*wanted[:n], *target.starts, *wanted[n:]]
    found = [space.canonical(c.as_dict()) for c in wanted]
    return list(dict.fromkeys(c for c in found if target.invalid(c) is None))


class Here:
    """A ``Lane`` in this process: compiled beforehand where possible, checked and timed on the GPU at once."""

    def __init__(self, target: KernelTarget, folder: Path, made: Mapping[LaunchConfig, Any]):
        self._target, self._folder, self._made = target, folder, made
        self._waiting: list[LaunchConfig] = []
        self._bench = target.bench()
        self._loaded: dict[LaunchConfig, Any] = {}

    @property
    def free(self) -> int:
        """See ``Lane``."""
        return 1 - len(self._waiting)

    def begin(self, config: LaunchConfig) -> None:
        """See ``Lane``."""
        self._waiting.append(config)

    def compiled(self, timeout_s: float) -> CompileResult | None:
        """See ``Lane``."""
        return self._result(self._waiting.pop(0)) if self._waiting else None

    def measure(self, config: LaunchConfig, incumbent: LaunchConfig, turns: Turns) -> Outcome:
        """See ``Lane``."""
        try:
            mine, rival = self._candidate(config), self._candidate(incumbent)
            if wrong := mine.check():
                return Outcome(None, "wrong result", wrong)
            return Outcome(measure(mine.launch, rival.launch, self._bench.clock, turns))
        except Exception as error:  # the trial's, said at the end of its pattern; a broken GPU ends the run elsewhere
            return Outcome(None, "error", f"{type(error).__name__}: {error}"[:300])

    def stop(self) -> None:
        """See ``Lane``."""

    def _candidate(self, config: LaunchConfig) -> Any:
        if config not in self._loaded:
            folder = self._result(config).folder
            self._loaded[config] = self._bench.load(config, folder)
        return self._loaded[config]

    def _result(self, config: LaunchConfig) -> CompileResult:
        folder = self._folder / place(config)
        made = self._made.get(config)
        if made is None:
            made = build({config: (self._target, config, folder)})[config]
        if isinstance(made, str):
            return CompileResult(config, folder, {}, "compile error", made)
        kind, reason = too_much(made, self._target.limits) or ("", "")
        return CompileResult(config, folder, made, kind, reason)


def place(config: LaunchConfig) -> str:
    """A folder's name for a configuration."""
    return str(config).replace(" ", "_").replace("/", "-")[-200:]


def build(wanted: Mapping[Any, tuple[KernelTarget, LaunchConfig, Path]]) -> dict[Any, Any]:
    """Compile configurations, all at once: the compiler's facts by variant, or its complaint."""
    jobs, owners = [], []
    for key, (target, config, folder) in wanted.items():
        source, plain = target.parts(config)
        for variant in target.timed(source, plain):
            jobs.append(Job(source, plain, variant, target.gpu, folder / variant))
            owners.append((key, variant))
    made: dict[Any, Any] = {key: {} for key in wanted}
    for (key, variant), outcome in zip(owners, compile_many(jobs)):
        b = outcome.binary
        if b is None:
            made[key] = outcome.error
        elif isinstance(made[key], dict):
            made[key][variant] = Compiled(b.registers, b.spill_bytes, b.shared_bytes)
    return made


def ready(target: KernelTarget, root: Path) -> KernelTarget:
    """The target whose bench compiles nothing."""
    return prepared(target, root) if isinstance(target, GradientTarget) else target


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("patterns", nargs="*")
    parser.add_argument("--passes", choices=["forward", "backward"], default="forward")
    parser.add_argument("--trials", type=int, default=8, help="configurations of each pattern")
    parser.add_argument("--seconds", type=float, default=10.0, help="search time of each pattern")
    parser.add_argument("--rounds", type=int, default=SEARCH.rounds, help="turns of every trial")
    parser.add_argument(
        "--stop-after", type=float, default=1e9, help="start no pattern after this many seconds"
    )
    options = parser.parse_args()
    gpu = gpu_here()
    assert gpu is not None, "a GPU is needed"
    started, root = time.time(), Path(tempfile.mkdtemp())
    targets: dict[str, KernelTarget] = {}
    for name in options.patterns or sorted(shipped_patterns()):
        pattern = Pattern.from_yaml(name)
        asked = pattern, pattern.problem or Problem(), gpu
        try:
            if options.passes == "forward":
                targets[name] = KernelTarget.of(*asked)
            else:
                for part in PARTS:
                    targets[f"{name}-{part}"] = GradientTarget.for_part(*asked, part)
        except UnsupportedError as error:
            print(f"{name}: {error}", flush=True)
    wanted = {
        (name, c): (target, c, root / name / place(c))
        for name, target in targets.items()
        for c in starts(target)[: options.trials]
    }
    made = build(wanted)
    gradients = [t for t in targets.values() if isinstance(t, GradientTarget)]
    compile_preparing(gradients, root)
    print(f"compiled {len(made)} configurations in {time.time() - started:.0f} s", flush=True)
    turn.take()
    turns = replace(SEARCH, rounds=options.rounds)
    for name, target in targets.items():
        if time.time() - started > options.stop_after:
            print(f"{name}: no time left", flush=True)
            continue
        begin = time.time()
        mine = {c: facts for (n, c), facts in made.items() if n == name}
        result = tune(
            target,
            budget=Budget(options.trials, options.seconds),
            seeds=starts(target),
            lane=Here(ready(target, root), root / name, mine),
            turns=turns,
        )
        failed = [t for t in result.trials if t.state == "failed" and t.kind != "stopped"]
        for trial in failed:
            print(f"    {name}: {trial.kind}: {trial.reason} [{trial.config}]", flush=True)
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
            f"noise {result.noise:.1%}, {result.complete} measured, {len(failed)} failed, "
            f"{time.time() - begin:.0f} s: {result.config}",
            flush=True,
        )


if __name__ == "__main__":
    main()
