"""A wheel and an editable install both find templates, patterns and measured winners."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DATA = ("templates", "patterns", "tuned")
FIND = "from sparsegen.paths import data_dir; import sparsegen; print(data_dir('patterns'), sparsegen.__version__)"


def build(kind: str, target: Path) -> Path:
    """Build a wheel with the backend itself: no network, no isolated environment."""
    pytest.importorskip("hatchling")
    code = f"import hatchling.build as b; print(b.{kind}({str(target)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return target / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("build_wheel", tmp_path_factory.mktemp("wheel"))


def python(code: str, path: Path, cwd: Path) -> str:
    """Run without site-packages (-S): an installed sparsegen must not be the one that is found."""
    env = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env=env,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_wheel_holds_code_and_data(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in DATA:
        files = [
            p
            for p in (ROOT / folder).rglob("*")
            if p.is_file() and p.name[0] != "." and "__pycache__" not in p.parts
        ]
        missing = [
            p
            for p in files
            if f"sparsegen/_data/{folder}/{p.relative_to(ROOT / folder).as_posix()}" not in names
        ]
        assert files and not missing, f"{folder}: {missing}"
    modules = {
        f"sparsegen/{p.relative_to(ROOT / 'sparsegen').as_posix()}"
        for p in (ROOT / "sparsegen").rglob("*")
        if p.suffix in (".py", ".jinja", ".css", ".js") and "_data" not in p.parts
    }
    assert modules <= names and "sparsegen/report/history_page.html.jinja" in names
    assert not [n for n in names if n.startswith(("tests/", "docs/"))]


def test_wheel_metadata(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    text = archive.read(name).decode()
    assert "License-Expression: Apache-2.0" in text and "Requires-Python: >=3.10" in text
    pinned = [
        line
        for line in re.findall(r"^Requires-Dist: .*$", text, re.M)
        if "==" in line.split(";")[0]
    ]
    assert not pinned, "ranges, not pins"


def test_unpacked_wheel_finds_its_data(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    found = python(FIND, tmp_path / "site", tmp_path)
    assert found.startswith(str(tmp_path / "site" / "sparsegen" / "_data" / "patterns"))


def test_editable_install_finds_the_checkout(tmp_path: Path) -> None:
    wheel = build("build_editable", tmp_path)
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    # What an interpreter does with a .pth file of site-packages.
    code = f"import site; site.addsitedir({str(tmp_path / 'site')!r}); {FIND}"
    found = python(code, tmp_path / "nothing", tmp_path)
    assert found.startswith(str(ROOT / "patterns"))
