"""Opening the place where a study is kept, so that many processes and a busy file do not break it.

SQLite fails in three ways under several writers: two processes create the tables at once, a write finds the file
locked, and a reader (a dashboard) blocks every writer.  Against the first, everything that writes holds a lock file
beside the database; against the second, each operation is tried again until a deadline; against the third, the
write-ahead log is switched on where the folder is local (it does not work across hosts).
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
from typing import TYPE_CHECKING, Any, TypeVar

from sparsegen.errors import TuneError

if TYPE_CHECKING:
    import filelock
    import optuna

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
    ``patience_s`` bounds every wait for a lock.
    """

    where: str
    path: Path | None
    backend: optuna.storages.BaseStorage
    patience_s: float
    lock: filelock.BaseFileLock | None = None  # one object, so that the owner may take it again

    def locked(self) -> AbstractContextManager[object]:
        """One process at a time (SQLite); databases with a server do their own locking.

        Raises:
            StorageBusy: another process held the lock for more than ``patience_s``.
        """
        if self.lock is None:
            return contextlib.nullcontext()
        return _holding(self.lock, self.where, self.patience_s)

    def patiently(self, operation: Callable[[], Result]) -> Result:
        """``operation()``, tried again while the database is locked, until ``patience_s`` are over."""
        return _patiently(operation, self.patience_s, self.where)


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
    url, path, shown = _address(storage)
    if path is None:
        backend = _open(url, {"pool_pre_ping": True}, shown)
        return Storage(shown, None, backend, patience_s)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TuneError(f"cannot make the folder of the study {path}: {error}") from error

    def create() -> optuna.storages.RDBStorage:
        _write_ahead(path)
        return _open(url, {"connect_args": {"timeout": min(_BUSY_S, patience_s)}}, shown)

    lock = filelock.FileLock(f"{path}.lock")
    with _holding(lock, shown, patience_s):
        backend = _patiently(create, patience_s, shown)
    return Storage(shown, path, backend, patience_s, lock)


def _address(storage: str | Path) -> tuple[str, Path | None, str]:
    """(URL for SQLAlchemy, path of a SQLite file or None, the URL without its password)."""
    import sqlalchemy

    text = str(storage)
    if "://" not in text:
        path = Path(text).expanduser().absolute()
        return f"sqlite:///{path}", path, str(path)
    try:
        url = sqlalchemy.engine.make_url(text)
    except sqlalchemy.exc.ArgumentError as error:
        raise TuneError(f"--storage {text!r} is neither a path nor a database URL") from error
    if url.get_backend_name() == "sqlite" and url.database not in (None, "", ":memory:"):
        path = Path(str(url.database)).absolute()
        return f"sqlite:///{path}", path, str(path)
    return text, None, url.render_as_string(hide_password=True)


def _open(url: str, engine_kwargs: dict[str, Any], shown: str) -> optuna.storages.RDBStorage:
    import optuna
    import sqlalchemy

    try:
        return optuna.storages.RDBStorage(url, engine_kwargs=engine_kwargs)
    except (ImportError, sqlalchemy.exc.NoSuchModuleError) as error:
        raise TuneError(f"the driver of {shown} is not installed: {error}") from error
    except (sqlalchemy.exc.DatabaseError, optuna.exceptions.StorageInternalError) as error:
        if _is_locked(error):
            raise
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


def _patiently(operation: Callable[[], Result], patience_s: float, where: str) -> Result:
    end = time.monotonic() + patience_s
    while True:
        try:
            return operation()
        except Exception as error:
            if not _is_locked(error):
                raise
            if time.monotonic() >= end:
                raise StorageBusy(
                    f"the study {where} is locked by another process for more than "
                    f"{patience_s:.0f} s"
                ) from error
            _LOG.debug("%s is locked; trying again", where)
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
