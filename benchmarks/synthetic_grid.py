"""Synthetic times for the knobs of the forward template, where no GPU has recorded any.  No figure of ours comes from here.

The formula has what makes real grids hard to search: tiles that waste cells, loops too short for many stages, few
programs on a multiprocessor, knobs that matter together only, and a few per cent of chance for each configuration.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from recording_binaries import Plan

from sparsegen.codegen import LaunchConfig
from sparsegen.spec.problem import Problem
from sparsegen.tune.recording import Entry


def synthetic_us(name: str, problem: Problem, config: LaunchConfig, keys: float) -> float:
    """µs for a problem whose rows see about ``keys`` keys."""
    c = config.as_dict()
    m, n, stages = int(c["BLOCK_M"]), int(c["BLOCK_N"]), int(c["STAGES"])
    hopper = c["KERNEL"] == "hopper"
    wide = problem.head_dim / 128
    touched = keys + 0.5 * n + 0.4 * m
    speed = (700 if n >= 128 else 560 if n >= 64 else 300) if hopper else 330
    if not hopper:
        speed *= {32: 0.55, 64: 1.0, 128: 0.92}[m] * {16: 0.6, 32: 0.85, 64: 1.0, 128: 0.9}[n]
        warps = {(64, 4): 1.0, (64, 8): 0.9, (128, 8): 1.12, (128, 4): 0.75, (32, 4): 1.0}
        speed *= warps[m, int(c["num_warps"])]
        speed *= 1.08 if c["TMA"] and n >= 64 else 0.97
    speed *= 1.0 - 0.08 * abs(stages - (2 if n >= 128 else 3))
    speed *= 0.62 if m * n * wide >= 128 * 128 * 1.5 and not hopper else 1.0  # registers
    rows = problem.heads * problem.batch * problem.lengths[0][0]
    start = 1.3 * rows / m / 132 * (0.35 if c["PERSISTENT"] else 1.0)
    imbalance = 1.06 if c["PERSISTENT"] and keys > 4096 else 1.0
    grouped = 1.0 + 0.03 * (c["GROUP_HEADS"] != (8 if keys > 2048 else 1))
    work = 4e-6 * touched * rows * problem.head_dim / speed * imbalance * grouped
    digest = hashlib.sha256(f"{name} {config}".encode()).digest()
    return round((work + start) * (1.0 + 0.04 * (digest[0] / 255 - 0.5)), 3)


class SyntheticGauge:
    """Stands where ``recording_run.Gauge`` does."""

    def entry(
        self, plan: Plan, config: LaunchConfig, folders: Mapping[LaunchConfig, Path]
    ) -> Entry:
        """A trial that always is right."""
        keys = float(plan.recorded.features["row_keys"])
        us = synthetic_us(plan.recorded.name, plan.target.problem, config, keys)
        return Entry(plan.recorded.name, config, us, (us,), 0.01)

    def stop(self) -> None:
        """Nothing to stop."""
