"""Files that a command reads whole: those that never end, that are no text, that are not there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparsegen.artifact import problems
from sparsegen.errors import InputError
from sparsegen.report import runtime_data
from sparsegen.spec.text_file import read_text

READERS: list[tuple[Callable[[Path], Any], Any]] = [
    (problems.read_problems, problems),
    (runtime_data.read_runtime, runtime_data),
]


@pytest.mark.parametrize(("read", "module"), READERS, ids=["problems", "runtime"])
def test_a_device_has_no_end(read: Callable[[Path], Any], module: Any) -> None:
    with pytest.raises(InputError, match=f"^/dev/zero: is longer than {module.MOST_BYTES} bytes$"):
        read(Path("/dev/zero"))


@pytest.mark.parametrize(("read", "module"), READERS, ids=["problems", "runtime"])
def test_what_is_no_text(read: Callable[[Path], Any], module: Any, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xff\xfe")
    for name, said in (
        ("a", "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        ("none", "No such file or directory"),
        ("", "Is a directory"),
    ):
        with pytest.raises(InputError) as error:
            read(tmp_path / name)
        assert str(error.value) == f"{tmp_path / name}: cannot be read: {said}"


def test_the_limit_is_what_may_be_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("äb")
    assert read_text(path, 3) == read_text(str(path), 4) == "äb"
    with pytest.raises(InputError, match=r"/a: is longer than 2 bytes$"):
        read_text(path, 2)
