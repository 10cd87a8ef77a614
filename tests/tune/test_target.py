"""The real candidate source, as far as it goes without a GPU, and what is kept of a result."""

from __future__ import annotations

import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.tune import standin

pytest.importorskip("triton")

from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.errors import ToolchainError, TuneError, UnsupportedError
from sparsegen.spec.gpu import find_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from sparsegen.tune import history, store, winners
from sparsegen.tune.kernel_bench import KernelBench, KernelCandidate
from sparsegen.tune.prune import CompilePool
from sparsegen.tune.schedules import SCHEDULE, candidates_of, split, times_us
from sparsegen.tune.space import Space
from sparsegen.tune.target import KernelTarget
from sparsegen.tune.tuner import Budget, TuneResult, tune

PROBLEM = Problem(head_dim=64, heads=4, lengths=((1024, 1024), (4096, 4096)))
WINDOW = Pattern.from_dict({"name": "narrow", "mask": {"window": {"size": 256}}})
GPU = find_gpu("h200")


STRIDED = Pattern.from_dict(
    {"name": "strided", "mask": {"any_of": [{"window": {"size": 64}}, {"strided": {"stride": 64}}]}}
)
SMALL = Problem(head_dim=16, heads=1, lengths=((2048, 2048),))


def target(pattern=WINDOW, problem=PROBLEM, **options):
    return KernelTarget.of(pattern, problem, GPU, **options)


@pytest.fixture
def choice(monkeypatch):
    """A target with several schedules, however near the cost model thinks they are."""
    monkeypatch.setattr("sparsegen.schedule.search.WITHIN", 1e9)
    candidates_of.cache_clear()
    yield target(STRIDED, SMALL)
    candidates_of.cache_clear()


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
    with pytest.raises(ToolchainError, match="^cannot measure here: no GPU is here"):
        tune(target())


def test_a_winner_is_kept_and_found_again(tmp_path):
    source = target()
    config = next(
        c for c in Space(source.knobs).neighbours(source.default) if not source.invalid(c)
    )
    result = TuneResult(config, 90.0, 100.0, 0.02, (), "best of 40 trials", "memory")
    winners.keep(source, result, tmp_path)
    found = store.lookup(
        WINDOW, PROBLEM, GPU, source.template, source.labels, lengths=(1024, 1024), root=tmp_path
    )
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
        WINDOW, PROBLEM, GPU, budget=Budget(4, 600), tuned=tmp_path, lane=lane
    )
    assert found == source and result.complete == 4
    assert lane.measured[:2] == [source.default, shipped]


def plain_ones(choice: KernelTarget) -> list[LaunchConfig]:
    """What is tried first of the portable kernel: one configuration a schedule."""
    return [c for c in (choice.default, *choice.starts) if c["KERNEL"] == "portable"]


def test_the_schedule_is_a_knob_only_where_there_is_a_choice(choice):
    assert SCHEDULE not in {knob.name for knob in target().knobs}
    assert target().key.endswith(target().sources[0][1].digest[:12])  # as before there were any
    first, *others = choice.knobs
    assert first.name == SCHEDULE and first.default == first.choices[0] and first.summary
    assert len(first.choices) >= 2 and first.choices == choice.labels
    listed = [c.schedule.label for c in candidates_of(STRIDED, SMALL) if c.to_measure]
    assert list(choice.labels) == listed
    assert tuple(others) == choice.template.knobs
    space = Space(choice.knobs)
    assert space.canonical(choice.default.as_dict()) == choice.default
    first_tried = (choice.default, *choice.starts)
    assert [c[SCHEDULE] for c in first_tried if c["KERNEL"] == "portable"] == listed
    special = [c for c in first_tried if c["KERNEL"] == "hopper"]
    with_special = [label for label, source in choice.sources if source.hopper is not None]
    assert with_special and list(dict.fromkeys(c[SCHEDULE] for c in special)) == with_special
    assert not any(map(choice.invalid, first_tried))


def test_a_schedule_without_the_special_kernel_is_not_asked_for_it(choice):
    config = next(c for c in choice.starts if c["KERNEL"] == "hopper")
    bare = replace(
        choice, sources=tuple((label, replace(s, hopper=None)) for label, s in choice.sources)
    )
    assert choice.invalid(config) is None
    assert bare.invalid(config) == "KERNEL=hopper does no launch of this schedule"


def test_the_key_covers_every_schedule(choice):
    (label, source), *others = choice.sources
    changed = replace(source, text=source.text + "# another\n")
    keys = {
        choice.key,
        replace(choice, sources=((label, changed), *others)).key,
        replace(choice, sources=((label, source), (others[0][0], changed), *others[1:])).key,
        replace(choice, sources=(*others, (label, source))).key,
        replace(choice, sources=((label, source),)).key,
    }
    assert len(keys) == 5


