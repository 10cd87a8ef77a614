"""Schedule × template → the source text of one kernel module."""

from __future__ import annotations

import ast
import hashlib
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsegen.codegen.grids import Grid, launches_of
from sparsegen.codegen.hopper import OWN_KNOBS, gluon, hopper_plan
from sparsegen.codegen.plan import ForwardPlan, HopperPlan, Table
from sparsegen.codegen.planner import make_plan, of_whole_lines
from sparsegen.codegen.template import Template, load_template
from sparsegen.schedule.tree import Schedule
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem

if TYPE_CHECKING:
    import jinja2


@dataclass(frozen=True)
class KernelSource:
    """A rendered kernel module.  One text serves every length and every tuning trial of its problem."""

    template: str
    text: str
    entry: str  # name of the kernel function
    dtype: str
    head_dim: int
    value_dim: int
    parameters: tuple[tuple[str, str], ...]  # (name, type) of the run-time arguments
    constexprs: tuple[str, ...]
    tables: tuple[Table, ...]
    grids: tuple[
        Grid, ...
    ]  # of the launches, in order; with several, the constexpr SWEEP says which
    position_limit: int
    max_position: int | None
    min_position: int | None
    hopper: KernelSource | None = None  # the warp-specialised text, where it does any launch
    launches: tuple[int, ...] = ()  # those that this text does: all of a portable one

    @property
    def periods(self) -> tuple[int, ...]:
        """Periods of keys that tensor descriptors would load one group of (``entries.descriptor_of``), runs left out."""
        found = {period for grid in self.grids for period, _ in grid.described if period > 1}
        return tuple(sorted(found))

    @property
    def digest(self) -> str:
        """sha256 of the text, and of the warp-specialised one with it."""
        texts = self.text + (self.hopper.text if self.hopper else "")
        return hashlib.sha256(texts.encode()).hexdigest()


def render(
    pattern: Pattern, schedule: Schedule, problem: Problem, template: str = "forward"
) -> KernelSource:
    """Render ``template`` for one pattern.  Raises ``UnsupportedError`` for what the template cannot do."""
    which = load_template(template)
    source, plan, hopper = _planned(pattern, schedule, problem, which)
    source = replace(source, text=render_text(which, "kernel.py.jinja", plan=plan))
    if source.hopper is None:
        return source
    text = render_text(which, "hopper.py.jinja", plan=plan, hopper=hopper)
    return replace(source, hopper=replace(source.hopper, text=text))


def outline(
    pattern: Pattern, schedule: Schedule, problem: Problem, template: str = "forward"
) -> KernelSource:
    """As ``render``, in a fraction of its time, with empty texts: for kernels that were rendered and compiled before."""
    return _planned(pattern, schedule, problem, load_template(template))[0]


def _planned(
    pattern: Pattern, schedule: Schedule, problem: Problem, which: Template
) -> tuple[KernelSource, ForwardPlan, HopperPlan | None]:
    """A source without its texts, and what they are rendered from."""
    knobs = tuple(x for x in which.constexprs if x not in OWN_KNOBS)
    plan = make_plan(pattern, schedule, problem, which.name, which.entry, knobs)
    grids = tuple(launch.grid for launch in launches_of(schedule))
    source = KernelSource(
        template=which.name,
        text="",
        entry=plan.entry,
        dtype=problem.dtype,
        head_dim=problem.head_dim,
        value_dim=problem.value_dim,
        parameters=tuple(zip(plan.parameters, plan.types)),
        constexprs=plan.constexprs,
        tables=plan.tables,
        grids=grids,
        position_limit=schedule.position_limit,
        max_position=schedule.max_position,
        min_position=schedule.min_position,
        launches=tuple(range(len(grids))),
    )
    hopper = hopper_plan(of_whole_lines(plan), grids, problem.dtype)
    if hopper is None:
        return source, plan, None
    special = replace(
        source,
        entry=hopper.entry,
        parameters=tuple(zip(hopper.parameters, hopper.types)),
        constexprs=hopper.constexprs,
        launches=tuple(launch.number for launch in hopper.launches.values()),
    )
    return replace(source, hopper=special), plan, hopper


@cache
def _environment(*folders: Path) -> jinja2.Environment:
    """Jinja over a template's folder, then those that it imports from; it keeps the parsed files."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folders),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["gluon"] = gluon
    return environment


def render_text(template: Template, file: str, **given: Any) -> str:
    """One file of a template, given plans by name: Python text, tidy."""
    text = _environment(template.folder, *template.imports).get_template(file).render(**given)
    lines = [line.rstrip() for line in text.splitlines()]
    tidy = [
        line for i, line in enumerate(lines) if line or (i and lines[i - 1])
    ]  # no two blank lines from Jinja
    text = "\n".join(tidy).strip("\n") + "\n"
    text = re.sub(r"\n+(@triton\.jit|@gluon\.)", r"\n\n\n\1", text)
    ast.parse(
        text
    )  # a template that renders no Python is a bug of ours: fail here and not in Triton
    return text
