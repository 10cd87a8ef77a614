"""``sparsegen tune`` and the rows that ``sparsegen check`` looks at, with the measuring left out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sparsegen.artifact import fleet
from sparsegen.cli import app
from sparsegen.codegen import load_template
from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.errors import InputError
from sparsegen.report import tuning
from sparsegen.spec.gpu import find_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.tune import store, winners
from sparsegen.tune.schedules import SCHEDULE
from sparsegen.tune.study import Trial
from sparsegen.tune.target import KernelTarget
from sparsegen.tune.tuner import TuneResult

H200 = find_gpu("h200")
AXIAL = """
name: small_axial
mask:
  axial: {shape: [32, 32]}
problem: {head_dim: 16, heads: 1, lengths: [1024]}
"""


@pytest.fixture
def axial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pattern with several candidate schedules, on a machine that seems to have a GPU."""
    file = tmp_path / "small_axial.yaml"
    file.write_text(AXIAL)
    monkeypatch.setattr("sparsegen.spec.gpu.current_gpu", lambda: H200)
    monkeypatch.setenv("SPARSEGEN_CACHE", str(tmp_path / "cache"))
    return file


def test_tune_says_which_schedule_won(axial: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tune_pattern(pattern: Any, problem: Any, gpu: Any, **_: Any) -> Any:
        target = KernelTarget.of(pattern, problem, gpu)
        configs = [target.default, *target.starts]
        trials = tuple(Trial(i, c, "complete", time_us=90.0 - i) for i, c in enumerate(configs))
        return target, TuneResult(configs[-1], 80.0, 90.0, 0.01, trials, "best", "here")

    monkeypatch.setattr(winners, "tune_pattern", tune_pattern)
    done = CliRunner().invoke(app, ["tune", str(axial), "--json"])
    (row,) = json.loads(done.stdout)
    labels = tuning.labels_of_row(
        Pattern.from_yaml(axial), store.Measured(16, 16, 1, 1, 1, "bfloat16", 1024, 1024)
    )
    assert len(labels) > 1 and SCHEDULE not in row["config"]
    assert row["schedule"].startswith(f"{labels[-1]} (predicted ")
    assert f"; {labels[0]} " in row["schedule"] and "measured 0.09 ms" in row["schedule"]
    lines = CliRunner().invoke(app, ["tune", str(axial)]).stdout.splitlines()
    assert lines[-1] == f"small_axial: schedule: {row['schedule']}"


def test_check_names_a_row_whose_schedule_is_no_candidate(
    axial: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern, template = Pattern.from_yaml(axial), load_template()
    config = template.default(pattern.problem, H200).as_dict()
    for length, label in ((1024, "mod 7"), (1000, "runs")):
        row = store.Row(
            pattern=pattern.name,
            pattern_digest=pattern.digest(),
            template=template.name,
            template_digest=template.digest,
            problem=store.Measured.of(pattern.problem, length, length),
            config=LaunchConfig.of({**config, SCHEDULE: label}).as_dict(),
            time_us=90.0,
            baseline_us=100.0,
            noise=0.01,
            trials=40,
            versions={},
            date="2026-11-29T20:00:00+00:00",
        )
        store.write(tmp_path / "tuned", H200, row)
    monkeypatch.setattr("sparsegen.spec.shipped.shipped_patterns", lambda: {pattern.name: axial})
    asked = []
    real = tuning.labels_of_row
    monkeypatch.setattr(
        tuning,
        "labels_of_row",
        lambda p, m, template: (
            asked.append(m.q_len) or (*real(p, m, template), *(["runs"] if m.q_len == 1000 else []))
        ),
    )
    folder = tuning.data_dir
    monkeypatch.setattr(
        tuning, "data_dir", lambda name: tmp_path / name if name == "tuned" else folder(name)
    )
    (said,) = tuning.stale_rows(["h200"])
    assert "the row of small_axial at 1024x1024: schedule 'mod 7' is no candidate" in said
    assert asked == [1000, 1024]


def test_check_looks_at_rows_of_the_patterns_asked_for(
    axial: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stale row of a shipped pattern is no fault of the own one that is checked, so a workflow goes on to export."""
    shipped, own = Pattern.from_yaml(axial), tmp_path / "my_own.yaml"
    own.write_text("name: my_own\nmask: causal\n")
    same = tmp_path / "same_mask.yaml"  # found by what it is, whatever it is called
    same.write_text(AXIAL.replace("small_axial", "same_mask"))
    template, folder = load_template(), tuning.data_dir
    config = template.default(shipped.problem, H200).as_dict()
    row = store.Row(
        shipped.name, shipped.digest(), template.name, "0" * 64,
        store.Measured.of(shipped.problem, 1024, 1024), config, 90.0, 100.0, 0.01, 40, {}, "2026-11-30",
    )  # fmt: skip
    store.write(tmp_path / "tuned", H200, row)
    monkeypatch.setattr("sparsegen.spec.shipped.shipped_patterns", lambda: {shipped.name: axial})
    monkeypatch.setattr(
        tuning, "data_dir", lambda name: tmp_path / name if name == "tuned" else folder(name)
    )
    monkeypatch.setattr("sparsegen.artifact.fleet.check", lambda *given, **more: fleet.Report(()))
    said = "template forward was 000000000000 when measured"
    for words, faults in (([], 1), ([axial], 1), ([same], 1), ([own], 0), ([own, axial], 1)):
        done = CliRunner().invoke(app, ["check", "--gpu", "h200", *map(str, words)])
        assert (done.exit_code, done.output.count(said)) == (min(faults, 1), faults), words
    broken = tmp_path / "broken.yaml"  # what is wrong with it is the cache's part of the report
    broken.write_text("mask: nothing_known\n")
    assert tuning.stale_rows(["h200"], [broken]) == []
    # rows of an own pattern that was tuned with --keep are judged by its file
    kept = Pattern.from_yaml(own)
    digests = {
        "pattern": kept.name,
        "pattern_digest": kept.digest(),
        "template_digest": template.digest,
    }
    store.write(tmp_path / "tuned", H200, replace(row, **digests))
    assert tuning.stale_rows(["h200"], [own]) == []
    own.write_text("name: my_own\nmask: full\n")
    (now,) = tuning.stale_rows(["h200"], [own])
    assert "pattern my_own was" in now


def test_the_candidates_of_a_row_are_those_of_its_lengths(axial: Path) -> None:
    pattern = Pattern.from_yaml(axial)

    def labels(length: int) -> tuple[str, ...]:
        measured = store.Measured(16, 16, 1, 1, 1, "bfloat16", length, length)
        return tuning.labels_of_row(pattern, measured)

    assert labels(1024) == KernelTarget.of(pattern, pattern.problem, H200).labels
    assert labels(40)  # lengths that the problem does not name


def test_the_gradients_of_keys_have_candidates_of_their_own(axial: Path) -> None:
    from sparsegen.tune.gradient_target import GradientTarget

    pattern = Pattern.from_yaml(axial)
    measured = store.Measured(16, 16, 1, 1, 1, "bfloat16", 1024, 1024)
    for part in ("queries", "keys"):
        target = GradientTarget.for_part(pattern, pattern.problem, H200, part)
        assert tuning.labels_of_row(pattern, measured, f"backward-{part}") == target.labels


def test_passes_to_tune() -> None:
    assert tuning.parts_of(["forward"]) == (None,)
    assert tuning.parts_of(["backward"]) == ("queries", "keys")
    assert tuning.parts_of(["backward", "forward"]) == (None, "queries", "keys")
    assert tuning.parts_of(["backward"], False) == ("queries", "keys", "fused")
    assert tuning.parts_of(["forward"], False) == (None,)
    with pytest.raises(InputError, match="passes must be some of forward, backward, got 'decode'"):
        tuning.parts_of(["decode"])
