"""Commands that cannot do what they are asked: one sentence, and nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsegen.errors import InputError, SpecError
from sparsegen.report import built as built_module
from sparsegen.spec.gpu import find_gpu
from tests.cli.test_commands import run


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPARSEGEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("level", ["quick", "full"])
@pytest.mark.parametrize("passes", ["forward", "backward"])
@pytest.mark.parametrize(
    ("here", "there"), [(None, "there is none"), ("h200", "that is nvidia-h200")]
)
def test_compile_measures_no_gpu_that_is_elsewhere(
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    here: str | None,
    there: str,
    passes: str,
    level: str,
) -> None:
    """An empty study would stay in the cache, and a page of measurements would list it."""
    monkeypatch.setattr(built_module, "current_gpu", lambda: here and find_gpu(here))
    with pytest.raises(InputError) as error:
        run("compile", "causal", "--gpu", "a100", "--tune", level, "--passes", passes)
    assert str(error.value) == (
        f"tune={level!r} measures on the GPU here and {there}: for nvidia-a100 say tune='off' (--tune off), which takes "
        "the configuration on record"
    )
    assert not cache.exists()


@pytest.mark.parametrize("problems", [False, True])
def test_tune_reads_every_pattern_before_it_measures_one(
    problems: bool, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A misspelt last name was said after minutes on the first one, whose row was lost."""
    monkeypatch.setattr("sparsegen.report.tuning.tune_one", lambda *_, **__: pytest.fail("tuned"))
    (tmp_path / "problems.yaml").write_text("- {heads: 4}\n")
    words = ["--problems", str(tmp_path / "problems.yaml")] if problems else []
    with pytest.raises(SpecError, match="no_such_one: cannot be read"):
        run("tune", "causal", "no_such_one", *words)
