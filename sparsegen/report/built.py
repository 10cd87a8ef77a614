"""``sparsegen compile``: build one artifact and say what came out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparsegen.artifact.build import Progress, ask, ensure
from sparsegen.artifact.compiler import Compiler
from sparsegen.artifact.entry import Artifact
from sparsegen.spec.gpu import current_gpu, find_gpu
from sparsegen.spec.pattern import Pattern


@dataclass(frozen=True)
class Built:
    """An artifact as it was asked for; ``here``: its GPU type is the one of this machine."""

    artifact: Artifact
    here: bool

    def as_dict(self) -> dict[str, Any]:
        """The object of ``compile --json``."""
        key, manifest = self.artifact.key, self.artifact.manifest
        decision = manifest.decision
        return {
            "pattern": manifest.pattern,
            "gpu": key.gpu,
            "cross_compiled": not self.here,
            "key": key.digest(),
            "path": str(self.artifact.path),
            "config": decision.config.as_dict(),
            "chosen_by": decision.chosen_by,
            "tune": decision.tune,
            "time_us": decision.time_us,
            "baseline_us": decision.baseline_us,
            "variants": [
                {
                    "name": v.name,
                    "registers": v.registers,
                    "spill_bytes": v.spill_bytes,
                    "shared_bytes": v.shared_bytes,
                }
                for v in decision.variants
            ],
        }

    def text(self) -> str:
        """For a person: configuration and who chose it, resources, folder."""
        key, decision = self.artifact.key, self.artifact.manifest.decision
        lines = [
            f"{self.artifact.manifest.pattern} for {key.gpu}, {key.dtype}, head_dim {key.head_dim}, "
            f"heads {key.heads}:{key.kv_heads}",
            f"configuration  {decision.config}",
            f"chosen by      {decision.chosen_by}",
        ]
        for v in decision.variants:
            spills = "" if v.spill_bytes is None else f", {v.spill_bytes} bytes spilled"
            registers = "" if v.registers is None else f"{v.registers} registers{spills}, "
            lines.append(
                f"variant        {v.name}: {registers}{v.shared_bytes} bytes shared memory"
            )
        lines.append(f"artifact       {self.artifact.path}")
        if not self.here:
            lines.append(f"There is no {key.gpu} here: cross-compiled, not run.")
        return "\n".join(lines)


def default_level(*, here: bool) -> str:
    """Tuning level where none is named: a GPU that is here is measured, one that is not cannot be."""
    return "quick" if here else "off"


def build(
    pattern: str,
    *,
    gpu: str | None = None,
    tune: str | None = None,
    budget_s: float = 900.0,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Built:
    """Build ``pattern`` (a file or a shipped name) for the problem it states, or take it from the cache.

    ``gpu``: a name or alias; ``None`` for the one here.  ``tune``: ``off``, ``quick`` or ``full`` (``budget_s`` seconds);
    ``None``: ``quick`` where that GPU is here, ``off`` where it is cross-compiled for.
    Errors are those of ``artifact.build.ensure``.
    """
    spec = Pattern.from_yaml(pattern)
    found = current_gpu()
    wanted = ask(spec, None, None if gpu is None else find_gpu(gpu)).gpu
    here = found is not None and found.name == wanted.name
    builder = Compiler(jobs=jobs, full_budget_s=budget_s)
    level = tune or default_level(here=here)
    artifact = ensure(spec, None, wanted, tune=level, builder=builder, progress=progress)
    return Built(artifact, here)
