"""What `record_grid.py` and `record_cover.py` share: compile many configurations, check and time each, write as they come.

Compilers work on all cores but two while the GPU measures what they have finished.  All problems are measured in one
worker process of the tuner's own kind: a kernel that crashes or hangs costs its own trial and a new worker, nothing else.
What is in the folder of binaries is not compiled again, and what is in the recording is not measured again, so a run may
stop at any moment and the same command goes on.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recording_binaries import Compilers, Plan, folder_of

from sparsegen.codegen import LaunchConfig
from sparsegen.spec.gpu import Gpu, current_gpu
from sparsegen.tune.candidates import Compiled, Limits
from sparsegen.tune.measure import Measurement, Turns
from sparsegen.tune.prune import too_much
from sparsegen.tune.recording import Entry, Origin, Recorder, Recording
from sparsegen.tune.target import KernelTarget
from sparsegen.tune.winners import current_versions
from sparsegen.tune.worker import Worker

QUICK = Turns(rounds=3, warm_up_ms=2.0, measured_ms=8.0, give_up=3.0)
PROBLEM = "PROBLEM"  # travels with a configuration to the worker; no knob has this name


@dataclass(frozen=True)
class ManyTargets:
    """A candidate source of several problems, so that one worker measures them all (see ``serve``)."""

    targets: Mapping[str, KernelTarget]
    key: str = "recording"
    knobs: tuple[Any, ...] = ()
    default: LaunchConfig | None = None
    limits: Limits | None = None

    def invalid(self, config: LaunchConfig) -> str | None:
        """Not asked."""
        return None

    def compile(self, config: LaunchConfig, folder: Path) -> dict[str, Compiled]:
        """Not asked: ``compile_many`` does."""
        raise NotImplementedError

    def bench(self) -> ManyBenches:
        """In the worker."""
        return ManyBenches(self.targets)


class ManyBenches:
    """The bench of the problem that is asked for; that of another one is dropped, for its tensors take room."""

    def __init__(self, targets: Mapping[str, KernelTarget]) -> None:
        self._targets = targets
        self._name, self._bench = "", next(iter(targets.values())).bench()
        self.clock = self._bench.clock

    def load(self, config: LaunchConfig, folder: Path) -> Any:
        """See ``Bench``; the problem's name travels with the configuration."""
        values = config.as_dict()
        name = str(values.pop(PROBLEM))
        if name != self._name:
            self._name, self._bench = name, self._targets[name].bench()
        return self._bench.load(LaunchConfig.of(values), folder)


class Gauge:
    """Checks and times on the GPU here."""

    def __init__(self, plans: Sequence[Plan], before: Recording, timeout_s: float = 40.0) -> None:
        self._worker = Worker(ManyTargets({p.recorded.name: p.target for p in plans}), "measuring")
        self._timeout_s = timeout_s
        known = {p: before.trials.get(p.recorded.name, {}).get(p.anchor) for p in plans}
        self._scale = {p.recorded.name: e.time_us for p, e in known.items() if e and e.time_us}

    def entry(
        self, plan: Plan, config: LaunchConfig, folders: Mapping[LaunchConfig, Path]
    ) -> Entry:
        """One trial, its time on the scale of the first time of the problem's anchor."""
        name = plan.recorded.name

        def named(c: LaunchConfig) -> dict[str, Any]:
            return {"config": {**c.as_dict(), PROBLEM: name}, "folder": str(folders[c])}

        anchored = plan.anchor in folders
        anchor = plan.anchor if anchored else config
        request = {"op": "measure", "candidate": named(config), "incumbent": named(anchor)}
        answer = self._worker.request({**request, "turns": asdict(QUICK)}, self._timeout_s)
        if "measured" in answer:
            m = Measurement.of(answer["measured"])
            ratios = [a / b for a, b in zip(m.rounds_us, m.incumbent_rounds_us)]
            if anchored:
                first = self._scale.setdefault(name, m.incumbent_us)
                rounds = tuple(round(first * r, 3) for r in ratios)
            else:  # no default that runs here: times as they are
                rounds = tuple(round(us, 3) for us in m.rounds_us)
            return Entry(name, config, statistics.median(rounds), rounds, round(m.noise, 5))
        if "wrong" in answer:
            return Entry(name, config, kind="wrong result", reason=answer["wrong"])
        self._worker.stop()  # after an exception the context may be unusable
        kind = {"crash": "crash", "timeout": "hang"}.get(answer.get("failure", ""), "error")
        return Entry(
            name, config, kind=kind, reason=str(answer.get("reason") or answer.get("error"))
        )

    def stop(self) -> None:
        """End the worker."""
        self._worker.stop()


def origin_of(gpu: Gpu, template: str, digest: str, synthetic: bool) -> Origin:
    """The first line of a recording made here and now."""
    versions = {n: v for n, v in current_versions().items() if n != "sparsegen"}
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return Origin(gpu.name, template, digest, versions, now, synthetic)


