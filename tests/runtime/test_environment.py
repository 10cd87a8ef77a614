"""Machines that lack something: no GPU, no Triton, no C compiler.  Everything but a launch works there."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def child(code: str, *words: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """``code`` in a new process; None takes a variable away."""
    changes = {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": None, **environment}
    env = {k: v for k, v in {**os.environ, **changes}.items() if v is not None}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *words],
        env=env,
        capture_output=True,
        text=True,
        timeout=250,
    )


WITHOUT_TRITON = """
    import os, sys
    sys.modules["triton"] = None  # importing it fails from here on
    import sparsegen
    from sparsegen.codegen import load_template, render
    from sparsegen.schedule.build import build
    from sparsegen.schedule.dump import dump
    from sparsegen.spec.gpu import find_gpu

    pattern = sparsegen.Pattern.from_yaml("streaming_llm")
    schedule = build(pattern)
    assert "sinks" in dump(schedule) or "segment" in dump(schedule)
    source = render(pattern, schedule, pattern.problem)
    assert load_template().default(pattern.problem, find_gpu("h200"))["BLOCK_M"]
    compile(source.text, "kernel.py", "exec")

    from sparsegen.cli import main
    for words in (["show", "causal", "--length", "256"], ["cache", "ls"], ["doctor"], ["--help"]):
        sys.argv = ["sparsegen", *words]
        try:
            main()
        except SystemExit as end:
            assert not end.code, (words, end.code)

    import torch
    q = torch.randn(1, 2, 5, 8)
    attend = sparsegen.compile("causal", backend="reference")
    assert attend(q, q, q).shape == q.shape
    assert not torch.cuda.is_initialized()
    print("all done")
"""


@pytest.mark.one_triton
def test_without_a_gpu_and_without_triton(cache: Path) -> None:
    """Import, read, schedule, render, show, list the cache, doctor, reference: each exits 0 (CASES B18)."""
    done = child(WITHOUT_TRITON, CUDA_VISIBLE_DEVICES="", SPARSEGEN_CACHE=str(cache))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "all done" and "Traceback" not in done.stderr


FORK = """
    import os, sys
    import sparsegen
    from sparsegen.codegen import render
    from sparsegen.launch import Call, variants
    from sparsegen.schedule.build import build
    import torch

    pattern = sparsegen.Pattern.from_yaml("causal")
    source = render(pattern, build(pattern), pattern.problem)
    assert not torch.cuda.is_initialized(), "importing and rendering made a context"
    here = torch.cuda.device_count() if os.path.exists("/dev/nvidiactl") else 0
    pid = os.fork()
    if pid == 0:
        if here:
            assert torch.zeros(2, device="cuda").sum().item() == 0
        os._exit(0 if not torch.cuda.is_initialized() or here else 5)
    print("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.one_triton
def test_a_forked_child_can_still_use_the_gpu() -> None:
    """No context is made by importing, reading, analysing or rendering (CASES B18)."""
    done = child(FORK)
    assert (done.returncode, done.stdout.strip()) == (0, "child 0"), done.stderr


@pytest.fixture
def no_compiler(tmp_path: Path) -> dict[str, str | None]:
    """A PATH that holds nothing, and no CC: a slim image."""
    empty = tmp_path / "bin"
    empty.mkdir()
    return {"PATH": str(empty), "CC": None, "CXX": None}


COMPILE = """
    import shutil, sys
    assert not any(map(shutil.which, ("cc", "gcc", "clang")))
    from sparsegen.cli import main
    sys.argv = ["sparsegen", *sys.argv[1:]]
    main()
"""


def test_cross_compiling_needs_no_c_compiler(
    no_compiler: dict[str, str | None], tmp_path: Path, cache: Path
) -> None:
    """Only a launch builds something in C: artifacts are made without, and found again (CASES B12)."""
    pattern = tmp_path / "tiny.yaml"
    pattern.write_text("name: tiny\nmask: causal\nproblem: {head_dim: 16}\n")
    for words in (["compile", "--gpu", "a100"], ["show", "--length", "64"]):
        done = child(COMPILE, words[0], str(pattern), *words[1:], **no_compiler)
        assert done.returncode == 0, done.stderr
    done = child(COMPILE, "check", str(pattern), "--gpu", "a100", **no_compiler)
    assert done.returncode == 0 and "ok" in done.stdout, done.stdout + done.stderr
    (entry,) = (cache / "artifacts").iterdir()
    assert entry.name.startswith("tiny-nvidia-a100-")


@pytest.mark.one_triton
def test_a_launch_without_a_gpu_is_one_sentence(cache: Path, no_compiler: dict) -> None:
    """The command and the function say the same, with no traceback (CASES B12)."""
    done = child(COMPILE, "compile", "causal", CUDA_VISIBLE_DEVICES="", **no_compiler)
    (line,) = done.stderr.strip().splitlines()
    assert done.returncode == 1 and line.startswith("ToolchainError: no GPU here: ")
