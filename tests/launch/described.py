"""Kernels with every kind of parameter, compiled by the tests of what is written beside a binary and of who reads it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparsegen.codegen import LaunchConfig, load_template, render
from sparsegen.launch import Job, compile_many
from sparsegen.launch import signature as sig
from sparsegen.launch.binary import folder_of
from sparsegen.launch.description import LAUNCH
from sparsegen.schedule.build import candidates
from sparsegen.spec.gpu import find_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem

H200, MI300X = find_gpu("h200"), find_gpu("mi300x")
FEATURES = {"sink_logits": True, "null_key": True, "alibi": True}
RANDOM = {"any_of": [{"window": {"radius": 8}}, {"random_blocks": {"block": 16, "per_row": 2, "seed": 1}}]}  # fmt: skip
COLUMNS = {
    "all_of": ["causal", {"any_of": [{"window": {"size": 64}}, {"strided": {"stride": 64}}]}]
}
SMALL = Problem(head_dim=64, dtype="float16")
LONG = Problem(head_dim=96, lengths=((8192, 8192),))
SCHEDULES = {"boxes of periods": "runs + mod 64"}
# name → (mask, settings of the pattern, problem, knobs, variant)
KERNELS: dict[str, Any] = {
    "pointers": ("causal", {}, SMALL, {"TMA": False}, "fast"),
    "boxes": ("causal", {}, SMALL, {"TMA": True}, "fast"),
    "boxes of periods": (COLUMNS, {}, LONG, {"TMA": True}, "fast"),
    "float32": ("causal", {}, replace(SMALL, dtype="float32"), {"TMA": True}, "fast"),
    "hopper": ("causal", {}, Problem(), {"KERNEL": "hopper", "BLOCK_M": 128}, "fast"),
    "general": ("causal", {}, SMALL, {"TMA": True}, "general"),
    "everything": (RANDOM, FEATURES, SMALL, {"TMA": True}, "fast"),
}
# the same for an AMD GPU, where no kernel takes descriptors
ON_AMD: dict[str, Any] = {
    "amd float16": ("causal", {}, SMALL, {}, "fast"),
    "amd bfloat16": (COLUMNS, {}, LONG, {"num_warps": 8}, "fast"),
    "amd float32": ("causal", {}, replace(SMALL, dtype="float32"), {}, "fast"),
    "amd general": ("causal", {}, SMALL, {}, "general"),
    "amd everything": (RANDOM, FEATURES, SMALL, {}, "fast"),
}
SCHEDULES["amd bfloat16"] = "runs + mod 64"


def job_of(name: str, root: Path) -> Job:
    gpu = MI300X if name in ON_AMD else H200
    mask, settings, problem, knobs, variant = (KERNELS | ON_AMD)[name]
    pattern = Pattern.from_dict({"name": "p", "mask": mask, **settings})
    found = {c.schedule.label: c.schedule for c in candidates(pattern, problem)}
    schedule = found[SCHEDULES[name]] if name in SCHEDULES else next(iter(found.values()))
    source = render(pattern, schedule, problem)
    config = LaunchConfig.of(load_template().default(problem, gpu).as_dict() | knobs)
    return Job(source, config, variant, gpu, root / name)


def compiled(names: Iterable[str], root: Path) -> dict[str, Job]:
    """Jobs by name, done: what they made lies in their folders."""
    made = {name: job_of(name, root) for name in names}
    for outcome in compile_many(list(made.values()), 2):
        assert outcome.binary is not None, outcome.error
        assert any(LAUNCH in name for name in outcome.binary.files)
    return made


def launches(job: Job) -> list[tuple[int, Path, str]]:
    """(number, folder, entry) of every launch of a job."""
    numbers = range(len(job.source.grids))
    entries = [sig.unit(job.source, job.config, job.variant, i)[0].entry for i in numbers]
    return [(i, folder_of(job.source, job.directory, i), e) for i, e in zip(numbers, entries)]
