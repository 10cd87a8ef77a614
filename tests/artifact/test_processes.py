"""Many processes on one store, and builders that are killed."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import re
import time

import pytest

from sparsegen.artifact import cache, folder
from sparsegen.artifact.store import Store
from tests.artifact import standin
from tests.artifact.standin import KEY, build, key

PROCESSES, ROUNDS, KILLS = 8, 50, 20
FILES = 5  # of what the stand-in writes

if not hasattr(os, "fork"):
    pytest.skip("needs processes of POSIX", allow_module_level=True)


@pytest.fixture(scope="module")
def processes():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["tests.artifact.standin", "sparsegen.artifact.store", "filelock"]
    )
    return context


def run(context, target, arguments, count):
    workers = [context.Process(target=target, args=arguments) for _ in range(count)]
    for worker in workers:
        worker.start()
    return workers


def check_clean(root, keys=1):
    names = os.listdir(root / "artifacts")
    assert len(names) == keys and not [n for n in names if n.startswith(".")], names


def test_eight_processes_start_at_once_on_an_empty_store(processes, tmp_path):
    start, results = processes.Barrier(PROCESSES), processes.Queue()
    workers = run(
        processes, standin.build_in_process, (str(tmp_path), ROUNDS, start, results), PROCESSES
    )
    got = [results.get(timeout=60) for _ in range(PROCESSES * ROUNDS)]
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert not [error for number, _, error in got if number < 0]
    for number in range(ROUNDS):
        here = {(path, digest) for n, path, digest in got if n == number}
        assert len(here) == 1, "all got the same entry with the same binary"
        check_clean(tmp_path / str(number))
        assert Store(tmp_path / str(number)).load(KEY)


def test_without_locks_one_entry_wins(processes, tmp_path):
    """A network disk may have no locks; the rename alone must do."""
    start, results = processes.Barrier(PROCESSES), processes.Queue()
    workers = run(
        processes, standin.build_without_locks, (str(tmp_path), 4, start, results), PROCESSES
    )
    got = [results.get(timeout=60) for _ in range(PROCESSES * 4)]
    for worker in workers:
        worker.join()
    assert not [error for number, _, error in got if number < 0]
    for number in range(4):
        names = os.listdir(tmp_path / str(number) / "artifacts")
        assert names and not [n for n in names if n.startswith(".")], names
        assert Store(tmp_path / str(number)).load(KEY)


def test_a_killed_builder_leaves_no_trace_after_the_next(processes, tmp_path, monkeypatch, caplog):
    """Killed before each of its files, and at moments of which some are late enough for the publishing."""
    monkeypatch.setattr(folder, "_NOTE_AFTER_S", 0.0)  # any wait is said
    store, draw = Store(tmp_path), random.Random(7)
    began = time.monotonic()
    build(store, key(heads=1, kv_heads=1), pause_s=0.005)
    whole = time.monotonic() - began
    for number in range(KILLS):
        wanted = key(head_dim=number)
        ready, halted = processes.Event(), number < FILES
        if halted:
            target, rest = standin.build_and_halt, (number, processes.Event())
        else:
            target, rest = standin.build_and_tell, (0.005,)
        worker = processes.Process(target=target, args=(str(tmp_path), wanted, ready, *rest))
        worker.start()
        assert ready.wait(60)
        if not halted:
            time.sleep(draw.uniform(0, 0.9 * whole))
        worker.kill()
        worker.join()
        finished = store.try_load(wanted) is not None
        assert not (halted and finished)
        for path, manifest in store.entries():
            assert not isinstance(manifest, Exception), (path, manifest)
        if not finished:  # the builder's lock died with it: this must not wait
            with caplog.at_level(logging.WARNING):
                build(store, wanted)
            assert "waiting" not in caplog.text
        assert store.load(wanted).read("kernel.py")
    cache.prune(store)
    check_clean(tmp_path, KILLS + 1)


def test_prune_sweeps_after_a_kill_but_never_a_live_builder(processes, tmp_path):
    store = Store(tmp_path)
    ready = processes.Event()
    args = (str(tmp_path), KEY, ready, 1, processes.Event())
    worker = processes.Process(target=standin.build_and_halt, args=args)
    worker.start()
    assert ready.wait(60)
    assert len(folder.leftovers(store.artifacts)) == 1
    assert cache.prune(store, everything=True).leftovers == ()
    assert len(folder.leftovers(store.artifacts)) == 1
    worker.kill()
    worker.join()
    assert len(cache.prune(store).leftovers) == 1
    assert os.listdir(store.artifacts) == []


def test_waiting_is_said(processes, tmp_path, monkeypatch, caplog):
    """The other goes on when it was said."""
    monkeypatch.setattr(folder, "_NOTE_AFTER_S", 0.05)
    ready, go = processes.Event(), processes.Event()
    args = (str(tmp_path), KEY, ready, 1, go)
    worker = processes.Process(target=standin.build_and_halt, args=args)
    worker.start()
    assert ready.wait(60)
    emit = caplog.handler.emit
    monkeypatch.setattr(caplog.handler, "emit", lambda record: (emit(record), go.set()))
    with caplog.at_level(logging.WARNING):
        got = build(Store(tmp_path), content=b"ours")
    worker.join()
    assert re.search(rf"waiting for another process that builds {KEY.short()}", caplog.text)
    assert got.read("fast/forward.cubin")[:4] == b"cubi", "theirs was taken"


def test_a_stale_lock_file_is_no_lock(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(folder, "_NOTE_AFTER_S", 0.0)  # any wait is said
    store = Store(tmp_path)
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks" / f"{KEY.short()}.lock").write_text("12345")
    with caplog.at_level(logging.WARNING):
        assert build(store)
    assert "waiting" not in caplog.text
