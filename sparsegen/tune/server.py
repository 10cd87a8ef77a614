"""A study in a database with a server (PostgreSQL): its address, one writer at a time, and errors for people.

Hosts cannot look into each other, so a process that works on trials there says every ``_BEAT_S`` seconds that it lives
(Optuna's heartbeats, by the server's clock); a trial whose owner has been silent for ``_SILENT_S`` is left behind.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import threading
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from sparsegen.errors import TuneError

if TYPE_CHECKING:
    import optuna
    import sqlalchemy

_BEAT_S, _SILENT_S = 20, 90
_CONNECT_S = 10  # for a server that does not answer; libpq alone would wait for minutes
_SECRETS = ("password", "passwd", "sslpassword")  # also behind the question mark of an address
_FORM = "postgresql://USER:PASSWORD@HOST:PORT/DATABASE"
# SQLSTATE of what passes: connections lost (08), a server that starts or stops (57P), deadlocks and clashes (40), and a
# lock that was not had in time.
_PASSING = re.compile(r"08...|57P0[123]|40...|55P03")
_LOG = logging.getLogger("sparsegen.tune")


def address(text: str) -> sqlalchemy.URL:
    """The URL of ``--storage``, with the driver that sparsegen installs where none is named.

    Raises:
        TuneError: it cannot be read; the message has nothing of it but its first word, for a password may stand anywhere.
    """
    import sqlalchemy

    try:
        url = sqlalchemy.engine.make_url(text)
    except (sqlalchemy.exc.ArgumentError, ValueError) as error:
        scheme = text.split("://")[0]
        raise TuneError(
            f"--storage {scheme}://… is neither a path nor a database URL ({_FORM}; "
            "write @ : / in a password as %40 %3A %2F)"
        ) from error.with_traceback(None)
    if url.drivername in ("postgresql", "postgres"):
        url = url.set(drivername="postgresql+psycopg")
    return url


def shown(url: sqlalchemy.URL) -> str:
    """The URL for a person: the password is ``***`` wherever it stands."""
    hidden = {k: "***" if k.lower() in _SECRETS else v for k, v in url.query.items()}
    plain = url.set(query=hidden, drivername=url.get_backend_name())
    return plain.render_as_string(hide_password=True).replace("%2A%2A%2A", "***")


def connect_arguments(url: sqlalchemy.URL) -> dict[str, Any]:
    """For the driver: give up on a server that does not answer."""
    if url.get_backend_name() != "postgresql" or "connect_timeout" in url.query:
        return {}
    return {"connect_timeout": _CONNECT_S}


def failure(error: BaseException, url: sqlalchemy.URL) -> str:
    """The innermost message of a chain of errors on one line, without a password."""
    text = " ".join(str(_innermost(error)).split())
    for secret in (url.password, *(url.query.get(name) for name in _SECRETS)):
        if isinstance(secret, str) and secret:
            text = text.replace(secret, "***").replace(quote(secret, safe=""), "***")
    return text


def is_passing(error: BaseException) -> bool:
    """Whether the same operation may succeed a little later: the connection was lost, or another was in the way."""
    import sqlalchemy

    link: BaseException | None = error
    while link is not None:
        if isinstance(link, sqlalchemy.exc.PendingRollbackError):
            return True  # Optuna went on with a connection that it had just lost
        if isinstance(link, sqlalchemy.exc.DBAPIError):
            state = getattr(link.orig, "sqlstate", None) or getattr(link.orig, "pgcode", None)
            if link.connection_invalidated or _PASSING.fullmatch(state or ""):
                return True
            # A connection that cannot be made has no state of the server.
            if state is None and isinstance(link, sqlalchemy.exc.OperationalError):
                return _driver(link.orig) in ("psycopg", "psycopg2")
        link = link.__cause__
    return False


def _driver(error: BaseException | None) -> str:
    return type(error).__module__.split(".")[0]


def _innermost(error: BaseException) -> BaseException:
    while (deeper := error.__cause__ or getattr(error, "orig", None)) is not None:
        error = deeper
    return error


class Turn:
    """One process at a time for a study on PostgreSQL: an advisory lock, which the server frees when its owner dies.

    Other servers have no such lock here: two tuners may then measure the same configuration, nothing worse.
    """

    def __init__(self, url: sqlalchemy.URL, patience_s: float) -> None:
        import sqlalchemy

        self._url, self._patience_s = url, patience_s
        self._engine = sqlalchemy.create_engine(
            url,
            poolclass=sqlalchemy.pool.NullPool,
            isolation_level="AUTOCOMMIT",
            connect_args=connect_arguments(url),
        )
        self._connection: sqlalchemy.Connection | None = None
        self._depth = 0

    @contextlib.contextmanager
    def held(self, name: str) -> Iterator[None]:
        """Hold the lock of ``name``; its owner may take it again.

        Raises:
            sqlalchemy.exc.DBAPIError: not had within the patience, or the connection was lost; see ``is_passing``.
        """
        if self._url.get_backend_name() != "postgresql" or self._depth:
            yield
            return
        self._take(_number(name))
        self._depth = 1
        try:
            yield
        finally:
            self._depth = 0
            self._give(_number(name))

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            with contextlib.suppress(Exception):  # it may be broken, which closes it as well
                self._connection.close()
        self._connection = None

    def _take(self, number: int) -> None:
        from sqlalchemy import text

        try:
            if self._connection is None:
                self._connection = self._engine.connect()
            wait_ms = max(int(self._patience_s * 1000), 1)
            self._connection.execute(text(f"SET lock_timeout = {wait_ms}"))
            self._connection.execute(text(f"SELECT pg_advisory_lock({number})"))
        except BaseException:
            self.close()
            raise

    def _give(self, number: int) -> None:
        from sqlalchemy import text

        try:
            assert self._connection is not None
            self._connection.execute(text(f"SELECT pg_advisory_unlock({number})"))
        except Exception:
            self.close()  # the server frees what a closed connection held


class Heartbeat:
    """Tells the server every few seconds that the trials of this process are still at work."""

    def __init__(self, backend: optuna.storages.RDBStorage) -> None:
        self._backend = backend
        self._trials: set[int] = set()
        self._guard = threading.Lock()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, trial_id: int) -> None:
        """From now on for this trial too."""
        with self._guard:
            self._trials.add(trial_id)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
            self._thread.start()
        self._beat(trial_id)

    def end(self, trial_id: int) -> None:
        """It has an outcome."""
        with self._guard:
            self._trials.discard(trial_id)

    def stop(self) -> None:
        """No more."""
        self._end.set()

    def _run(self) -> None:
        while not self._end.wait(_BEAT_S):
            with self._guard:
                trials = sorted(self._trials)
            for trial_id in trials:
                self._beat(trial_id)

    def _beat(self, trial_id: int) -> None:
        try:
            self._backend.record_heartbeat(trial_id)
        except (
            Exception
        ) as error:  # the next one may arrive; if the server stays away the work says so
            _LOG.debug("no heartbeat for trial %d: %s", trial_id, error)


def backend(url: sqlalchemy.URL) -> optuna.storages.RDBStorage:
    """Optuna's storage there, its tables made; connections are looked at before they are used again."""
    import optuna

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # heartbeats
        return optuna.storages.RDBStorage(
            url.render_as_string(hide_password=False),
            engine_kwargs={"pool_pre_ping": True, "connect_args": connect_arguments(url)},
            heartbeat_interval=_BEAT_S,
            grace_period=_SILENT_S,
        )


def fail_silent(study: optuna.Study) -> None:
    """Mark the trials of processes that are silent for too long as failed, those of other hosts too."""
    import optuna

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        optuna.storages.fail_stale_trials(study)


def _number(name: str) -> int:
    """A lock's name on the server: a signed integer of 64 bits."""
    digest = hashlib.sha256(f"sparsegen {name}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)
