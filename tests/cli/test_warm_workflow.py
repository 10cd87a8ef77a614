"""The workflow that warms caches: every command in it is one of ours, and its steps do what they say, in small."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from sparsegen.cli import app
from sparsegen.spec.gpu import find_gpu

ROOT = Path(__file__).parents[2]
FILE = ROOT / ".github" / "workflows" / "warm-cache.yml"
ASKED = {"h100", "h200", "a100", "b200", "mi300x"}
GPU = "a100"  # no rows of tuned/, so that check looks at the cache alone


def workflow() -> dict[Any, Any]:
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))


def commands(job: str, gpu: str) -> list[list[str]]:
    """The words of every command of a job, for one GPU type."""
    found = []
    for step in workflow()["jobs"][job]["steps"]:
        text = re.sub(r"\$\{\{ *matrix\.gpu *\}\}", gpu, step.get("run", ""))
        assert "${{" not in text, f"{step['name']}: something else is put into a command line"
        found += [shlex.split(line) for line in text.splitlines() if line.strip()]
    return found


def parsed(words: list[str]) -> str:
    """The name of the command that would run; a usage error if it does not exist or takes no such options."""
    command, rest, name = typer.main.get_command(app), words[1:], []
    while hasattr(command, "commands"):
        assert rest and rest[0] in command.commands, f"no command {' '.join(words)}"
        name.append(rest[0])
        command, rest = command.commands[rest[0]], rest[1:]
    command.make_context(command.name, rest)
    return " ".join(name)


def test_it_is_a_matrix_of_the_gpu_types() -> None:
    job = workflow()["jobs"]["warm"]
    gpus = job["strategy"]["matrix"]["gpu"]
    assert set(gpus) == ASKED and len({find_gpu(g).name for g in gpus}) == len(gpus)
    assert job["strategy"]["fail-fast"] is False
    assert set(workflow()[True]) >= {"schedule", "workflow_dispatch"}  # YAML 1.1 reads `on` as true
    assert workflow()["permissions"] == {"contents": "read"}


@pytest.mark.parametrize("gpu", sorted(ASKED))
def test_every_command_is_one_that_we_have(gpu: str) -> None:
    names = []
    for words in [*commands("warm", gpu), *commands("report", gpu)]:
        if words == ["pip", "install", "."]:
            continue
        assert words[0] == "sparsegen"
        names.append(parsed(words))
    assert names == ["warm", "check", "cache prune", "cache export", "report"]


def test_the_cache_is_kept_between_runs_and_the_archive_uploaded() -> None:
    job = workflow()["jobs"]["warm"]
    by_use = {s["uses"].split("@")[0]: s for s in job["steps"] if "uses" in s}
    restore, save = by_use["actions/cache/restore"], by_use["actions/cache/save"]
    assert restore["with"]["path"] == save["with"]["path"]
    assert job["env"]["SPARSEGEN_CACHE"] == "${{ github.workspace }}/" + save["with"]["path"]
    assert restore["with"]["key"] == save["with"]["key"] and save["if"] == "always()"
    assert restore["with"]["key"].startswith(restore["with"]["restore-keys"].strip())
    exported = commands("warm", "${gpu}")[-1][3].replace("${gpu}", "${{ matrix.gpu }}")
    assert by_use["actions/upload-artifact"]["with"]["path"] == exported
    steps = [s.get("name", s.get("uses")) for s in job["steps"]]
    assert (
        steps.index("Take what is built") < steps.index("Warm") < steps.index("Keep what is built")
    )


def run(words: list[str], folder: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "SPARSEGEN_CACHE": str(cache)}
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=280)


def test_the_steps_in_small(tmp_path: Path) -> None:
    """One pattern, one GPU type, a cache of its own: the commands of the file, in their order."""
    cache = tmp_path / "cache"
    said = {}
    for words in commands("warm", GPU):
        if words[0] != "sparsegen":
            continue
        small = [*words, "causal"] if words[1] in ("warm", "check") else words
        done = run(small, tmp_path, cache)
        assert done.returncode == 0, f"{small}: {done.stderr}"
        said[words[1] if words[1] != "cache" else words[2]] = done.stdout
    # forward and gradients, as its problem names them
    assert "2 built" in said["warm"] and "2 ok" in said["check"]
    assert "removed 0 artifacts" in said["prune"] and "2 artifacts in" in said["export"]
    (archive,) = tmp_path.glob("kernels-*.tar.gz")

    again = run(["sparsegen", "warm", "--gpu", GPU, "causal"], tmp_path, cache)
    assert "2 hit" in again.stdout, "the next run finds what this one kept"
    other = tmp_path / "serving"
    before = run(["sparsegen", "check", "--gpu", GPU, "causal"], tmp_path, other)
    assert before.returncode == 1 and "missing" in before.stdout
    assert run(["sparsegen", "cache", "import", str(archive)], tmp_path, other).returncode == 0
    after = run(["sparsegen", "check", "--gpu", GPU, "causal"], tmp_path, other)
    assert after.returncode == 0 and "2 ok" in after.stdout


def test_a_warm_that_was_killed_goes_on(tmp_path: Path) -> None:
    """Killed after its first artifact: the second run takes that and builds the rest; nothing is left lying about."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "SPARSEGEN_CACHE": str(tmp_path / "cache")}
    small = "problem: {head_dim: 16, heads: 2}\n"  # two kernels, not ten
    masks = {
        "one": "causal",
        "two": "{window: {size: 64}}",
        "three": "full",
        "four": "{chunks: {size: 64}}",
    }
    for name, mask in masks.items():
        (tmp_path / f"{name}.yaml").write_text(f"name: {name}\nmask: {mask}\n{small}")
    words = ["sparsegen", "warm", "--gpu", GPU, "--jobs", "1", *(f"{name}.yaml" for name in masks)]
    first = subprocess.Popen(
        [sys.executable, "-m", *words], cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True
    )
    assert first.stderr is not None
    line = next(line for line in first.stderr if line.startswith("warm 1/4"))
    first.kill()
    first.communicate(timeout=60)
    assert line.strip() == "warm 1/4: nvidia-a100 one: built"
    second = run(words, tmp_path, tmp_path / "cache")
    # on a busy machine it may have got further before it was killed
    said = re.search(r"(\d) hit, (\d) built", second.stdout)
    assert second.returncode == 0 and said is not None, second.stdout
    assert int(said[1]) >= 1 and int(said[2]) >= 1 and int(said[1]) + int(said[2]) == 4
    folders = [p for p in (tmp_path / "cache" / "artifacts").iterdir() if p.is_dir()]
    assert len([p for p in folders if not p.name.startswith(".")]) == 4
