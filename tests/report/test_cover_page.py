"""``tune --cover`` of what is neither a recording nor studies: said, and left as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsegen.errors import TuneError
from sparsegen.report.cover import cover_of


@pytest.mark.parametrize("content", [b"", b"mask: causal\n"], ids=["empty", "a pattern"])
def test_a_file_of_another_kind_is_refused_and_not_written(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "x"
    file.write_bytes(content)
    with pytest.raises(TuneError, match="neither a recording nor a SQLite file"):
        cover_of(str(file))
    assert file.read_bytes() == content
