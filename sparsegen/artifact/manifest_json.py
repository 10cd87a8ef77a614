"""The manifest as JSON.

Written with sorted keys, so two manifests differ line by line where the decisions do.  The reader is strict: a file
that it accepts has every field, of the right type, and its own digest right.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime
from typing import Any

from sparsegen.artifact.key import ArtifactKey
from sparsegen.artifact.manifest import (
    LEVELS,
    MANIFEST,
    SCHEMA,
    SIGNATURE,
    AlteredError,
    Bucket,
    Considered,
    DamagedError,
    Decision,
    FileRecord,
    Manifest,
    Variant,
    safe_name,
)
from sparsegen.codegen.knobs import LaunchConfig, Value


def written(manifest: Manifest) -> str:
    """The text of ``manifest.json``."""
    data = _plain(manifest)
    data["digest"] = _digest(data)
    return json.dumps(data, sort_keys=True, indent=1) + "\n"


def read(text: str) -> Manifest:
    """Inverse of ``written``; DamagedError says what is wrong, AlteredError that somebody changed it."""
    data = _parse(text)
    try:
        manifest = _manifest(dict(data))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedError(f"{MANIFEST} is damaged: {error}") from None
    if data.get("digest") != _digest({k: v for k, v in data.items() if k != "digest"}):
        raise AlteredError(manifest)
    return manifest


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
    for bucket in manifest.decision.buckets:
        named.update(name for variant in bucket.variants for name in variant.files)
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
    kernels = data["kernels"]
    if not isinstance(kernels, dict):
        raise ValueError("decision.kernels must map kernels to their configurations")
    candidates = tuple(map(_considered, data["candidates"]))
    if values["label"] not in [c.label for c in candidates]:
        raise ValueError(f"decision.label: {values['label']!r} is none of its candidates")
    return Decision(
        candidates=candidates,
        config=_config(data["config"], "config"),
        variants=tuple(map(_variant, data["variants"])),
        time_us=_number(data["time_us"]),
        baseline_us=_number(data["baseline_us"]),
        kernels={name: _config(c, f"kernels.{name}") for name, c in kernels.items()},
        buckets=tuple(_bucket(b, [c.label for c in candidates]) for b in data["buckets"]),
        **values,
    )


def _config(data: Any, where: str) -> LaunchConfig:
    if not isinstance(data, dict) or any(type(v) not in (int, bool, str) for v in data.values()):
        raise ValueError(f"decision.{where} must map knobs to numbers, booleans and texts")
    return LaunchConfig.of(data)


def _bucket(data: Any, labels: list[str]) -> Bucket:
    _names(data, {f.name for f in fields(Bucket)}, "bucket")
    types = {"q_len": int, "kv_len": int, "folder": str, "label": str, "chosen_by": str}
    values = _typed(data, types, "bucket", whole=False)
    if values["label"] not in labels:
        raise ValueError(f"bucket.label: {values['label']!r} is none of the candidates")
    if values["folder"] and not safe_name(values["folder"]):
        raise ValueError(f"bucket.folder: {values['folder']!r} leaves the entry")
    variants = tuple(map(_variant, data["variants"]))
    return Bucket(config=_config(data["config"], "buckets"), variants=variants, **values)


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
    kernels = {name: c.as_dict() for name, c in decision.kernels.items()}
    plain.update(config=config, kernels=kernels, problem=dict(decision.problem))
    plain["candidates"] = [dict(vars(c)) for c in decision.candidates]
    plain["variants"] = _plain_variants(decision.variants)
    plain["buckets"] = [
        {**vars(b), "config": b.config.as_dict(), "variants": _plain_variants(b.variants)}
        for b in decision.buckets
    ]
    return {
        "schema": SCHEMA,
        "key": manifest.key.as_dict(),
        "pattern": manifest.pattern,
        "decision": plain,
        "versions": dict(manifest.versions),
        "created": manifest.created,
        "files": {name: dict(vars(record)) for name, record in manifest.files.items()},
    }


def _plain_variants(variants: tuple[Variant, ...]) -> list[dict[str, Any]]:
    return [{**vars(v), "files": list(v.files)} for v in variants]


def _digest(data: Mapping[str, Any]) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
