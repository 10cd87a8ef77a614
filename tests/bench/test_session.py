"""`benchmarks/session.py`: stages in their order, ended in time, with what failed and what had no time said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "session.py"
PLANS = sorted((ROOT / "benchmarks" / "plans").glob("*.yaml"))


def run(tmp_path: Path, stages: object, *words: str) -> subprocess.CompletedProcess[str]:
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump(stages))
    command = [sys.executable, SCRIPT, plan, "--out", tmp_path / "out", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=250)


def test_each_stage_has_its_log_and_its_folder(tmp_path):
    code = "import os, sys; print(os.environ['SPARSEGEN_CACHE']); open(sys.argv[1], 'w').write('x')"
    stages = [
        {"name": "one", "seconds": 30, "run": f'python -c "{code}" {{out}}/result'},
        {"name": "two", "seconds": 30, "run": 'python -c "raise SystemExit(3)"'},
        {"name": "late", "seconds": 500, "run": "true"},
    ]
    done = run(tmp_path, stages, "--seconds", "100")
    assert done.returncode == 1, done.stderr
    assert "one: ok" in done.stdout and "two: failed (3)" in done.stdout
    assert "late: no time for it (500 s)" in done.stdout
    out = tmp_path / "out"
    assert (out / "one" / "result").read_text() == "x"
    assert (out / "one.log").read_text().startswith(str(out / "cache-0"))
    assert not (out / "late.log").exists()


def test_a_stage_is_ended_with_its_children(tmp_path):
    """One that ignores being asked, and a child that has left it."""
    code = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print(subprocess.Popen(['sleep', '300']).pid, flush=True); time.sleep(300)"
    )
    stages = [{"name": "stuck", "seconds": 2, "run": f'python -c "{code}"'}]
    done = run(tmp_path, stages, "--seconds", "60")
    assert done.returncode == 0 and "stuck: cut after 2 s" in done.stdout, done.stderr
    child = int((tmp_path / "out" / "stuck.log").read_text())
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] in "ZX"


COMPILES_AHEAD = """
import sys, time
sys.path.insert(0, "benchmarks")
import turn

print("start", time.monotonic())
time.sleep(1)
turn.take()
print("measure", time.monotonic())
time.sleep(2)
print("end", time.monotonic())
"""


def moments(tmp_path: Path, name: str) -> dict[str, float]:
    lines = (tmp_path / "out" / f"{name}.log").read_text().splitlines()
    found = (line.split() for line in lines if not line.startswith("waited"))
    return {word: float(second) for word, second in found}


def test_stages_compile_ahead_and_measure_one_after_the_other(tmp_path):
    """Two that take their turns and, in front of them, one that knows of none: it has the lane while it runs."""
    script = tmp_path / "ahead.py"
    script.write_text(COMPILES_AHEAD)
    plain = "import time; print('measure', time.monotonic()); time.sleep(2); print('end', time.monotonic())"
    stages = [
        {"name": "plain", "seconds": 30, "run": f'{sys.executable} -c "{plain}"'},
        {"name": "one", "seconds": 30, "run": f"{sys.executable} {script}", "ahead": True},
        {"name": "two", "seconds": 30, "run": f"{sys.executable} {script}", "ahead": True},
    ]
    done = run(tmp_path, stages, "--seconds", "200")
    assert done.returncode == 0, done.stdout + done.stderr
    plain, one, two = (moments(tmp_path, name) for name in ("plain", "one", "two"))
    assert one["start"] < plain["end"] <= one["measure"]
    assert two["start"] < one["end"] <= two["measure"]


def test_time_counts_from_the_turn_on(tmp_path):
    """A stage that goes ahead is cut so many seconds behind its turn; one that never gets there, at the end."""
    script = tmp_path / "ahead.py"
    script.write_text(COMPILES_AHEAD.replace("time.sleep(2)", "time.sleep(300)"))
    stages = [{"name": "long", "seconds": 2, "run": f"{sys.executable} {script}", "ahead": True}]
    done = run(tmp_path, stages, "--seconds", "60")
    assert "long: cut after 2 s" in done.stdout, done.stdout + done.stderr
    assert "measure" in moments(tmp_path, "long")
    stages = [{"name": "idle", "seconds": 1, "run": "sleep 300", "ahead": True}]
    done = run(tmp_path, stages, "--seconds", "4")
    assert "idle: cut before its turn" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ({}, "a plan is a list of stages"),
        ([{"name": "a", "run": "true"}], "stage 1: a stage has name, seconds, run"),
        ([{"name": "a", "seconds": "1", "run": "true"}], "stage 1: seconds is '1'"),
        ([{"name": "a", "seconds": 1, "run": "true", "ahead": 1}], "stage 1: ahead is 1"),
        ([{"name": "a", "seconds": 1, "run": "true"}] * 2, "stage 2: there is a stage a already"),
    ],
)
def test_what_is_no_plan_is_one_sentence(tmp_path, stages, words):
    done = run(tmp_path, stages)
    assert done.returncode == 1 and words in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: p.stem)
def test_plans_name_scripts_and_tests_that_exist(plan):
    stages = yaml.safe_load(plan.read_text())
    named = [w for s in stages for w in s["run"].split() if w.endswith(".py")]
    assert named and not [w for w in named if not (ROOT / w).is_file()]
    done = subprocess.run([sys.executable, SCRIPT, plan, "--dry"], capture_output=True, text=True)
    assert done.returncode == 0 and all(s["name"] in done.stdout for s in stages)
