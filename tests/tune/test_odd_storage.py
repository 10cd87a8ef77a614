"""Names of studies as people type them: files with odd characters, and GPU types by their short names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy

from sparsegen.errors import TuneError
from sparsegen.report import cover
from sparsegen.tune.storage import open_storage
from sparsegen.tune.tuner import quiet_optuna
from tests.tune.recordings import write_grids


@pytest.mark.parametrize("name", ["a?b", "a#b", "a%20b", "100%", "{SCHEMA}", "ü @:;&=", "a\nb"])
def test_a_study_lies_in_the_file_that_was_named(name: str, tmp_path: Path) -> None:
    """An address ends at a ``?``: all studies of such names would have been one, in a file that nobody named."""
    with quiet_optuna():
        for _ in range(2):
            opened = open_storage(tmp_path / name)
            found = [s.study_name for s in opened.backend.get_all_studies()]
            if not found:
                from optuna.study import StudyDirection

                opened.backend.create_new_study([StudyDirection.MINIMIZE], "one")
            opened.backend.engine.dispose()
            opened.close()
    assert found == ["one"] and (tmp_path / name).stat().st_size > 0
    assert {p.name.removeprefix(name) for p in tmp_path.iterdir()} <= {"", ".lock", "-wal", "-shm"}


def test_a_name_that_cannot_be_an_address_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with SQLAlchemy 2.0, which writes and reads names as they are."""
    monkeypatch.setattr(
        sqlalchemy.URL,
        "render_as_string",
        lambda url, hide_password=True: f"sqlite:///{url.database}",
    )
    with pytest.raises(TuneError, match=r"a\?b cannot be a study"):
        open_storage(tmp_path / "a?b")
    assert list(tmp_path.iterdir()) == []


def test_a_recording_of_another_gpu_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(write_grids(tmp_path / "record.jsonl", {"causal": 1}))
    with pytest.raises(TuneError) as error:
        cover.cover_of(path, gpu="a100")
    assert str(error.value) == f"{path} was measured on nvidia-h200, and not on nvidia-a100"
    monkeypatch.setattr(cover, "cover", lambda record, limit: (record.origin.gpu, limit))
    for name in (None, "h200", "nvidia-h200"):
        assert cover.cover_of(path, gpu=name).found == ("nvidia-h200", cover.LIMIT)


def test_studies_are_asked_for_by_the_full_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have what ``Gpu.name`` was; a type without an alias is named as it is."""
    asked: list[Any] = []

    def of_studies(source: Any, gpu: Any) -> Any:
        asked.append(gpu)
        raise TuneError("none here")

    monkeypatch.setattr("sparsegen.tune.recorded_studies.of_studies", of_studies)
    for name in ("h200", "nvidia-h200", "nvidia-geforce-gtx-1", None):
        with pytest.raises(TuneError, match="none here"):
            cover.cover_of("postgresql://host/studies", gpu=name)
    assert asked == ["nvidia-h200", "nvidia-h200", "nvidia-geforce-gtx-1", None]
