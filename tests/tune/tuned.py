"""Stand-ins for what a row of ``tuned/`` is about, and rows of them."""

from __future__ import annotations

from dataclasses import dataclass

from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.tune import history, store
from tests.tune.standin import DEFAULT, KNOBS


@dataclass(frozen=True)
class StandInProblem:
    head_dim: int = 128
    value_dim: int | None = None
    heads: int = 16
    kv_heads: int | None = None
    batch: int = 1
    dtype: str = "bfloat16"
    lengths: tuple[tuple[int, int], ...] = ((4096, 4096),)


@dataclass(frozen=True)
class StandInGpu:
    name: str = "nvidia-h200"
    backend: str = "cuda"
    arch: int | str = 90


@dataclass(frozen=True)
class StandInPattern:
    name: str = "causal"
    value: str = "a" * 64

    def digest(self) -> str:
        return self.value


@dataclass(frozen=True)
class StandInTemplate:
    name: str = "forward"
    digest: str = "b" * 64
    knobs: tuple = KNOBS
    forbidden: tuple[LaunchConfig, ...] = ()

    def default(self, problem, gpu):
        return DEFAULT

    def invalid(self, config, problem, gpu):
        return "too large" if config in self.forbidden else None


PROBLEM, GPU, PATTERN, TEMPLATE = (
    StandInProblem(),
    StandInGpu(),
    StandInPattern(),
    StandInTemplate(),
)
H100, A100 = StandInGpu("nvidia-h100"), StandInGpu("nvidia-a100", arch=80)


def config(**values):
    return LaunchConfig.of({**DEFAULT.as_dict(), **values})


def row(length=4096, problem=PROBLEM, pattern=PATTERN, template=TEMPLATE, **values):
    return store.Row(
        pattern=pattern.name,
        pattern_digest=pattern.digest(),
        template=template.name,
        template_digest=template.digest,
        problem=store.Measured.of(problem, length, length),
        config=config(**values).as_dict(),
        time_us=90.0,
        baseline_us=100.0,
        noise=0.01,
        trials=40,
        versions={"torch": "2.13.0", "triton": "3.9.0", "driver": "570.1"},
        date="2026-11-29T20:00:00+00:00",
    )


def entry(**values):
    fields = {name: name for name in history.COLUMNS}
    numbers = {"median_us": 90.5, "spread_us": 1.0, "baseline_us": 100.0}
    return history.Entry(**{**fields, **numbers, **values})
