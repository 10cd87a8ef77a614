"""Tests share what Triton compiled (``tests/compiled_once.py``): what a test finds is what it would have compiled."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from sparsegen.codegen import load_template, render
from sparsegen.launch import Job, compile_many
from sparsegen.launch.binary import _tool
from sparsegen.launch.sass import listing_of
from sparsegen.schedule.build import build
from sparsegen.spec.gpu import find_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="needs triton"),
    pytest.mark.skipif("TRITON_CACHE_MANAGER" not in os.environ, reason="nothing is shared here"),
]
A100 = find_gpu("a100")


def compiled(folder: Path) -> dict[str, bytes]:
    """The files of a kernel that no other test has."""
    problem = Problem(head_dim=16, dtype="float16")
    pattern = Pattern.from_dict({"name": "p", "mask": {"window": {"size": 77}}})
    source = render(pattern, build(pattern, problem), problem)
    config = load_template().default(problem, A100)
    (outcome,) = compile_many([Job(source, config, "fast", A100, folder)])
    assert outcome.binary is not None, outcome.error
    return {name: (folder / name).read_bytes() for name in outcome.binary.files}


def test_what_is_shared_is_what_would_be_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    monkeypatch.setenv("SPARSEGEN_TESTS_COMPILED", str(shared))
    first = compiled(tmp_path / "first")
    (entry,) = shared.iterdir()
    (cubin,) = entry.glob("*.cubin")
    assert cubin.read_bytes() in first.values()
    cubin.write_bytes(cubin.read_bytes() + b"found")  # behind all that ELF names
    second = compiled(tmp_path / "second")
    assert second[cubin.name] == cubin.read_bytes(), "it was compiled again"
    monkeypatch.delenv("TRITON_CACHE_MANAGER")
    anew = compiled(tmp_path / "first")  # in the same place, which the text of PTX names
    assert {n: anew[n] for n in anew if n != cubin.name} == {
        n: first[n] for n in first if n != cubin.name
    }
    code = [listing_of(tmp_path / f / cubin.name, _tool("nvdisasm")) for f in ("first", "second")]
    assert code[0] == code[1] and "EXIT" in code[0]  # ptxas writes names of its own temporary files
