"""tuned/: its files, written by several at once; history.csv; where the folder is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import sparsegen.paths
from sparsegen.errors import ArtifactError, ToolchainError
from sparsegen.tune import history, store
from tests.tune.tuned import GPU, entry, row


def test_a_file_has_sorted_keys_and_one_problem_a_line(tmp_path):
    for length in (16384, 4096, 8192):
        path = store.write(tmp_path, GPU, row(length))
    assert path == tmp_path / "nvidia-h200" / "causal.json"
    text = path.read_text()
    content = json.loads(text)
    assert list(content) == ["arch", "backend", "gpu", "rows"]
    lines = [line for line in text.splitlines() if line.startswith('{"')]
    assert len(lines) == 3
    for line in lines:
        one = json.loads(line.rstrip(","))
        assert list(one) == sorted(one) and list(one["config"]) == sorted(one["config"])
    assert [r["problem"]["q_len"] for r in content["rows"]] == [4096, 8192, 16384]
    assert store.read(tmp_path, "nvidia-h200", "causal") == [row(n) for n in (4096, 8192, 16384)]


def test_a_new_row_takes_the_place_of_the_old_one_only(tmp_path):
    store.write(tmp_path, GPU, row(4096))
    store.write(tmp_path, GPU, row(8192))
    before = (tmp_path / "nvidia-h200" / "causal.json").read_text().splitlines()
    store.write(tmp_path, GPU, row(8192, warps=8))
    after = (tmp_path / "nvidia-h200" / "causal.json").read_text().splitlines()
    assert sum(a != b for a, b in zip(before, after)) == 1 and len(before) == len(after)


WRITER = """
import sys
sys.path[:] = {path!r}
from pathlib import Path
from tests.tune.tuned import *
root, first = Path(sys.argv[1]), int(sys.argv[2])
for length in range(first, first + 10):
    store.write(root, GPU, row(length))
    history.append(root / "history.csv", [entry(problem=str(length))])
"""


def test_four_writers_lose_no_row_and_no_line(tmp_path):
    script = WRITER.format(path=sys.path)
    processes = [
        subprocess.Popen([sys.executable, "-c", script, str(tmp_path), str(first)])
        for first in (100, 200, 300, 400)
    ]
    assert [process.wait(60) for process in processes] == [0] * 4
    assert len(store.read(tmp_path, "nvidia-h200", "causal")) == 40
    assert len({e.problem for e in history.read(tmp_path / "history.csv")}) == 40
    litter = {p.name for p in tmp_path.rglob("*") if p.is_file()}
    assert litter == {"causal.json", ".lock", "history.csv", ".history.csv.lock"}


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = store.write(tmp_path, GPU, row())
    before = path.read_text()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        store.write(tmp_path, GPU, row(8192))
    assert path.read_text() == before
    assert {p.name for p in path.parent.iterdir()} == {"causal.json", ".lock"}


def test_history_only_grows_and_reads_back(tmp_path):
    path = tmp_path / "history.csv"
    assert history.read(path) == []
    history.append(path, [entry(config='a, "b"'), entry(date="2")])
    first = path.read_bytes()
    history.append(path, [entry(date="3")])
    assert path.read_bytes().startswith(first)
    assert history.read(path) == [entry(config='a, "b"'), entry(date="2"), entry(date="3")]
    assert path.read_text().splitlines()[0] == (
        "date,commit,gpu,driver,torch,triton,pattern,problem,config,median_us,spread_us,baseline,baseline_us"
    )


def test_a_foreign_or_damaged_history_is_never_appended_to(tmp_path):
    path = tmp_path / "history.csv"
    path.write_text("when,what\n1,2\n")
    for use in (history.read, lambda p: history.append(p, [entry()])):
        with pytest.raises(ArtifactError, match="has the columns when, what; expected date,"):
            use(path)
    path.unlink()
    history.append(path, [entry()])
    path.write_text(path.read_text() + "cut")
    with pytest.raises(ArtifactError, match="the last line is cut off"):
        history.append(path, [entry()])
    with pytest.raises(ArtifactError, match=r"history.csv:3: the line has \d+ fields; expected 13"):
        history.read(path)


def test_data_is_found_in_the_package_first_then_beside_it(tmp_path, monkeypatch):
    package = tmp_path / "site" / "sparsegen"
    (tmp_path / "site" / "tuned").mkdir(parents=True)
    package.mkdir()
    monkeypatch.setattr(sparsegen.paths, "__file__", str(package / "paths.py"))
    assert sparsegen.paths.data_dir("tuned") == tmp_path / "site" / "tuned"
    (package / "_data" / "tuned").mkdir(parents=True)
    assert sparsegen.paths.data_dir("tuned") == package / "_data" / "tuned"
    with pytest.raises(
        ToolchainError, match="folder patterns/ .* is missing; .*install sparsegen again"
    ):
        sparsegen.paths.data_dir("patterns")
