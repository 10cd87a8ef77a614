"""The storage under many processes, locks and kills."""

from __future__ import annotations

import collections
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest

from sparsegen.errors import TuneError
from sparsegen.tune.storage import StorageBusy, _is_locked, open_storage
from sparsegen.tune.tuner import Budget, TuningWarning, recorded, tune
from tests.tune.standin import DEFAULT, InProcessLane, StandInSource

PRELUDE = f"""
import json, os, sys, time
sys.path[:] = {sys.path!r}
from tests.tune.standin import DEFAULT, InProcessLane, StandInSource
from sparsegen.tune.tuner import Budget, tune
"""


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + script, *map(str, arguments)],
        text=True,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def completed(path: Path) -> dict[str, int]:
    found = {}
    for summary in optuna.get_all_study_summaries(f"sqlite:///{path}"):
        study = optuna.load_study(study_name=summary.study_name, storage=f"sqlite:///{path}")
        found[study.study_name] = collections.Counter(t.state.name for t in study.trials)
    return found


TOGETHER = """
folder, number, key, trials = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
source = StandInSource(key=key, log=f"{folder}/log", slow_s=0.01)
open(f"{folder}/here-{number}", "w").close()
while len([n for n in os.listdir(folder) if n.startswith("here-")]) < 8:
    time.sleep(0.01)
result = tune(source, budget=Budget(trials, 600), storage=f"{folder}/s.db", lane=InProcessLane(source))
assert not result.how.startswith("template default:"), result.how
"""


@pytest.mark.parametrize("shared", [True, False], ids=["one study", "eight studies"])
def test_eight_processes_start_one_storage_at_once(tmp_path, shared):
    """B14: 80 complete trials, no lock error gets out.  Waiting for locks has an end, and what ends it is an error."""
    processes = [
        start(TOGETHER, tmp_path, n, "same" if shared else f"problem {n}", 80 if shared else 10)
        for n in range(8)
    ]
    for process in processes:
        _, err = process.communicate(timeout=250)
        assert process.returncode == 0, err
        assert err == ""
    counted = completed(tmp_path / "s.db")
    assert sum(counts["COMPLETE"] for counts in counted.values()) == 80
    assert all(counts["RUNNING"] == 0 for counts in counted.values())
    assert len(counted) == (1 if shared else 8)
    if shared:  # nobody measured what another had measured, but for the winner against the baseline
        log = (tmp_path / "log").read_text().splitlines()
        begins = collections.Counter(line for line in log if line.startswith("begin"))
        assert len(begins) == 80 and sum(begins.values()) <= 80 + 8


HOLD = """
import sqlite3
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN EXCLUSIVE")
print("held", flush=True)
time.sleep(float(sys.argv[2]))
open(sys.argv[1] + ".over", "w").close()
"""


@pytest.mark.parametrize(
    ("before", "seconds"), [(True, 10), (False, 3)], ids=["existing file", "new file"]
)
def test_an_exclusive_lock_is_waited_for(tmp_path, before, seconds):
    path, source = tmp_path / "s.db", StandInSource()
    if before:
        tune(source, budget=Budget(2, 600), storage=path, lane=InProcessLane(source))
    holder = start(HOLD, path, seconds)
    assert holder.stdout.readline() == "held\n"
    result = tune(source, budget=Budget(4, 600), storage=path, lane=InProcessLane(source))
    assert result.complete == 4
    assert Path(f"{path}.over").exists(), "it did not wait"
    holder.communicate()


def test_a_lock_that_stays_gives_the_default_with_a_warning(tmp_path):
    path, source = tmp_path / "s.db", StandInSource()
    tune(source, budget=Budget(2, 600), storage=path, lane=InProcessLane(source))
    holder = start(HOLD, path, 60)
    assert holder.stdout.readline() == "held\n"
    try:
        with pytest.warns(TuningWarning, match="locked by another process for more than 1 s"):
            result = tune(
                source,
                budget=Budget(4, 600),
                storage=path,
                lane=InProcessLane(source),
                patience_s=1.0,
            )
        assert (result.config, result.time_us) == (DEFAULT, None)
        assert result.how.startswith("template default: the study ")
    finally:
        holder.kill()
        holder.communicate()


def test_the_lock_file_has_the_same_patience(tmp_path):
    first = open_storage(tmp_path / "s.db")
    with first.locked():
        with first.locked():  # the owner may take it again
            pass
        with pytest.raises(StorageBusy, match="in use by another process for more than 0 s"):
            open_storage(tmp_path / "s.db", patience_s=0.2)


KILLED = """
source = StandInSource(log=sys.argv[2], slow_s=0.3)
tune(source, budget=Budget(10, 600), storage=sys.argv[1], lane=InProcessLane(source), seed=11)
"""


