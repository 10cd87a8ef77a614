"""The configuration for a problem that was not measured, as the rule of its GPU says (``rule``), and what is wrong with rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.errors import ArtifactError, TuneError
from sparsegen.tune import rule as rules
from sparsegen.tune.features import features_of
from sparsegen.tune.space import Space

if TYPE_CHECKING:
    from sparsegen.codegen import Template
    from sparsegen.spec.gpu import Gpu
    from sparsegen.spec.pattern import Pattern
    from sparsegen.spec.problem import Problem
    from sparsegen.tune.store import Measured


@dataclass(frozen=True)
class Answer:
    """``config`` under its ``name`` in the rule, or ``why`` there is none ("" where there is no rule)."""

    config: LaunchConfig | None
    name: str = ""
    why: str = ""
    warning: str = ""


def configuration(
    root: Path, pattern: Pattern, problem: Problem, wanted: Measured, gpu: Gpu, template: Template
) -> Answer:
    """Ask the rule of ``gpu`` for the schedule that is predicted best.

    Raises:
        ArtifactError: its file is damaged.
    """
    rule = rules.read(rules.path_of(root, gpu.name, template.name))
    # Patterns that need data at run time have no features before they are called.
    if rule is None or pattern.runtime_names or not wanted.q_len:
        return Answer(None)
    if outside := rule.outside(wanted):
        return Answer(None, why=outside)
    features = features_of(pattern, problem, wanted.q_len, wanted.kv_len, template.name)
    name = rule.choose(features)
    try:
        config = Space(tuple(template.knobs)).canonical(rule.configurations[name].as_dict())
    except TuneError as error:
        stale = f"the rule of {gpu.name} does not fit the template {template.name}: {error}"
        return Answer(None, name, str(error), f"{stale}; it is not used")
    if config.as_dict().get("KERNEL") == "hopper" and not features["specialised"]:
        return Answer(None, name, f"{name} is for launches that the schedule has not")
    if refused := template.invalid(config, problem, gpu):
        return Answer(None, name, refused)
    warning = ""
    if rule.template_digest != template.digest:
        warning = f"{_changed(rule, template.digest)}; it is used all the same"
    return Answer(config, name, warning=warning)


def errors(root: Path, gpu: str, templates: Mapping[str, str]) -> list[str]:
    """What ``sparsegen check`` says of the rules of a GPU; ``templates``: digests by name."""
    found = []
    for path in sorted((root / gpu).glob("*.rule.yaml")):
        try:
            rule = rules.read(path)
        except ArtifactError as error:
            found.append(str(error))
            continue
        now = templates.get(rule.template, "absent") if rule else ""
        if rule and rule.template_digest != now:
            found.append(f"{path}: {_changed(rule, now)}")
    return found


def _changed(rule: rules.Rule, now: str) -> str:
    return (
        f"the rule of {rule.gpu} was made with template {rule.template} {rule.template_digest[:12]}, "
        f"now it is {now[:12]}"
    )
