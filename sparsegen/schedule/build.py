"""From a pattern to its schedule, in six named passes.

normalise   expression            → DNF over integer forms
reduce      DNF                   → fewer, plainer cubes; conjuncts that no length of the problem reaches leave
classify    heads                 → classes of heads with equal canonical masks
decompose   DNF                   → disjoint branches, the cheapest choice
close       branches              → segments in closed form
order       segments              → named, narrow ones first, table walks last
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sparsegen.errors import UnsupportedError
from sparsegen.schedule import canonical, naming, reach
from sparsegen.schedule.branches import Branch
from sparsegen.schedule.choose import choose
from sparsegen.schedule.facts import ANALYSIS, ANY_LENGTH
from sparsegen.schedule.formula import Cube, dnf_text
from sparsegen.schedule.normalise import to_dnf
from sparsegen.schedule.tiling import close
from sparsegen.schedule.tree import IDENTITY, HeadClass, Schedule, Segment, Sweep
from sparsegen.spec import expr as ex

Heads = tuple[tuple[int, int], ...] | None
Rules = Sequence[tuple[Heads, ex.Bool]]


@dataclass(frozen=True)
class Draft:
    """A head class between passes; fields are filled from left to right."""

    heads: Heads
    mask: ex.Bool
    cubes: tuple[Cube, ...] = ()
    max_position: int | None = None
    min_position: int | None = None
    branches: tuple[Branch, ...] = ()
    segments: tuple[Segment, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What the passes work on."""

    align: str
    lengths: tuple[tuple[int, int], ...]
    classes: tuple[Draft, ...]
    notes: tuple[str, ...] = ()


def build(pattern: Any, problem: Any = None) -> Schedule:
    """The schedule of a pattern; ``problem`` (or the pattern's own) tells which lengths it must serve.

    Raises UnsupportedError, with the place in the pattern's file, where the mask needs run-time data.
    """
    _refuse_run_time_data(pattern)
    problem = problem if problem is not None else pattern.problem
    return build_from_exprs(pattern.exprs, pattern.align, problem.lengths if problem else ())


def _refuse_run_time_data(pattern: Any) -> None:
    for path, node in pattern.nodes():
        if node.decided_by_data:
            place, where = pattern.place(path), f"{path}: {node.keyword}"
            raise UnsupportedError(
                f"{where if place == path else f'{place}: {where}'} is decided by run-time data, "
                "which is not compiled yet; backend='reference' runs it"
            )


def build_from_exprs(
    rules: Rules, align: str = "bottom_right", lengths: Iterable[tuple[int, int]] = ()
) -> Schedule:
    """The schedule of masks per group of heads: (inclusive head ranges, None = the rest, mask)."""
    plan = Plan(align, tuple(lengths), tuple(Draft(heads, mask) for heads, mask in rules))
    with ANALYSIS:
        for name, run in PASSES:
            plan = run(plan)
            _check(name, plan)
    classes = tuple(
        HeadClass(c.heads, (Sweep(IDENTITY, c.segments),), dnf_text(c.cubes)) for c in plan.classes
    )
    limits = [c.max_position for c in plan.classes if c.max_position is not None]
    floors = [c.min_position for c in plan.classes if c.min_position is not None]
    return Schedule(
        align=align,
        classes=classes,
        position_limit=reach.position_limit(s for c in plan.classes for s in c.segments),
        max_position=min(limits, default=None),
        min_position=max(floors, default=None),
        notes=plan.notes,
    )


def _normalise(plan: Plan) -> Plan:
    return _each(plan, lambda c: replace(c, cubes=tuple(to_dnf(c.mask))))


def _reduce(plan: Plan) -> Plan:
    notes = []

    def one(c: Draft) -> Draft:
        cubes = canonical.reduced(c.cubes)
        short, most, least = canonical.at_lengths(cubes, plan.align, plan.lengths)
        if most is not None:
            notes.append(f"{dnf_text(cubes)}: below position {most} this is {dnf_text(short)}")
        return replace(c, cubes=short, max_position=most, min_position=least)

    plan = _each(plan, one)
    return replace(plan, notes=(*plan.notes, *notes))


def _classify(plan: Plan) -> Plan:
    """Rules with equal cubes are one class; a class that holds the rest rule has ``heads`` None."""
    groups: dict[tuple[Cube, ...], Draft] = {}
    notes = []
    for c in plan.classes:
        old = groups.get(c.cubes)
        if old is None:
            groups[c.cubes] = c
            continue
        heads = None if old.heads is None or c.heads is None else (*old.heads, *c.heads)
        most = [x for x in (old.max_position, c.max_position) if x is not None]
        least = [x for x in (old.min_position, c.min_position) if x is not None]
        groups[c.cubes] = replace(
            old,
            heads=heads,
            max_position=min(most, default=None),
            min_position=max(least, default=None),
        )
        notes.append(f"heads {old.heads or 'rest'} and {c.heads or 'rest'} have one mask")
    return replace(plan, classes=tuple(groups.values()), notes=(*plan.notes, *notes))


def _decompose(plan: Plan) -> Plan:
    chosen = [choose(list(c.cubes), ANY_LENGTH) for c in plan.classes]
    classes = [replace(c, branches=x.branches) for c, x in zip(plan.classes, chosen, strict=True)]
    return replace(plan, classes=tuple(classes), notes=(*plan.notes, *map(str, chosen)))


def _close(plan: Plan) -> Plan:
    return _each(plan, lambda c: replace(c, segments=tuple(map(close, c.branches))))


def _order(plan: Plan) -> Plan:
    return _each(plan, lambda c: replace(c, segments=naming.ordered(c.segments)))


PASSES: tuple[tuple[str, Callable[[Plan], Plan]], ...] = (
    ("normalise", _normalise),
    ("reduce", _reduce),
    ("classify", _classify),
    ("decompose", _decompose),
    ("close", _close),
    ("order", _order),
)


def _each(plan: Plan, change: Callable[[Draft], Draft]) -> Plan:
    return replace(plan, classes=tuple(map(change, plan.classes)))


def _check(name: str, plan: Plan) -> None:
    """Cheap structural checks; a failure is a fault of the pass that just ran."""
    for c in plan.classes:
        for cube in (*c.cubes, *(x for b in c.branches for x in (*b.alts, *b.minus))):
            forms = [r.lin for r in cube]
            assert len(forms) == len(set(forms)), f"{name}: two ranges of one form in {cube}"
        for s in c.segments:
            kinds = [x.kind for x in s.spans]
            assert ("full" in kinds) == (s.full_lo is not None) == (s.full_hi is not None), name
            assert "whole" in kinds or "tail" in kinds, f"{name}: {s.branch} leaves keys out"
            assert not s.guards or "full" in kinds, f"{name}: guards without a full part"
