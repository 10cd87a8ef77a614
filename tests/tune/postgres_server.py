"""A real PostgreSQL server for tests: made, started, stopped hard and started again in a folder of its own."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

PASSWORD = "se/cr:et@7"  # characters that an address must have escaped
ESCAPED = "se%2Fcr%3Aet%407"


def programs() -> Path | None:
    """The folder of ``initdb`` and ``pg_ctl``: on PATH, or where Debian's package puts them."""
    found = shutil.which("initdb")
    if found:
        return Path(found).parent
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return folders[-1].parent if folders else None


class Server:
    """Listens on a free port of 127.0.0.1; the server refuses to run as root, so root hands it to another user."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._user = _another_user()
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = one.getsockname()[1]
        (folder / "password").write_text(PASSWORD)
        if self._user:
            for path in (folder, folder / "password"):
                shutil.chown(path, self._user)
        auth = ["--auth=scram-sha-256", f"--pwfile={folder}/password", "--username=tuner"]
        self._run("initdb", "-D", str(folder / "data"), "-E", "UTF8", "--no-sync", *auth)

    @property
    def url(self) -> str:
        return f"postgresql://tuner:{ESCAPED}@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        options = f"-p {self.port} -h 127.0.0.1 -k {self._folder} -c fsync=off"
        log = str(self._folder / "log")
        self._run(
            "pg_ctl", "start", "-w", "-D", str(self._folder / "data"), "-l", log, "-o", options
        )

    def stop(self) -> None:
        """At once, as a power cut would."""
        self._run("pg_ctl", "stop", "-w", "-m", "immediate", "-D", str(self._folder / "data"))

    def _run(self, program: str, *arguments: str) -> None:
        folder = programs()
        assert folder is not None
        done = subprocess.run(
            [str(folder / program), *arguments],
            user=self._user,
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            stdout=(self._folder / "said").open("ab"),
            stderr=subprocess.STDOUT,
            env={**os.environ, "LC_ALL": "C", "HOME": str(self._folder)},
            timeout=120,
        )
        assert done.returncode == 0, (self._folder / "said").read_text()


@contextlib.contextmanager
def running() -> Iterator[Server]:
    # Not below pytest's own folders: the other user could not enter them.
    with tempfile.TemporaryDirectory(prefix="sparsegen-postgres-") as folder:
        server = Server(Path(folder))
        server.start()
        try:
            yield server
        finally:
            with contextlib.suppress(AssertionError):  # a test may have stopped it
                server.stop()


def _another_user() -> str | None:
    if os.getuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return next(name for name in ("postgres", "nobody") if name in names)
