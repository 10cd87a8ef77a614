"""Real processes with real faults: each loses one candidate, is recorded, and work goes on."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.errors import ToolchainError, TuneError
from sparsegen.tune.candidates import Compiled, Limits
from sparsegen.tune.lane import ProcessLane
from sparsegen.tune.measure import Turns
from sparsegen.tune.prune import CompilePool, too_much
from sparsegen.tune.worker import Worker
from tests.tune.standin import DEFAULT, StandInSource, time_of


def config(**values):
    return LaunchConfig.of({**DEFAULT.as_dict(), **values})


def lane_for(source, folder, **options):
    options = {"jobs": 1, "compile_timeout_s": 60.0, "measure_timeout_s": 60.0, **options}
    return ProcessLane(source, folder, **options)


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("segfault", "crash", "killed by SIGSEGV.*Segmentation fault"),
        ("kill", "crash", "killed by SIGKILL"),
        ("abort", "crash", "killed by SIGABRT"),
        ("exit", "crash", "exit code 3"),
        ("hang", "hang", "no answer within 2 s; killed"),
        ("raise", "error", "RuntimeError: CUDA error: an illegal memory access"),
    ],
)
def test_a_fault_on_the_gpu_costs_one_candidate(tmp_path, fault, kind, words):
    bad, good = config(warps=8), config(stages=3)
    limit = {"measure_timeout_s": 2.0} if fault == "hang" else {}
    lane = lane_for(StandInSource(faults=(("gpu", bad, fault),)), tmp_path, **limit)
    try:
        outcome = lane.measure(bad, DEFAULT, Turns())
        assert outcome.kind == kind and outcome.measured is None
        import re

        assert re.search(words, outcome.reason, re.DOTALL), outcome.reason
        after = lane.measure(good, DEFAULT, Turns())  # a new worker, the incumbent loaded again
        assert after.measured is not None
        assert after.measured.time_us == pytest.approx(time_of(good) * 1.001)
        assert after.measured.beats
    finally:
        lane.stop()


@pytest.mark.parametrize(
    ("fault", "kind"),
    [("segfault", "compile crash"), ("hang", "compile timeout"), ("raise", "compile error")],
)
def test_a_fault_in_the_compiler_costs_one_candidate(tmp_path, fault, kind):
    bad, good = config(warps=8), config(stages=3)
    limit = 2.0 if fault == "hang" else 60.0
    pool = CompilePool(StandInSource(faults=(("compile", bad, fault),)), tmp_path, 1, limit)
    try:
        for which, wanted in ((bad, kind), (good, "")):
            pool.begin(which)
            while (result := pool.next(1.0)) is None:
                pass
            assert (result.config, result.kind) == (which, wanted)
        assert result.facts["general"].registers == 128
    finally:
        pool.stop()


def test_a_wrong_result_is_no_measurement_and_keeps_the_worker(tmp_path):
    wrong = config(warps=8)
    lane = lane_for(StandInSource(wrong=(wrong,)), tmp_path)
    try:
        outcome = lane.measure(wrong, DEFAULT, Turns())
        assert (outcome.kind, outcome.reason) == ("wrong result", "max-abs error 1 > 0.1 allowed")
        pid = lane._gpu._process.pid
        assert lane.measure(config(stages=1), DEFAULT, Turns()).measured is not None
        assert lane._gpu._process.pid == pid
    finally:
        lane.stop()


def test_compilations_run_side_by_side(tmp_path):
    """Each waits until all three have begun, which one after the other never would."""
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    pool = CompilePool(StandInSource(meeting=(str(meeting), 3)), tmp_path, 3)
    try:
        for stages in (1, 2, 3):
            pool.begin(config(stages=stages))
        assert pool.free == 0
        while pool.free < 3:
            if (result := pool.next(1.0)) is not None:
                assert result.kind == "", result.reason
    finally:
        pool.stop()


def test_no_gpu_is_one_clear_error(tmp_path):
    lane = lane_for(StandInSource(no_gpu=True), tmp_path)
    try:
        with pytest.raises(ToolchainError, match="cannot measure here: .*no CUDA device"):
            lane.open()
    finally:
        lane.stop()


def test_a_source_that_does_not_unpickle_is_one_clear_error(tmp_path, monkeypatch):
    """Its module is found here, and no longer where the worker starts."""
    (tmp_path / "of_one_process.py").write_text("class Source:\n    key = 'gone'\n")
    monkeypatch.syspath_prepend(tmp_path)
    worker = Worker(importlib.import_module("of_one_process").Source(), "compile")
    monkeypatch.undo()
    with pytest.raises(TuneError, match="compile worker cannot start: ModuleNotFoundError"):
        worker.request({"op": "open"}, 5.0)
    assert not worker.running


def test_workers_die_with_their_parent_even_while_hanging(tmp_path):
    pids = tmp_path / "pids"
    script = f"""
import os, sys
sys.path[:] = {sys.path!r}
from tests.tune.standin import DEFAULT, StandInSource
from sparsegen.tune.worker import Worker
worker = Worker(StandInSource(faults=(("compile", DEFAULT, "hang"),)), "compile")
message = {{"op": "compile", "config": DEFAULT.as_dict(), "folder": {str(tmp_path)!r}}}
worker.send({{"op": "open"}}, 60)
while worker.reply() is None: pass
worker.send(message, 60)
open({str(pids)!r}, "w").write(str(worker._process.pid))
while True: worker.reply()
"""
    parent = subprocess.Popen([sys.executable, "-c", script])
    while not (pids.exists() and pids.read_text()):
        time.sleep(0.05)
    child = int(pids.read_text())
    os.kill(child, 0)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state == "Z":
            return
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    pytest.fail("the worker outlived its parent")


def test_limits_judge_every_variant_for_shared_memory_and_the_first_for_spills():
    limits = Limits(shared_bytes=100, spill_bytes=8)
    fits, spills, large = Compiled(32, 8, 100), Compiled(32, 12, 10), Compiled(32, 0, 101)
    assert too_much({"fast": fits, "general": spills}, limits) is None
    assert too_much({"fast": spills, "general": fits}, limits) == (
        "spills",
        "variant fast spills 12 bytes a thread; at most 8 are allowed",
    )
    assert too_much({"fast": fits, "general": large}, limits) == (
        "shared memory",
        "variant general needs 101 bytes of shared memory; the GPU has 100",
    )
    assert too_much({"fast": Compiled(None, None, 10)}, limits) is None
