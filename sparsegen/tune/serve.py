"""Inside a worker process: compile, check and measure what the tuner asks for (see ``worker``)."""

from __future__ import annotations

import base64
import json
import os
import pickle
import signal
import sys
from pathlib import Path
from typing import IO, Any

from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.errors import SparsegenError
from sparsegen.tune.candidates import Bench, Candidate, CandidateSource
from sparsegen.tune.measure import Turns, measure

Message = dict[str, Any]


def main() -> None:
    """Serve requests until the parent closes the pipe or dies."""
    answers = _private_output()
    hello = json.loads(sys.stdin.readline() or "{}")
    if not hello:
        return
    _die_with(hello["parent"])
    try:
        server = _Server(pickle.loads(base64.b64decode(hello["source"])))
    except Exception as error:
        _say(answers, {"broken": _text(error)})
        return
    _say(answers, {"ready": True})
    for line in sys.stdin:
        _say(answers, server.answer(json.loads(line)))


class _Server:
    """Holds the bench, made at the first request that needs the GPU, and the incumbent, kept loaded."""

    def __init__(self, source: CandidateSource) -> None:
        self._source = source
        self._bench: Bench | None = None
        self._loaded: tuple[Message, Candidate] | None = None

    def answer(self, message: Message) -> Message:
        """The reply to one request; exceptions become ``{"error": text}``."""
        try:
            if message["op"] == "compile":
                return self._compile(message)
            if message["op"] == "open":
                return self._open()
            return self._measure(message)
        except Exception as error:
            return {"error": _text(error)}

    def _open(self) -> Message:
        try:
            self._bench = self._source.bench()
        except SparsegenError as error:
            return {"error": str(error)}  # a sentence; who asked raises it under a class of its own
        return {"opened": True}

    def _compile(self, message: Message) -> Message:
        folder = Path(message["folder"])
        folder.mkdir(parents=True, exist_ok=True)
        compiled = self._source.compile(LaunchConfig.of(message["config"]), folder)
        return {"compiled": {name: facts.as_dict() for name, facts in compiled.items()}}

    def _measure(self, message: Message) -> Message:
        candidate = self._load(message["candidate"])
        wrong = candidate.check()
        if wrong:
            return {"wrong": wrong}
        if message["incumbent"] == message["candidate"]:
            incumbent = candidate
        else:
            incumbent = self._incumbent(message["incumbent"])
        bench = self._opened()
        turns = Turns(**message["turns"])
        measured = measure(candidate.launch, incumbent.launch, bench.clock, turns)
        return {"measured": measured.as_dict()}

    def _incumbent(self, named: Message) -> Candidate:
        if self._loaded is None or self._loaded[0] != named:
            self._loaded = (named, self._load(named))
        return self._loaded[1]

    def _load(self, named: Message) -> Candidate:
        return self._opened().load(LaunchConfig.of(named["config"]), Path(named["folder"]))

    def _opened(self) -> Bench:
        if self._bench is None:
            self._bench = self._source.bench()
        return self._bench


def _private_output() -> IO[bytes]:
    """The pipe to the parent, out of reach of libraries that print: they print to stderr instead."""
    private = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(private, "wb")


def _die_with(parent: int) -> None:
    """Linux: be killed when the parent is, even inside a compiler or a kernel that never returns."""
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it died before we asked


def _say(answers: IO[bytes], message: Message) -> None:
    answers.write(json.dumps(message).encode() + b"\n")
    answers.flush()


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:2000]
