"""The real candidate source, as far as it goes without a GPU, and what is kept of a result."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import standin

pytest.importorskip("triton")

from sparsegen.errors import ToolchainError, TuneError, UnsupportedError
from sparsegen.spec.gpu import find_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from sparsegen.tune import history, store, winners
from sparsegen.tune.prune import CompilePool
from sparsegen.tune.space import Space
from sparsegen.tune.target import KernelTarget
from sparsegen.tune.tuner import Budget, TuneResult, tune

PROBLEM = Problem(head_dim=64, heads=4, lengths=((1024, 1024), (4096, 4096)))
WINDOW = Pattern.from_dict({"name": "narrow", "mask": {"window": {"size": 256}}})
GPU = find_gpu("h200")


def target(pattern=WINDOW, problem=PROBLEM, **options):
    return KernelTarget.of(pattern, problem, GPU, **options)


def test_the_key_names_all_that_a_time_depends_on():
    key = target().key
    assert key.startswith("nvidia-h200 narrow 1024x1024 bfloat16 forward triton ")
    assert key == target().key
    others = [
        target(lengths=(4096, 4096)),
        target(problem=replace(PROBLEM, heads=8)),
        target(pattern=Pattern.from_dict({"name": "narrow", "mask": {"window": {"size": 257}}})),
        KernelTarget.of(WINDOW, PROBLEM, find_gpu("h100")),
    ]
    assert len({key, *(other.key for other in others)}) == 5


def test_the_template_declares_a_consistent_space_and_a_valid_default():
    source = target()
    space = Space(source.knobs)
    default = space.canonical(source.default.as_dict())
    assert default == source.default and source.invalid(default) is None
    valid = sum(source.invalid(config) is None for config in space.enumerate())
    assert 100 < valid <= space.cardinality


def test_it_travels_to_a_worker_and_compiles_without_a_gpu(tmp_path):
    source = target()
    assert pickle.loads(pickle.dumps(source)).key == source.key
    pool = CompilePool(source, tmp_path, jobs=1)
    try:
        pool.begin(source.default)
        while (result := pool.next(5.0)) is None:
            pass
    finally:
        pool.stop()
    assert (result.kind, result.reason) == ("", "")
    first = next(iter(result.facts.values()))
    assert 0 < first.registers <= 255 and 0 < first.shared_bytes <= GPU.shared_bytes
    assert list(result.folder.rglob("*.cubin"))


def test_run_time_data_and_a_missing_gpu_are_clear_errors(monkeypatch):
    documents = Pattern.from_dict({"name": "packed", "mask": "documents"})
    with pytest.raises(UnsupportedError):
        target(pattern=documents)
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ToolchainError, match="no GPU is here"):
        target().bench()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ToolchainError, match="cannot measure here: ToolchainError: no GPU is here"):
        tune(target())


def test_a_winner_is_kept_and_found_again(tmp_path):
    source = target()
    config = next(
        c for c in Space(source.knobs).neighbours(source.default) if not source.invalid(c)
    )
    result = TuneResult(config, 90.0, 100.0, 0.02, (), "best of 40 trials", "memory")
    winners.keep(source, result, tmp_path)
    found = store.lookup(WINDOW, PROBLEM, GPU, source.template, lengths=(1024, 1024), root=tmp_path)
    assert found == (config, "exact GPU")
    (line,) = history.read(tmp_path / "history.csv")
    assert (line.median_us, line.spread_us, line.baseline_us) == (90.0, 2.0, 100.0)
    assert (line.gpu, line.pattern) == ("nvidia-h200", "narrow")
    assert line.problem == "B1 H4:4 D64:64 bfloat16 1024x1024"
    nothing = replace(result, time_us=None, how="template default: no trial is complete")
    with pytest.raises(TuneError, match="nothing to keep for narrow: template default: no trial"):
        winners.keep(source, nothing, tmp_path)


def test_a_tuning_starts_from_the_shipped_winner(tmp_path, monkeypatch):
    monkeypatch.setattr(standin, "time_of", lambda config: 100.0 + len(str(config)))
    source = target()
    shipped = next(
        c for c in Space(source.knobs).enumerate() if c != source.default and not source.invalid(c)
    )
    kept = TuneResult(shipped, 90.0, 100.0, 0.02, (), "best of 40 trials", "memory")
    winners.keep(source, kept, tmp_path)
    lane = standin.InProcessLane(standin.StandInSource())
    found, result = winners.tune_pattern(
        WINDOW, PROBLEM, GPU, budget=Budget(4, 60), tuned=tmp_path, lane=lane
    )
    assert found == source and result.complete == 4
    assert lane.measured[:2] == [source.default, shipped]
