"""Tunings over a real Ray cluster of this machine: its nodes have GPUs by name alone, times are a replay."""

from __future__ import annotations

import collections
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="needs Ray: the extra ray")

from typer.testing import CliRunner

from sparsegen.cli import app
from sparsegen.errors import ToolchainError
from sparsegen.report.tuning import job_of, run_there, tune_many
from sparsegen.spec.gpu import find_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.tune import cluster, recording
from sparsegen.tune.cluster import Failed, spread
from sparsegen.tune.job import Job, run
from sparsegen.tune.storage import open_storage
from sparsegen.tune.study import trial_of
from sparsegen.tune.tuner import Budget
from tests.tune import ray_jobs
from tests.tune.recordings import write_grids

PATTERNS = {"causal": 1, "streaming_llm": 2, "axial_image": 3}


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    """One node that says it has an H200, one that says it has an A100; one processor each."""
    from ray.cluster_utils import Cluster

    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        nodes = Cluster()
        common = {"num_cpus": 1, "num_gpus": 1, "object_store_memory": 80_000_000}
        nodes.add_node(**common, resources={"accelerator_type:H200": 1}, include_dashboard=False)
        nodes.add_node(**common, resources={"accelerator_type:A100": 1})
        nodes.wait_for_nodes()
        yield nodes.address
        nodes.shutdown()


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_grids(tmp_path_factory.mktemp("record") / "grid.jsonl", PATTERNS)


def jobs(
    record: Path, names: dict[str, str], storage: object = None, pause_s: float = 0.0
) -> list[Job]:
    """Replayed jobs: pattern → GPU type."""
    from dataclasses import replace

    whole = recording.read(record)
    made = []
    for name, gpu in names.items():
        path = None if storage is None else str(storage)
        job = job_of(Pattern.from_yaml(name), None, find_gpu(gpu), path, None, None, whole)
        source = replace(job.replay, pause_s=pause_s)
        made.append(replace(job, budget=Budget(12, 600), replay=source))
    return made


def test_the_same_winners_as_without_a_cluster(ray_address, record, tmp_path):
    wanted = jobs(record, {"causal": "h200", "streaming_llm": "a100", "axial_image": "h200"})
    said: list[str] = []
    outcomes = spread(
        wanted,
        run_there,
        ray_address,
        lambda done, total, text: said.append(f"{done}/{total} {text}"),
    )
    here = [run(job) for job in wanted]
    for there, alone in zip(outcomes, here):
        assert not isinstance(there, Failed), there
        assert there.job.name == alone.job.name and "(replay)" in there.job.name
        assert (there.result.config, there.result.time_us) == (
            alone.result.config,
            alone.result.time_us,
        )
        assert there.result.trials == alone.result.trials
    assert len(said) == 3 and said[-1].startswith("3/3 ") and all("best" in line for line in said)


