"""``sparsegen compile``: build one artifact and say what came out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from sparsegen.artifact.build import Builder, Progress, ask, check_measurable, ensure
from sparsegen.artifact.compiler import Compiler
from sparsegen.artifact.entry import Artifact
from sparsegen.artifact.gradients import BACKWARD, GradientCompiler, passes_of
from sparsegen.artifact.manifest import Considered, Decision
from sparsegen.artifact.store import Store
from sparsegen.errors import InputError
from sparsegen.spec.gpu import current_gpu, find_gpu
from sparsegen.spec.pattern import Pattern


@dataclass(frozen=True)
class Built:
    """An artifact as it was asked for; ``here``: its GPU type is the one of this machine.

    ``gradients``: that of the backward pass, where it was asked for.
    """

    artifact: Artifact
    here: bool
    gradients: Artifact | None = None

    def as_dict(self) -> dict[str, Any]:
        """The object of ``compile --json``."""
        return {
            "pattern": self.artifact.manifest.pattern,
            "gpu": self.artifact.key.gpu,
            "cross_compiled": not self.here,
            **_decided(self.artifact),
            "gradients": None if self.gradients is None else _decided(self.gradients),
        }

    def text(self) -> str:
        """For a person: schedule, configuration and who chose it, resources, folder."""
        key = self.artifact.key
        lines = [
            f"{self.artifact.manifest.pattern} for {key.gpu}, {key.dtype}, head_dim {key.head_dim}, "
            f"heads {key.heads}:{key.kv_heads}",
            *_lines(self.artifact),
        ]
        if self.gradients is not None:
            lines += ["gradients", *_lines(self.gradients)]
        if not self.here:
            lines.append(f"There is no {key.gpu} here: cross-compiled, not run.")
        return "\n".join(lines)


def _decided(artifact: Artifact) -> dict[str, Any]:
    """Key, folder and decision as plain values."""
    decision = artifact.manifest.decision
    names = ("name", "registers", "spill_bytes", "shared_bytes")
    return {
        "key": artifact.key.digest(),
        "path": str(artifact.path),
        "schedule": decision.label,
        "candidates": [asdict(c) for c in decision.candidates],
        "predicted_for": decision.predicted_for,
        "config": decision.config.as_dict(),
        "kernels": {name: c.as_dict() for name, c in decision.kernels.items()},
        "chosen_by": decision.chosen_by,
        "tune": decision.tune,
        "time_us": decision.time_us,
        "baseline_us": decision.baseline_us,
        "variants": [{name: getattr(v, name) for name in names} for v in decision.variants],
    }


def _lines(artifact: Artifact) -> list[str]:
    """The same for a person."""
    decision = artifact.manifest.decision
    lines = [
        f"schedule       {among(decision.label, decision.candidates)}",
        *_configurations(decision),
        f"chosen by      {decision.chosen_by}",
    ]
    for v in decision.variants:
        spills = "" if v.spill_bytes is None else f", {v.spill_bytes} bytes spilled"
        registers = "" if v.registers is None else f"{v.registers} registers{spills}, "
        lines.append(f"variant        {v.name}: {registers}{v.shared_bytes} bytes shared memory")
    return [*lines, f"artifact       {artifact.path}"]


def _configurations(decision: Decision) -> list[str]:
    """That of the kernel, or of each where there are several."""
    if not decision.kernels:
        return [f"configuration  {decision.config}"]
    return [f"configuration  {name}: {config}" for name, config in decision.kernels.items()]


def among(label: str, candidates: Iterable[Considered]) -> str:
    """The chosen schedule, then the others: ``runs + mod 128 (predicted 0.21 ms; runs 2.1 ms)``."""
    candidates = list(candidates)
    chosen = next(c for c in candidates if c.label == label)
    others = [f"{c.label} {_times(c)}" for c in candidates if c is not chosen]
    return f"{label} ({'; '.join([f'predicted {_times(chosen)}', *others])})"


def _times(one: Considered) -> str:
    predicted = f"{one.predicted_ms:.3g} ms"
    if one.measured_us is None:
        return predicted
    return f"{predicted}, measured {one.measured_us / 1e3:.3g} ms"


def default_level(*, here: bool) -> str:
    """Tuning level where none is named: a GPU that is here is measured, one that is not cannot be."""
    return "quick" if here else "off"


def build(
    pattern: str,
    *,
    gpu: str | None = None,
    tune: str | None = None,
    budget_s: float = 900.0,
    passes: Iterable[str] | None = None,
    deterministic: bool = True,
    stored: bool = False,
    jobs: int | None = None,
    store: Store | None = None,
    progress: Progress | None = None,
) -> Built:
    """Build ``pattern`` (a file or a shipped name) for the problem it states, or take it from the cache.

    ``gpu``: a name or alias; ``None`` for the one here.  ``tune``: ``off``, ``quick`` or ``full`` (``budget_s`` seconds);
    ``None``: ``quick`` where that GPU is here, ``off`` where it is cross-compiled for.  ``passes``: see
    ``artifact.gradients.passes_of``; each gradient kernel is tuned at that level too.  ``deterministic``: as of
    ``sparsegen.compile``; ``stored``: gradients for calls with a workspace.
    Errors are those of ``artifact.build.ensure``, and ``InputError`` where a GPU is to be measured that is not here.
    """
    spec = Pattern.from_yaml(pattern)
    found = current_gpu()
    request = ask(spec, None, None if gpu is None else find_gpu(gpu))
    wanted, trains = request.gpu, BACKWARD in passes_of(passes, request.problem)
    asked = "a workspace" if stored else "" if deterministic else "deterministic=False"
    if asked and not trains:
        raise InputError(
            f"{asked} is about gradients, and {spec.name} is built without: "
            "ask for them with passes forward,backward"
        )
    here = found is not None and found.name == wanted.name
    level, steps = tune or default_level(here=here), 1 + trains
    check_measurable(wanted, level, found)
    builder = Compiler(jobs=jobs, full_budget_s=budget_s)

    def step(done: int, builder: Builder) -> Artifact:
        if progress is not None:  # compiling takes minutes and says nothing itself
            progress(done, steps, f"{'gradients' if done else 'forward pass'} for {wanted.name}")
        return ensure(
            spec, None, wanted, tune=level, store=store, builder=builder, progress=progress
        )

    artifact = step(0, builder)
    if not trains:
        return Built(artifact, here)
    return Built(
        artifact, here, step(1, GradientCompiler(jobs, None, budget_s, deterministic, stored))
    )
