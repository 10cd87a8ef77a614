"""``cache push | pull | keygen``, and signatures of ``export`` and ``import``: through the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sparsegen.artifact import remote
from sparsegen.artifact.build import ask, load
from sparsegen.artifact.compiler import Compiler
from sparsegen.artifact.signing import read_signature
from sparsegen.artifact.store import Store
from sparsegen.cli import app
from sparsegen.errors import ArtifactError, InputError
from sparsegen.spec.gpu import find_gpu
from sparsegen.spec.pattern import Pattern
from tests.artifact.standin import write_standin

ROOT = Path(__file__).parents[2]


def run(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def fill(root: Path, *names: str, gpu: str = "a100") -> None:
    """A cache with entries of shipped patterns: the right keys, with files of no compiler."""
    builder = Compiler()
    for name in names:
        key = builder.key(ask(Pattern.from_yaml(name), None, find_gpu(gpu)))
        Store(root).build_once(key, name, write_standin, builder.versions())


def forward_only(folder: Path, name: str) -> Path:
    """A shipped pattern whose problem names the forward pass alone: no artifact of gradients is asked for."""
    pattern = Pattern.from_yaml(name)
    assert pattern.problem is not None
    file = folder / f"{name}.yaml"
    file.write_text(
        replace(pattern, problem=replace(pattern.problem, passes=("forward",))).to_yaml()
    )
    return file


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("filled")
    fill(root, "causal", "streaming_llm")
    return root


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """``at(root)``: the next commands use this cache."""

    def use(root: Path) -> Path:
        monkeypatch.setenv("SPARSEGEN_CACHE", str(root))
        return root

    return use


def test_push_and_pull(filled: Path, at, tmp_path: Path) -> None:
    url = tmp_path / "folder"
    at(filled)
    assert run("cache", "push", url) == (
        0,
        "nvidia-a100 causal: pushed\nnvidia-a100 streaming_llm: pushed\n2 pushed\n",
    )
    assert run("cache", "push", url, "causal", "--gpu", "a100")[1].endswith("1 kept\n")
    at(tmp_path / "new")
    causal, streaming = (forward_only(tmp_path, n) for n in ("causal", "streaming_llm"))
    assert run("cache", "pull", url, causal, streaming, "--gpu", "a100") == (
        0,
        "nvidia-a100 causal: pulled\nnvidia-a100 streaming_llm: pulled\n2 pulled\n",
    )
    assert run("cache", "pull", url, causal, "--gpu", "a100")[1].endswith("1 hit\n")
    assert len(os.listdir(tmp_path / "new" / "artifacts")) == 2
    code, text = run("cache", "pull", url, causal, "--gpu", "h200,a100", "--json")
    rows = json.loads(text)
    assert code == 1 and [r["state"] for r in rows] == ["missing", "hit"]
    assert str(url) in rows[0]["detail"]
    code, text = run("cache", "pull", url, "causal", "--gpu", "a100")
    assert (
        code == 1 and "nvidia-a100 causal gradients: missing" in text
    )  # its problem names both passes


def test_pull_for_other_problems(filled: Path, at, tmp_path: Path) -> None:
    at(filled)
    run("cache", "push", tmp_path / "folder", "causal")
    (tmp_path / "p.yaml").write_text("- {}\n- {dtype: float16}\n")
    at(tmp_path / "new")
    words = (
        forward_only(tmp_path, "causal"),
        "--gpu",
        "a100",
        "--problems",
        tmp_path / "p.yaml",
        "--json",
    )
    rows = json.loads(run("cache", "pull", tmp_path / "folder", *words)[1])
    assert [r["state"] for r in rows] == ["pulled", "missing"]
    assert "float16" in rows[1]["problem"]


def test_compile_and_warm_take_a_store(filled: Path, at, tmp_path: Path) -> None:
    """What the store has is not built; a push goes nowhere without one."""
    with pytest.raises(InputError, match="push needs the URL"):
        run("warm", "causal", "--gpu", "a100", "--push")
    with pytest.raises(InputError, match="push needs the URL"):
        run("compile", "causal", "--gpu", "a100", "--push")
    at(tmp_path / "new")
    with pytest.raises(InputError, match="a store must be"):
        run("warm", "causal", "--gpu", "a100", "--store", "nowhere")


def test_what_is_asked_for_is_there(filled: Path, at, tmp_path: Path) -> None:
    at(filled)
    with pytest.raises(InputError, match="no artifact of bigbird in"):
        run("cache", "push", tmp_path / "folder", "bigbird", "causal")
    assert not (tmp_path / "folder").exists()
    assert run("cache", "push", tmp_path / "folder", "--gpu", "h200")[1] == "nothing to do\n"
    file = ROOT / "patterns" / "causal.yaml"
    assert run("cache", "push", tmp_path / "folder", file)[1].endswith("causal: pushed\n1 pushed\n")


def test_damaged_ones_are_named_and_not_pushed(at, tmp_path: Path) -> None:
    fill(at(tmp_path / "cache"), "causal", "streaming_llm")
    (next((tmp_path / "cache" / "artifacts").glob("causal-*")) / "kernel.py").write_text("")
    code, text = run("cache", "push", tmp_path / "folder")
    assert code == 1 and "causal: damaged (" in text and "1 pushed, 1 damaged" in text


def test_damaged_and_unsigned_ones_are_refused(filled: Path, at, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    at(filled)
    run("cache", "push", tmp_path / "folder", "causal")
    run("cache", "keygen", tmp_path / "key")
    at(tmp_path / "new")
    pull = ("cache", "pull", tmp_path / "folder", "causal", "--gpu", "a100")
    code, text = run(*pull, "--trust", tmp_path / "key.pub")
    assert code == 1 and "causal: refused (" in text and "is not signed" in text
    next((tmp_path / "folder").rglob("*.gz")).write_bytes(b"x")
    code, text = run(*pull)
    assert code == 1 and "refused" in text and "is damaged or no .tar.gz" in text
    assert not (tmp_path / "new" / "artifacts").exists()


def test_a_store_that_cannot_be_reached_ends_it_at_once(
    filled: Path, at, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_FIRST_PAUSE_S", 0.01)
    at(filled)
    with pytest.raises(ArtifactError, match="http://127.0.0.1:9: v3/.* could not be read in 3"):
        run("cache", "push", "http://127.0.0.1:9")
    with pytest.raises(ArtifactError, match="could not be read in 3 tries"):
        run("cache", "pull", "http://127.0.0.1:9", "--gpu", "a100")


def test_signed_from_end_to_end(filled: Path, at, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    at(filled)
    code, text = run("cache", "keygen", tmp_path / "key")
    assert code == 0 and f"public key: {tmp_path / 'key.pub'}" in text
    assert "PRIVATE" not in text
    run("cache", "push", tmp_path / "folder", "--sign", tmp_path / "key")
    run("cache", "export", tmp_path / "x.tar.gz", "--sign", tmp_path / "key")
    trust = ("--trust", tmp_path / "key.pub")
    at(tmp_path / "new")
    causal = forward_only(tmp_path, "causal")
    assert run("cache", "pull", tmp_path / "folder", causal, "--gpu", "a100", *trust)[0] == 0
    code, text = run("cache", "import", tmp_path / "x.tar.gz", *trust)
    assert code == 0 and text.endswith("1 added, 1 already here\n")
    at(tmp_path / "other")
    run("cache", "keygen", tmp_path / "stranger")
    with pytest.raises(ArtifactError, match="which is not trusted here"):
        run("cache", "import", tmp_path / "x.tar.gz", "--trust", tmp_path / "stranger.pub")
    assert not (tmp_path / "other").exists()


def test_keys_and_stores_of_the_file(filled: Path, at, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    run("cache", "keygen", tmp_path / "key")
    sender, taker = tmp_path / "sender", tmp_path / "taker"
    fill(sender, "causal")
    (sender / "stores.yaml").write_text(f"sign: {tmp_path / 'key'}\n")
    at(sender)
    run("cache", "push", tmp_path / "folder")
    taker.mkdir()
    (taker / "stores.yaml").write_text(
        f"stores: [{{url: {tmp_path / 'folder'}}}]\ntrust: [{tmp_path / 'key.pub'}]\n"
    )
    at(taker)
    got = load(Pattern.from_yaml("causal"), None, find_gpu("a100"))
    assert got.path.parent == taker / "artifacts"
    assert read_signature(got.path) is not None


def test_one_message_and_exit_1(tmp_path: Path) -> None:
    """In a process of its own: what a person sees of a mistake in the file."""
    (tmp_path / "stores.yaml").write_text("trsut: [a.pub]\n")
    done = subprocess.run(
        [sys.executable, "-m", "sparsegen", "cache", "push", str(tmp_path / "x")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "SPARSEGEN_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("InputError: ") and "'trsut' is not known" in done.stderr
    assert "Traceback" not in done.stderr
