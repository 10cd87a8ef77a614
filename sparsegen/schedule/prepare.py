"""From the masks of a pattern to classes of heads in normal form: three named passes.

normalise   expression  → DNF over integer forms
reduce      DNF         → fewer, plainer cubes; conjuncts that no length of the problem reaches leave
classify    heads       → classes of heads with equal canonical masks
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from sparsegen.schedule import canonical, shortfalls
from sparsegen.schedule.formula import Cube, dnf_text
from sparsegen.schedule.normalise import to_dnf
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


@dataclass(frozen=True)
class Plan:
    """What the passes work on."""

    align: str
    lengths: tuple[tuple[int, int], ...]
    classes: tuple[Draft, ...]
    notes: tuple[str, ...] = ()


def prepare(rules: Rules, align: str, lengths: Iterable[tuple[int, int]]) -> Plan:
    """All passes over (inclusive head ranges, None = the rest; mask) pairs."""
    plan = Plan(align, tuple(lengths), tuple(Draft(heads, mask) for heads, mask in rules))
    for name, run in PASSES:
        plan = run(plan)
        _check(name, plan)
    return plan


def _normalise(plan: Plan) -> Plan:
    return _each(plan, lambda c: replace(c, cubes=tuple(to_dnf(c.mask))))


def _reduce(plan: Plan) -> Plan:
    notes = []

    def one(c: Draft) -> Draft:
        plain = canonical.reduced(c.cubes)
        short = canonical.at_lengths(plain.cubes, plan.align, plan.lengths)
        most = short.max_position
        if most is not None:
            text = dnf_text(short.cubes)
            notes.append(f"{dnf_text(plain.cubes)}: below position {most} this is {text}")
        notes.extend(shortfalls.of_cubes(short.cubes))
        if plain.exhausted or short.exhausted:
            notes.append(shortfalls.UNPROVEN)
        return replace(c, cubes=short.cubes, max_position=most, min_position=short.min_position)

    plan = _each(plan, one)
    return replace(plan, notes=tuple(dict.fromkeys((*plan.notes, *notes))))


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


PASSES: tuple[tuple[str, Callable[[Plan], Plan]], ...] = (
    ("normalise", _normalise),
    ("reduce", _reduce),
    ("classify", _classify),
)


def _each(plan: Plan, change: Callable[[Draft], Draft]) -> Plan:
    return replace(plan, classes=tuple(map(change, plan.classes)))


def _check(name: str, plan: Plan) -> None:
    """A failure is a fault of the pass that just ran."""
    for c in plan.classes:
        for cube in c.cubes:
            forms = [r.lin for r in cube]
            assert len(forms) == len(set(forms)), f"{name}: two ranges of one form in {cube}"
