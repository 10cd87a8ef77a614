"""Stand-ins for kernels: a candidate source without a GPU, whose times follow a formula and whose faults are real.

Nothing here imports torch or triton, so worker processes start fast.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from sparsegen.codegen.knobs import Knob, LaunchConfig
from sparsegen.tune.candidates import Compiled, Limits
from sparsegen.tune.lane import Outcome
from sparsegen.tune.measure import Measurement, Turns
from sparsegen.tune.prune import CompileResult

KNOBS = (
    Knob("block_m", (32, 64, 128, 256), 64, "query rows of a tile"),
    Knob("block_n", (32, 64, 128), 64, "keys of a tile"),
    Knob("warps", (4, 8), 4, "warps of a block"),
    Knob("stages", (1, 2, 3, 4), 2, "pipeline depth"),
    Knob("persistent", (False, True), False, "one block a multiprocessor"),
    Knob("grid_factor", (1, 2), 1, "blocks a multiprocessor", when=("persistent", True)),
)
LIMITS = Limits(shared_bytes=1 << 17)
DEFAULT = LaunchConfig.of({knob.name: knob.default for knob in KNOBS})


def time_of(config: LaunchConfig) -> float:
    """Simulated µs: a bowl with its bottom at 128 x 128, 8 warps, 3 stages, persistent, factor 2."""
    c = {**DEFAULT.as_dict(), **config.as_dict()}  # tests may leave knobs out
    cost = 100.0
    cost += 20 * abs(c["block_m"].bit_length() - 8) + 15 * abs(c["block_n"].bit_length() - 8)
    cost += 10 * (c["warps"] != 8) + 5 * abs(c["stages"] - 3)
    return cost + 8 * (not c["persistent"]) + 4 * (c["persistent"] and c["grid_factor"] != 2)


@dataclass(frozen=True)
class StandInClock:
    """Answers with the formula's time instead of running anything."""

    log: str

    def times_us(self, launch, warm_up_ms: float, measured_ms: float) -> list[float]:
        return [launch() * (1 + 0.001 * n) for n in range(3)]


@dataclass(frozen=True)
class StandInCandidate:
    source: StandInSource
    config: LaunchConfig
    folder: Path

    def check(self) -> str:
        assert (self.folder / "binary").read_text() == str(self.config)
        self.source.note("begin", self.config)
        self.source.act("gpu", self.config)
        return "max-abs error 1 > 0.1 allowed" if self.config in self.source.wrong else ""

    def launch(self) -> float:
        return time_of(self.config)


@dataclass(frozen=True)
class StandInBench:
    source: StandInSource

    @property
    def clock(self) -> StandInClock:
        return StandInClock(self.source.log)

    def load(self, config: LaunchConfig, folder: Path) -> StandInCandidate:
        return StandInCandidate(self.source, config, folder)


@dataclass(frozen=True)
class StandInSource:
    """``faults``: (where, config, what): where is "compile" or "gpu", what is segfault, kill, hang, raise or exit.

    ``meeting``: a folder, and how many compilers must be under way in it before any goes on.
    """

    key: str = "stand-in problem"
    knobs: tuple[Knob, ...] = KNOBS
    default: LaunchConfig = DEFAULT
    limits: Limits = LIMITS
    faults: tuple[tuple[str, LaunchConfig, str], ...] = ()
    wrong: tuple[LaunchConfig, ...] = ()
    forbidden: tuple[LaunchConfig, ...] = ()
    slow_s: float = 0.0
    meeting: tuple[str, int] | None = None
    log: str = ""
    no_gpu: bool = False

    def invalid(self, config: LaunchConfig) -> str | None:
        return "forbidden" if config in self.forbidden else None

    def compile(self, config: LaunchConfig, folder: Path) -> dict[str, Compiled]:
        self.act("compile", config)
        self.meet(config)
        (folder / "binary").write_text(str(config))
        c = config.as_dict()
        shared = (c["block_m"] + c["block_n"] * c["stages"]) * 256
        spill = 64 if c["block_m"] * c["block_n"] > 128 * 128 and c["warps"] == 4 else 0
        return {"general": Compiled(128, spill, shared), "fast": Compiled(96, 0, shared // 2)}

    def bench(self) -> StandInBench:
        if self.no_gpu:
            raise RuntimeError("no CUDA device is here")
        return StandInBench(self)

    def act(self, where: str, config: LaunchConfig) -> None:
        time.sleep(self.slow_s)
        if _BROKEN and where == "gpu":
            _raise()
        for place, which, what in self.faults:
            if place == where and which == config:
                print("this line must not break the protocol")
                _FAULTS[what]()

    def meet(self, config: LaunchConfig) -> None:
        if self.meeting is None:
            return
        place, number = Path(self.meeting[0]), self.meeting[1]
        (place / str(config)).touch()
        end = time.monotonic() + 60
        while len(list(place.iterdir())) < number:
            if time.monotonic() > end:
                raise RuntimeError(f"not {number} compilers at once")
            time.sleep(0.02)

    def note(self, word: str, config: LaunchConfig) -> None:
        if self.log:
            with open(self.log, "a") as file:
                file.write(f"{word} {config}\n")


_BROKEN: list[bool] = []  # as a CUDA context is after an illegal access: every later call fails too


def _raise() -> None:
    _BROKEN.append(True)
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


_FAULTS = {
    "segfault": lambda: ctypes.string_at(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "abort": os.abort,
    "hang": lambda: time.sleep(600),
    "raise": _raise,
    "exit": lambda: os._exit(3),
}


class InProcessLane:
    """A ``Lane`` without processes: for tests of the study and its storage."""

    def __init__(self, source: StandInSource, noise: float = 0.0, slow: float = 1.0) -> None:
        self.source = source
        self.noise, self.slow = noise, slow
        self.measured: list[LaunchConfig] = []
        self._waiting: list[LaunchConfig] = []

    @property
    def free(self) -> int:
        return 1 - len(self._waiting)

    def begin(self, config: LaunchConfig) -> None:
        self._waiting.append(config)

    def compiled(self, timeout_s: float) -> CompileResult:
        config = self._waiting.pop()
        facts = {"general": Compiled(128, 0, 1000)}
        return CompileResult(config, Path("nowhere"), facts)

    def measure(self, config: LaunchConfig, incumbent: LaunchConfig, turns: Turns) -> Outcome:
        self.measured.append(config)
        self.source.note("begin", config)
        time.sleep(self.source.slow_s)
        if config in self.source.wrong:
            return Outcome(None, "wrong result", "max-abs error 1 > 0.1 allowed")
        mine, rival = time_of(config) * self.slow, time_of(incumbent) * self.slow
        self.source.note("end", config)
        return Outcome(Measurement(mine, rival, self.noise, (mine,), (rival,)))

    def stop(self) -> None:
        pass
