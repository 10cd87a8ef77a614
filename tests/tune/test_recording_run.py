"""`benchmarks/record_*.py` and `search_quality.py` without a GPU: what they compile, write, stop and go on with."""

from __future__ import annotations

import statistics
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import record_grid
from prepared import PreparedBench, compile_preparing, prepared
from recording_binaries import Compilers, Plan, folder_of
from recording_run import Gauge, origin_of, record
from search_quality import quality
from synthetic_grid import SyntheticGauge

from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.spec.gpu import find_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from sparsegen.tune import recording
from sparsegen.tune.cover import cover
from sparsegen.tune.gradient_target import GradientTarget
from sparsegen.tune.recording import Recorded, Recorder, Recording
from sparsegen.tune.replay import ReplaySource
from sparsegen.tune.store import Measured
from tests.tune.standin import DEFAULT, KNOBS, StandInSource, time_of

ROOT = Path(__file__).parents[2]


def test_the_search_beats_chance_on_a_synthetic_grid(tmp_path):
    """The goal of `search_quality.py`, on times from a formula and with fewer seeds than there."""
    path = tmp_path / "grid.jsonl"
    done = script("record_grid.py", "--dry", "--problems", "2", "--out", path)
    assert done.returncode == 0, done.stderr
    grid = recording.read(path)
    assert grid.origin.synthetic
    (name,) = grid.problems
    assert len(grid.times(name)) >= 300
    source = ReplaySource(grid.problems[name], grid.trials[name])
    found = quality(source, grid.times(name), 0.15, seeds=4)
    assert found.trials == int(0.15 * found.valid)
    assert statistics.median(found.search) >= 0.97
    assert statistics.median(found.search) > statistics.median(found.random)


def script(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / name), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_a_run_that_is_out_of_time_stops_cleanly_and_goes_on(tmp_path, capsys):
    plan = record_grid.plan_of("causal", 4096, "h200")
    short = replace(plan, configs=plan.configs[:30])
    origin = origin_of(find_gpu("h200"), "forward", plan.target.template.digest, True)
    path = tmp_path / "r.jsonl"

    def go(seconds):
        recorder = Recorder(path, origin)
        done = record([short], recorder, tmp_path, seconds=seconds, gauge=SyntheticGauge())
        recorder.close()
        return done, len(recording.read(path).trials[plan.recorded.name])

    assert go(0.0) == (False, 0)
    assert "the same command goes on" in capsys.readouterr().out
    assert go(60.0) == (True, 30)
    assert go(60.0) == (True, 30)
    assert "0 trials to go" in capsys.readouterr().out


def test_a_problem_that_was_begun_is_finished(tmp_path, monkeypatch):
    """The time ends within the second of three problems: it is finished, the third is not begun."""
    clock = Slow()
    monkeypatch.setattr("recording_run.time", SimpleNamespace(monotonic=lambda: clock.now))
    first = record_grid.plan_of("causal", 4096, "h200")
    plans = [
        replace(first, configs=first.configs[:10], recorded=replace(first.recorded, name=name))
        for name in ("one", "two", "three")
    ]
    origin = origin_of(find_gpu("h200"), "forward", first.target.template.digest, True)
    recorder = Recorder(tmp_path / "r.jsonl", origin)
    given = {"seconds": 0.75, "gauge": clock, "finish_s": 30.0}
    assert not record(plans, recorder, tmp_path, **given)
    recorder.close()
    trials = recording.read(tmp_path / "r.jsonl").trials
    assert [len(trials[p.recorded.name]) for p in plans] == [10, 10, 0]


class Slow(SyntheticGauge):
    """Takes 50 ms a trial, by its own clock."""

    now = 0.0

    def entry(self, *asked):
        self.now += 0.05
        return super().entry(*asked)


@pytest.mark.parametrize("kernel", ["queries", "keys"])
def test_gradients_have_a_recording_and_a_rule_of_their_own(kernel, tmp_path):
    path = tmp_path / "r.jsonl"
    names = ("causal", "streaming_llm", "gemma3_local", "sparse_transformer_fixed")
    done = script("record_cover.py", "--dry", "--kernel", kernel, "--out", path, *names)
    assert done.returncode == 0, done.stderr
    made = recording.read(path)
    assert made.origin.template == f"backward-{kernel}" and len(made.problems) == 6 * len(names)
    found = cover(made)
    assert sum(one.held_out for one in found.losses) >= 0.3 * len(found.losses)
    kernels = {c["KERNEL"] for c in found.rule.configurations.values()}
    assert "hopper" in kernels
    asked = {p.problem.head_dim for p in made.problems.values()}
    assert set(found.rule.measured["head_dim"]) == asked == {64, 128, 256}


