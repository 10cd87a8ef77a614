"""Opening the place where a study is kept, so that many processes and a busy file do not break it.

SQLite fails in three ways under several writers: two processes create the tables at once, a write finds the file
locked, and a reader (a dashboard) blocks every writer.  Against the first, everything that writes holds a lock file
beside the database; against the second, each operation is tried again until a deadline; against the third, the
write-ahead log is switched on where the folder is local (it does not work across hosts).  What a database with a server needs
stands in ``server``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from sparsegen.errors import TuneError
from sparsegen.tune import server

if TYPE_CHECKING:
    import filelock
    import optuna
    import sqlalchemy

Result = TypeVar("Result")

_BUSY_S = 15.0  # one SQLite operation waits this long for a lock, before it is tried again
_NETWORK = ("nfs", "cifs", "smb", "lustre", "fuse", "9p", "gpfs", "afs", "ceph", "beegfs")
_LOG = logging.getLogger("sparsegen.tune")


class StorageBusy(TuneError):
    """The storage stayed locked by another process for longer than we wait."""


@dataclass
class Storage:
    """An opened storage.

    ``where`` is what a person may read (no password); ``path`` is set for SQLite; ``backend`` is Optuna's.
    ``patience_s`` bounds every wait for a lock or for a server.  ``turn`` and ``heartbeat`` are of a server.
    """

    where: str
    path: Path | None
    backend: optuna.storages.BaseStorage
    patience_s: float
    lock: filelock.BaseFileLock | None = None  # one object, so that the owner may take it again
    turn: server.Turn | None = None
    heartbeat: server.Heartbeat | None = None

    def locked(self, study: str = "") -> AbstractContextManager[object]:
        """One process at a time: in the whole file (SQLite), in one study (a server).

        Raises:
            StorageBusy: another process held the lock for more than ``patience_s``.
        """
        if self.turn is not None:
            return _in_turn(self.turn, study, self.where, self.patience_s)
        if self.lock is None:
            return contextlib.nullcontext()
        return _holding(self.lock, self.where, self.patience_s)

    def patiently(self, operation: Callable[[], Result]) -> Result:
        """``operation()``, tried again while the database is locked or away, until ``patience_s`` are over."""
        return _patiently(operation, self.patience_s, self.where)

    def close(self) -> None:
        """Close the connections to a server; a file needs no closing."""
        if self.heartbeat is not None:
            self.heartbeat.stop()
        if self.turn is not None:
            self.turn.close()
            self.backend.remove_session()


def open_storage(storage: str | Path | None, patience_s: float = 120.0) -> Storage:
    """Open or create the storage of a study.

    Args:
        storage: a path (SQLite file, made if absent), a database URL, or None for memory only.
        patience_s: how long to wait for other processes, in all, at each operation.

    Raises:
        StorageBusy: locked by another process for longer than ``patience_s``.
        TuneError: unreachable, damaged, or of another Optuna version; the message says what to do.
    """
    import filelock
    import optuna

    if storage is None:
        memory = optuna.storages.InMemoryStorage()
        return Storage("memory (lost when this process ends)", None, memory, patience_s)
    found = address_of(storage)
    if not isinstance(found, Path):
        return _open_server(found, patience_s)
    path, url, shown = found, _sqlite_url(found), str(found)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TuneError(f"cannot make the folder of the study {path}: {error}") from error

    def create() -> optuna.storages.RDBStorage:
        _write_ahead(path)
        kwargs = {"connect_args": {"timeout": min(_BUSY_S, patience_s)}}
        with _explained(shown):
            return optuna.storages.RDBStorage(url, engine_kwargs=kwargs)

    beside = f"{path}.lock"
    try:  # a lock that cannot be made would look like one that another process holds
        os.close(os.open(beside, os.O_CREAT | os.O_RDWR, 0o644))
    except OSError as error:
        raise TuneError(
            f"cannot write {beside}: {error.strerror}; give another --storage"
        ) from error
    lock = filelock.FileLock(beside)
    with _holding(lock, shown, patience_s):
        backend = _patiently(create, patience_s, shown)
    return Storage(shown, path, backend, patience_s, lock)


def address_of(storage: str | Path) -> Path | sqlalchemy.URL:
    """The absolute path of a SQLite file, or the URL of anything else."""
    text = str(storage)
    if "://" not in text:
        return Path(text).expanduser().absolute()
    url = server.address(text)
    if url.get_backend_name() == "sqlite" and url.database not in (None, "", ":memory:"):
        return Path(str(url.database)).absolute()
    return url


def _sqlite_url(path: Path) -> str:
    """The address that SQLAlchemy reads as this path, for Optuna, which fills in what stands in braces.

    TuneError where there is none: older versions take what follows a ``?`` for options, and another file for the study.
    """
    import sqlalchemy

    url = sqlalchemy.URL.create("sqlite", database=str(path)).render_as_string()
    if sqlalchemy.engine.make_url(url).database != str(path):
        raise TuneError(f"{path} cannot be a study: SQLAlchemy reads another name of a file in it")
    return url.replace("{", "{{").replace("}", "}}")


def _open_server(url: sqlalchemy.URL, patience_s: float) -> Storage:
    """Connect once, for a clear error; then make the tables, one process at a time."""
    shown = server.shown(url)
    with _explained(shown, url):
        turn = server.Turn(url, patience_s)
        with turn.held("tables"):
            backend = server.backend(url)
    return Storage(shown, None, backend, patience_s, turn=turn, heartbeat=server.Heartbeat(backend))


@contextlib.contextmanager
def _explained(shown: str, url: sqlalchemy.URL | None = None) -> Iterator[None]:
    """What fails while a storage is opened, as one sentence; a locked file is the caller's."""
    import optuna
    import sqlalchemy

    try:
        yield
    except (ImportError, sqlalchemy.exc.NoSuchModuleError) as error:
        cure = ": pip install 'sparsegen[postgres]'" if shown.startswith("postgresql:") else ""
        raise TuneError(f"the driver of {shown} is not installed: {error}{cure}") from error
    except (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        if _is_locked(error):
            raise
        if url is not None:  # the chain is cut: drivers repeat what they were given, a password too
            said = server.failure(error, url)
            raise TuneError(f"cannot use {shown} as a study: {said}") from None
        raise TuneError(
            f"cannot use {shown} as a study: {_cause(error)}; give another --storage, or move it away"
        ) from error
    except RuntimeError as error:  # Optuna's word for a schema of another version
        raise TuneError(f"{shown} was made by another version of optuna: {error}") from error


def _write_ahead(path: Path) -> None:
    if _on_network(path.parent):
        return
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=_BUSY_S)) as connection:
            connection.execute("PRAGMA journal_mode=WAL")
    except sqlite3.DatabaseError as error:
        if _is_locked(error):
            raise
        raise TuneError(f"{path} is not a SQLite file: {error}; give another --storage") from error


