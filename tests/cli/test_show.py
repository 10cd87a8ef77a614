"""``show``: numbers against the dense mask, pictures against it block by block, and no cost that grows with cells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparsegen import InputError, Pattern
from sparsegen.report import coverage, show
from sparsegen.report.art import draw
from sparsegen.report.show import look
from tests.cli.show_masks import MASKS, pattern_of

LENGTHS = [(60, 60), (33, 47), (50, 20), (1, 57)]


def dense(pattern: Pattern, q_len: int, kv_len: int, head: int = 0, **runtime: Any) -> np.ndarray:
    mask = pattern.dense_mask(q_len, kv_len, **runtime)
    mask = mask[0] if mask.dim() == 4 else mask
    return mask[head if len(mask) > 1 else 0].numpy()


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_numbers_and_picture_are_the_mask(name: str, lengths: tuple[int, int]) -> None:
    pattern = pattern_of(MASKS[name])
    seen = look(pattern, lengths, (16, 16))
    mask = dense(pattern, *lengths)
    assert seen.counts.exact and seen.counts.cells == mask.sum()
    assert seen.density == pytest.approx(mask.mean())
    grid = seen.grid((64, 64))  # a block a cell: the picture is the mask itself
    assert grid.exact
    np.testing.assert_array_equal(grid.total(), mask.astype(float))


@pytest.mark.parametrize("name", MASKS)
def test_coarse_picture_misses_no_block(name: str) -> None:
    """Blocks of 30 x 30 cells: what is there shows, what is not does not, and shares are near."""
    pattern = pattern_of(MASKS[name])
    mask = dense(pattern, 60, 60).astype(float)
    grid = look(pattern, (60, 60)).grid((20, 20))
    shares = mask.reshape(20, 3, 20, 3).mean((1, 3))
    np.testing.assert_array_equal(grid.total() > 0, shares > 0)
    np.testing.assert_allclose(grid.total(), shares)  # 3 rows and 3 keys: all are looked at
    coarse = look(pattern, (60, 60)).grid((2, 2)).total()
    # 4 of 30 rows are looked at: enough for the shade, not for the digit
    np.testing.assert_allclose(coarse, mask.reshape(2, 30, 2, 30).mean((1, 3)), atol=0.2)


def test_rows_looked_at_stand_for_their_share() -> None:
    """The first row of a block is one row of it, however few rows are looked at."""
    pattern = pattern_of({"global": {"positions": [0], "columns": False}})
    assert look(pattern, (100, 100)).grid((1, 1)).total() == pytest.approx(0.01)


def test_shades() -> None:
    share = np.array([[0.0, 0.01, 0.5, 0.99, 1.0]])
    grid = coverage.Grid({"a": share}, np.ones((1, 5)), (0, 1), (0, 1, 2, 3, 4, 5), True)
    assert draw(grid, ascii_only=True).splitlines()[1].split()[-1] == ".-+*#"


def test_computed_cells_are_whole_tiles() -> None:
    seen = look(pattern_of("causal"), (1024, 1024), (64, 64))
    assert seen.counts.cells == 1024 * 1025 // 2
    assert seen.counts.computed == 16 * 17 // 2 * 64 * 64
    assert seen.counts.efficiency == pytest.approx(1024 * 1025 / 2 / (136 * 4096))


def test_patterns_per_head() -> None:
    pattern = Pattern.from_dict(
        {
            "name": "two",
            "heads": [
                {"heads": [0, "2-3"], "mask": {"all_of": ["causal", {"window": {"size": 5}}]}},
                {"heads": "rest", "mask": "causal"},
            ],
            "problem": {"heads": 6},
        }
    )
    for head in range(6):
        seen = look(pattern, (40, 40), head=head)
        assert seen.counts.cells == dense(pattern, 40, 40, head).sum()
    with pytest.raises(InputError, match="6 heads; head 6"):
        look(pattern, (40, 40), head=6)


def test_grid_too_small_for_the_length() -> None:
    with pytest.raises(InputError, match="64 cells"):
        look(pattern_of(MASKS["axial"]), (100, 100))


def test_text_has_picture_numbers_and_branches() -> None:
    text = look(pattern_of(MASKS["window_sink"], summary="for a test"), (4096, 4096)).text(
        explain=True
    )
    assert text.startswith("example: for a test\n4,096 queries x 4,096 keys")
    assert "2 branches, disjoint" in text and "canonical mask: " in text
    assert "full tiles: no test" in text or "tiles without a full part" in text
    assert max(map(len, text.splitlines())) < 200


def test_one_branch_is_not_said_to_be_disjoint() -> None:
    assert "\n1 branch\n" in look("causal", (64, 64)).text()


def test_one_key_has_one_label() -> None:
    picture = look("causal", (1, 1)).text().splitlines()
    assert [line.rstrip() for line in picture[3:5]] == ["  k 0", "0 q █"]


def test_text_art_shows_a_diagonal() -> None:
    lines = draw(
        look(pattern_of("causal"), (4096, 4096)).grid(show.TEXT_SIZE), ascii_only=True
    ).splitlines()
    rows = [line.split()[-1] for line in lines[1:33]]
    assert len(rows) == 32 and all(len(row) == 64 for row in rows)
    for i, row in enumerate(rows):
        assert set(row[: 2 * i]) <= {"#"} and set(row[2 * i + 2 :]) <= {"."}


def test_json_object() -> None:
    seen = look(pattern_of(MASKS["window_sink"]), (1, 4096)).as_dict()
    wanted = {
        "pattern",
        "q_len",
        "kv_len",
        "cells",
        "cells_exact",
        "computed_cells",
        "efficiency",
        "branches",
    }
    assert wanted <= set(seen) and json.loads(json.dumps(seen)) == seen
    assert seen["efficiency"] == seen["cells"] / seen["computed_cells"]
    for branch in seen["branches"]:
        assert {"name", "tiling", "segments"} <= set(branch)
        assert all(s["kind"] in ("head", "full", "tail", "whole") for s in branch["segments"])


STRIDED = {
    "all_of": ["causal", {"any_of": [{"window": {"size": 128}}, {"strided": {"stride": 128}}]}]
}
FIXED = {
    "all_of": [
        "causal",
        {"any_of": [{"chunks": {"size": 128}}, {"columns": {"stride": 128, "width": 8}}]},
    ]
}
GRID = {"neighborhood": {"shape": [64, 256], "radius": [8, 8]}}
GLOBAL = {"any_of": [{"window": {"radius": 256}}, {"global": {"positions": list(range(64))}}]}
TILINGS = {
    "strided": (
        STRIDED,
        ["runs", "tiles of one residue class q % 128; keys: the same residue, k % 128 == q % 128"],
        "runs + mod 128",
    ),
    "fixed": (FIXED, ["runs", "runs; keys: last 8 of every 128"], "runs + keys mod 128"),
    "grid": (
        GRID,
        [
            "tiles of 16 x 8 positions of a grid with lines of 256; "
            "keys: boxes of a grid with lines of 256"
        ],
        "box 8 of 256",
    ),
    "global": (GLOBAL, ["runs", "runs", "runs"], "runs + split rows"),
}


@pytest.mark.parametrize("name", TILINGS)
def test_tilings_in_words(name: str) -> None:
    mask, words, label = TILINGS[name]
    seen = look(pattern_of(mask), (16384, 16384))
    assert [b["tiling"] for b in seen.branches] == words
    assert seen.as_dict()["schedule"] == label and f"schedule  {label}" in seen.text()


def test_rows_apart_are_said() -> None:
    seen = look(pattern_of(GLOBAL), (16384, 16384))
    assert [(b["sweep"], b["rows"], b["split"]) for b in seen.branches] == [
        (1, None, False),
        (1, None, False),
        (2, [0, 63], True),
    ]
    text = seen.text()
    assert "rows (runs, sweep 2, rows 0 to 63, keys split over programs)" in text
    workspace = seen.candidates[0].cost.workspace_bytes
    # 64 chunks of 256 keys, 64 rows, 8 heads, OUT and LSE
    assert workspace == 64 * 64 * 8 * 129 * 4 and f"workspace {workspace:,} bytes" in text


def test_the_schedule_is_chosen_for_the_tile_that_is_asked() -> None:
    """The longest program of 64 global rows is half as long in tiles of 64 rows, and needs no splitting."""
    mask = {"any_of": [{"window": {"radius": 256}}, {"global": {"tokens": 64}}]}
    small, large = (look(pattern_of(mask), (32768, 32768), t) for t in ((64, 64), (128, 64)))
    assert small.schedule is not None and large.schedule is not None
    assert (small.schedule.label, large.schedule.label) == ("runs", "runs + split rows")


def test_predictions_are_for_the_problem_and_say_so() -> None:
    """Four times the heads and half the columns are twice the work; without a problem it is 8 heads of 128."""
    own = {"heads": 32, "kv_heads": 8, "head_dim": 64}
    plain, more = (look(pattern_of(STRIDED, **x), (32768, 32768)) for x in ({}, {"problem": own}))
    for seen, sizes in (
        (plain, "8 heads of 128 in bfloat16"),
        (more, "32 query and 8 key heads of 64 in bfloat16"),
    ):
        text = seen.text(explain=True)
        assert f"tiles, predicted for {sizes}," in text and f"later sweeps ({sizes})" in text
        assert seen.as_dict()["predicted_for"] == sizes
    work = [x.as_dict()["candidates"][0]["predicted_parts_ms"]["matmul"] for x in (plain, more)]
    assert work[1] == pytest.approx(2 * work[0])
    moved = [x.candidates[0].cost.state_bytes for x in (plain, more)]
    rows = moved[0] // (8 * (3 * 128 * 2 + 8))
    assert moved[1] == rows * 32 * (3 * 64 * 2 + 8)


def test_notes_of_what_a_bound_costs_are_shown() -> None:
    text = "k <= " + " + ".join(f"q // {m}" for m in range(3, 40))
    seen = look(pattern_of({"predicate": text}), (512, 512))
    note = "forms of more than 60 operations became tests or wider limits"
    assert note in seen.text(explain=True) and note not in seen.text()


def test_candidates_are_explained() -> None:
    seen = look(pattern_of(STRIDED), (32768, 32768))
    first, *others = seen.as_dict()["candidates"]
    assert first["schedule"] == "runs + mod 128" and first["to_measure"]
    assert first["cells"] == seen.counts.cells
    assert first["computed_cells"] == seen.counts.computed
    assert first["efficiency"] == seen.counts.efficiency
    assert sum(first["predicted_parts_ms"].values()) == pytest.approx(first["predicted_ms"])
    plain = others[-1]
    assert plain["schedule"] == "runs" and not plain["to_measure"]
    assert plain["predicted_ms"] > 15 * first["predicted_ms"]
    text = seen.text(explain=True)
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("candidates for 32,768"))
    assert lines[at + 2].split()[:4] == ["runs", "+", "mod", "128"]
    why = next(line for line in lines if line.startswith("runs + mod 128 is predicted"))
    assert "times as fast as runs: 57.0 % of its cells are visible instead of 1.5 %" in why
    assert "candidates for" not in seen.text()


def test_one_candidate_says_that_nothing_comes_near() -> None:
    text = look(pattern_of("causal"), (4096, 4096)).text(explain=True)
    assert "runs: no other query tiling, key cuts or split of rows comes near it" in text


def test_only_visible_cells_are_estimates_where_there_is_a_schedule() -> None:
    seen = look(pattern_of({"predicate": "k <= q and (q * k) % 5 < 2"}), (8192, 8192))
    text = seen.text()
    assert "visible   about" in text and "computed  about" not in text


def test_the_command_takes_a_tile(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from sparsegen.cli.app import app

    file = tmp_path / "strided.yaml"
    file.write_text(pattern_of(STRIDED).to_yaml())
    shares = []
    for tile in ((), ("--tile", "64x64")):
        run = CliRunner().invoke(app, ["show", str(file), "--length", "32768", "--json", *tile])
        assert run.exit_code == 0, run.output
        found = json.loads(run.output)
        shares.append((tuple(found["tile"]), found["efficiency"]))
    assert [t for t, _ in shares] == [(128, 64), (64, 64)]
    assert 0.55 < shares[0][1] < 0.60 and 0.71 < shares[1][1] < 0.74


def test_png(tmp_path: Path) -> None:
    look(pattern_of(MASKS["global"]), (512, 512)).save_png(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(InputError, match="cannot be written"):
        look(pattern_of("causal"), (64, 64)).save_png(tmp_path / "no" / "a.png")