def test_the_kernel_that_prepares_is_compiled_beforehand(tmp_path):
    """One for both lengths; a target of keys finds it, one of queries needs none."""
    pattern, gpu = Pattern.from_yaml("causal"), find_gpu("h200")
    problems = [Problem(head_dim=64, heads=2, lengths=((n, n),)) for n in (512, 1024)]
    make = lambda part: [GradientTarget.for_part(pattern, p, gpu, part) for p in problems]
    compile_preparing([*make("queries"), *make("keys")], tmp_path)
    times = lambda: {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.cubin")}
    before = times()
    assert len(before) == 2  # of the launch that prepares, and of the kernel's own
    compile_preparing(make("keys"), tmp_path)
    assert times() == before
    queries, keys = make("queries")[0], prepared(make("keys")[0], tmp_path)
    assert prepared(queries, tmp_path) is queries and keys.key == make("keys")[0].key
    bench = object.__new__(PreparedBench)
    bench.target = keys
    given = bench._prepares()
    assert given["source"].part == "queries"
    assert all(p.is_relative_to(given["directories"]["fast"]) for p in before)


def test_compiles_once_and_shares_binaries(tmp_path):
    """Real compilations for sm_90: the facts, and nothing done again."""
    plan = record_grid.plan_of("causal", 4096, "h200")
    configs = (plan.anchor, plan.recorded.starts[0])
    few = replace(plan, configs=configs)
    assert record([few], None, tmp_path, seconds=200.0, gauge=Gauge([few], empty(plan)))
    again = Compilers(tmp_path, [(few, c) for c in configs], 1)
    assert again.missing == 0
    for config in configs:
        facts = again.facts(folder_of(tmp_path, few, config), 1.0)
        assert facts["fast"].shared_bytes > 0
    assert not list(tmp_path.rglob("*.ptx")) and list(tmp_path.rglob("*.cubin"))


def empty(plan: Plan) -> Recording:
    return Recording(origin_of(find_gpu("h200"), "forward", "0", False), {}, {})


@dataclass(frozen=True)
class StandInTarget(StandInSource):
    """A stand-in that has a problem's name, so that several can be told apart."""


def measured_plans(tmp_path, **faults) -> tuple[list[Plan], dict[LaunchConfig, Path]]:
    plans, folders = [], {}
    for name in ("one", "two"):
        problem = Measured(64, 64, 1, 1, 1, "bfloat16", 128, 128)
        target = StandInTarget(key=name, log=str(tmp_path / f"{name}.log"), **faults.get(name, {}))
        recorded = Recorded(name, name, "0", problem, KNOBS, DEFAULT)
        plans.append(Plan(recorded, target, (), DEFAULT))
    for config in (DEFAULT, other("warps", 8), other("stages", 3)):
        folders[config] = tmp_path / str(abs(hash(config)))
        folders[config].mkdir()
        (folders[config] / "binary").write_text(str(config))
    return plans, folders


def other(name, value):
    return LaunchConfig.of({**DEFAULT.as_dict(), name: value})


def test_one_worker_measures_all_problems(tmp_path, monkeypatch):
    """The real worker process and its protocol; kernels are stand-ins."""
    plans, folders = measured_plans(tmp_path)
    gauge = Gauge(plans, Recording(None, {}, {}))
    starts = []
    monkeypatch.setattr(gauge._worker, "_start", counted(gauge._worker._start, starts))
    try:
        for plan in plans:
            for config in folders:
                entry = gauge.entry(plan, config, folders)
                assert entry.kind == "" and entry.problem == plan.recorded.name, entry
                assert len(entry.rounds_us) == 3
            assert gauge.entry(plan, DEFAULT, folders).time_us == pytest.approx(
                time_of(DEFAULT), rel=0.01
            )
        assert gauge.entry(plans[0], other("warps", 8), folders).time_us < time_of(DEFAULT)
    finally:
        gauge.stop()
    assert len(starts) == 1
    assert (tmp_path / "one.log").exists() and (tmp_path / "two.log").exists()


def counted(function, calls):
    def call():
        calls.append(1)
        function()

    return call


def test_faults_cost_their_own_trial(tmp_path):
    bad, wrong = other("warps", 8), other("stages", 3)
    plans, folders = measured_plans(
        tmp_path, one={"faults": (("gpu", bad, "segfault"),), "wrong": (wrong,)}
    )
    gauge = Gauge(plans, Recording(None, {}, {}))
    try:
        kinds = [gauge.entry(plans[0], c, folders).kind for c in (DEFAULT, bad, wrong, DEFAULT)]
        assert kinds == ["", "crash", "wrong result", ""]
        assert gauge.entry(plans[1], bad, folders).kind == ""
    finally:
        gauge.stop()


def test_a_hang_is_killed(tmp_path):
    bad = other("warps", 8)
    plans, folders = measured_plans(tmp_path, one={"faults": (("gpu", bad, "hang"),)})
    gauge = Gauge(plans, Recording(None, {}, {}), timeout_s=3.0)
    try:
        assert gauge.entry(plans[0], DEFAULT, folders).kind == ""
        assert gauge.entry(plans[0], bad, folders).kind == "hang"
        assert gauge.entry(plans[0], DEFAULT, folders).kind == ""
    finally:
        gauge.stop()
