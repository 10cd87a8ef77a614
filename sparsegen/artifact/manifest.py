"""The manifest: what was decided for a key, with the digest of every file beside it.

Written as JSON with sorted keys, so two manifests differ line by line where the decisions do.  The reader is strict:
a file that it accepts has every field, of the right type, and its own digest right.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any

from sparsegen.artifact.key import ArtifactKey, describe_difference
from sparsegen.codegen.knobs import LaunchConfig, Value
from sparsegen.errors import ArtifactError

SCHEMA = 2  # 1 knew one schedule a pattern
MANIFEST = "manifest.json"
SIGNATURE = "signature.json"  # of the manifest; it may stand beside it and has no digest there
MAX_BYTES = 4 << 20  # a manifest is some kilobytes; a larger file is not one
LEVELS = ("off", "quick", "full")  # tuning, in rising order


class DamagedError(ArtifactError):
    """An entry is not what was written: a file is missing, cut, changed or unreadable."""


class MismatchError(ArtifactError):
    """A sound entry that was made for something else; the message names both sides."""


@dataclass(frozen=True)
class Variant:
    """One compiled kernel of the artifact.

    ``registers`` per thread, ``spill_bytes`` per thread and ``shared_bytes`` per block are ``None``
    where the backend's tools do not tell.  ``guard`` says in words when this variant may be launched.
    ``files`` are its files, relative to the entry.
    """

    name: str
    guard: str
    registers: int | None
    spill_bytes: int | None
    shared_bytes: int | None
    files: tuple[str, ...]


@dataclass(frozen=True)
class Considered:
    """A candidate schedule: its predicted time, and the best that was measured with it, None where nothing was."""

    label: str
    predicted_ms: float
    measured_us: float | None


@dataclass(frozen=True)
class Decision:
    """What a builder decided for a key.

    ``label`` names the schedule; it is one of ``candidates``, best prediction first, which were predicted for the call
    ``predicted_for``.  ``config`` is the template's.  ``chosen_by`` says how the configuration was found (a study, a step of the ``tuned/`` look-up, the template's default);
    ``tune`` is the level that was reached, one of ``LEVELS``.  ``time_us`` and
    ``baseline_us`` are medians where something was measured, ``measured`` says what and when.
    ``problem`` is the problem that the configuration was chosen for (its lengths are not in the key).
    ``schedule`` names the file with the schedule dump, ``source`` the generated kernel.
    """

    label: str
    candidates: tuple[Considered, ...]
    predicted_for: str
    config: LaunchConfig
    chosen_by: str
    tune: str
    variants: tuple[Variant, ...]
    schedule: str
    source: str
    problem: Mapping[str, Any]
    time_us: float | None = None
    baseline_us: float | None = None
    measured: str = ""


@dataclass(frozen=True)
class FileRecord:
    """Size and sha256 (hex) of one file of an entry."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Everything that is known about an entry: the key asked, the decision, versions, digests.

    ``versions`` has python, sparsegen, triton, torch and ptxas (``""`` = not known).  ``created`` is
    UTC, ISO 8601.  ``files`` maps every file but the manifest itself to its record.
    """

    key: ArtifactKey
    pattern: str
    decision: Decision
    versions: Mapping[str, str]
    created: str
    files: Mapping[str, FileRecord]

    def to_json(self) -> str:
        """The text of ``manifest.json``."""
        data = _plain(self)
        data["digest"] = _digest(data)
        return json.dumps(data, sort_keys=True, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Inverse of ``to_json``; DamagedError says what is wrong, MismatchError what it was made for."""
        data = _parse(text)
        try:
            manifest = _manifest(dict(data))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DamagedError(f"{MANIFEST} is damaged: {error}") from None
        if data.get("digest") != _digest({k: v for k, v in data.items() if k != "digest"}):
            raise AlteredError(manifest)
        return manifest

    def check(self, key: ArtifactKey) -> None:
        """MismatchError unless this manifest was made for ``key``, by the versions it names."""
        different = self.key.difference(key)
        if different:
            said = describe_difference(different, "made for", "asked")
            raise MismatchError(f"the entry was made for something else: {said}")
        triton, torch = self.versions.get("triton", ""), self.versions.get("torch", "")
        if triton != key.triton:
            raise MismatchError(f"the entry was made by triton {triton}, asked: {key.triton}")
        if ".".join(torch.split(".")[:2]) != key.torch:
            raise MismatchError(f"the entry was made with torch {torch}, asked: {key.torch}")


class AlteredError(DamagedError):
    """A well-formed manifest whose digest is not its own: somebody changed it after it was written.

    ``manifest`` holds what it says now, so that a message can name both sides.
    """

    def __init__(self, manifest: Manifest):
        self.manifest = manifest
        super().__init__(f"{MANIFEST} was changed after it was written (its digest does not fit)")


def level_at_least(have: str, asked: str) -> bool:
    """Whether tuning level ``have`` covers ``asked``."""
    return LEVELS.index(have) >= LEVELS.index(asked)


def safe_name(name: str) -> bool:
    """Whether ``name`` is a plain relative path that stays below its folder, in normal form."""
    path = PurePosixPath(name)
    return (
        bool(path.parts)
        and not path.is_absolute()
        and str(path) == name
        and ".." not in path.parts
        and "\\" not in name
        and "\0" not in name
    )


# --- plain data -> manifest; every failure is a ValueError, TypeError or KeyError, turned above ---