def test_a_configuration_names_its_kernel_and_no_template_sees_the_schedule(choice):
    plain = choice.template.default(SMALL, GPU)
    for config, (label, source) in zip(plain_ones(choice), choice.sources):
        assert choice.parts(config) == (source, plain)
        assert split(config, choice.labels) == (label, plain)
    stranger = choice.default.as_dict() | {SCHEDULE: "mod 7"}
    known = f"schedule 'mod 7' is no candidate; there are {choice.labels[0]!r}, "
    with pytest.raises(TuneError, match=known):
        choice.parts(LaunchConfig.of(stranger))
    odd = choice.default.as_dict() | {"num_warps": 8, "BLOCK_M": 64}
    assert "128 query rows" in choice.invalid(LaunchConfig.of(odd))


def test_each_schedule_compiles_its_own_kernel(choice, tmp_path):
    pool = CompilePool(choice, tmp_path, jobs=2)
    wanted = {choice.default, choice.starts[0]}
    results = {}
    try:
        for config in wanted:
            pool.begin(config)
        while wanted - set(results):
            if (result := pool.next(5.0)) is not None:
                results[result.config] = result
    finally:
        pool.stop()
    for config, result in results.items():
        assert (result.kind, result.reason) == ("", "")
        source, _ = choice.parts(config)
        assert len(list(result.folder.rglob("*.cubin"))) == len(source.grids)
    assert len({r.folder for r in results.values()}) == 2


def test_a_loaded_candidate_runs_the_kernel_of_its_schedule(choice, tmp_path):
    bench = SimpleNamespace(target=choice)
    for config, (_, source) in zip(plain_ones(choice), choice.sources):
        folder = tmp_path / source.digest[:8]
        folder.mkdir()
        candidate = KernelCandidate(bench, config, folder)
        assert candidate._kernel.source == source and not any(
            folder.iterdir()
        )  # nothing reads texts
        assert candidate._kernel.config == choice.template.default(SMALL, GPU)
        assert candidate._calls.of(8, 8, {}).tables == []


def test_keys_of_the_checks_are_whole_periods_and_odd_timed_ones_bring_their_variant(monkeypatch):
    dilated = Pattern.from_dict({"name": "d", "mask": {"dilated": {"size": 64, "dilation": 8}}})
    even, odd = (target(dilated, replace(PROBLEM, lengths=((n, n),))) for n in (4096, 4100))
    source, config = even.parts(even.default)
    assert source.periods == (8,) and config["TMA"]
    assert even.timed(source, config) == ("fast",)
    assert odd.timed(source, config) == ("fast", "pointers")
    bench = object.__new__(KernelBench)
    bench.target = even
    monkeypatch.setattr(bench, "_fresh", lambda q_len, kv_len, *rest, **more: (q_len, kv_len))
    lengths = bench.small()
    assert lengths and all(kv_len % 8 == 0 for _, kv_len in lengths)
    assert any(q_len % 8 for q_len, _ in lengths)
    assert all(q_len % 8 == kv_len % 8 == 0 for q_len, kv_len in bench.small(whole_queries=True))


def test_a_timed_launch_is_prepared_once(tmp_path, monkeypatch):
    """Else the host is timed where it takes longer than the kernel."""
    import torch

    q = torch.zeros(1, 4, 16, 64)
    case = SimpleNamespace(q=q, k=q, v=q, keywords={})
    bench = SimpleNamespace(target=target(), case=case, out=q, lse=q[..., 0])
    candidate = KernelCandidate(bench, target().default, tmp_path)
    made, launched = [], []

    def prepare(*args):
        made.append(args)
        return lambda *tensors: launched.append(tensors)

    monkeypatch.setattr(candidate._kernel, "prepare", prepare)
    for _ in range(3):
        candidate.launch()
    assert len(made) == 1 and len(launched) == 3
    assert [t is x for t, x in zip(launched[0], (q, q, q, q, bench.lse))] == [True] * 5


def test_every_schedule_is_tried_first_and_the_winner_is_found_again(choice, tmp_path, monkeypatch):
    """The plain schedule wins here against its prediction: measuring decides."""
    last = choice.labels[-1]
    monkeypatch.setattr(
        standin, "time_of", lambda config: 50.0 if config[SCHEDULE] == last else 100.0
    )
    lane = standin.InProcessLane(standin.StandInSource())
    tried = [choice.default, *choice.starts]
    found, result = winners.tune_pattern(
        STRIDED, SMALL, GPU, budget=Budget(len(tried), 60), tuned=tmp_path, lane=lane
    )
    assert list(dict.fromkeys(lane.measured))[: len(tried)] == tried
    assert result.config == next(c for c in tried if c[SCHEDULE] == last)
    best = times_us(result.trials, choice.labels)
    assert best[last] == 50.0 and best[choice.labels[0]] == 100.0
    winners.keep(found, result, tmp_path)
    (row,) = store.read(tmp_path, GPU.name, "strided")
    assert row.config[SCHEDULE] == last
    again = store.lookup(STRIDED, SMALL, GPU, choice.template, choice.labels, root=tmp_path)
    assert again == (result.config, "exact GPU")
