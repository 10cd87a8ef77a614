"""What long commands say while they work: lines on stderr in a log, nothing of it on stdout."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sparsegen.artifact.build import Request
from sparsegen.artifact.compiler import Compiler
from sparsegen.artifact.gradients import GradientCompiler
from sparsegen.cli import app
from sparsegen.launch import Binary, Job, Outcome
from sparsegen.report import history_page, history_page_pictures
from sparsegen.spec.gpu import find_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.shipped import shipped_patterns
from tests.report.reading import entry, write_history


def compile_many(
    jobs: Sequence[Job],
    workers: int | None = None,
    done: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """A compiler that takes everything, last job first, in several threads."""

    def one(job: Job) -> Outcome:
        job.directory.mkdir(parents=True)
        (job.directory / "k.cubin").write_bytes(b"x")
        binary = Binary(job.variant, "e", job.directory, ("k.cubin",), 64, 0, 1024)
        outcome = Outcome(job, binary, "", 1.0)
        done(outcome)
        return outcome

    with ThreadPoolExecutor(3) as threads:
        return list(threads.map(one, reversed(jobs)))[::-1]


@pytest.mark.parametrize(
    ("builder", "names"),
    [
        (Compiler(), {"fast", "general"}),
        (
            GradientCompiler(),
            {
                f"{kernel}/{variant}"
                for kernel in ("queries", "keys", "keys-DK", "keys-DV")
                for variant in ("fast", "general")
            },
        ),
    ],
    ids=["forward", "gradients"],
)
def test_a_build_says_what_is_compiled(
    builder: Any, names: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling takes a minute or two; without words nobody knows whether it hangs."""
    monkeypatch.setattr("sparsegen.launch.compile_many", compile_many)
    pattern = Pattern.from_dict(
        {"name": "tiny", "mask": "causal", "problem": {"head_dim": 16, "heads": 2}}
    )
    assert pattern.problem is not None
    request = Request(pattern, pattern.problem, find_gpu("a100"))
    said: list[tuple[int, int, str]] = []
    builder.build(request, tmp_path, lambda *step: said.append(step))
    assert [done for done, _, _ in said] == list(range(1, len(names) + 1))
    assert {total for _, total, _ in said} == {len(names)}
    assert {message for _, _, message in said} == {f"compiled {name}" for name in names}


@pytest.mark.parametrize("words", [[], ["--json"]], ids=["text", "json"])
def test_report_says_what_it_is_at(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARSEGEN_CACHE", str(tmp_path / "cache"))
    folder, real = write_history(tmp_path / "tuned", entry()), history_page.data_dir
    monkeypatch.setattr(history_page, "data_dir", lambda n: folder if n == "tuned" else real(n))
    blank = history_page_pictures.Picture("causal", "", 8, "", "", (), "", "none here")
    monkeypatch.setattr(history_page_pictures, "picture", lambda pattern: blank)
    done = CliRunner().invoke(app, ["report", "--out", str(tmp_path / "page.html"), *words])
    assert done.exit_code == 0, done.output
    names = list(shipped_patterns())
    steps = 1 + len(names)
    assert done.stderr.splitlines() == [
        f"report 0/{steps}: tuned/ and studies",
        *(f"report {i}/{steps}: picture of {name}" for i, name in enumerate(names, 2)),
    ]
    assert "picture of" not in done.stdout
    if words:
        assert json.loads(done.stdout)["page"] == str(tmp_path / "page.html")
