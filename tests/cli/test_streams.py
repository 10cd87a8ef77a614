"""What a shell does to stdout and stderr: no traceback, nothing of stderr in stdout, no noise when a reader goes away."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``line`` in bash, where ``sparsegen`` is this tree's; output buffered, as it is without a terminal."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    command = f'sparsegen() {{ "{sys.executable}" -m sparsegen "$@"; }}; {line}'
    return subprocess.run(
        ["bash", "-c", command],
        env={**env, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=280,
    )


@pytest.mark.parametrize("environment", [{}, {"PYTHONUNBUFFERED": "1"}], ids=str)
@pytest.mark.parametrize("words", ["--version", "schema"])  # less and more than a buffer
def test_a_reader_that_goes_away_ends_the_command_quietly(
    words: str, environment: dict[str, str]
) -> None:
    done = shell(f"sparsegen {words} | true; echo ${{PIPESTATUS[0]}}", **environment)
    assert (done.stdout, done.stderr) == ("1\n", "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("environment", [{}, {"PYTHONUNBUFFERED": "1"}], ids=str)
@pytest.mark.parametrize("words", ["--version", "schema"])
def test_a_full_disk_is_one_sentence(words: str, environment: dict[str, str]) -> None:
    done = shell(f"sparsegen {words} > /dev/full", **environment)
    said = "the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_messages_never_go_to_stdout() -> None:
    done = shell("sparsegen show no_such_pattern --length 8 2>&-")
    assert (done.returncode, done.stdout) == (1, "")


def test_a_closed_stdout_is_no_error() -> None:
    done = shell("sparsegen show causal --length 8 >&-")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_character_that_stdout_lacks_is_escaped(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text("summary: naïve → dense\nmask: full\n", encoding="utf-8")
    done = shell(f"sparsegen show {file} --length 8", PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and "p: na\\xefve \\u2192 dense" in done.stdout


def test_thousands_of_mistakes_are_cut(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text("mask: {any_of: [" + "sausal, " * 500 + "causal]}\n", encoding="utf-8")
    done = shell(f"sparsegen show {file} --length 8")
    lines = done.stderr.splitlines()
    assert done.returncode == 1 and len(lines) == 21 and lines[-1] == "… and 480 more"
    assert all("unknown node 'sausal'" in line for line in lines[:-1])


def test_one_artifact_is_no_artifacts() -> None:
    from sparsegen.cli.output import artifacts

    assert [artifacts(n) for n in (0, 1, 2)] == ["0 artifacts", "1 artifact", "2 artifacts"]
