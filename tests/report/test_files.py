"""Files that commands write: refused before the work, whole or as they were, and nothing made where only reading was asked."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from sparsegen.bench.output import Files
from sparsegen.errors import InputError, TuneError
from sparsegen.report import files, history_page
from sparsegen.report.cover import cover_of
from sparsegen.report.history_page_studies import read_studies
from sparsegen.report.show import look
from sparsegen.report.tuning import tune_many, tune_one
from sparsegen.spec.pattern import Pattern


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_cannot_be_written_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError) as error:
        files.check_writable(tmp_path)
    assert str(error.value) == f"{tmp_path}: cannot be written: it is a folder"
    gone = tmp_path / "none" / "a"
    with pytest.raises(InputError) as error:
        files.check_writable(gone)
    assert str(error.value) == f"{gone}: there is no folder {gone.parent}"
    files.check_writable(tmp_path / "a")
    assert left(tmp_path) == []
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(InputError, match="/a: cannot be written: .* is no writable folder$"):
        files.check_writable(tmp_path / "a")


def test_a_file_is_whole_or_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / ("a" * 250)  # as long as names may be: the neighbour's is shorter
    files.write(path, b"one")
    path.chmod(0o640)
    files.write(path, b"two")
    assert path.read_bytes() == b"two" and path.stat().st_mode & 0o777 == 0o640

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError) as error:
        files.write(path, b"three")
    assert str(error.value) == f"{path}: cannot be written: No space left on device"
    assert path.read_bytes() == b"two" and left(tmp_path) == [path.name]


def test_links_and_pipes_stay_what_they_are(tmp_path: Path) -> None:
    real, link, pipe = tmp_path / "real", tmp_path / "link", tmp_path / "pipe"
    real.write_bytes(b"")
    link.symlink_to(real)
    files.write(link, b"page")
    assert link.is_symlink() and real.read_bytes() == b"page"
    os.mkfifo(pipe)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    files.write(pipe, b"page")
    reader.join(10)
    assert got == [b"page"] and pipe.is_fifo()


# ---- who asks ----


def test_a_report_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_page, "gather", None)
    with pytest.raises(InputError, match="it is a folder"):
        history_page.report(tmp_path)


@pytest.mark.parametrize("which", ["csv", "png", "out"])
def test_results_are_refused_before_anything_is_measured(which: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="it is a folder"):
        Files(**{which: tmp_path})


def test_a_picture_over_a_folder(tmp_path: Path) -> None:
    seen = look(Pattern.from_dict({"name": "p", "mask": "causal"}), (64, 64))
    with pytest.raises(InputError) as error:
        seen.save_png(tmp_path)
    assert str(error.value) == f"{tmp_path}: cannot be written: Is a directory"


@pytest.mark.parametrize("read", [read_studies, cover_of], ids=["report", "cover"])
@pytest.mark.parametrize("form", ["{}", "sqlite:///{}"])
def test_reading_studies_makes_no_file(read: Any, form: str, tmp_path: Path) -> None:
    """A storage is made where one is opened; whoever only reads has misspelt its name."""
    with pytest.raises((InputError, TuneError), match="no such file|is no folder, no SQLite file"):
        read(form.format(tmp_path / "none" / "a.sqlite"))
    assert left(tmp_path) == []


@pytest.mark.parametrize("form", ["{}", "sqlite:///{}"])
def test_an_empty_file_holds_no_studies(form: str, tmp_path: Path) -> None:
    """To SQLite it is a database, so a page would say that there are 0 studies."""
    path = tmp_path / "a.sqlite"
    path.touch()
    with pytest.raises(TuneError, match=r"a\.sqlite: it is empty$"):
        read_studies(form.format(path))
    assert left(tmp_path) == ["a.sqlite"] and not path.stat().st_size


@pytest.mark.parametrize("how", ["here", "there", "cover"])
def test_keep_needs_a_folder_that_can_be_written(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not known after minutes of measuring alone: an installed package often belongs to root."""
    calls = {
        "here": lambda: tune_one("causal", keep=True),
        "there": lambda: tune_many(["causal"], "auto", keep=True),
        "cover": lambda: cover_of("record.jsonl", keep=True),
    }
    monkeypatch.setattr("sparsegen.spec.gpu.current_gpu", lambda: object())
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(InputError, match=r"^--keep writes to .*tuned, which cannot be written: "):
        calls[how]()
