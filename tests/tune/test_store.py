"""tuned/: the files, the look-up steps, mismatches; history.csv."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import warnings
from dataclasses import dataclass, replace

import pytest

import sparsegen.paths
from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.errors import ArtifactError, ToolchainError
from sparsegen.tune import history, store
from tests.tune.standin import DEFAULT, KNOBS


@dataclass(frozen=True)
class StandInProblem:
    head_dim: int = 128
    value_dim: int | None = None
    heads: int = 16
    kv_heads: int | None = None
    batch: int = 1
    dtype: str = "bfloat16"
    lengths: tuple[tuple[int, int], ...] = ((4096, 4096),)


@dataclass(frozen=True)
class StandInGpu:
    name: str = "nvidia-h200"
    backend: str = "cuda"
    arch: int | str = 90


@dataclass(frozen=True)
class StandInPattern:
    name: str = "causal"
    value: str = "a" * 64

    def digest(self) -> str:
        return self.value


@dataclass(frozen=True)
class StandInTemplate:
    name: str = "forward"
    digest: str = "b" * 64
    knobs: tuple = KNOBS
    forbidden: tuple[LaunchConfig, ...] = ()

    def default(self, problem, gpu):
        return DEFAULT

    def invalid(self, config, problem, gpu):
        return "too large" if config in self.forbidden else None


PROBLEM, GPU, PATTERN, TEMPLATE = (
    StandInProblem(),
    StandInGpu(),
    StandInPattern(),
    StandInTemplate(),
)
H100, A100 = StandInGpu("nvidia-h100"), StandInGpu("nvidia-a100", arch=80)


def config(**values):
    return LaunchConfig.of({**DEFAULT.as_dict(), **values})


def row(length=4096, problem=PROBLEM, pattern=PATTERN, template=TEMPLATE, **values):
    return store.Row(
        pattern=pattern.name,
        pattern_digest=pattern.digest(),
        template=template.name,
        template_digest=template.digest,
        problem=store.Measured.of(problem, length, length),
        config=config(**values).as_dict(),
        time_us=90.0,
        baseline_us=100.0,
        noise=0.01,
        trials=40,
        versions={"torch": "2.13.0", "triton": "3.9.0", "driver": "570.1"},
        date="2026-11-29T20:00:00+00:00",
    )


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(store, "_SAID", set())


def find(
    root,
    problem=PROBLEM,
    gpu=GPU,
    pattern=PATTERN,
    template=TEMPLATE,
    length=4096,
    labels=("runs",),
):
    at = (length, length)
    return store.lookup(pattern, problem, gpu, template, labels, lengths=at, root=root)


def wrong_rows(root, patterns, templates, labels=None):
    return store.errors(root, "nvidia-h200", patterns, templates, labels or no_analysis)


def no_analysis(row):
    raise AssertionError(f"analysed for a row without a schedule: {row}")


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


def test_the_steps_in_their_order(tmp_path, caplog):
    caplog.set_level(logging.INFO, "sparsegen.tune")
    assert find(tmp_path) == (DEFAULT, "template default")
    store.write(tmp_path, A100, row(warps=8, stages=1))
    assert find(tmp_path) == (DEFAULT, "template default")  # another architecture
    store.write(tmp_path, H100, row(8192, warps=8, stages=4))
    step = "same architecture (nvidia-h100: q_len 8192, kv_len 8192)"
    assert find(tmp_path) == (config(warps=8, stages=4), step)
    store.write(tmp_path, GPU, row(32768, warps=8))
    store.write(tmp_path, GPU, row(8192, warps=8, stages=3))
    step = "exact GPU, nearest problem (q_len 8192, kv_len 8192)"
    assert find(tmp_path) == (config(warps=8, stages=3), step)
    store.write(tmp_path, GPU, row(4096, block_m=128))
    assert find(tmp_path) == (config(block_m=128), "exact GPU")
    find(tmp_path)
    said = [record.getMessage() for record in caplog.records]
    assert said == [  # each step once, however often it is taken
        "causal on nvidia-h200: configuration by template default",
        "causal on nvidia-h200: configuration by same architecture (nvidia-h100: q_len 8192, kv_len 8192)",
        "causal on nvidia-h200: configuration by exact GPU, nearest problem (q_len 8192, kv_len 8192)",
        "causal on nvidia-h200: configuration by exact GPU",
    ]


@pytest.mark.parametrize(
    "change", [{"head_dim": 64}, {"value_dim": 64}, {"dtype": "float16"}], ids=str
)
def test_rows_of_other_dims_or_dtype_are_never_used(tmp_path, change):
    store.write(tmp_path, GPU, row(warps=8))
    assert find(tmp_path, problem=replace(PROBLEM, **change))[1] == "template default"
    assert find(tmp_path, problem=replace(PROBLEM, heads=8))[1].startswith("exact GPU, nearest")


def test_nearest_is_by_length_then_by_group(tmp_path):
    grouped = replace(PROBLEM, kv_heads=4)
    store.write(tmp_path, GPU, row(4096, problem=grouped, warps=8))
    store.write(tmp_path, GPU, row(8192, stages=3))
    assert find(tmp_path, length=4096)[1] == "exact GPU, nearest problem (kv_heads 4)"
    assert find(tmp_path, length=8000)[0] == config(stages=3)


def test_a_renamed_pattern_is_found_by_its_digest(tmp_path):
    store.write(tmp_path, GPU, row(warps=8))
    renamed = StandInPattern("autoregressive")
    assert find(tmp_path, pattern=renamed) == (config(warps=8), "exact GPU")
    assert find(tmp_path, pattern=StandInPattern("other", "c" * 64))[1] == "template default"


def test_another_version_is_a_warning_for_users_and_an_error_for_check(tmp_path):
    store.write(tmp_path, GPU, row(warps=8))
    pattern, template = StandInPattern(value="c" * 64), StandInTemplate(digest="d" * 64)
    with pytest.warns(store.StaleTuningWarning) as caught:
        assert find(tmp_path, pattern=pattern, template=template)[0] == config(warps=8)
    assert [str(w.message) for w in caught] == [
        "tuned row of causal on nvidia-h200: pattern causal was aaaaaaaaaaaa when measured, now it is "
        "cccccccccccc; its configuration is used all the same",
        "tuned row of causal on nvidia-h200: template forward was bbbbbbbbbbbb when measured, now it is "
        "dddddddddddd; its configuration is used all the same",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        find(tmp_path, pattern=pattern, template=template)  # told once
    path = tmp_path / "nvidia-h200" / "causal.json"
    now = {"causal": "c" * 64}, {"forward": "b" * 64}
    assert wrong_rows(tmp_path, *now) == [
        f"{path}: pattern causal was aaaaaaaaaaaa when measured, now it is cccccccccccc"
    ]
    assert wrong_rows(tmp_path, {"causal": "a" * 64}, {"forward": "b" * 64}) == []
    assert wrong_rows(tmp_path, {}, {}) == [f"{path}: there is no pattern named causal"]


def test_what_the_template_forbids_here_is_passed_over(tmp_path):
    store.write(tmp_path, GPU, row(warps=8))
    store.write(tmp_path, GPU, row(8192, stages=3))
    template = StandInTemplate(forbidden=(config(warps=8),))
    assert find(tmp_path, template=template)[0] == config(stages=3)


def test_a_row_with_unknown_knobs_is_passed_over_with_a_warning(tmp_path):
    store.write(tmp_path, GPU, replace(row(), config={"colour": 1}))
    with pytest.warns(store.StaleTuningWarning, match="unknown knob colour.*it is not used"):
        assert find(tmp_path) == (DEFAULT, "template default")


def scheduled(length, schedule, **values):
    made = row(length, **values)
    return replace(made, config={**made.config, "SCHEDULE": schedule})


def test_a_row_gives_its_schedule_where_there_is_a_choice(tmp_path):
    labels = ("runs + mod 8", "runs")
    start = config(SCHEDULE="runs + mod 8")
    assert find(tmp_path, labels=labels) == (start, "template default")
    store.write(tmp_path, GPU, scheduled(4096, "runs", warps=8))
    assert find(tmp_path, labels=labels) == (config(warps=8, SCHEDULE="runs"), "exact GPU")
    # nothing to choose any more, and it is this one: the knob is gone
    assert find(tmp_path, labels=("runs",)) == (config(warps=8), "exact GPU")
    # measured when there was nothing to choose: for the best prediction
    store.write(tmp_path, GPU, row(4096, warps=8))
    assert find(tmp_path, labels=labels)[0] == config(warps=8, SCHEDULE="runs + mod 8")


def test_a_row_whose_schedule_is_no_candidate_is_passed_over_with_a_warning(tmp_path):
    store.write(tmp_path, GPU, scheduled(4096, "mod 16", warps=8))
    store.write(tmp_path, GPU, scheduled(8192, "runs", stages=3))
    labels = ("runs + mod 8", "runs")
    with pytest.warns(store.StaleTuningWarning) as caught:
        assert find(tmp_path, labels=labels)[0] == config(stages=3, SCHEDULE="runs")
    said = (
        "the row of causal at 4096x4096: schedule 'mod 16' is no candidate; "
        "there are 'runs + mod 8', 'runs'"
    )
    assert [str(w.message) for w in caught] == [
        f"tuned row of causal on nvidia-h200 is not used: {said}"
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        find(tmp_path, labels=labels)  # told once
    path = tmp_path / "nvidia-h200" / "causal.json"
    now = {"causal": "a" * 64}, {"forward": "b" * 64}
    assert wrong_rows(tmp_path, *now, lambda row: labels) == [f"{path}: {said}"]
    assert wrong_rows(tmp_path, *now, lambda row: (*labels, "mod 16")) == []


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"rows": [{}]}', '{"rows": [1]}', '{"rows": null}'], ids=str
)
def test_a_damaged_file_is_one_error_with_its_name(tmp_path, text):
    path = store.write(tmp_path, GPU, row())
    path.write_text(text)
    with pytest.raises(ArtifactError, match="causal.json is damaged .*restore or delete it"):
        find(tmp_path)
    (message,) = wrong_rows(tmp_path, {}, {})
    assert "is damaged" in message


WRITER = """
import sys
sys.path[:] = {path!r}
from pathlib import Path
from tests.tune.test_store import *
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

    monkeypatch.setattr(store.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        store.write(tmp_path, GPU, row(8192))
    assert path.read_text() == before
    assert {p.name for p in path.parent.iterdir()} == {"causal.json", ".lock"}


def entry(**values):
    fields = {name: name for name in history.COLUMNS}
    numbers = {"median_us": 90.5, "spread_us": 1.0, "baseline_us": 100.0}
    return history.Entry(**{**fields, **numbers, **values})


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
