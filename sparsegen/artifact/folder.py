"""The disk under a store: names, atomic publish, one builder a key, removal.

    <root>/artifacts/<pattern>-<gpu>-<key12>/       a published entry, never changed after its rename
    <root>/artifacts/<pattern>-<gpu>-<key12>.<n>/   a later generation of the same key (better tuned)
    <root>/artifacts/.build-<key12>-<host>-<pid>-*  an entry in the making
    <root>/artifacts/.old-*  .damaged-*             renamed out of the way, on the way to removal
    <root>/locks/<key12>.lock                       held (flock) by the one builder of that key

Files appear under their final name only by the rename of a whole, synced folder, so a reader sees an entry whole or
not at all, whenever its builder is killed.  Functions here raise plain OSError; the store decides what follows.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import filelock

log = logging.getLogger(__name__)

# Network file systems and parallel cleaners raise these where a second try, or nothing, is right.
TRANSIENT = frozenset({errno.EBUSY, errno.ESTALE, errno.EINTR, errno.EAGAIN, errno.ETXTBSY})
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})
_TAKEN = frozenset({errno.EEXIST, errno.ENOTEMPTY, errno.EISDIR})
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})
_TRIES = 6
_FIRST_PAUSE_S = 0.01  # doubles: all tries together take 0.3 s
_NOTE_AFTER_S = 2.0  # waiting longer than this for another builder is worth a line in the log
_NOTE_EVERY_S = 60.0
_ABANDONED_S = 3600.0  # no builder leaves its folder untouched that long: a study writes its trials
_ENTRY = re.compile(r"(?P<name>[^.].*)-(?P<key12>[0-9a-f]{12})(?:\.(?P<generation>[1-9]\d*))?")
_BUILD = re.compile(r"\.build-(?P<key12>[0-9a-f]{12})-(?P<host>.*)-(?P<pid>\d+)-[^-]*")

T = TypeVar("T")


@dataclass(frozen=True)
class EntryName:
    """A folder name taken apart; generation 1 carries no number."""

    name: str  # <pattern>-<gpu>
    key12: str
    generation: int

    def __str__(self) -> str:
        suffix = "" if self.generation == 1 else f".{self.generation}"
        return f"{self.name}-{self.key12}{suffix}"

    @classmethod
    def parse(cls, text: str) -> EntryName | None:
        """The parts of ``text``, or ``None`` where it is no entry's name."""
        found = _ENTRY.fullmatch(text)
        if found is None:
            return None
        return cls(found["name"], found["key12"], int(found["generation"] or 1))


def plain(text: str) -> str:
    """``text`` as part of a file name: letters, digits, ``_ . -``; at most 80, not starting with a dot."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", text)[:80].lstrip(".-") or "pattern"


def patient(operation: Callable[[], T]) -> T:
    """Run ``operation``, again after a pause while it raises a transient OSError."""
    pause = _FIRST_PAUSE_S
    for _ in range(_TRIES - 1):
        try:
            return operation()
        except OSError as error:
            if error.errno not in TRANSIENT:
                raise
            log.debug("trying again after: %s", error)
        time.sleep(pause)
        pause *= 2
    return operation()


def entry_names(artifacts: Path) -> list[EntryName]:
    """Names of all entries, newest generation first; empty where the folder is not there."""
    try:
        found = map(EntryName.parse, patient(lambda: os.listdir(artifacts)))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((n for n in found if n), key=lambda n: (-n.generation, n.name, n.key12))


def read_bytes(path: Path, limit: int | None = None) -> bytes:
    """Content of a regular file (never through a link); ValueError if it holds more than ``limit`` bytes."""

    def read() -> bytes:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
        with open(descriptor, "rb") as file:
            content = file.read() if limit is None else file.read(limit + 1)
        if limit is not None and len(content) > limit:
            raise ValueError(f"{path} holds more than {limit} bytes")
        return content

    return patient(read)


def make_private(path: Path) -> None:
    """Make a folder and its missing parents, all with mode 0700; those that exist keep their mode."""
    if not path.parent.is_dir():
        make_private(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)


def start_build(artifacts: Path, key12: str) -> Path:
    """A new empty folder beside the entries, marked with who makes it."""
    prefix = f".build-{key12}-{plain(socket.gethostname())}-{os.getpid()}-"
    return Path(tempfile.mkdtemp(prefix=prefix, dir=artifacts))


def sync(directory: Path) -> None:
    """Force all files and folders below ``directory`` to the disk."""
    for folder, _, names in os.walk(directory, topdown=False):
        for name in names:
            _sync_one(os.path.join(folder, name))
        _sync_one(folder)


def publish(build: Path, artifacts: Path, target: EntryName) -> bool:
    """Rename a finished build to its name; False where that name is taken (somebody was first)."""
    sync(build)
    final = artifacts / str(target)

    def rename() -> bool:
        try:
            os.rename(build, final)
        except OSError as error:
            # A network file system may report a failure for a rename that took place.
            if error.errno in _TAKEN or (final.is_dir() and not build.exists()):
                return not build.exists()
            fleeting = error.errno in TRANSIENT or error.errno == errno.ENOENT
            if fleeting and final.is_dir():
                return False
            if error.errno == errno.ENOENT and build.is_dir() and artifacts.is_dir():
                raise OSError(errno.ESTALE, "stale name at rename", str(final)) from error
            raise
        return True

    done = patient(rename)
    with contextlib.suppress(
        OSError
    ):  # the entry is there; its durability is the disk's matter now
        _sync_one(artifacts)
    return done


def remove(path: Path) -> None:
    """Remove a folder: out of sight by one rename first, so that no reader finds half an entry.

    What cannot be removed now (another process holds it open on a network disk) stays under a name that the next
    sweep finds; that is logged, not raised.
    """
    try:
        if not path.name.startswith("."):
            path = set_aside(path, "old")
        patient(partial(shutil.rmtree, path))
    except OSError as error:
        if os.path.lexists(path):  # else it is gone: done, or somebody else's work
            log.info("left for the next sweep: %s (%s)", path, error)


def set_aside(path: Path, why: str) -> Path:
    """Rename an entry to a hidden name that starts with ``why`` and that no look-up finds."""
    hidden = path.with_name(f".{why}-{path.name}-{os.getpid()}-{time.time_ns():x}")
    with contextlib.suppress(FileNotFoundError):  # somebody else did it
        patient(lambda: os.rename(path, hidden))
    return hidden


def sweep(artifacts: Path, key12: str) -> list[Path]:
    """Remove what killed builders of ``key12`` left; the caller holds that key's lock."""
    gone = []
    for name in _listing(artifacts):
        build = _BUILD.fullmatch(name)
        left = build and build["key12"] == key12 and _is_abandoned(artifacts / name, build)
        if left or (name.startswith((".old-", ".damaged-")) and f"-{key12}" in name):
            gone.append(artifacts / name)
    for path in gone:
        remove(path)
    return gone


