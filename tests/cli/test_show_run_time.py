"""`show` of masks that are made of run-time data."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsegen import InputError
from sparsegen.report import sampling
from sparsegen.report.runtime_data import read_runtime
from sparsegen.report.show import look
from tests.cli.show_masks import pattern_of


def test_documents_from_a_file(tmp_path: Path) -> None:
    pattern = pattern_of({"all_of": ["causal", "documents"]})
    file = tmp_path / "data.yaml"
    file.write_text("document_lengths: [30, 50, 20]\n")
    seen = look(pattern, (100, 100), (16, 16), runtime=file)
    assert seen.counts.exact
    assert seen.counts.cells == sum(n * (n + 1) // 2 for n in (30, 50, 20))
    assert seen.schedule is None and "documents" in seen.refusal
    assert "no kernel yet" in seen.text() and seen.as_dict()["unsupported"]


def test_long_run_time_masks_are_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "WHOLE_CELLS", 1 << 16)
    monkeypatch.setattr(sampling, "SOME_CELLS", 1 << 13)
    pattern = pattern_of({"all_of": ["causal", "documents"]})
    seen = look(pattern, (512, 512), (16, 16), runtime={"document_lengths": [512]})
    assert not seen.counts.exact and seen.as_dict()["cells_exact"] is False
    assert seen.counts.cells == pytest.approx(512 * 513 // 2, rel=0.02)
    assert seen.counts.computed == pytest.approx(32 * 33 // 2 * 256, rel=0.02)
    assert "about" in seen.text()


def test_drawn_block_mask_is_the_documented_one(tmp_path: Path) -> None:
    file = tmp_path / "m.json"
    file.write_text('{"block_mask": {"rows": 10, "cols": 10, "percent": 30, "seed": 5}}')
    seen = look(pattern_of({"block_mask": {"block": [16, 16]}}), (160, 160), runtime=file)
    assert seen.counts.cells == 6400  # worked out elsewhere from the written definition
    mask = read_runtime(file)["block_mask"]
    assert mask.shape == (10, 10)
    assert mask[0].nonzero().flatten().tolist() == [0, 8, 9]


def test_missing_run_time_data_is_named() -> None:
    with pytest.raises(InputError, match=r"cu_seqlens.*document_ids.*document_lengths.*--runtime"):
        look(pattern_of({"all_of": ["causal", "documents"]}), (64, 64))


def test_blocks_chosen_from_tensors_say_what_is_missing() -> None:
    pattern = pattern_of({"all_of": ["causal", {"top_blocks": {"block": 16, "count": 2}}]})
    with pytest.raises(InputError, match="block_scores.*--runtime"):
        look(pattern, (64, 64))
    scores = [[1.0] * 4] * 4
    assert look(pattern, (64, 64), runtime={"block_scores": scores}).counts.cells > 0


def test_unwanted_run_time_data_is_refused() -> None:
    with pytest.raises(InputError, match="kv_lengths"):
        look(pattern_of("causal"), (64, 64), runtime={"kv_lengths": [3]})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1, 2]", "must be a mapping"),
        ("block_mask: [1, [0]]", "lists of 0 and 1"),
        ("block_mask: [[2]]", "0 and 1 only"),
        ("block_mask: {rows: 2}", "needs rows, cols, percent, seed"),
        ("block_mask: {rows: 99999, cols: 99999, percent: 1, seed: 0}", "rows x cols"),
        ("a: [", "not readable"),
        ("block_mask: {rows: 2, cols: 2, percent: 300, seed: 0}", "percent must be from 0 to 100"),
        ("- " * 5000 + "1", "not readable"),
        ("q_lengths: [3]\nq_lengths: [4]", "'q_lengths' is given twice"),
    ],
)
def test_bad_run_time_files(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(InputError, match=said) as caught:
        read_runtime(file)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_a_name_given_twice_in_json(tmp_path: Path) -> None:
    file = tmp_path / "twice.json"
    file.write_text('{"q_lengths": [3], "q_lengths": [4]}')
    with pytest.raises(InputError, match="'q_lengths' is given twice"):
        read_runtime(file)


def test_absent_run_time_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_runtime(tmp_path / "absent.yaml")
