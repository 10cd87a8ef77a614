"""The backward template as each of its two kernels sees it: what is tuned of it is tuned for each of them alone."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache

from sparsegen.codegen.backward import default_config, unfit
from sparsegen.codegen.backward_planner import KEYS, OUTPUTS, QUERIES
from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.codegen.template import Template, load_template
from sparsegen.paths import data_dir
from sparsegen.spec.gpu import Gpu
from sparsegen.spec.problem import Problem

BACKWARD = "backward"  # the folder below templates/
PARTS = (QUERIES, KEYS)


@dataclass(frozen=True)
class GradientTemplate(Template):
    """Knobs and digest of ``templates/backward`` under a name of their own: "backward-queries" or "backward-keys"."""

    part: str = QUERIES

    def default(self, problem: Problem, gpu: Gpu) -> LaunchConfig:
        """See ``codegen.backward.default_config``."""
        return default_config(problem, gpu)

    def invalid(self, config: LaunchConfig, problem: Problem, gpu: Gpu) -> str | None:
        """See ``codegen.backward.unfit``, for the kernel that gives all gradients of its part."""
        return unfit(config, problem, gpu, OUTPUTS[self.part])


@cache
def gradient_template(part: str) -> GradientTemplate:
    """The template of the kernel of "queries" or of "keys"."""
    whole = load_template(BACKWARD)
    given = {f.name: getattr(whole, f.name) for f in fields(whole)}
    return GradientTemplate(**{**given, "name": f"{BACKWARD}-{part}"}, part=part)


def tuned_templates() -> dict[str, Template]:
    """Everything that rows of ``tuned/`` may be about, by name: each template, the backward one as its two parts."""
    found: list[Template] = []
    for folder in sorted(p for p in data_dir("templates").iterdir() if p.is_dir()):
        if folder.name == BACKWARD:
            found += map(gradient_template, PARTS)
        else:
            found.append(load_template(folder.name))
    return {which.name: which for which in found}


def part_of(template: str) -> str | None:
    """The part of a template's name; None where it is no gradient kernel's."""
    return next((part for part in PARTS if template == f"{BACKWARD}-{part}"), None)
