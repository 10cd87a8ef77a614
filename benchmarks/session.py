"""Many measurements in a limited time: stages of a plan, side by side on the GPUs here, with a log for each.

    python benchmarks/session.py benchmarks/plans/gradients.yaml --seconds 560 [--out DIR] [--only NAME,NAME] [--dry]

A plan is a list of stages, most wanted first:

    - name: causal           # its log is OUT/causal.log
      seconds: 200           # it is ended after so many, of what it measures where it goes ahead
      run: python benchmarks/backward.py --cases causal
      ahead: true            # it may be left out: the stage compiles first, and then takes its turn itself (turn.py)

Every GPU is a lane with its share of the cores and a cache of its own, and takes the next stage that fits into what is left of
--seconds.  A stage that goes ahead starts while the one before measures, without the last two of the lane's cores.  ``{out}`` in a command is a folder of the stage's own below OUT, ``python`` is this one.  Stages run in the repository's root, each in a
process group that is ended as a whole; what a stage has written until then stays.  Ends with 1 if a stage failed, and says
which stages had no time.  ``--dry`` prints the stages and runs nothing.

``--compile-only h200 --binaries DIR`` runs the stages that go ahead as far as they compile, on any machine with the same Triton; with
``--binaries DIR`` a session then takes from DIR what is there (beforehand.py).
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import beforehand
import turn
import yaml

from sparsegen.errors import SparsegenError
from sparsegen.spec.gpu import find_gpu

ROOT = Path(__file__).parents[1]
GRACE = 5.0  # seconds between asking a stage to end and ending it
POLL = 0.1  # seconds between two looks at whose turn it is
FIELDS = {"name": str, "seconds": (int, float), "run": str}
LEFT = 2  # cores of a lane that a stage which goes ahead leaves to the one that measures


@dataclass(frozen=True)
class Stage:
    name: str
    seconds: float
    run: str
    ahead: bool = False


@dataclass(frozen=True)
class Lane:
    """``gpu``: its number, or None where there is no GPU."""

    gpu: int | None
    cores: tuple[int, ...]
    cache: Path

    @property
    def turn(self) -> Path:
        """Says who measures."""
        return self.cache.with_suffix(".turn")

    def environment(self) -> dict[str, str]:
        seen = {} if self.gpu is None else {"CUDA_VISIBLE_DEVICES": str(self.gpu)}
        return {**os.environ, "SPARSEGEN_CACHE": str(self.cache), **seen}


def read_plan(path: Path) -> list[Stage]:
    """The stages of a plan.  SystemExit with one sentence for what is no plan."""
    stages: list[Stage] = []
    given = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(given, list) or not given:
        raise SystemExit(f"{path}: a plan is a list of stages")
    for number, entry in enumerate(given, 1):
        where = f"{path}, stage {number}"
        if not isinstance(entry, Mapping) or set(entry) - {"ahead"} != set(FIELDS):
            raise SystemExit(
                f"{where}: a stage has {', '.join(FIELDS)}, it may have ahead, and nothing else"
            )
        kinds = FIELDS | {"ahead": bool}
        odd = [name for name, value in entry.items() if not isinstance(value, kinds[name])]
        if odd:
            raise SystemExit(f"{where}: {odd[0]} is {entry[odd[0]]!r}")
        if any(entry["name"] == s.name for s in stages):
            raise SystemExit(f"{where}: there is a stage {entry['name']} already")
        stages.append(Stage(**entry))
    return stages


def lanes_here(out: Path) -> list[Lane]:
    import torch

    gpus: list[int | None] = [*range(torch.cuda.device_count())] or [None]
    cores = sorted(os.sched_getaffinity(0))
    share = max(len(cores) // len(gpus), 1)
    return [
        Lane(gpu, tuple(cores[i * share : (i + 1) * share] or cores), out / f"cache-{i}")
        for i, gpu in enumerate(gpus)
    ]


class Session:
    """Stages that lanes take in turn until ``end`` (``time.monotonic``)."""

    def __init__(
        self, stages: Sequence[Stage], out: Path, end: float, told: Mapping[str, str]
    ) -> None:
        """``told``: what all stages find in their environment."""
        self.waiting, self.out, self.end, self.told = list(stages), out, end, told
        self.outcomes: dict[str, str] = {}
        self._changed = threading.Condition()
        # by lane: stages under way, and when each began to measure
        self._running: dict[Lane, dict[Stage, float | None]] = {}

    def next(self, lane: Lane) -> Stage | None:
        """The next stage for a lane, once there is one; None when none of those that wait can fit any more."""
        with self._changed:
            while True:
                running = self._running.setdefault(lane, {})
                left = self.end - time.monotonic() - sum(map(self._to_come, running.items()))
                fit = [s for s in self.waiting if s.seconds <= left]
                found = next((s for s in fit if s.ahead or not running), None)
                if found is not None:
                    self.waiting.remove(found)
                    running[found] = None
                    return found
                if not self.waiting or not running:
                    return None
                self._changed.wait(1.0)

    @staticmethod
    def _to_come(item: tuple[Stage, float | None]) -> float:
        """Seconds that a stage under way may still measure."""
        stage, began = item
        return stage.seconds if began is None else began + stage.seconds - time.monotonic()

    def work(self, lane: Lane) -> None:
        while (stage := self.next(lane)) is not None:
            start = time.monotonic()
            outcome = self.run(stage, lane)
            line = f"{stage.name}: {outcome}, {time.monotonic() - start:.0f} s, lane {lane.gpu}"
            with self._changed:
                del self._running[lane][stage]
                self.outcomes[stage.name] = outcome
                self._changed.notify_all()
                print(line, flush=True)

    def run(self, stage: Stage, lane: Lane) -> str:
        """ "ok", "failed (CODE)", "cut after N s" or "cut before its turn"."""
        if stage.ahead:
            return self._watched(stage, lane)
        with turn.hold(lane.turn):
            self._began(stage, lane)
            return self._watched(stage, lane)

    def _began(self, stage: Stage, lane: Lane) -> None:
        with self._changed:
            self._running[lane][stage] = time.monotonic()

    def _watched(self, stage: Stage, lane: Lane) -> str:
        folder = self.out / stage.name
        folder.mkdir(parents=True, exist_ok=True)
        words = shlex.split(stage.run.replace("{out}", str(folder)))
        words = [sys.executable if word == "python" else word for word in words]
        alone = len(self._running[lane]) == 1
        cores = lane.cores if alone else lane.cores[:-LEFT] or lane.cores
        taken = {turn.NAMED_IN: str(lane.turn)} if stage.ahead else {}
        with (self.out / f"{stage.name}.log").open("wb") as log:
            process = subprocess.Popen(
                words,
                cwd=ROOT,
                env={**lane.environment(), **taken, **self.told},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: os.sched_setaffinity(0, cores),
            )
            code = self._waited(process, stage, lane)
        if code is None:
            began = self._running[lane][stage]
            return "cut before its turn" if began is None else f"cut after {stage.seconds:g} s"
        return "ok" if code == 0 else f"failed ({code})"

    def _waited(self, process: subprocess.Popen[Any], stage: Stage, lane: Lane) -> int | None:
        """The exit status; None where the stage had to be ended."""
        while (began := self._running[lane][stage]) is None:
            if (code := process.poll()) is not None:
                return code
            if turn.holder(lane.turn) == process.pid:
                self._began(stage, lane)
            elif time.monotonic() > self.end:
                _end(process)
                return None
            time.sleep(POLL)
        try:
            return process.wait(max(began + stage.seconds - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            _end(process)
            return None


def _end(process: subprocess.Popen[Any]) -> None:
    """The whole group: asked to end, then ended."""
    for sign, wait in ((signal.SIGTERM, GRACE), (signal.SIGKILL, None)):
        os.killpg(process.pid, sign)
        try:
            process.wait(wait)
        except subprocess.TimeoutExpired:
            continue
        if sign == signal.SIGTERM:  # children that are still there
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        return


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plan", type=Path)
    parser.add_argument("--seconds", type=float, default=560.0, help="for all of it")
    parser.add_argument("--out", type=Path, default=Path("session"), help="logs and results")
    parser.add_argument("--only", default="", help="names of stages, with commas")
    parser.add_argument("--binaries", type=Path, help="a folder of kernels compiled beforehand")
    parser.add_argument(
        "--compile-only",
        metavar="GPU",
        help="compile for this type into --binaries, measure nothing",
    )
    parser.add_argument("--dry", action="store_true")
    given = parser.parse_args(arguments)
    stages = read_plan(given.plan)
    names = [s.name for s in stages]
    only = [name for name in given.only.split(",") if name]
    if unknown := [name for name in only if name not in names]:
        parser.error(f"no stage {unknown[0]}; there are {', '.join(names)}")
    stages = [s for s in stages if not only or s.name in only]
    told = {}
    if given.binaries:
        told[beforehand.BINARIES] = str(given.binaries.resolve())
        given.binaries.mkdir(parents=True, exist_ok=True)
    if given.compile_only:
        if not given.binaries:
            parser.error("--compile-only needs --binaries")
        try:
            told[beforehand.TYPE] = find_gpu(given.compile_only).name
        except SparsegenError as error:
            parser.error(str(error))
        for s in stages:
            if not s.ahead:
                print(f"{s.name}: compiles nothing beforehand")
        stages = [s for s in stages if s.ahead]
    if given.dry:
        for s in stages:
            print(f"{s.name:24} {s.seconds:5g} s  {s.run}")
        return 0
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    session = Session(stages, out, time.monotonic() + given.seconds, told)
    lanes = [lane for lane in lanes_here(out) for _ in range(2)]  # one measures, one goes ahead
    threads = [threading.Thread(target=session.work, args=(lane,)) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for stage in session.waiting:
        print(f"{stage.name}: no time for it ({stage.seconds:g} s)")
    return int(any(o.startswith("failed") for o in session.outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
