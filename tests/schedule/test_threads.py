"""What is analysed at the same time in other threads does not decide a schedule: the key of an artifact hangs on it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from sparsegen.schedule.build import build
from sparsegen.schedule.dump import dump
from sparsegen.spec.pattern import Pattern

# longnet_dilated uses up its budget of proofs, so whatever spends or saves a step shows
NAMES = ["longnet_dilated", "bigbird", "video_3d", "sparse_transformer_strided", "longnet_dilated"]


def _dump(name: str) -> str:
    return dump(build(Pattern.from_yaml(name)))


def test_threads_leave_schedules_alone() -> None:
    alone = {name: _dump(name) for name in set(NAMES)}
    with ThreadPoolExecutor(4) as threads:
        for name, text in zip(NAMES * 2, threads.map(_dump, NAMES * 2)):
            assert text == alone[name], name
