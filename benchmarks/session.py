"""Many measurements in a limited time: stages of a plan, side by side on the GPUs here, with a log for each.

    python benchmarks/session.py benchmarks/plans/gradients.yaml --seconds 560 [--out DIR] [--only NAME,NAME] [--dry]

A plan is a list of stages, most wanted first:

    - name: causal           # its log is OUT/causal.log
      seconds: 200           # it is ended after so many
      run: python benchmarks/backward.py --cases causal

Every GPU is a lane with its share of the cores and a cache of its own, and takes the next stage that fits into what is left of
--seconds.  ``{out}`` in a command is a folder of the stage's own below OUT.  Stages run in the repository's root, each in a
process group that is ended as a whole; what a stage has written until then stays.  Ends with 1 if a stage failed, and says
which stages had no time.  ``--dry`` prints the stages and runs nothing.
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

import yaml

ROOT = Path(__file__).parents[1]
GRACE = 5.0  # seconds between asking a stage to end and ending it
FIELDS = {"name": str, "seconds": (int, float), "run": str}


@dataclass(frozen=True)
class Stage:
    name: str
    seconds: float
    run: str


@dataclass(frozen=True)
class Lane:
    """``gpu``: its number, or None where there is no GPU."""

    gpu: int | None
    cores: tuple[int, ...]
    cache: Path

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
        if not isinstance(entry, Mapping) or set(entry) != set(FIELDS):
            raise SystemExit(f"{where}: a stage has {', '.join(FIELDS)} and nothing else")
        odd = [name for name, kind in FIELDS.items() if not isinstance(entry[name], kind)]
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

    def __init__(self, stages: Sequence[Stage], out: Path, end: float) -> None:
        self.waiting, self.out, self.end = list(stages), out, end
        self.outcomes: dict[str, str] = {}
        self._lock = threading.Lock()

    def next(self) -> Stage | None:
        with self._lock:
            left = self.end - time.monotonic()
            found = next((s for s in self.waiting if s.seconds <= left), None)
            if found is not None:
                self.waiting.remove(found)
            return found

    def work(self, lane: Lane) -> None:
        while (stage := self.next()) is not None:
            start = time.monotonic()
            outcome = self.run(stage, lane)
            line = f"{stage.name}: {outcome}, {time.monotonic() - start:.0f} s, lane {lane.gpu}"
            with self._lock:
                self.outcomes[stage.name] = outcome
                print(line, flush=True)

    def run(self, stage: Stage, lane: Lane) -> str:
        """ "ok", "failed (CODE)" or "cut after N s"."""
        folder = self.out / stage.name
        folder.mkdir(parents=True, exist_ok=True)
        words = shlex.split(stage.run.replace("{out}", str(folder)))
        with (self.out / f"{stage.name}.log").open("wb") as log:
            process = subprocess.Popen(
                words,
                cwd=ROOT,
                env=lane.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: os.sched_setaffinity(0, lane.cores),
            )
            try:
                code = process.wait(stage.seconds)
            except subprocess.TimeoutExpired:
                _end(process)
                return f"cut after {stage.seconds:g} s"
        return "ok" if code == 0 else f"failed ({code})"


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
    parser.add_argument("--dry", action="store_true")
    given = parser.parse_args(arguments)
    stages = read_plan(given.plan)
    names = [s.name for s in stages]
    only = [name for name in given.only.split(",") if name]
    if unknown := [name for name in only if name not in names]:
        parser.error(f"no stage {unknown[0]}; there are {', '.join(names)}")
    stages = [s for s in stages if not only or s.name in only]
    if given.dry:
        for s in stages:
            print(f"{s.name:24} {s.seconds:5g} s  {s.run}")
        return 0
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    session = Session(stages, out, time.monotonic() + given.seconds)
    threads = [threading.Thread(target=session.work, args=(lane,)) for lane in lanes_here(out)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for stage in session.waiting:
        print(f"{stage.name}: no time for it ({stage.seconds:g} s)")
    return int(any(o.startswith("failed") for o in session.outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