def leftovers(artifacts: Path) -> list[Path]:
    """Everything beside the entries: builds in the making, or left by a kill, and what waits for removal."""
    hidden = (".build-", ".old-", ".damaged-")
    return [artifacts / name for name in _listing(artifacts) if name.startswith(hidden)]


def unfinished_keys(artifacts: Path) -> set[str]:
    """Short keys for which something stands beside the entries that a sweep may remove."""
    found = (re.search(r"-([0-9a-f]{12})(?:[-.]|$)", p.name) for p in leftovers(artifacts))
    return {match[1] for match in found if match}


@contextlib.contextmanager
def builder_lock(root: Path, key12: str, timeout_s: float = -1) -> Iterator[None]:
    """Hold the lock of one key, across processes; the kernel frees it when its holder dies.

    ``timeout_s`` < 0 waits without end, with a note in the log; else TimeoutError after that time.  On a file system
    without locks the build goes on unlocked: the rename still lets one entry win.
    """
    import filelock

    make_private(root / "locks")
    lock = filelock.FileLock(str(root / "locks" / f"{key12}.lock"))
    try:
        _acquire(lock, key12, timeout_s)
    except OSError as error:
        if isinstance(error, TimeoutError) or error.errno not in _NO_LOCKS:
            raise
        log.warning("%s has no file locks (%s): going on without", root, error)
        yield
        return
    try:
        yield
    finally:
        try:
            lock.release()
        except (
            OSError
        ) as error:  # a lost network disk: closing the file frees the lock all the same
            log.info("lock %s: %s", lock.lock_file, error)


def _acquire(lock: filelock.BaseFileLock, key12: str, timeout_s: float) -> None:
    import filelock

    waited, pause = 0.0, _NOTE_AFTER_S
    while True:
        step = pause if timeout_s < 0 else timeout_s
        try:
            patient(partial(lock.acquire, timeout=step, poll_interval=0.02))
            return
        except filelock.Timeout:
            if timeout_s >= 0:
                raise TimeoutError(f"{lock.lock_file} is held") from None
        waited, pause = waited + step, _NOTE_EVERY_S
        log.warning("waiting for another process that builds %s (%.0f s so far)", key12, waited)


def _is_abandoned(path: Path, build: re.Match[str]) -> bool:
    """Whether the builder named by ``path`` is gone.

    Its lock is in our hands, so it is, unless the lock does not reach its host: then only age tells.
    """
    here = build["host"] == plain(socket.gethostname())
    if here and not _is_alive(int(build["pid"])):
        return True
    try:
        newest = max(os.stat(p).st_mtime for p in (path, *path.rglob("*")))
    except OSError:  # vanishing under our eyes, or not to be read: someone else's turn
        return False
    return time.time() - newest > _ABANDONED_S


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # alive, another user's
        return True
    return True


def _listing(artifacts: Path) -> list[str]:
    try:
        return sorted(patient(lambda: os.listdir(artifacts)))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _sync_one(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that cannot sync folders
            raise
    finally:
        os.close(descriptor)
