"""The training example: its verdict, its files, and that the sparse run follows the dense one of its seed."""

from __future__ import annotations

import csv
import importlib.util
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_lm", ROOT / "examples" / "train_lm.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = load()
TINY = ["--small", "--backend", "reference", "--steps", "6", "--length", "48", "--batch", "2"]


@pytest.fixture
def one_thread() -> Any:
    """Threads that wait for each other on a busy machine take many times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_small_run_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main([*TINY, "--out", str(tmp_path / "run")]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("INSIDE the band at every step: ")
    assert float(last.split("at most ")[1].split()[0]) < 1e-3
    with (tmp_path / "run" / "loss.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6 and float(rows[-1]["dense_seed_0"]) < float(rows[0]["dense_seed_0"])
    for row in rows:  # one seed is one run: the same weights, the same text
        gaps = [float(row["sparse_seed_0"]) - float(row[f"dense_seed_{i}"]) for i in range(3)]
        assert abs(gaps[0]) < 1e-3 and min(map(abs, gaps[1:])) > 1e-3
    picture = (tmp_path / "run" / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) < 60_000


def test_a_sparse_layer_and_a_dense_one() -> None:
    """The stack holds what it says, and both layers compute the same from the same weights."""
    args = Namespace(
        **{**example.SMALL, "small": True, "backend": "reference", "length": 64, "window": 8}
    )
    models = []
    for dense in (False, True):
        torch.manual_seed(0)
        models.append(example.Model(args, dense))
    sparse, dense = models
    names = [b.attention.pattern.name for b in sparse.blocks]
    assert names == ["full", "full", "window_8_sinks"]
    assert sparse.state_dict().keys() == dense.state_dict().keys()
    text = torch.randint(256, (2, 64))
    torch.testing.assert_close(sparse(text), dense(text), rtol=1e-4, atol=1e-5)
    dense.blocks[2].attention.pattern = dense.blocks[0].attention.pattern
    del dense.blocks[2].attention.mask
    assert not torch.allclose(sparse(text), dense(text), atol=1e-3)


DENSE = [[3.0 - 0.01 * i + 0.05 * ((i * s) % 3) for i in range(160)] for s in (1, 2, 4)]
CURVES = {
    "inside": ([sum(x) / 3 for x in zip(*DENSE)], True),
    "an edge, rounded": ([max(x) + 0.001 for x in zip(*DENSE)], True),
    "a little above": ([max(x) + 0.02 for x in zip(*DENSE)], False),
    "below": ([min(x) - 0.02 for x in zip(*DENSE)], False),
    "late": ([x + 0.5 * (i > 150) for i, x in enumerate(DENSE[0])], False),
    "not a number": ([*DENSE[0][:-1], float("nan")], False),
}


@pytest.mark.parametrize("name", CURVES)
def test_verdict(name: str) -> None:
    curve, inside = CURVES[name]
    found = example.compare(DENSE, curve)
    assert (found["steps_outside"] == 0) is inside
    assert example.verdict(found).startswith("INSIDE the band" if inside else "OUTSIDE the band at")


def test_a_curve_outside_is_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = lambda text, args, seed, dense: [3.0 + seed if dense else 9.0] * 6
    monkeypatch.setattr(example, "train", losses)
    assert example.main([*TINY, "--out", str(tmp_path)]) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--out", str(tmp_path / "run")]) == 1
    said: Any = capsys.readouterr()
    assert said.err.strip() == (
        "compiled kernels need a GPU, none is here; "
        "--backend reference --small runs the dense reference on the CPU"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_compiled_kernels_follow_the_dense_run(tmp_path: Path) -> None:
    args = ["--steps", "30", "--length", "256", "--batch", "4", "--out", str(tmp_path)]
    assert example.main(args) == 0