def test_the_command_line_spreads_and_says_replay(ray_address, record):
    names = ["causal", "streaming_llm"]
    base = ["tune", *names, "--replay", str(record), "--budget", "5"]
    done = CliRunner().invoke(app, [*base, "--ray", ray_address, "--gpu", "h200,a100", "--json"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert [(r["pattern"], r["gpu"]) for r in rows] == [
        ("causal", "nvidia-h200"),
        ("streaming_llm", "nvidia-h200"),
        ("causal", "nvidia-a100"),
        ("streaming_llm", "nvidia-a100"),
    ]
    alone = json.loads(CliRunner().invoke(app, [*base, "--json"]).stdout)
    for row in rows:
        same = next(r for r in alone if r["pattern"] == row["pattern"])
        assert row["how"].startswith("replay: ")
        assert (row["best_us"], row["config"]) == (same["best_us"], same["config"])


def test_a_killed_worker_is_tried_again_and_loses_only_its_trial(ray_address, record, tmp_path):
    """B23 on a cluster: a real SIGKILL of the process that measures."""
    (job,) = jobs(record, {"causal": "h200"}, tmp_path / "s.sqlite", pause_s=0.25)
    said: list[str] = []
    killed: list[int] = []

    def kill() -> None:
        while not killed:
            time.sleep(0.2)
            running = [t for t in trials(tmp_path / "s.sqlite") if t.state.name == "RUNNING"]
            if len(trials(tmp_path / "s.sqlite")) >= 4 and running:
                killed.append(running[0].user_attrs["owner"]["pid"])
                os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    (outcome,) = spread([job], run_there, ray_address, lambda d, t, text: said.append(text))
    killer.join(timeout=60)
    assert not isinstance(outcome, Failed), outcome
    assert killed and any("its worker was lost" in line and "try 2 of 3" in line for line in said)
    counts = collections.Counter(
        trial_of(t).kind or trial_of(t).state for t in trials(tmp_path / "s.sqlite")
    )
    assert counts["complete"] == 12 and 1 <= counts["left behind"] <= 2
    owners = {t.user_attrs["owner"]["pid"] for t in trials(tmp_path / "s.sqlite")}
    assert len(owners) == 2


def trials(path: Path):
    if not path.exists():
        return []
    backend = open_storage(path).backend
    studies = backend.get_all_studies()
    return backend.get_all_trials(studies[0]._study_id) if studies else []


def test_a_worker_that_always_dies_is_given_up(ray_address, record):
    said: list[str] = []
    wanted = jobs(record, {"causal": "h200"})
    (outcome,) = spread(wanted, ray_jobs.dies, ray_address, lambda d, t, text: said.append(text))
    assert isinstance(outcome, Failed) and "worker was lost" in outcome.reason
    assert "3 times" in outcome.reason
    assert sum("; try " in line for line in said) == 2


def test_a_job_that_fails_is_not_tried_again_and_hinders_no_other(ray_address, record):
    said: list[str] = []
    wanted = jobs(record, {"causal": "h200"})
    (outcome,) = spread(wanted, ray_jobs.refuses, ray_address, lambda d, t, text: said.append(text))
    assert isinstance(outcome, Failed) and outcome.reason == "causal cannot be done here"
    assert len(said) == 1


def test_another_version_on_the_node_is_said(ray_address, record):
    from dataclasses import replace

    (job,) = jobs(record, {"causal": "h200"})
    (outcome,) = spread([replace(job, version="0.0.1")], run_there, ray_address)
    assert isinstance(outcome, Failed) and "the job was made by 0.0.1" in outcome.reason


def test_without_a_replay_a_node_without_that_gpu_says_so(ray_address, record):
    """B18 on a cluster: a node may say what it likes; the job looks."""
    from dataclasses import replace

    (job,) = jobs(record, {"causal": "h200"})
    (outcome,) = spread([replace(job, replay=None)], run_there, ray_address)
    assert isinstance(outcome, Failed) and "nvidia-h200 was asked for" in outcome.reason


def test_a_cluster_without_that_gpu_is_an_error_at_once(ray_address, record):
    done = CliRunner().invoke(
        app, ["tune", "causal", "--replay", str(record), "--ray", ray_address, "--gpu", "b200"]
    )
    assert isinstance(done.exception, ToolchainError)
    text = str(done.exception)
    assert (
        "has no B200 (for nvidia-b200); its GPUs: A100 (1), H200 (1)" in text and "\n" not in text
    )


def test_a_node_that_goes_for_good_ends_its_jobs(ray_address, record, tmp_path, monkeypatch):
    """The last node of a type is lost while a job of it runs: not a wait for ever."""
    from ray.cluster_utils import Cluster

    monkeypatch.setattr(cluster, "_GONE_S", 3.0)
    nodes = Cluster()
    try:
        nodes.add_node(
            num_cpus=1, num_gpus=0, object_store_memory=80_000_000, include_dashboard=False
        )
        resources = {"accelerator_type:H100": 1}
        lost = nodes.add_node(
            num_cpus=1, num_gpus=1, object_store_memory=80_000_000, resources=resources
        )
        nodes.wait_for_nodes()
        wanted = jobs(record, {"causal": "h100"}, tmp_path)

        def remove() -> None:
            while not list(tmp_path.iterdir()):
                time.sleep(0.2)
            nodes.remove_node(lost, allow_graceful=False)

        threading.Thread(target=remove, daemon=True).start()
        (outcome,) = spread(wanted, ray_jobs.says_who_and_waits, nodes.address)
    finally:
        nodes.shutdown()
    assert isinstance(outcome, Failed) and "lost its last H100" in outcome.reason


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense"])
def test_no_cluster_there_is_one_sentence(address):
    with pytest.raises(ToolchainError, match=f"cannot reach a Ray cluster at {address}") as caught:
        tune_many(["causal"], address, gpus=["h200"])
    assert "\n" not in str(caught.value)


INTERRUPTED = """
import signal, sys
sys.path[:] = {path!r}
from pathlib import Path
from tests.tune.test_cluster import jobs
from tests.tune import ray_jobs
from sparsegen.tune.cluster import spread
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
spread(jobs(Path(sys.argv[1]), {{"causal": "h200", "streaming_llm": "a100"}}, sys.argv[2]), ray_jobs.says_who_and_waits, sys.argv[3])
"""


def test_ctrl_c_ends_the_jobs(ray_address, record, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED.format(path=sys.path), record, tmp_path, ray_address],
        stderr=subprocess.PIPE,
        text=True,
    )
    while len(list(tmp_path.iterdir())) < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.2)
    assert "KeyboardInterrupt" in interrupted(process)
    end = time.monotonic() + 60
    workers = [int(path.name) for path in tmp_path.iterdir()]
    while any(alive(pid) for pid in workers) and time.monotonic() < end:
        time.sleep(0.2)
    assert not any(alive(pid) for pid in workers)


def interrupted(process):
    """What a process says when Ctrl-C is pressed; one that arrives inside Ray's own code may be lost, so again."""
    for _ in range(4):
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=20)[1]
    process.kill()
    raise AssertionError("four times Ctrl-C and no end")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