def _parse(text: str) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not a number")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({name for name, _ in pairs}) != len(pairs):
            raise ValueError("a name stands twice")
        return dict(pairs)

    try:
        data = json.loads(text, parse_constant=refuse, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{MANIFEST} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise DamagedError(f"{MANIFEST} must hold one object, got {type(data).__name__}")
    if data.get("schema") != SCHEMA:
        raise DamagedError(
            f"{MANIFEST} has schema {data.get('schema')!r}, this version reads {SCHEMA}"
        )
    return data


def _manifest(data: dict[str, Any]) -> Manifest:
    _names(data, {"schema", "digest", *(f.name for f in fields(Manifest))}, "manifest")
    files = {
        name: FileRecord(**_typed(record, {"bytes": int, "sha256": str}, f"files.{name}"))
        for name, record in _typed(data, {"files": dict}, "manifest", whole=False)["files"].items()
    }
    for name in files:
        if not safe_name(name):
            raise ValueError(f"file name {name!r} leaves the entry")
        if name in (MANIFEST, SIGNATURE):
            raise ValueError(f"file name {name!r} is taken")
    versions = data["versions"]
    if not isinstance(versions, dict) or not all(isinstance(v, str) for v in versions.values()):
        raise ValueError("versions must be texts")
    datetime.fromisoformat(data["created"])
    manifest = Manifest(
        key=ArtifactKey.from_dict(data["key"]),
        decision=_decision(data["decision"]),
        versions=versions,
        files=files,
        **_typed(data, {"pattern": str, "created": str}, "manifest", whole=False),
    )
    named = {manifest.decision.schedule, manifest.decision.source}
    named.update(name for variant in manifest.decision.variants for name in variant.files)
    if not named <= set(files):
        raise ValueError(f"no digest for {sorted(named - set(files))}")
    return manifest


def _decision(data: Any) -> Decision:
    _names(data, {f.name for f in fields(Decision)}, "decision")
    texts = ("label", "predicted_for", "chosen_by", "tune", "schedule", "source", "measured")
    types: dict[str, type] = {"problem": dict, **dict.fromkeys(texts, str)}
    values = _typed(data, types, "decision", whole=False)
    if values["tune"] not in LEVELS:
        raise ValueError(f"decision.tune: {values['tune']!r} is not one of {', '.join(LEVELS)}")
    config = data["config"]
    if not isinstance(config, dict) or any(
        type(v) not in (int, bool, str) for v in config.values()
    ):
        raise ValueError("decision.config must map knobs to numbers, booleans and texts")
    candidates = tuple(map(_considered, data["candidates"]))
    if values["label"] not in [c.label for c in candidates]:
        raise ValueError(f"decision.label: {values['label']!r} is none of its candidates")
    return Decision(
        candidates=candidates,
        config=LaunchConfig.of(config),
        variants=tuple(map(_variant, data["variants"])),
        time_us=_number(data["time_us"]),
        baseline_us=_number(data["baseline_us"]),
        **values,
    )


def _considered(data: Any) -> Considered:
    _names(data, {f.name for f in fields(Considered)}, "candidate")
    predicted = _number(data["predicted_ms"])
    if predicted is None:
        raise ValueError("candidate.predicted_ms must be a number")
    label = _typed(data, {"label": str}, "candidate", whole=False)["label"]
    return Considered(label, predicted, _number(data["measured_us"]))


def _variant(data: Any) -> Variant:
    _names(data, {f.name for f in fields(Variant)}, "variant")
    counts = {name: data[name] for name in ("registers", "spill_bytes", "shared_bytes")}
    if any(type(v) not in (int, type(None)) for v in counts.values()):
        raise ValueError(f"variant: {counts} must be whole numbers or null")
    names = data["files"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("variant.files must be a list of names")
    return Variant(
        files=tuple(names), **counts, **_typed(data, {"name": str, "guard": str}, "v", whole=False)
    )


def _names(data: Any, allowed: set[str], where: str) -> None:
    if not isinstance(data, dict):
        raise ValueError(f"{where} must be an object")
    if set(data) != allowed:
        odd = sorted(set(data) ^ allowed)
        raise ValueError(f"{where} lacks or does not know {odd}")


def _typed(data: Any, types: Mapping[str, type], where: str, whole: bool = True) -> dict[str, Any]:
    if whole:
        _names(data, set(types), where)
    for name, kind in types.items():
        if type(data[name]) is not kind:
            raise ValueError(f"{where}.{name} must be {kind.__name__}, got {data[name]!r}")
    return {name: data[name] for name in types}


def _number(value: Any) -> float | None:
    if value is not None and type(value) not in (int, float):
        raise ValueError(f"a time must be a number or null, got {value!r}")
    return None if value is None else float(value)


# --- manifest -> plain data ---


def _plain(manifest: Manifest) -> dict[str, Any]:
    decision = manifest.decision
    config: dict[str, Value] = decision.config.as_dict()
    plain = {f.name: getattr(decision, f.name) for f in fields(Decision)}
    plain.update(config=config, problem=dict(decision.problem))
    plain["candidates"] = [dict(vars(c)) for c in decision.candidates]
    plain["variants"] = [{**vars(v), "files": list(v.files)} for v in decision.variants]
    return {
        "schema": SCHEMA,
        "key": manifest.key.as_dict(),
        "pattern": manifest.pattern,
        "decision": plain,
        "versions": dict(manifest.versions),
        "created": manifest.created,
        "files": {name: dict(vars(record)) for name, record in manifest.files.items()},
    }


def _digest(data: Mapping[str, Any]) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