def kill_in_trial(number: int, path: Path, log: Path, script: str = KILLED) -> None:
    process = start(script, path, log)
    begun = 0
    while begun < number:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
        text = log.read_text() if log.exists() else ""
        begun = sum(line.startswith("begin") for line in text.splitlines())
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()


def test_killed_in_the_third_of_ten_trials_and_started_again(tmp_path):
    """B23: exactly ten complete, the stale one marked FAIL, nothing measured twice."""
    path, log = tmp_path / "s.db", tmp_path / "log"
    kill_in_trial(3, path, log)
    before = completed(path)["stand-in problem"]
    assert before["COMPLETE"] == 2 and 1 <= before["RUNNING"] <= 2  # one measured, one compiled
    again = start(KILLED, path, log)
    _, err = again.communicate(timeout=250)
    assert again.returncode == 0, err
    counts = completed(path)["stand-in problem"]
    assert counts == {"COMPLETE": 10, "FAIL": before["RUNNING"]}
    trials = recorded(StandInSource(), path).trials
    stale = [t for t in trials if t.state == "failed"]
    assert {t.kind for t in stale} == {"left behind"}
    assert {t.config for t in stale} <= {t.config for t in trials if t.state == "complete"}
    ended = [line for line in log.read_text().splitlines() if line.startswith("end")]
    assert len(ended) == 10 + 1  # and the winner against the baseline
    assert len(set(ended)) == 10


def test_killed_before_any_trial_is_complete_gives_the_default(tmp_path):
    path, log = tmp_path / "s.db", tmp_path / "log"
    kill_in_trial(1, path, log)
    result = recorded(StandInSource(), path)
    assert (result.config, result.complete) == (DEFAULT, 0)
    assert result.how == "template default: no trial is complete"


REAL = """
source = StandInSource(log=sys.argv[2], slow_s=0.1)
tune(source, budget=Budget(5, 600), storage=sys.argv[1], jobs=2, seed=11)
"""


def test_killed_with_real_workers_and_started_again(tmp_path):
    path, log = tmp_path / "s.db", tmp_path / "log"
    kill_in_trial(3, path, log, REAL)
    again = start(REAL, path, log)
    _, err = again.communicate(timeout=250)
    assert again.returncode == 0, err
    counts = completed(path)["stand-in problem"]
    assert counts["COMPLETE"] == 5 and counts["RUNNING"] == 0
    assert 1 <= counts["FAIL"] <= 4  # the one that was measured, and those being compiled


def test_a_configuration_left_behind_twice_is_not_tried_again(tmp_path):
    path, log = tmp_path / "s.db", tmp_path / "log"
    kill_in_trial(1, path, log)
    kill_in_trial(2, path, log)
    source = StandInSource()
    lane = InProcessLane(source)
    result = tune(source, budget=Budget(3, 600), storage=path, lane=lane)
    assert result.complete == 3 and DEFAULT not in lane.measured
    left = [t.config for t in result.trials if t.kind == "left behind"]
    assert left.count(DEFAULT) == 2


def test_a_url_and_a_path_are_the_same_place(tmp_path):
    source = StandInSource()
    tune(source, budget=Budget(3, 600), storage=tmp_path / "a" / "s.db", lane=InProcessLane(source))
    found = recorded(source, f"sqlite:///{tmp_path}/a/s.db")
    assert found.complete == 3 and found.storage == str(tmp_path / "a" / "s.db")


@pytest.mark.parametrize(
    ("storage", "words"),
    [
        ("damaged", "is not a SQLite file: file is not a database; give another --storage"),
        ("folder", "folder is not a SQLite file: unable to open database file"),
        ("/proc/study.db", "^cannot write /proc/study.db.lock: .*; give another --storage$"),
        ("nonsense://", "the driver of nonsense:// is not installed"),
        ("mysql+absent://me:secret@nowhere.invalid/x", "driver of mysql://me:\\*\\*\\*@nowhere"),
    ],
)
def test_what_cannot_be_a_storage_is_one_clear_error(tmp_path, storage, words):
    (tmp_path / "damaged").write_bytes(b"no database at all" * 100)
    (tmp_path / "folder").mkdir()
    where = storage if "://" in storage else tmp_path / storage
    with pytest.raises(TuneError, match=words) as caught:
        open_storage(where)
    assert "secret" not in str(caught.value)


def test_only_lock_errors_are_tried_again(tmp_path):
    storage = open_storage(tmp_path / "s.db", patience_s=5)
    calls = []

    def fails_twice():
        calls.append(1)
        if len(calls) < 3:
            raise sqlite3.OperationalError("database is locked")
        return "done"

    assert storage.patiently(fails_twice) == "done" and len(calls) == 3
    assert not _is_locked(sqlite3.OperationalError("no such table: trials"))
    wrapped = ValueError("outer")
    wrapped.__cause__ = sqlite3.OperationalError("database is locked")
    assert _is_locked(wrapped)
    with pytest.raises(KeyError):
        storage.patiently(lambda: {}["x"])
