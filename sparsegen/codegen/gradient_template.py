"""The backward templates as each gradient kernel sees them: what is tuned of them is tuned for each kernel alone."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache

from sparsegen.codegen import backward_fused, backward_stored
from sparsegen.codegen.backward import default_config, unfit
from sparsegen.codegen.backward_fused import FUSED
from sparsegen.codegen.backward_planner import KEYS, OUTPUTS, QUERIES
from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.codegen.template import Template, load_template
from sparsegen.paths import data_dir
from sparsegen.spec.gpu import Gpu
from sparsegen.spec.problem import Problem

BACKWARD = "backward"  # the folder below templates/
PARTS = (QUERIES, KEYS)  # kernels of the split design


@dataclass(frozen=True)
class GradientTemplate(Template):
    """Knobs and digest of a backward template: "backward-queries", "backward-keys", or "backward_fused" as it is."""

    part: str = QUERIES

    def default(self, problem: Problem, gpu: Gpu) -> LaunchConfig:
        """See ``codegen.backward.default_config`` and ``codegen.backward_fused.default_config``."""
        if self.part == FUSED:
            return backward_fused.default_config(problem, gpu)
        return default_config(problem, gpu)

    def invalid(self, config: LaunchConfig, problem: Problem, gpu: Gpu) -> str | None:
        """See ``codegen.backward.unfit``, for the kernel that gives all gradients of its part."""
        if self.part == FUSED:
            return backward_fused.unfit(config, problem, gpu)
        return unfit(config, problem, gpu, OUTPUTS[self.part])


@cache
def gradient_template(part: str) -> GradientTemplate:
    """The template of the kernel of "queries", of "keys", or of the "fused" one."""
    name = backward_fused.TEMPLATE if part == FUSED else f"{BACKWARD}-{part}"
    whole = load_template(backward_fused.TEMPLATE if part == FUSED else BACKWARD)
    given = {f.name: getattr(whole, f.name) for f in fields(whole)}
    return GradientTemplate(**{**given, "name": name}, part=part)


def tuned_templates() -> dict[str, Template]:
    """Everything that rows of ``tuned/`` may be about, by name: each template, the backward one as its two parts."""
    found: list[Template] = []
    for folder in sorted(p for p in data_dir("templates").iterdir() if p.is_dir()):
        if folder.name == BACKWARD:
            found += map(gradient_template, PARTS)
        elif folder.name == backward_fused.TEMPLATE:
            found.append(gradient_template(FUSED))
        elif folder.name != backward_stored.TEMPLATE:  # whose kernels are not tuned
            found.append(load_template(folder.name))
    return {which.name: which for which in found}


def part_of(template: str) -> str | None:
    """The part of a template's name; None where it is no gradient kernel's."""
    parts = (*PARTS, FUSED)
    return next((part for part in parts if template == gradient_template(part).name), None)
