"""Look after a store: list what is in it, remove what is no longer wanted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path

from sparsegen.artifact import folder
from sparsegen.artifact.entry import Artifact, read_entry
from sparsegen.artifact.manifest import Manifest
from sparsegen.artifact.store import Store
from sparsegen.errors import ArtifactError

log = logging.getLogger(__name__)

_GRACE = timedelta(hours=1)  # readers of a replaced entry have that long before prune takes it


@dataclass(frozen=True)
class EntryInfo:
    """One stored entry for people: sizes in bytes, ages in seconds.

    ``fault`` says why it cannot be used (then ``pattern`` is what its folder says and the rest is empty), ``superseded`` that a newer
    generation of the same key stands beside it.
    """

    path: Path
    pattern: str
    gpu: str
    dtype: str
    schedule: str
    config: str
    chosen_by: str
    key: str  # 12 hex digits
    size_bytes: int
    age_s: float
    superseded: bool = False
    fault: str = ""


@dataclass(frozen=True)
class Pruned:
    """What ``prune`` removed, or would remove."""

    entries: tuple[EntryInfo, ...]
    leftovers: tuple[Path, ...]  # of killed builders

    @property
    def size_bytes(self) -> int:
        """Bytes that the entries hold or held."""
        return sum(info.size_bytes for info in self.entries)


def list_entries(store: Store | None = None) -> list[EntryInfo]:
    """All entries of a store, by pattern, GPU and age; damaged ones carry their fault.  Files are not hashed."""
    store = Store() if store is None else store
    seen: set[tuple[Path, str]] = set()
    out = []
    for path, manifest in store.entries():  # newest generation first
        name = folder.EntryName.parse(path.name)
        key12 = name.key12 if name else ""
        superseded = (path.parent, key12) in seen
        seen.add((path.parent, key12))
        out.append(_info(path, manifest, key12, superseded))
    return sorted(out, key=lambda e: (e.pattern, e.gpu, e.dtype, e.key, e.age_s))


def select(
    store: Store | None = None, *, gpu: str | None = None, pattern: str | None = None
) -> list[Artifact]:
    """The newest verified entry of every key, for an export; ArtifactError names a damaged one."""
    store = Store() if store is None else store
    wanted = [
        e
        for e in list_entries(store)
        if not e.superseded and gpu in (None, e.gpu) and pattern in (None, e.pattern)
    ]
    return [read_entry(e.path) for e in wanted]


def prune(
    store: Store | None = None,
    *,
    older_than: timedelta | None = None,
    gpu: str | None = None,
    everything: bool = False,
    dry_run: bool = False,
) -> Pruned:
    """Remove entries, and what killed builders left.

    Args:
        older_than: entries made longer ago than that.
        gpu: only entries for that GPU type (exact name); alone: all of them.
        everything: all entries.
        dry_run: say what would go, touch nothing.

    Damaged entries and replaced generations always go.  Keys that are being built now are left alone.
    """
    store = Store() if store is None else store
    wanted = [e for e in list_entries(store) if _is_wanted(e, older_than, gpu, everything)]
    if dry_run:
        return Pruned(tuple(wanted), tuple(folder.leftovers(store.artifacts)))
    gone: list[EntryInfo] = []
    for info in wanted:
        if _with_lock(info.path.parent.parent, info.key, partial(folder.remove, info.path)):
            gone.append(info)
    swept: list[Path] = []
    for key12 in sorted(folder.unfinished_keys(store.artifacts)):
        _with_lock(store.root, key12, partial(_sweep_into, swept, store.artifacts, key12))
    return Pruned(tuple(gone), tuple(swept))


def _sweep_into(swept: list[Path], artifacts: Path, key12: str) -> None:
    swept += folder.sweep(artifacts, key12)


def _is_wanted(
    info: EntryInfo, older_than: timedelta | None, gpu: str | None, everything: bool
) -> bool:
    if info.fault or (info.superseded and info.age_s > _GRACE.total_seconds()):
        return True
    if gpu is not None and info.gpu != gpu:
        return False
    if older_than is not None:
        return info.age_s > older_than.total_seconds()
    return everything or gpu is not None


def _with_lock(root: Path, key12: str, action: Callable[[], object]) -> bool:
    """Run ``action`` under the key's lock; False, with a line in the log, where a builder holds it."""
    try:
        with folder.builder_lock(root, key12, timeout_s=0):
            action()
    except TimeoutError:
        log.info("left alone, it is being built now: %s", key12)
        return False
    except OSError as error:
        raise ArtifactError(f"{root} cannot be written: {error}") from error
    return True


def _info(path: Path, manifest: Manifest | Exception, key12: str, superseded: bool) -> EntryInfo:
    size = sum(p.lstat().st_size for p in path.rglob("*") if p.is_file())
    if isinstance(manifest, Exception):
        parts = folder.EntryName.parse(path.name)
        name = parts.name if parts else path.name
        made = datetime.fromtimestamp(path.lstat().st_mtime, timezone.utc)
        return EntryInfo(
            path, name, "", "", "", "", "", key12, size, _age(made), superseded, str(manifest)
        )
    return EntryInfo(
        path=path,
        pattern=manifest.pattern,
        gpu=manifest.key.gpu,
        dtype=manifest.key.dtype,
        schedule=manifest.decision.label,
        config=str(manifest.decision.config),
        chosen_by=manifest.decision.chosen_by,
        key=key12,
        size_bytes=size,
        age_s=_age(datetime.fromisoformat(manifest.created)),
        superseded=superseded,
    )


def _age(made: datetime) -> float:
    return (datetime.now(timezone.utc) - made).total_seconds()
