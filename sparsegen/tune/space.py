"""The search space of a template: its knobs, which of them are active where, and one name for equal configurations."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparsegen.codegen.knobs import Knob, LaunchConfig, Value
from sparsegen.errors import TuneError

if TYPE_CHECKING:
    import optuna


@dataclass(frozen=True)
class Space:
    """All configurations of a list of knobs.

    A knob with ``when`` is active only where the knob it names has the value it names; elsewhere it keeps its default,
    so two choices that differ only in inactive knobs are one ``LaunchConfig`` and are measured once.

    Raises:
        TuneError: the knobs contradict each other; every mistake is named.
    """

    knobs: tuple[Knob, ...]

    def __post_init__(self) -> None:
        mistakes = list(_mistakes(self.knobs))
        if mistakes:
            raise TuneError("the template's knobs are inconsistent: " + "; ".join(mistakes))
        object.__setattr__(self, "knobs", _parents_first(self.knobs))

    @property
    def default(self) -> LaunchConfig:
        """Every knob at its own default."""
        return LaunchConfig.of({knob.name: knob.default for knob in self.knobs})

    def canonical(self, values: Mapping[str, Value]) -> LaunchConfig:
        """The one configuration that ``values`` means: inactive knobs at their default, absent ones too.

        Raises:
            TuneError: an unknown knob, or a value that is not among its knob's choices.
        """
        unknown = sorted(set(values) - {knob.name for knob in self.knobs})
        if unknown:
            raise TuneError(f"unknown knob {', '.join(unknown)}; known: {self._names()}")
        chosen: dict[str, Value] = {}
        for knob in self.knobs:
            value = values.get(knob.name, knob.default) if _active(knob, chosen) else knob.default
            if not _among(value, knob.choices):
                raise TuneError(f"knob {knob.name} cannot be {value!r}; choices: {knob.choices}")
            chosen[knob.name] = value
        return LaunchConfig.of(chosen)

    def parameters(self, config: LaunchConfig) -> dict[str, Value]:
        """The active knobs of ``config``: what a study stores and what a trial is enqueued with."""
        values = config.as_dict()
        return {knob.name: values[knob.name] for knob in self.knobs if _active(knob, values)}

    def suggest(self, trial: optuna.Trial) -> LaunchConfig:
        """Ask the trial for each active knob in turn (define by run)."""
        chosen: dict[str, Value] = {}
        for knob in self.knobs:
            if _active(knob, chosen):
                chosen[knob.name] = trial.suggest_categorical(knob.name, list(knob.choices))
            else:
                chosen[knob.name] = knob.default
        return LaunchConfig.of(chosen)

    def enumerate(self) -> Iterator[LaunchConfig]:
        """Every configuration exactly once, in the order of the knobs and their choices."""

        def grow(chosen: dict[str, Value], rest: tuple[Knob, ...]) -> Iterator[LaunchConfig]:
            if not rest:
                yield LaunchConfig.of(chosen)
                return
            knob = rest[0]
            for value in knob.choices if _active(knob, chosen) else (knob.default,):
                yield from grow({**chosen, knob.name: value}, rest[1:])

        yield from grow({}, self.knobs)

    @property
    def cardinality(self) -> int:
        """How many different configurations there are."""
        return sum(1 for _ in self.enumerate())

    def draw(self, rng: random.Random) -> LaunchConfig:
        """One configuration at random, each active knob uniform over its choices."""
        chosen: dict[str, Value] = {}
        for knob in self.knobs:
            chosen[knob.name] = rng.choice(knob.choices) if _active(knob, chosen) else knob.default
        return LaunchConfig.of(chosen)

    def neighbours(self, config: LaunchConfig) -> list[LaunchConfig]:
        """The configurations one step away: one active knob moved to the choice before or after it."""
        found: dict[LaunchConfig, None] = {}
        values = config.as_dict()
        for knob in self.knobs:
            if not _active(knob, values):
                continue
            at = knob.choices.index(values[knob.name])
            for step in (at - 1, at + 1):
                if 0 <= step < len(knob.choices):
                    found[self.canonical({**values, knob.name: knob.choices[step]})] = None
        found.pop(config, None)
        return list(found)

    def _names(self) -> str:
        return ", ".join(knob.name for knob in self.knobs)


def _active(knob: Knob, chosen: Mapping[str, Value]) -> bool:
    return knob.when is None or _among(chosen[knob.when[0]], (knob.when[1],))


def _among(value: object, choices: tuple[Value, ...]) -> bool:
    """Membership that keeps True and 1 apart: they are different texts in generated code."""
    return any(type(value) is type(choice) and value == choice for choice in choices)


def _mistakes(knobs: tuple[Knob, ...]) -> Iterator[str]:
    named = {knob.name: knob for knob in knobs}
    if len(named) < len(knobs):
        yield "a knob is declared twice"
    for knob in knobs:
        if len(set(map(repr, knob.choices))) < len(knob.choices):
            yield f"{knob.name} lists a choice twice"
        if not _among(knob.default, knob.choices):
            yield f"the default {knob.default!r} of {knob.name} is not among its choices"
        if knob.when is None:
            continue
        parent, value = knob.when
        if parent not in named:
            yield f"{knob.name} depends on {parent}, which is not declared"
        elif not _among(value, named[parent].choices):
            yield f"{knob.name} waits for {parent}={value!r}, which {parent} never is"


def _parents_first(knobs: tuple[Knob, ...]) -> tuple[Knob, ...]:
    """Declared order, but a knob after the one it depends on."""
    ordered: dict[str, Knob] = {}
    waiting = list(knobs)
    while waiting:
        ready = [k for k in waiting if k.when is None or k.when[0] in ordered]
        if not ready:
            loop = ", ".join(knob.name for knob in waiting)
            raise TuneError(f"the template's knobs are inconsistent: {loop} depend on each other")
        ordered.update({knob.name: knob for knob in ready})
        waiting = [knob for knob in waiting if knob.name not in ordered]
    return tuple(ordered.values())
