"""Make one entry as the only builder of its key: fill a hidden folder, seal it, give it its name."""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import logging
import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path

from sparsegen.artifact import folder
from sparsegen.artifact.entry import (
    Artifact,
    GoneError,
    MissingError,
    UnreadableError,
    look_up,
    names_of,
    read_entry,
)
from sparsegen.artifact.folder import EntryName
from sparsegen.artifact.key import ArtifactKey
from sparsegen.artifact.manifest import (
    MANIFEST,
    SIGNATURE,
    Decision,
    FileRecord,
    Manifest,
    level_at_least,
    safe_name,
)
from sparsegen.artifact.signing import read_signature
from sparsegen.errors import ArtifactError

log = logging.getLogger(__name__)

Write = Callable[[Path], Decision]  # fills an empty folder, says what was decided
_PUBLISH_TRIES = 5


class CacheWarning(UserWarning):
    """The cache cannot be written: artifacts of this process go to a private temporary folder."""


class NoPlaceError(Exception):
    """The disk refuses; the cause is the OSError."""


@contextlib.contextmanager
def _disk() -> Iterator[None]:
    """Tell failures of the store's own disk work from failures of a builder."""
    try:
        yield
    except OSError as error:
        raise NoPlaceError from error


def build_in(
    root: Path,
    key: ArtifactKey,
    pattern: str,
    write: Write,
    versions: Mapping[str, str],
    accept: Callable[[Artifact], bool],
) -> Artifact:
    """``Store.build_once`` below one root; NoPlaceError where that root cannot be written."""
    with _building(root, key, accept) as (found, build):
        if found is not None:
            return found
        decision = _write(write, build)
        with _disk():
            return _publish(root, build, _seal(build, key, pattern, decision, versions))


def adopt_in(root: Path, artifact: Artifact) -> bool:
    """``Store.adopt`` below one root; NoPlaceError where that root cannot be written."""
    level = artifact.manifest.decision.tune

    def is_good(found: Artifact) -> bool:
        return level_at_least(found.manifest.decision.tune, level)

    with _building(root, artifact.key, is_good) as (found, build):
        if found is not None:
            return False
        signature = read_signature(artifact.path)
        for name in artifact.manifest.files:
            content = artifact.read(name)
            with _disk():
                (build / name).parent.mkdir(parents=True, exist_ok=True)
                (build / name).write_bytes(content)
        with _disk():
            (build / MANIFEST).write_text(artifact.manifest.to_json(), encoding="utf-8")
            if signature is not None:
                (build / SIGNATURE).write_bytes(signature)
            _publish(root, build, artifact.manifest)
        return True


def take_in(root: Path, artifact: Artifact) -> Artifact:
    """Adopt ``artifact`` below one root, and return what stands there for its key."""
    adopt_in(root, artifact)
    found, faults = look_up(root, artifact.key)
    if found is None:
        raise faults[0] if faults else GoneError(f"{artifact.path.name} was removed from {root}")
    return found


@contextlib.contextmanager
def _building(
    root: Path, key: ArtifactKey, accept: Callable[[Artifact], bool]
) -> Iterator[tuple[Artifact | None, Path]]:
    """As the one builder of ``key``: the stored artifact that ``accept`` takes, or an empty folder to fill."""
    artifacts = root / "artifacts"
    with contextlib.ExitStack() as held:
        with _disk():
            folder.make_private(artifacts)
            held.enter_context(folder.builder_lock(root, key.short()))
            discard_locked(root, key)
            found, _ = look_up(root, key)
        if found is not None and accept(found):
            yield found, found.path
            return
        with _disk():
            folder.sweep(artifacts, key.short())
            build = folder.start_build(artifacts, key.short())
        try:
            yield None, build
        finally:
            folder.remove(build)


def discard_locked(root: Path, key: ArtifactKey) -> None:
    """Move invalid entries of ``key`` aside; the caller holds the key's lock."""
    for name in names_of(root, key.short()):
        path = root / "artifacts" / str(name)
        try:
            read_entry(path, key)
        except (GoneError, UnreadableError):
            continue
        except ArtifactError as error:
            try:
                aside = folder.set_aside(path, "damaged")
            except OSError as refused:  # a later generation will stand before it
                log.info("invalid entry stays in place: %s (%s)", path, refused)
            else:
                log.info("moved aside to %s: %s", aside.name, error)


