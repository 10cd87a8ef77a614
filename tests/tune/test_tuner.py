"""A whole tuning on stand-ins: what is measured, what wins, what the result says."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from types import SimpleNamespace

import optuna
import pytest

from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.errors import TuneError
from sparsegen.tune.space import Space
from sparsegen.tune.tuner import Budget, full, recorded, tune
from tests.tune.standin import DEFAULT, KNOBS, InProcessLane, StandInSource, time_of

SPACE = Space(KNOBS)


def config(**values):
    return LaunchConfig.of({**DEFAULT.as_dict(), **values})


def run(source=None, trials=12, lane=None, **options):
    source = source or StandInSource()
    lane = lane or InProcessLane(source)
    return tune(source, budget=Budget(trials, 600), lane=lane, **options), lane


def test_the_baseline_is_measured_first_and_nothing_twice():
    result, lane = run(trials=30)
    assert lane.measured[0] == DEFAULT
    candidates = lane.measured[:-1]  # the last is the winner against the baseline
    assert lane.measured[-1] == result.config
    assert len(candidates) == len(set(candidates)) == 30 == result.complete
    assert result.time_us == time_of(result.config) < result.baseline_us == time_of(DEFAULT)
    assert result.how == "best of 30 trials" and "memory" in result.storage


def test_the_sampler_beats_chance():
    result, _ = run(trials=60)
    everything = sorted(map(time_of, SPACE.enumerate()))
    assert result.time_us <= everything[5]


def test_seeds_come_right_after_the_default():
    seed = config(block_m=256, stages=4)
    _, lane = run(trials=3, seeds=[seed, DEFAULT])
    assert lane.measured[:2] == [DEFAULT, seed]
    assert lane.measured[2] in SPACE.neighbours(seed)


def test_a_small_space_is_searched_to_the_end_and_then_it_stops():
    source = StandInSource(knobs=KNOBS[:2], default=Space(KNOBS[:2]).default)

    result, lane = run(source, trials=1000)
    assert result.complete == 12 == len(set(lane.measured))
    assert result.config.as_dict() == {"block_m": 128, "block_n": 128}


def test_forbidden_configurations_are_never_begun():
    forbidden = tuple(c for c in SPACE.enumerate() if c["warps"] == 8)
    result, lane = run(StandInSource(forbidden=forbidden), trials=25)
    assert result.complete == 25 and not set(forbidden) & set(lane.measured)
    assert len(result.trials) == 25


def test_the_incumbent_stays_unless_beaten_by_more_than_the_noise():
    result, _ = run(trials=40, lane=InProcessLane(StandInSource(), noise=0.9))
    assert result.config == DEFAULT
    assert result.how == "template default of 40 trials"
    assert result.time_us == result.baseline_us


def test_the_last_comparison_can_take_a_lucky_win_back():
    class Lucky(InProcessLane):
        def measure(self, config, incumbent, turns):
            self.noise = 0.9 if turns.give_up == float("inf") else 0.0
            return super().measure(config, incumbent, turns)

    result, _ = run(trials=20, lane=Lucky(StandInSource()))
    assert result.config == DEFAULT
    assert result.how == "template default: not beaten by more than the noise in 20 trials"


def test_wrong_results_are_failures_and_never_win():
    space = Space(KNOBS[:3])
    best = min(space.enumerate(), key=time_of)
    source = StandInSource(knobs=space.knobs, default=space.default, wrong=(best,))
    result, lane = run(source, trials=1000)
    assert best in lane.measured and result.config != best
    (failed,) = (t for t in result.trials if t.state == "failed")
    assert (failed.config, failed.kind, failed.time_us) == (best, "wrong result", None)
    assert result.complete == space.cardinality - 1


def test_a_default_that_is_wrong_leaves_the_first_right_one_as_incumbent():
    result, _ = run(StandInSource(wrong=(DEFAULT,)), trials=10)
    assert result.baseline_us is None and result.time_us == time_of(result.config)


def test_nothing_right_gives_the_default_and_no_exception(tmp_path):
    source = StandInSource(knobs=KNOBS[:2], wrong=tuple(Space(KNOBS[:2]).enumerate()))
    source = replace(source, default=Space(KNOBS[:2]).default)
    result, _ = run(source, trials=5, storage=tmp_path / "s.db")
    assert (result.config, result.time_us) == (source.default, None)
    assert result.how == "template default: no trial is complete"
    assert recorded(source, tmp_path / "s.db") == result


def test_a_slower_day_does_not_bend_the_comparison(tmp_path):
    storage, source = tmp_path / "s.db", StandInSource()
    run(source, trials=10, storage=storage)
    result, lane = run(source, trials=25, storage=storage, lane=InProcessLane(source, slow=2.0))
    times = {t.config: t.time_us for t in result.trials if t.state == "complete"}
    assert len(times) == 25
    assert all(times[c] == pytest.approx(time_of(c)) for c in times)


def test_going_on_measures_nothing_twice(tmp_path):
    storage, source = tmp_path / "s.db", StandInSource()
    first, before = run(source, trials=10, storage=storage, seed=5)
    again, idle = run(source, trials=10, storage=storage, seed=5)
    assert idle.measured == [] and again.trials == first.trials
    assert (again.config, again.time_us) == (first.config, first.time_us)
    more, after = run(source, trials=20, storage=storage, seed=5)
    assert more.complete == 20
    assert not set(before.measured[:-1]) & set(after.measured[:-1])
    assert recorded(source, storage).config == more.config


def test_the_budget_in_seconds_ends_a_tuning(monkeypatch):
    """By a clock that goes on by a quarter of a second a trial."""
    now = [0.0]

    class Slow(InProcessLane):
        def measure(self, *asked):
            now[0] += 0.25
            return super().measure(*asked)

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=None)
    monkeypatch.setattr("sparsegen.tune.tuner.time", clock)
    source = StandInSource()
    lane = Slow(source)
    result = tune(source, budget=full(2.0), lane=lane)
    assert (
        result.complete == 8 and len(lane.measured) == 8 + 1
    )  # and the winner against the baseline
    assert all(t.state != "running" for t in result.trials)


def test_what_is_pending_at_the_end_is_given_back(tmp_path):
    class Never(InProcessLane):
        def compiled(self, timeout_s):
            raise KeyboardInterrupt

    source = StandInSource()
    with pytest.raises(KeyboardInterrupt):
        run(source, trials=3, storage=tmp_path / "s.db", lane=Never(source))
    assert [t.kind for t in recorded(source, tmp_path / "s.db").trials if t.state == "failed"] == [
        "stopped"
    ]
    result, lane = run(source, trials=3, storage=tmp_path / "s.db")
    assert result.complete == 3 and DEFAULT in lane.measured


def test_progress_is_told_and_optuna_keeps_quiet(capfd):
    told = []
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.DEBUG)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run(trials=8, progress=told.append)
        assert optuna.logging.get_verbosity() == optuna.logging.DEBUG
    finally:
        optuna.logging.set_verbosity(before)
    assert [p.done for p in told] == list(range(9)) and {p.total for p in told} == {8}
    assert told[0].best_us is None and told[-1].best_us <= told[1].best_us == told[1].baseline_us
    out, err = capfd.readouterr()
    assert out == "" and err == ""


def test_tuning_inside_a_graph_capture_is_one_clear_error(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    lane = InProcessLane(StandInSource())
    with pytest.raises(TuneError, match="cannot tune while a CUDA graph is being captured"):
        run(lane=lane)
    assert lane.measured == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert run(trials=2)[0].complete == 2


def test_the_whole_way_through_real_processes(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    faults = (
        ("gpu", config(block_m=128), "segfault"),
        ("compile", config(block_n=128), "kill"),
        ("gpu", config(block_n=32), "raise"),
    )
    source = StandInSource(faults=faults, log=str(tmp_path / "log"))
    result = tune(source, budget=Budget(12, 600), storage=tmp_path / "s.db", jobs=2)
    assert result.complete == 12 and result.time_us < result.baseline_us
    kinds = {t.config: t.kind for t in result.trials if t.state == "failed"}
    assert kinds == {
        config(block_m=128): "crash",
        config(block_n=128): "compile crash",
        config(block_n=32): "error",
    }
    measured = [t for t in result.trials if t.state == "complete"]
    assert all(t.details["compiled"]["general"]["registers"] == 128 for t in measured)
    begun = (tmp_path / "log").read_text().splitlines()
    assert len(begun) == 12 + 2 + 1  # complete, failed on the GPU, the winner once more at the end
