"""Worker processes: a candidate that crashes, hangs or poisons the GPU takes only its worker with it.

A worker is a fresh interpreter (not a fork, which a CUDA context does not survive, and not a ``multiprocessing``
spawn, which would run the caller's script again).  Requests and replies are JSON lines on its standard input and
output; the first line is the candidate source, pickled.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import IO, Any

from sparsegen.errors import TuneError
from sparsegen.tune.candidates import CandidateSource

Message = dict[str, Any]

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from sparsegen.tune.serve import main; main()"
)
_START_S = 180.0  # importing torch and triton on a busy machine
_TAIL = 600  # characters of a worker's last words that go into the record


class Worker:
    """One worker process, started at its first request and again after each death.

    Replies are dictionaries.  A death is a reply too: ``{"failure": "crash" | "timeout", "reason": ...}``.
    """

    def __init__(self, source: CandidateSource, role: str) -> None:
        self.role = role
        self._hello = base64.b64encode(pickle.dumps(source)).decode()
        self._process: subprocess.Popen[bytes] | None = None
        self._words: IO[bytes] | None = None
        self._received = b""
        self._ready = False
        self._timeout_s = 0.0
        self._deadline = 0.0

    def send(self, message: Message, timeout_s: float) -> None:
        """Begin a request; its reply must come within ``timeout_s`` (counted from when the worker is up)."""
        if self._process is None:
            self._start()
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s + (0.0 if self._ready else _START_S)
        self._write(message)

    def reply(self) -> Message | None:
        """The reply if it has come, or the worker's death; None while it is at work.

        Raises:
            TuneError: the worker could not even start.
        """
        dead = self._process is None or self._process.poll() is not None  # before reading the rest
        for message in self._messages():
            if "broken" in message:
                self.stop()
                raise TuneError(f"the {self.role} worker cannot start: {message['broken']}")
            if "ready" in message:
                self._ready = True
                self._deadline = time.monotonic() + self._timeout_s
                continue
            return message
        if dead:
            return self._obituary()
        if time.monotonic() > self._deadline:
            self.stop()
            return {
                "failure": "timeout",
                "reason": f"no answer within {self._timeout_s:g} s; killed",
            }
        return None

    def request(self, message: Message, timeout_s: float) -> Message:
        """Send and wait."""
        self.send(message, timeout_s)
        while (answer := self.reply()) is None:
            wait([self], 0.5)
        return answer

    def stop(self) -> None:
        """Kill the worker and what it started.  A later request starts a new one."""
        if self._process is None:
            return
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it ended by itself a moment ago
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._words):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass  # unsent bytes for a process that is dead anyway
        self._process, self._words, self._received, self._ready = None, None, b"", False

    def fileno(self) -> int:
        """So that ``select`` can wait for workers."""
        return self._output().fileno()

    @property
    def running(self) -> bool:
        """Whether there is a process to wait for."""
        return self._process is not None

    def _start(self) -> None:
        if not sys.executable:
            raise TuneError("cannot start worker processes: sys.executable is empty")
        self._words = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the process)
        # Triton's interpreter replaces its compiler; a worker compiles and launches, whatever the parent does.
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        self._process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", _BOOT, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            env=environment,
            start_new_session=True,  # its own group: killed whole, and Ctrl-C reaches only us
        )
        self._received, self._ready = b"", False
        os.set_blocking(self.fileno(), False)
        self._write({"source": self._hello, "parent": os.getpid()})

    def _write(self, message: Message) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it died; ``reply`` says how

    def _output(self) -> IO[bytes]:
        assert self._process is not None and self._process.stdout is not None
        return self._process.stdout

    def _messages(self) -> list[Message]:
        if self._process is None:
            return []
        while True:
            try:
                chunk = os.read(self.fileno(), 1 << 16)
            except BlockingIOError:
                break
            if not chunk:
                break
            self._received += chunk
        *lines, self._received = self._received.split(b"\n")
        return [json.loads(line) for line in lines]

    def _obituary(self) -> Message:
        if self._process is None or self._words is None:
            return {"failure": "crash", "reason": "the worker was stopped"}
        code = self._process.wait()
        size = self._words.seek(0, os.SEEK_END)
        self._words.seek(max(size - 4 * _TAIL, 0))
        words = self._words.read().decode(errors="replace").strip()
        self.stop()
        return {"failure": "crash", "reason": f"{_ending(code)}: {_short(words)}".rstrip(": ")}


def wait(workers: Sequence[Worker], timeout_s: float) -> None:
    """Return when one of the workers has something to say, or after ``timeout_s``."""
    running = [worker for worker in workers if worker.running]
    if running:
        select.select(running, [], [], timeout_s)


def _ending(code: int) -> str:
    if code >= 0:
        return f"the worker ended with exit code {code}"
    try:
        return f"the worker was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"the worker was killed by signal {-code}"


def _short(words: str) -> str:
    """The first lines say what happened, the last ones where."""
    if len(words) <= _TAIL:
        return words
    return words[: _TAIL // 2] + " … " + words[-_TAIL // 2 :]
