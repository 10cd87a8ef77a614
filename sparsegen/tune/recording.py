"""Trials on record in a file: many configurations times several problems, written as they are measured.

One JSON object a line: first the file (GPU, template, versions), then problems, each before its trials.  A run that was
killed leaves at most a cut last line, which the next one removes; what is on record is not measured again.  Replays
(``replay``) and the search for few configurations (``cover``) read these files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from sparsegen.codegen.knobs import Knob, LaunchConfig
from sparsegen.errors import ArtifactError, InputError, TuneError
from sparsegen.spec.text_file import read_text
from sparsegen.tune.store import Measured

if TYPE_CHECKING:
    from sparsegen.tune.target import KernelTarget

FORMAT = "sparsegen recording 1"
MOST_BYTES = 1 << 28  # of a file that is read; a line a trial is 300 bytes, and a device never ends
Feature = str | int | float | bool


@dataclass(frozen=True)
class Origin:
    """What all trials of a file share.  ``synthetic``: the times come from a formula and not from a GPU."""

    gpu: str
    template: str
    template_digest: str
    versions: Mapping[str, str]
    date: str
    synthetic: bool = False


@dataclass(frozen=True)
class Recorded:
    """One problem of a file: what is needed to search it again, and to say how it differs from others.

    ``knobs`` span what was searched; ``starts`` are what a tuning without a record would measure after ``default``;
    ``features`` are those of ``cover`` (empty where only a search is replayed).
    """

    name: str
    pattern: str
    pattern_digest: str
    problem: Measured
    knobs: tuple[Knob, ...] = ()
    default: LaunchConfig | None = None
    starts: tuple[LaunchConfig, ...] = ()
    features: Mapping[str, Feature] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        plain = {**asdict(self), "knobs": [asdict(k) for k in self.knobs]}
        plain["default"] = self.default.as_dict() if self.default else None
        return {**plain, "starts": [c.as_dict() for c in self.starts]}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Recorded:
        """From JSON."""
        knobs = tuple(
            Knob(
                k["name"],
                tuple(k["choices"]),
                k["default"],
                k["summary"],
                tuple(k["when"]) if k["when"] else None,
            )
            for k in values["knobs"]
        )
        return cls(
            **{
                **values,
                "problem": Measured(**values["problem"]),
                "knobs": knobs,
                "default": LaunchConfig.of(values["default"]) if values["default"] else None,
                "starts": tuple(LaunchConfig.of(c) for c in values["starts"]),
            }
        )


@dataclass(frozen=True)
class Entry:
    """One trial: ``time_us`` (median of ``rounds_us``) where it was measured and right, else ``kind`` and ``reason``.

    ``kind`` as in ``study``: "spills", "wrong result", ...; "invalid" for what the template refuses for this problem.
    ``noise``: relative, as in ``measure``.
    """

    problem: str
    config: LaunchConfig
    time_us: float | None = None
    rounds_us: tuple[float, ...] = ()
    noise: float = 0.0
    kind: str = ""
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "config": self.config.as_dict()}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Entry:
        """From JSON."""
        config, rounds = LaunchConfig.of(values["config"]), tuple(values["rounds_us"])
        return cls(**{**values, "config": config, "rounds_us": rounds})


@dataclass(frozen=True)
class Recording:
    """A whole file: problems by name, trials by problem and configuration."""

    origin: Origin
    problems: Mapping[str, Recorded]
    trials: Mapping[str, Mapping[LaunchConfig, Entry]]

    def times(self, problem: str) -> dict[LaunchConfig, float]:
        """µs of every configuration that was measured and right for a problem."""
        found = self.trials[problem].items()
        return {config: e.time_us for config, e in found if e.time_us is not None}


def read(path: Path) -> Recording:
    """Read a file; a last line that is cut, as a killed run leaves it, does not count.

    Raises:
        ArtifactError: not such a file, or damaged; the message has the line.
    """
    try:
        lines = read_text(path, MOST_BYTES).split("\n")[:-1]
    except InputError as error:
        raise ArtifactError(f"cannot read the recording {error}") from error
    origin: Origin | None = None
    problems: dict[str, Recorded] = {}
    trials: dict[str, dict[LaunchConfig, Entry]] = {}
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
            if number == 1:
                origin = _origin(values)
            elif "knobs" in values:
                one = Recorded.of(values)
                problems[one.name] = one
                trials.setdefault(one.name, {})
            else:
                entry = Entry.of(values)
                trials[entry.problem][entry.config] = entry
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArtifactError(f"{path}:{number}: no line of a recording ({error})") from error
    if origin is None:
        raise ArtifactError(f"{path} is no recording: it has no first line ({FORMAT})")
    return Recording(origin, problems, trials)


class Recorder:
    """Writes a file, or goes on with one.

    ``before`` is what was on record when it was opened.

    Raises:
        TuneError: the file is of another GPU, template or compiler: times of the two cannot be compared.
        ArtifactError: the file is damaged.
    """

    def __init__(self, path: Path, origin: Origin) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = _cut_off(path)
        self.before = read(path) if whole else Recording(origin, {}, {})
        _refuse_another(path, self.before.origin, origin)
        self._problems = set(self.before.problems)
        self._file: IO[str] = path.open("a", encoding="utf-8")
        if not whole:
            self._write({"format": FORMAT, **asdict(origin)})

    def problem(self, recorded: Recorded) -> Mapping[LaunchConfig, Entry]:
        """Begin a problem; what is on record of it already."""
        if recorded.name not in self._problems:
            self._problems.add(recorded.name)
            self._write(recorded.as_dict())
        return self.before.trials.get(recorded.name, {})

    def trial(self, entry: Entry) -> None:
        """Add a trial; it is on disk when this returns."""
        self._write(entry.as_dict())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, values: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()


def described(
    target: KernelTarget, features: Mapping[str, Feature], fixed: Mapping[str, Any]
) -> Recorded:
    """The problem of a target, its knobs narrowed to what ``fixed`` allows (a value, or several)."""
    allowed = {n: v if isinstance(v, (list, tuple)) else (v,) for n, v in fixed.items()}
    knobs = tuple(
        Knob(k.name, choices, k.default if k.default in choices else choices[0], k.summary, k.when)
        for k in target.knobs
        for choices in [tuple(c for c in k.choices if c in allowed.get(k.name, k.choices))]
    )
    inside = [c for c in target.starts if _within(c, knobs)]
    default = target.default if _within(target.default, knobs) else None
    measured = Measured.of(target.problem, target.q_len, target.kv_len)
    p = measured
    name = (
        f"{target.pattern.name} {p.q_len}x{p.kv_len} B{p.batch} H{p.heads}:{p.kv_heads} "
        f"D{p.head_dim}:{p.value_dim} {p.dtype}"
    )
    digest = target.pattern.digest()
    return Recorded(
        name, target.pattern.name, digest, measured, knobs, default, tuple(inside), features
    )


def _within(config: LaunchConfig, knobs: tuple[Knob, ...]) -> bool:
    return all(config[knob.name] in knob.choices for knob in knobs)


def _origin(values: dict[str, Any]) -> Origin:
    if values.pop("format", None) != FORMAT:
        raise ValueError(f"the first line must say {FORMAT!r}")
    return Origin(**values)


def _cut_off(path: Path) -> bool:
    """Remove a last line without an end; whether anything is left."""
    if not path.exists():
        return False
    text = path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if len(whole) < len(text):
        os.truncate(path, len(whole))
    return bool(whole)


def _refuse_another(path: Path, there: Origin, here: Origin) -> None:
    names = ("gpu", "template", "template_digest", "versions", "synthetic")
    for name in names:
        if getattr(there, name) != getattr(here, name):
            raise TuneError(
                f"{path} was recorded with {name} {getattr(there, name)}, now it is "
                f"{getattr(here, name)}: record into another file"
            )
