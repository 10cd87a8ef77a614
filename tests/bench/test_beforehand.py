"""`benchmarks/beforehand.py`: what is compiled without a GPU is taken as it is, by the same kernels alone."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from sparsegen.codegen import LaunchConfig, load_template, render
from sparsegen.launch import Job
from sparsegen.schedule.build import build
from sparsegen.spec.gpu import find_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")


@pytest.fixture
def beforehand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The module, with a folder named as a session does it."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import beforehand

    monkeypatch.setenv(beforehand.BINARIES, str(tmp_path / "kept"))
    monkeypatch.delenv(beforehand.TYPE, raising=False)
    return beforehand


def job_of(folder: Path, **knobs: object) -> Job:
    pattern, gpu = Pattern.from_dict({"name": "causal", "mask": "causal"}), find_gpu("h200")
    problem = Problem(head_dim=64, heads=2)
    config = load_template().default(problem, gpu).as_dict() | knobs
    source = render(pattern, build(pattern), problem)
    return Job(source, LaunchConfig.of(config), "fast", gpu, folder)


def test_a_kernel_is_compiled_once(beforehand, tmp_path, capsys, monkeypatch):
    job = job_of(tmp_path / "first")
    (first,) = beforehand.compile_many([job])
    assert first.binary is not None and "0 of 1" in capsys.readouterr().out
    monkeypatch.setattr(beforehand, "compile_now", None)  # nothing is left to compile
    told = []
    again = replace(job, directory=tmp_path / "second")
    (second,) = beforehand.compile_many([again], done=told.append)
    assert told == [second] and "1 of 1" in capsys.readouterr().out
    assert second.job == again and second.error == ""
    assert second.binary == replace(first.binary, directory=tmp_path / "second")
    for name in (p.relative_to(job.directory) for p in job.directory.rglob("*") if p.is_file()):
        if name.suffix != ".ptx":
            assert (again.directory / name).read_bytes() == (job.directory / name).read_bytes()
    assert not (again.directory / beforehand.FACTS).exists()


def test_another_kernel_is_not_taken(beforehand, tmp_path):
    root, job = tmp_path / "kept", job_of(tmp_path / "a")
    others = [
        job_of(tmp_path / "a", BLOCK_N=32),
        replace(job, variant="general"),
        replace(job, gpu=find_gpu("h100")),
        replace(job, source=replace(job.source, text=job.source.text + "\n")),
    ]
    places = {beforehand.place_of(root, j) for j in (job, *others)}
    assert len(places) == 5
    assert beforehand.place_of(root, replace(job, directory=tmp_path / "b")) in places


def test_what_was_refused_is_not_kept(beforehand, tmp_path):
    job = job_of(tmp_path / "a")
    broken = replace(job, source=replace(job.source, text="import no_such_module\n"))
    (outcome,) = beforehand.compile_many([broken])
    assert outcome.binary is None and outcome.error
    assert not (tmp_path / "kept").exists() or not list((tmp_path / "kept").iterdir())


def test_without_a_folder_nothing_is_kept(beforehand, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv(beforehand.BINARIES)
    (outcome,) = beforehand.compile_many([job_of(tmp_path / "a")])
    assert outcome.binary is not None and capsys.readouterr().out == ""


def test_a_session_compiles_where_there_is_no_gpu(tmp_path):
    plan, kept = tmp_path / "plan.yaml", tmp_path / "kept"
    stages = [
        {
            "name": "again",
            "seconds": 9,
            "run": "python benchmarks/barriers.py causal",
            "ahead": True,
        },
        {"name": "tests", "seconds": 9, "run": "false"},
    ]
    plan.write_text(yaml.safe_dump(stages))
    command = [sys.executable, ROOT / "benchmarks" / "session.py", plan, "--out", tmp_path / "out"]

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *words], capture_output=True, text=True, timeout=250)

    wanted = ("--compile-only", "h200", "--binaries", str(kept), "--seconds", "200")
    for said in ("0 of ", "4 of 4 "):
        done = run(*wanted)
        log = (tmp_path / "out" / "again.log").read_text()
        assert done.returncode == 0, done.stdout + done.stderr + log
        assert "tests: compiles nothing beforehand" in done.stdout and "again: ok" in done.stdout
        assert said in log and log.rstrip().endswith("nothing was measured")
    facts = [json.loads(p.read_text()) for p in kept.glob("*/binary.json")]
    assert len(facts) == 4 and all(f["directory"] == "" and f["registers"] for f in facts)
    assert "known: " in run("--compile-only", "abacus", "--binaries", str(kept)).stderr
    assert "needs --binaries" in run("--compile-only", "h200").stderr
