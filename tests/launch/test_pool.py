"""Ctrl-C in the middle of compiling: one interruption, at once, and no compiler is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
ROOT = Path(__file__).parents[2]
MANY = """
import signal, sys
from pathlib import Path
from sparsegen.codegen import load_template, render
from sparsegen.launch import Job, compile_many
from sparsegen.schedule.build import build
from sparsegen.spec.gpu import find_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
gpu, pattern, problem = find_gpu("h200"), Pattern.from_yaml("causal"), Problem()
source = render(pattern, build(pattern, problem), problem)
config = load_template().default(problem, gpu)
jobs = [Job(source, config, "fast", gpu, Path(sys.argv[1], str(i))) for i in range(200)]
compile_many(jobs, 2, done=lambda outcome: print("done", flush=True))
"""
# the system gives the signal to a thread that compiles, while the main one sleeps
TO_A_THREAD = MANY.replace(
    'done=lambda outcome: print("done", flush=True)', "done=lambda outcome: interrupted()"
).replace(
    "signal.signal(",
    """
import threading
sent = []
def interrupted():
    print("done", flush=True)
    if not sent:
        sent.append(1)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
signal.signal(""",
)


def children(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(words[1]) == parent:
            found.append(int(stat.parent.name))
    return found


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.usefixtures("compiles_anew")
@pytest.mark.parametrize("script", [MANY, TO_A_THREAD], ids=["terminal", "thread"])
def test_ctrl_c_ends_compilers_and_is_told_once(script: str, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "done\n"
    workers = children(process.pid)
    if script is MANY:
        assert len(workers) == 2
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, said = process.communicate(timeout=100)
    assert process.returncode != 0
    assert said.count("Traceback") == 1 and said.rstrip().endswith("KeyboardInterrupt"), said
    assert out.count("done") < 50, "it went on"
    end = time.monotonic() + 60
    while any(map(running, workers)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(map(running, workers))
