"""Tables, CSV, JSON and the picture, from a recorded run."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from sparsegen.bench import table
from sparsegen.bench.output import Files, failed, turns_of
from sparsegen.bench.plot import contender_names, draw, save_png
from sparsegen.bench.results import LeftOut, Measured, Refused, Results, Row
from sparsegen.errors import InputError
from sparsegen.tune.measure import PUBLISHED
from tests.bench.standin import empty

ROWS = (
    Row("sparsegen", 1000.0, 12.5, 1100.0, 14.0, 3 << 20, 0.0, 0, 0.0),
    Row("flex", 1500.0, 20.0, 1700.0, 118.0, 5 << 20, 7.25, 2048, 0.0031),
    Row("fa4", 900.0, 3.0, 950.0, 60.0, 3 << 20, 0.0, 0, 0.004, host_in_time=True),
)
ONE = Measured(
    pattern="window",
    problem="B1 H8:8 D128:128 bfloat16 32768x32768",
    q_len=32768,
    kv_len=32768,
    schedule="runs",
    config="BLOCK_M=64, BLOCK_N=64",
    chosen_by="tuned/",
    cells=10**9,
    cells_exact=True,
    all_cells=8 * 32768**2,
    computed_cells=1250 * 10**6,
    flop=4 * 10**11,
    bytes=10**9,
    rows=ROWS,
    refused=(Refused("sdpa", "does causal and full masks only"), Refused("bad", "disagrees", 0.5)),
)
DECODE = replace(ONE, pattern="decode", q_len=1, computed_cells=None, rows=ROWS[:1], refused=())
LOST = LeftOut("moba", "8192", "its mask needs data at run time")
RUN = replace(
    empty((("flashinfer", "cannot be imported: No module named 'flashinfer'"),)),
    cases=(ONE, DECODE),
    left_out=(LOST,),
)


def test_json_goes_there_and_back() -> None:
    data = json.loads(json.dumps(RUN.as_dict()))
    assert Results.from_dict(data) == RUN
    row = data["cases"][0]["rows"][1]
    assert row["ratio"] == 1.5 and row["tflops"] == pytest.approx(266.67, abs=0.01)
    assert row["gbs"] == pytest.approx(666.7, abs=0.1)
    assert row["roofline"] == pytest.approx(500 / 1500)  # 4e11 at 800 TF/s
    one = data["cases"][0]
    assert one["efficiency"] == 0.8 and one["floor_us"] == 500 and one["intensity"] == 400
    assert one["visible_share"] == 10**9 / (8 * 32768**2)
    assert data["cases"][1]["efficiency"] is None


def test_csv_has_a_line_a_contender_and_a_reason_for_the_others() -> None:
    lines = list(csv.DictReader(io.StringIO(table.csv_text(RUN))))
    assert [(x["pattern"], x["contender"]) for x in lines] == [
        ("window", "sparsegen"), ("window", "flex"), ("window", "fa4"), ("window", "sdpa"), ("window", "bad"),
        ("decode", "sparsegen"), ("moba", ""),
    ]  # fmt: skip
    assert all(x["gpu"] == "nvidia-h200" and x["torch"] == "2.11" and x["date"] for x in lines)
    own, flex, fa4, sdpa, bad, decode, lost = lines
    assert (own["median_us"], own["schedule"], own["computed_cells"]) == (
        "1000.0",
        "runs",
        "1250000000",
    )
    assert (flex["ratio"], flex["setup_ms"], flex["setup_bytes"]) == ("1.5", "7.25", "2048")
    assert flex["schedule"] == "" and float(flex["roofline"]) == pytest.approx(1 / 3, abs=1e-4)
    assert (fa4["host_in_time"], own["host_in_time"]) == ("1", "0")
    assert sdpa["note"] == "does causal and full masks only" and sdpa["median_us"] == ""
    assert (bad["difference"], bad["note"]) == ("0.5", "disagrees")
    assert decode["computed_cells"] == "" and lost["note"] == LOST.reason
    assert (own["matmul_tflops"], own["copy_gbs"]) == ("800.0", "4000.0")


def test_table_says_everything_once() -> None:
    text = table.text(RUN)
    head, window, decode, lost, absent = text.split("\n\n")
    assert "nvidia-h200, driver 580, torch 2.11, triton 3.6" in head
    assert "800 TF/s matrix product, 4,000 GB/s copy, equal at 200 operations a byte" in head
    assert "visible 11.64% of all cells, 80.0% of the computed ones" in window
    assert "floor 500.0 µs" in window and "computed" not in decode
    row = next(x for x in window.splitlines() if x.lstrip().startswith("flex")).split()
    assert row == [
        "flex", "1,500.0", "20.0", "1.500", "1,700.0", "118", "267", "667", "33.3%", "5.0", "MiB", "7.2", "3.1e-03",
    ]  # fmt: skip
    assert "sdpa: does causal and full masks only" in window
    assert "fa4: the host's time is in it" in window
    assert lost == "not measured: moba 8192: its mask needs data at run time"
    assert absent == "not here: flashinfer: cannot be imported: No module named 'flashinfer'"


def test_table_says_about_where_cells_are_estimated() -> None:
    guessed = replace(RUN, cases=(replace(ONE, cells_exact=False),))
    assert "visible about 11.64%" in table.text(guessed)


def test_picture_has_roof_and_every_contender(tmp_path: Path) -> None:
    left, right = draw(RUN).axes
    assert contender_names(RUN) == ["sparsegen", "flex", "fa4"]
    named = {line.get_label(): line for line in left.get_lines()}
    assert list(named) == ["measured roof", "sparsegen", "flex", "fa4"]
    x, y = named["measured roof"].get_data()
    assert (x[1], y[1], y[2]) == (200.0, 800.0, 800.0) and y[0] == pytest.approx(4 * x[0])
    x, y = named["flex"].get_data()
    assert list(x) == [400] and y[0] == pytest.approx(266.67, abs=0.01)
    marks = [c.lines[0].get_data() for c in right.containers]
    assert [(x[0], y[0]) for x, y in marks] == [(1000, 0), (1500, 1), (900, 2), (1000, 4)]
    ends = [[p[0] for p in c.lines[2][0].get_segments()[0]] for c in right.containers]
    assert ends[:3] == [[993.75, 1006.25], [1490, 1510], [898.5, 901.5]]
    assert [t.get_text() for t in right.get_yticklabels()] == ["window\n32768", "decode\n1x32768"]
    save_png(RUN, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_picture_needs_a_result_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing was measured"):
        save_png(empty(), tmp_path / "a.png")
    with pytest.raises(InputError, match="cannot be written"):
        save_png(RUN, tmp_path / "none" / "a.png")


def test_files_are_written_after_every_case(tmp_path: Path) -> None:
    files = Files(tmp_path / "a.csv", tmp_path / "a.png", tmp_path / "a.json")
    files.keep(empty())
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 1
    assert not (tmp_path / "a.png").exists()
    files.keep(RUN)
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 8
    assert Results.from_dict(json.loads((tmp_path / "a.json").read_text())) == RUN
    assert (tmp_path / "a.png").exists()


def test_a_file_that_cannot_be_written_is_said_before_measuring(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no folder"):
        Files(csv=tmp_path / "none" / "a.csv")


def test_when_a_run_has_failed() -> None:
    assert failed(empty()) and not failed(RUN)
    assert failed(replace(RUN, left_out=(replace(LOST, wrong=True),)))


def test_the_default_protocol_is_the_published_one() -> None:
    assert turns_of(5, 0.7) == PUBLISHED
