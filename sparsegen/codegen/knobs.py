"""Tuning knobs: a template declares them, the tuner searches them, a ``LaunchConfig`` holds one choice of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Value = int | bool | str


@dataclass(frozen=True)
class Knob:
    """One tuning decision of a template.

    ``choices`` in search order; ``default`` is one of them.  ``when`` names (knob, value): the knob is searched only
    where that knob has that value, and keeps its default elsewhere.
    """

    name: str
    choices: tuple[Value, ...]
    default: Value
    summary: str
    when: tuple[str, Value] | None = None


@dataclass(frozen=True)
class LaunchConfig:
    """One value for every knob of a template: what the tuner decides and an artifact records."""

    values: tuple[tuple[str, Value], ...]

    @classmethod
    def of(cls, values: Mapping[str, Value]) -> LaunchConfig:
        return cls(tuple(sorted(values.items())))

    def __getitem__(self, name: str) -> Value:
        return dict(self.values)[name]

    def as_dict(self) -> dict[str, Value]:
        return dict(self.values)

    def __str__(self) -> str:
        return " ".join(f"{n}={v}" for n, v in self.values)