def _write(write: Write, build: Path) -> Decision:
    try:
        return write(build)
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:  # a full disk may come wrapped in a compiler's error
            if isinstance(cause, OSError) and cause.errno in folder.FULL:
                raise NoPlaceError from cause
            cause = cause.__cause__ or cause.__context__
        raise


def _seal(
    build: Path, key: ArtifactKey, pattern: str, decision: Decision, versions: Mapping[str, str]
) -> Manifest:
    """Write the manifest of a finished build: the digest of every file goes into it."""
    files = {}
    for path in sorted(build.rglob("*")):
        name, mode = path.relative_to(build).as_posix(), path.lstat().st_mode
        if stat.S_ISDIR(mode):
            continue
        if not stat.S_ISREG(mode) or not safe_name(name):
            raise ArtifactError(f"a builder left {name}, which is no plain file")
        content = path.read_bytes()
        files[name] = FileRecord(len(content), hashlib.sha256(content).hexdigest())
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    manifest = Manifest(key, pattern, decision, dict(versions), created, files)
    text = manifest.to_json()
    manifest = Manifest.from_json(text)  # what cannot be read back must not be published
    (build / MANIFEST).write_text(text, encoding="utf-8")
    return manifest


def _publish(root: Path, build: Path, manifest: Manifest) -> Artifact:
    key12 = manifest.key.short()
    name = f"{folder.plain(manifest.pattern)}-{manifest.key.gpu}"
    for _ in range(_PUBLISH_TRIES):
        there = [n.generation for n in names_of(root, key12)]
        target = EntryName(name, key12, max(there, default=0) + 1)
        path = root / "artifacts" / str(target)
        if folder.publish(build, root / "artifacts", target):
            _retire(root, key12, target.generation)
            return _read_back(path, manifest)
        found, _ = look_up(root, manifest.key)
        if found is not None:  # somebody without our lock was first: theirs is as good
            return found
    raise OSError(errno.EBUSY, "no name could be taken", str(root / "artifacts" / name))


def _read_back(path: Path, manifest: Manifest) -> Artifact:
    """Check what was published; a disk that will not show it yet does not undo a finished build."""
    try:
        return read_entry(path, manifest.key)
    except (UnreadableError, GoneError, MissingError) as error:
        log.info("published, not yet readable: %s (%s)", path, error)
        return Artifact(manifest.key, manifest, path)


def _retire(root: Path, key12: str, newest: int) -> None:
    """Remove generations that were already superseded when ``newest`` came."""
    for name in names_of(root, key12):
        if name.generation < newest - 1:
            folder.remove(root / "artifacts" / str(name))


# --- the private folder of a process whose store cannot be written ---

_SCRATCH: dict[
    tuple[int, Path], Path
] = {}  # (process id, store) -> folder; a forked child makes its own


def private_root(wanted: Path, reason: str) -> Path:
    """This process's own folder in place of the store ``wanted``, made with one CacheWarning at the first call."""
    mine = (os.getpid(), wanted)
    if mine not in _SCRATCH:
        try:
            made = Path(tempfile.mkdtemp(prefix="sparsegen-"))
        except OSError as error:
            raise ArtifactError(
                f"the cache {wanted} cannot be written ({reason}), nor a temporary folder ({error}); "
                "set SPARSEGEN_CACHE to a folder that can be written"
            ) from error
        _SCRATCH[mine] = made
        atexit.register(_remove_private, os.getpid(), made)
        warnings.warn(
            f"the cache {wanted} cannot be written ({reason}): what this process builds goes to {made} and is "
            "removed at its end; set SPARSEGEN_CACHE to a folder that can be written",
            CacheWarning,
            stacklevel=4,
        )
    return _SCRATCH[mine]


def roots(root: Path) -> list[Path]:
    """Where to look: ``root``, then this process's own folder in its place, if it had to make one."""
    scratch = _SCRATCH.get((os.getpid(), root))
    return [root] if scratch is None else [root, scratch]


def _remove_private(pid: int, made: Path) -> None:
    if pid == os.getpid():  # a forked child inherits the hook, not the folder
        shutil.rmtree(made, ignore_errors=True)
