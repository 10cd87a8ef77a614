"""``sparsegen bench``: options, errors, and what is printed and written, with the measuring left out."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from sparsegen.bench import run as bench_run
from sparsegen.bench.results import LeftOut, Results
from sparsegen.cli import app
from sparsegen.cli.bench import bench, pairs_of
from sparsegen.errors import InputError, ToolchainError
from sparsegen.tune.measure import PUBLISHED
from tests.bench.test_results import RUN


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command asks for; it is given the recorded run, or ``asked["answer"]``."""
    seen: dict[str, Any] = {"answer": RUN}

    def measured(
        patterns: Any, lengths: Any, *, keep: Any, progress: Any, **options: Any
    ) -> Results:
        seen.update(patterns=patterns, lengths=lengths, **options)
        progress(0, 1, "window 32768")
        keep(seen["answer"])
        return seen["answer"]

    monkeypatch.setattr(bench_run, "bench", measured)
    return seen


def test_defaults_are_everything_by_the_published_protocol(asked: dict[str, Any]) -> None:
    done = CliRunner().invoke(app, ["bench"])
    assert done.exit_code == 0, done.output
    assert asked["patterns"] is asked["lengths"] is asked["against"] is None
    assert asked["tune"] == "off" and asked["turns"] == PUBLISHED
    assert "window, B1 H8:8 D128:128 bfloat16 32768x32768" in done.stdout
    assert "not here: flashinfer" in done.stdout and "window 32768" in done.stderr


def test_options(asked: dict[str, Any], tmp_path: Path) -> None:
    files = {name: str(tmp_path / f"a.{name}") for name in ("csv", "png", "out")}
    words = ["causal", "a.yaml", "--lengths", "4096,1x65536", "--against", "flex,sdpa"]
    words += ["--tune", "quick", "--repeat", "3", "--idle", "0", "--json"]
    words += [w for name, path in files.items() for w in (f"--{name}", path)]
    done = CliRunner().invoke(app, ["bench", *words])
    assert done.exit_code == 0, done.output
    assert asked["patterns"] == ["causal", "a.yaml"]
    assert asked["lengths"] == [(4096, 4096), (1, 65536)]
    assert asked["against"] == ["flex", "sdpa"] and asked["tune"] == "quick"
    assert (asked["turns"].rounds, asked["turns"].idle_s) == (3, 0.0)
    assert asked["turns"].measured_ms == PUBLISHED.measured_ms
    assert Results.from_dict(json.loads(done.stdout)) == RUN
    assert all(Path(path).stat().st_size for path in files.values())


@pytest.mark.parametrize("text", ["", "0", "a", "4,", "4x", "4x5x6", "-4", "4 5", "x4", "٤"])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="--lengths"):
        pairs_of(text)
    assert CliRunner().invoke(app, ["bench", f"--lengths={text}"]).exit_code == 2


def test_lengths() -> None:
    assert pairs_of("4096") == [(4096, 4096)]
    assert pairs_of("1X8,16") == [(1, 8), (16, 16)]


@pytest.mark.parametrize("words", [["--tune", "full"], ["--rounds", "0"], ["--idle", "-1"]])
def test_usage_errors(words: list[str]) -> None:
    assert CliRunner().invoke(app, ["bench", *words]).exit_code == 2


def test_a_wrong_result_and_no_result_are_exit_1(asked: dict[str, Any]) -> None:
    wrong = LeftOut("causal", "4096", "wrong result: max-abs error 1 > 0.1 allowed", wrong=True)
    asked["answer"] = replace(RUN, left_out=(wrong,))
    done = CliRunner().invoke(app, ["bench"])
    assert done.exit_code == 1 and "not measured: causal 4096: wrong result" in done.stdout
    asked["answer"] = replace(RUN, cases=())
    assert CliRunner().invoke(app, ["bench"]).exit_code == 1


def test_no_gpu_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsegen.spec.gpu.current_gpu", lambda: None)
    done = CliRunner().invoke(app, ["bench", "causal"])
    assert isinstance(done.exception, ToolchainError)
    assert str(done.exception).count("\n") == 0 and "GPU" in str(done.exception)


def test_an_unknown_peer_is_said_before_a_gpu_is_looked_for() -> None:
    done = CliRunner().invoke(app, ["bench", "causal", "--against", "flex,fa3"])
    assert isinstance(done.exception, InputError)
    assert "unknown peer 'fa3'" in str(done.exception) and "flex-max" in str(done.exception)


def test_a_folder_that_is_not_there_is_said_first(tmp_path: Path, asked: dict[str, Any]) -> None:
    done = CliRunner().invoke(app, ["bench", "--csv", str(tmp_path / "none" / "a.csv")])
    assert isinstance(done.exception, InputError) and "patterns" not in asked


def test_help_names_every_peer() -> None:
    from sparsegen.bench.peers import NAMES

    text = str(
        inspect.signature(bench, eval_str=True)
        .parameters["against"]
        .annotation.__metadata__[0]
        .help
    )
    assert all(name in text for name in (*NAMES, "none"))
