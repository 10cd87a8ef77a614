"""What ``import sparsegen`` gives: the list, reality, and what stays unimported."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import sparsegen

HEAVY = ("torch", "triton", "pydantic", "optuna", "matplotlib", "networkx", "rich", "numpy", "yaml")


def fresh(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a new process; returns it with its output."""
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": root, **environment}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("name", [n for n in sparsegen.__all__ if n != "__version__"])
def test_every_listed_name_loads(name: str) -> None:
    value = getattr(sparsegen, name)
    module = getattr(value, "__module__", None)
    assert module is None or module.startswith("sparsegen")


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(sparsegen.__file__).read_text(encoding="utf-8"))
    block = next(n for n in tree.body if isinstance(n, ast.If))
    seen = {
        alias.asname: n.module
        for n in block.body
        if isinstance(n, ast.ImportFrom)
        for alias in n.names
    }
    lazy = {n: (m if m != f"sparsegen.{n}" else "sparsegen") for n, m in sparsegen._WHERE.items()}
    assert seen == lazy


def test_dir_lists_the_surface_and_unknown_names_fail() -> None:
    assert set(sparsegen.__all__) <= set(dir(sparsegen))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        sparsegen.nonsense  # noqa: B018


@pytest.mark.parametrize("code", ["import sparsegen", "import sparsegen.cli"])
def test_import_is_light(code: str) -> None:
    """Time is measured in benchmarks/, not here: a loaded machine would make that flake.  This cannot."""
    done = fresh(f"{code}, sys; print([m for m in {HEAVY!r} if m in sys.modules])")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_help_is_light() -> None:
    code = (
        "import sys; from sparsegen.cli import main; sys.argv = ['sparsegen', '--help']\n"
        "try: main()\n"
        f"finally: print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    )
    done = fresh(code)
    assert done.returncode == 0 and "Commands" in done.stdout
    assert done.stderr.strip() == "[]"


def test_import_without_any_gpu() -> None:
    code = "import sparsegen; p = sparsegen.Pattern.from_dict({'name': 'c', 'mask': 'causal'}); print(p.name)"
    done = fresh(code, CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout.strip()) == (0, "c"), done.stderr


def test_import_with_triton_and_torch_absent() -> None:
    """Reading and checking a pattern needs neither."""
    code = (
        "import sys\nsys.modules['triton'] = sys.modules['torch'] = None\n"
        "import sparsegen\n"
        "print(sparsegen.Pattern.from_dict({'name': 'c', 'mask': {'window': {'size': 4}}}).name)"
    )
    done = fresh(code)
    assert (done.returncode, done.stdout.strip()) == (0, "c"), done.stderr
