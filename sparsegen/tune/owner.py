"""Who runs a trial: enough to tell, later and from another process, whether its owner still lives."""

from __future__ import annotations

import datetime
import os
import socket
import uuid
from collections.abc import Mapping
from pathlib import Path

_FOREIGN_S = (
    900.0  # no trial takes this long: an older one of a host that we cannot look into is dead
)
_OPEN: set[str] = set()  # sessions of this process that are still at work


def open_session() -> dict[str, str | int]:
    """What a trial stores about its owner: host, boot, process id and start, and a name for this session."""
    session = uuid.uuid4().hex
    _OPEN.add(session)
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "boot": _boot(),
        "ids": _ids(),
        "pid": pid,
        "started": _started(pid),
        "session": session,
    }


def close_session(owner: Mapping[str, str | int]) -> None:
    """From now on trials of this session count as left behind."""
    _OPEN.discard(str(owner["session"]))


def alive(
    owner: Mapping[str, str | int], since: datetime.datetime | None, many_hosts: bool = False
) -> bool:
    """Whether the owner of a trial that began at ``since`` can still finish it.

    A process id alone is not enough: ids are used again, after a restart often at once (1 in a container), so the
    start time and the boot are compared too.  Containers of one host may share its name and number processes anew.
    ``many_hosts``: another boot under our name may be another machine (all called localhost), and not our own
    before a restart.
    """
    elsewhere = owner["host"] != socket.gethostname() or owner.get("ids", _ids()) != _ids()
    if elsewhere or (many_hosts and owner["boot"] != _boot()):
        return age_s(since) < _FOREIGN_S
    pid = int(owner["pid"])
    if owner["boot"] != _boot() or owner["started"] != _started(pid):
        return False
    return pid != os.getpid() or owner["session"] in _OPEN


def age_s(since: datetime.datetime | None) -> float:
    """Seconds since a local time, 0 for none."""
    return (datetime.datetime.now() - since).total_seconds() if since else 0.0


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def _ids() -> str:
    """The namespace that process ids here belong to; "" where there are none."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Start of a process in clock ticks since boot, "" for a process that is not there."""
    try:
        # The name, in brackets, may hold spaces and brackets; the fields wanted come after the last one.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return "" if Path("/proc/self").exists() else _running_elsewhere(pid)
    except ProcessLookupError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]  # a zombie finishes nothing


def _running_elsewhere(pid: int) -> str:
    """Without /proc (macOS) only whether the process id is taken is known."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        return "running"
    return "running"
