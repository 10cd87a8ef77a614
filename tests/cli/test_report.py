"""``sparsegen report`` as a command: the file, the words, the JSON, the errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sparsegen.cli import app
from sparsegen.report import history_page, history_page_pictures
from tests.report.reading import entry, read, write_history

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tuned(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ``tuned/`` with two lines of history, no cache, and no time spent on pictures."""
    folder = write_history(tmp_path / "tuned", entry(), entry(date="2026-12-01T00:00:00+00:00"))
    real = history_page.data_dir
    monkeypatch.setattr(history_page, "data_dir", lambda n: folder if n == "tuned" else real(n))
    monkeypatch.setattr(history_page_pictures, "pictures", lambda patterns: [])
    monkeypatch.chdir(tmp_path)
    return folder


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["report", *words], catch_exceptions=True)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout


def test_it_writes_a_page_and_says_what_is_on_it(tuned: Path) -> None:
    code, text = run()
    page = Path("sparsegen-report.html")
    assert code == 0 and page.is_file() and read(page.read_text(encoding="utf-8")).faults == []
    lines = text.splitlines()
    assert lines[0].startswith("sparsegen-report.html (") and lines[0].endswith(" KiB)")
    assert lines[1].startswith("0 winners, 0 of ") and "shipped patterns measured" in lines[1]
    assert lines[2] == "2 lines of history, 0 studies with 0 trials"


def test_json_has_the_figures(tuned: Path, tmp_path: Path) -> None:
    code, text = run("--json", "--out", "other.html")
    said = json.loads(text)
    assert code == 0 and said["page"] == "other.html"
    assert said["size_bytes"] == (tmp_path / "other.html").stat().st_size
    figures = said["figures"]
    assert set(figures) == {"summary", "winners", "standings", "series", "studies"}
    (series,) = figures["series"]
    assert [p["speedup"] for p in series["points"]] == [1.5, 1.5]
    assert figures["standings"][0] | {} == {
        "gpu": "nvidia-h200",
        "baseline": "flex",
        "count": 1,
        "mean": pytest.approx(1.5),
        "least": ["causal", 1.5],
        "most": ["causal", 1.5],
    }


def test_errors_are_one_sentence_and_leave_no_page(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for words, said in (
        (["--studies", "nowhere"], "InputError: --studies 'nowhere' is no folder"),
        (["--out", "gone/page.html"], "InputError: gone/page.html: there is no folder"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "sparsegen", "report", *words],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 1 and done.stdout == ""
        *steps, last = done.stderr.splitlines()
        assert last.startswith(said) and all(s.startswith("report 0/") for s in steps)
    assert list(tmp_path.iterdir()) == []