def record(
    plans: Sequence[Plan],
    recorder: Recorder | None,
    root: Path,
    *,
    seconds: float,
    gauge: Any,
    finish_s: float = 0.0,
) -> bool:
    """Measure what is not on record yet; whether all of it is now.

    ``recorder``: None to compile and measure nothing.  ``gauge``: a ``Gauge``; a dry run has one of its own, and then
    nothing is compiled.  ``finish_s``: how much longer than ``seconds`` a problem may take that was begun before.
    """
    over = time.monotonic() + seconds
    work = [(p, c) for p in plans for c in _missing(p, recorder)]
    dry = not isinstance(gauge, Gauge)
    cores = max((os.cpu_count() or 2) - 2 * (recorder is not None), 1)
    anchors = [(p, p.anchor) for p in plans]
    able = [(p, c) for p, c in [*anchors, *work] if p.target.invalid(c) is None]
    compilers = Compilers(root, [] if dry else able, cores)
    print(f"{len(work)} trials to go, {compilers.missing} kernels to compile", flush=True)
    done, begun = 0, None
    for plan, config in work:
        end = over + finish_s if plan is begun else over
        folders = {c: folder_of(root, plan, c) for c in (config, plan.anchor)}
        refused = plan.target.invalid(config)
        facts = None
        if not dry and refused is None:
            facts = compilers.facts(folders[config], end - time.monotonic())
        if time.monotonic() >= end or (facts is None and not dry and refused is None):
            print(
                f"stopped after {seconds:.0f} s: {done} trials; the same command goes on",
                flush=True,
            )
            return False
        done, begun = done + 1, plan
        if recorder is None:
            continue
        entry = _judged(plan, config, refused, facts)
        if entry is None:
            ready = {c: f for c, f in folders.items() if dry or _usable(compilers, f, end)}
            entry = gauge.entry(plan, config, ready)
        recorder.trial(entry)
        if done % 25 == 0 or entry.kind not in ("", "spills", "shared memory", "invalid"):
            said = (
                f"{entry.time_us:.1f} us" if entry.time_us else f"{entry.kind}: {entry.reason[:90]}"
            )
            print(f"{done}/{len(work)} {plan.recorded.name}: {said}", flush=True)
    return True


def _missing(plan: Plan, recorder: Recorder | None) -> list[LaunchConfig]:
    before = recorder.problem(plan.recorded) if recorder is not None else {}
    return [c for c in plan.configs if c not in before]


def _judged(plan: Plan, config: LaunchConfig, refused: str | None, facts: Any) -> Entry | None:
    """The trial if it ends before the GPU."""
    name = plan.recorded.name
    if refused is not None:
        return Entry(name, config, kind="invalid", reason=refused)
    if isinstance(facts, str):
        return Entry(name, config, kind="compile error", reason=facts[:300])
    over = too_much(facts, plan.target.limits) if facts else None
    return Entry(name, config, kind=over[0], reason=over[1]) if over else None


def _usable(compilers: Compilers, folder: Path, end: float) -> bool:
    return isinstance(compilers.facts(folder, end - time.monotonic()), dict)


def run(
    plans: Sequence[Plan],
    out: Path,
    folder: Path,
    *,
    seconds: float,
    synthetic: Any = None,
    compile_only: bool = False,
    finish_s: float = 0.0,
) -> None:
    """The whole of a script after its options; ends the process: 0 all is on record, 3 the same command goes on."""
    for plan in plans:
        print(f"{plan.recorded.name}: {len(plan.configs)} configurations", flush=True)
    target, done = plans[0].target, False
    origin = origin_of(target.gpu, target.template.name, target.template.digest, bool(synthetic))
    recorder = None if compile_only else Recorder(out, origin)
    before = recorder.before if recorder is not None else Recording(origin, {}, {})
    gauge = synthetic or Gauge(plans, before)
    try:
        given = {"seconds": seconds, "gauge": gauge, "finish_s": finish_s}
        done = record(plans, recorder, folder, **given)
    except KeyboardInterrupt:
        print("stopped; the same command goes on", flush=True)
    gauge.stop()
    # Compilers may still be at work, in threads that Python would wait for; what they finish is theirs to lose.
    os._exit(0 if done else 3)


def options(
    parser: argparse.ArgumentParser, name: Callable[[argparse.Namespace], str]
) -> argparse.Namespace:
    """The options of both scripts; ``gpu`` is the type that is here, or the one that was named.

    ``name``: of the recording, by the options.
    """
    parser.add_argument("--out", type=Path, help="default: benchmarks/records/NAME.jsonl")
    folder = Path(tempfile.gettempdir()) / "sparsegen-recording"
    parser.add_argument("--folder", type=Path, default=folder, help="binaries, kept between runs")
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--gpu", default="h200", help="for --compile-only and --dry")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--dry", action="store_true")
    found = parser.parse_args()
    found.out = found.out or Path(f"benchmarks/records/{name(found)}.jsonl")
    if not (found.dry or found.compile_only):
        here = current_gpu()
        if here is None:
            parser.error("no GPU is here: --compile-only or --dry")
        found.gpu = here.name
    return found