def _on_network(folder: Path) -> bool:
    """Whether the folder lies on a network file system; False where the system does not tell."""
    try:
        mounts = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return False
    real = os.path.realpath(folder)
    kind, longest = "", -1
    for _, point, system, *_ in map(str.split, mounts):
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= longest:
            kind, longest = system, len(point)
    return kind.startswith(_NETWORK)


@contextlib.contextmanager
def _holding(lock: filelock.BaseFileLock, where: str, patience_s: float) -> Iterator[None]:
    import filelock

    try:
        lock.acquire(timeout=patience_s)
    except filelock.Timeout as error:
        raise StorageBusy(
            f"the study {where} is in use by another process for more than {patience_s:.0f} s"
        ) from error
    except OSError as error:
        raise TuneError(f"cannot lock the study {where}: {error}") from error
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _in_turn(turn: server.Turn, study: str, where: str, patience_s: float) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        _patiently(lambda: stack.enter_context(turn.held(study)), patience_s, where)
        yield


def _patiently(operation: Callable[[], Result], patience_s: float, where: str) -> Result:
    end = time.monotonic() + patience_s
    while True:
        try:
            return operation()
        except Exception as error:
            locked = _is_locked(error)
            if not locked and not server.is_passing(error):
                raise
            if time.monotonic() >= end:
                how = "is locked by another process for" if locked else "did not answer for"
                raise StorageBusy(
                    f"the study {where} {how} more than {patience_s:.0f} s"
                ) from error
            _LOG.debug("%s is locked or away; trying again", where)
            time.sleep(0.05 + random.random() * 0.2)


def _is_locked(error: BaseException) -> bool:
    """Whether SQLite said "locked", at any depth of the chain: Optuna and SQLAlchemy both wrap it."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, sqlite3.OperationalError) and any(
            word in str(link) for word in ("database is locked", "database table is locked")
        ):
            return True
        link = link.__cause__ or getattr(link, "orig", None)
    return False


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error)
