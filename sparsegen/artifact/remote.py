"""The transport to a store behind a URL: one object in, one object out, through fsspec.

    <url>/v<schema>/<sha256 of the key>.tar.gz     one entry, as archive.py writes it

The name of an object follows from the key alone, so nothing is ever listed.  An object is replaced as a whole: readers
see the old or the new one, whoever writes at the same time, and never half of one.  Nothing here trusts what it
receives; archive.py, entry.py and signing.py check it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sparsegen.artifact.key import ArtifactKey
from sparsegen.artifact.manifest import SCHEMA
from sparsegen.artifact.remote_places import Remote
from sparsegen.errors import ArtifactError, ToolchainError

log = logging.getLogger(__name__)

MAX_OBJECT_BYTES = 256 << 20  # an entry has some hundred kilobytes
TRIES = 3
_FIRST_PAUSE_S = 0.2  # then four times that
_CONNECT_S, _SILENCE_S = 10, 30  # to connect; without a byte
_DEADLINE_S = 300.0  # of one object, all tries together
# Their clients show an object only when all of it has arrived; others might show half of one.
_WHOLE_OBJECTS = frozenset({"s3", "s3a", "gs", "gcs", "memory"})
_LOCAL = frozenset({"file", "local"})
_REFUSED = (401, 403)
_PACKAGES = {"gs": "gcs", "gcs": "gcs"}  # protocol -> extra; all others: remote


class StoreError(ArtifactError):
    """A store could not be asked, or would not take an object."""


class NotThereError(StoreError):
    """A store was asked and has no such object: a miss."""


class RefusedError(StoreError):
    """An object that a store does not let us read or write, or that we do not take: too large, too slow."""


class _TooLargeError(Exception):
    """More arrives, or for longer, than any entry needs; the words follow the name of the object."""


def object_name(key: ArtifactKey) -> str:
    """Where an entry lies below the URL of a store."""
    return f"v{SCHEMA}/{key.digest()}.tar.gz"


def fetch(remote: Remote, name: str, target: Path) -> None:
    """Write the object ``name`` of ``remote`` to the new file ``target``, unchecked.

    At most MAX_OBJECT_BYTES are taken, whatever size is claimed.  NotThereError where there is none, StoreError after
    TRIES failures.
    """

    def get(ends: float) -> None:
        system, path = _open(remote)
        target.unlink(missing_ok=True)
        if _protocols(system) & _LOCAL:
            _copy_bounded(Path(path) / name, target)
            return
        _run(system, "get_file", f"{path}/{name}", str(target), ends, callback=_bounded(ends))
        if target.stat().st_size > MAX_OBJECT_BYTES:  # a client that does not tell its progress
            raise _TooLargeError(f"holds more than {MAX_OBJECT_BYTES} bytes")

    _try(remote, name, get, "read")


def put(remote: Remote, name: str, file: Path) -> None:
    """Make ``file`` the object ``name`` of ``remote``, in one step.  StoreError after TRIES failures."""

    def upload(ends: float) -> None:
        system, path = _open(remote)
        protocols = _protocols(system)
        if protocols & _LOCAL:
            _replace(Path(path) / name, file)
        elif protocols & _WHOLE_OBJECTS:
            _run(system, "put_file", str(file), f"{path}/{name}", ends)
        else:
            raise StoreError(
                f"{remote} can only be read: a client of {min(protocols)} may show half an object; "
                f"stores that can be written: a folder, {', '.join(sorted(_WHOLE_OBJECTS))}"
            )

    _try(remote, name, upload, "written")


def _try(remote: Remote, name: str, action: Callable[[float], None], done: str) -> None:
    """Run ``action`` up to TRIES times within _DEADLINE_S; every failure becomes one StoreError.

    ``action`` gets the time (monotonic) at which it must end.
    """
    pause, ends = _FIRST_PAUSE_S, time.monotonic() + _DEADLINE_S
    for attempt in range(1, TRIES + 1):
        try:
            return action(ends)
        except (StoreError, ToolchainError):
            raise
        except FileNotFoundError as error:
            if done == "read":
                raise NotThereError(f"{remote} has no {name} ({_reason(error)})") from None
            raise StoreError(f"{remote}: {name} could not be {done}: {_reason(error)}") from error
        except _TooLargeError as error:
            raise RefusedError(f"{remote}: {name} {error}") from None
        except PermissionError as error:
            raise _refused(remote, name, done, error) from error
        except Exception as error:
            # The errors of a dozen clients have no common base: aiohttp's, botocore's, google's, the system's.
            if getattr(error, "status", None) in _REFUSED:
                raise _refused(remote, name, done, error) from error
            late = time.monotonic() >= ends
            if late or attempt == TRIES or isinstance(error, TypeError | ValueError):
                tries = f" within {_DEADLINE_S:g} s" if late else f" in {attempt} tries"
                raise StoreError(
                    f"{remote}: {name} could not be {done}{tries * (late or attempt > 1)}: {_reason(error)}"
                ) from error
            log.info("%s: trying again after: %s", remote, _reason(error))
        time.sleep(pause)
        pause *= 4


def _refused(remote: Remote, name: str, done: str, error: Exception) -> RefusedError:
    return RefusedError(
        f"{remote}: {name} may not be {done}, or is not there and may not be looked for: {_reason(error)}"
    )


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split()) or "no further words"
    return f"{type(error).__name__}: {text[:300]}"


def _open(remote: Remote) -> tuple[Any, str]:
    """The fsspec file system of ``remote`` and the path in it, without a slash at its end."""
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise ToolchainError(
            f"{remote} needs the package fsspec: pip install 'sparsegen[remote]'"
        ) from None
    protocol = remote.url.partition("://")[0]
    try:
        # fsspec keeps one instance for equal arguments, and another one after a fork
        system, path = url_to_fs(remote.url, **{**_patience(protocol), **remote.options})
    except ImportError as error:
        extra = _PACKAGES.get(protocol, "remote")
        raise ToolchainError(
            f"{remote} needs a package that is not here ({error}): pip install 'sparsegen[{extra}]'"
        ) from None
    if "s3" in _protocols(system):
        system.retries = 1  # _try counts
    return system, path.rstrip("/")


def _patience(protocol: str) -> dict[str, Any]:
    """Arguments of the client that bound its waiting, where the ``options`` of a store say nothing else."""
    if protocol in ("s3", "s3a"):
        # one stream an object: parts in parallel would take the size from the server
        waits = {"connect_timeout": _CONNECT_S, "read_timeout": _SILENCE_S}
        return {"config_kwargs": {**waits, "retries": {"max_attempts": 0}}, "max_concurrency": 1}
    if protocol in ("http", "https"):
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENCE_S)
        return {"client_kwargs": {"timeout": timeout}}
    return {}


def _protocols(system: Any) -> frozenset[str]:
    names = system.protocol
    return frozenset((names,) if isinstance(names, str) else names)


def _run(system: Any, method: str, source: str, target: str, ends: float, **more: Any) -> None:
    """``get_file`` or ``put_file`` of a file system, ended at ``ends`` where its client can be cancelled."""
    if not getattr(system, "async_impl", False):
        getattr(system, method)(source, target, **more)
        return
    from fsspec.asyn import sync

    left = max(0.01, ends - time.monotonic())
    sync(system.loop, getattr(system, f"_{method}"), source, target, timeout=left, **more)


def _bounded(ends: float) -> Any:
    """A callback of fsspec that ends a transfer which is too large or takes too long."""
    from fsspec.callbacks import Callback

    class Bounded(Callback):  # type: ignore[misc]
        def relative_update(self, inc: int = 1) -> None:
            super().relative_update(inc)
            if self.value > MAX_OBJECT_BYTES:
                raise _TooLargeError(f"holds more than {MAX_OBJECT_BYTES} bytes")
            if time.monotonic() > ends:
                raise _TooLargeError(f"could not be read within {_DEADLINE_S:g} s")

    return Bounded()


def _copy_bounded(source: Path, target: Path) -> None:
    if not stat.S_ISREG(os.stat(source).st_mode):  # a fifo would be waited for
        raise ValueError(f"{source} is no plain file")
    with open(source, "rb") as there, open(target, "wb") as here:
        here.write(there.read(MAX_OBJECT_BYTES + 1))
    if target.stat().st_size > MAX_OBJECT_BYTES:
        raise _TooLargeError(f"holds more than {MAX_OBJECT_BYTES} bytes")


def _replace(path: Path, file: Path) -> None:
    """Copy ``file`` to ``path`` through a hidden neighbour that takes its name when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _neighbour(path) as (descriptor, temporary):
        with open(descriptor, "wb") as out, open(file, "rb") as there:
            shutil.copyfileobj(there, out)
            out.flush()
            os.fsync(out.fileno())
        os.chmod(temporary, 0o644)  # a folder of artifacts is there to be read by others
        os.replace(temporary, path)


@contextlib.contextmanager
def _neighbour(path: Path) -> Iterator[tuple[int, str]]:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:20]}-")
    try:
        yield descriptor, temporary
    finally:
        with contextlib.suppress(FileNotFoundError):  # it has its name
            os.unlink(temporary)
