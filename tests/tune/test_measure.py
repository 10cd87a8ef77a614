"""Turns, noise band, and when a candidate wins."""

from __future__ import annotations

import itertools

import pytest

from sparsegen.errors import TuneError
from sparsegen.tune.measure import Measurement, Turns, measure


class ScriptedClock:
    """Gives out prepared times, and remembers who was timed when."""

    def __init__(self, **times):
        self.times = {name: itertools.cycle(values) for name, values in times.items()}
        self.order = []

    def times_us(self, launch, warm_up_ms, measured_ms):
        name = launch()
        self.order.append(name)
        return [next(self.times[name])] * 3


def run(candidate, incumbent, **turns):
    clock = ScriptedClock(c=candidate, i=incumbent)
    return measure(lambda: "c", lambda: "i", clock, Turns(**turns)), clock.order


def test_rounds_interleave_and_alternate():
    measured, order = run([90.0], [100.0], rounds=4)
    assert order == ["i", "c", "c", "i", "i", "c", "c", "i"]
    assert (measured.time_us, measured.incumbent_us, measured.noise) == (90.0, 100.0, 0.0)
    assert measured.beats


def test_a_gain_within_the_noise_is_no_win():
    noisy = [100.0, 104.0, 98.0, 103.0, 97.0]
    measured, _ = run([97.0], noisy)
    ratios = sorted(97.0 / t for t in noisy)
    assert measured.noise == pytest.approx(2 * 1.4826 * (ratios[2] - ratios[1]))
    assert 0.08 < measured.noise < 0.09 and not measured.beats
    assert run([88.0], noisy)[0].beats


def test_heat_that_slows_both_is_no_noise():
    """Both a third slower at the end: the ratio of every round says the same."""
    heat = [1.0, 1.1, 1.2, 1.3, 1.35]
    measured, _ = run([96.0 * h for h in heat], [100.0 * h for h in heat])
    assert measured.noise == pytest.approx(0.0) and measured.beats


def test_one_odd_round_is_no_noise():
    measured, _ = run([96.0, 96.0, 180.0, 96.0, 96.0], [100.0])
    assert measured.noise == 0.0 and measured.beats


def test_an_outlier_round_moves_no_median():
    measured, _ = run([90.0, 90.0, 500.0, 90.0, 90.0], [100.0])
    assert measured.time_us == 90.0


def test_a_much_slower_candidate_is_given_up_after_one_round():
    measured, order = run([200.0], [100.0])
    assert order == ["i", "c"] and not measured.beats
    assert len(run([200.0], [100.0], give_up=float("inf"))[1]) == 10


def test_the_same_launch_twice_beats_nothing():
    measured, _ = run([100.0], [100.0])
    assert not measured.beats


def test_round_trip_and_empty_clock():
    measured, _ = run([90.0], [100.0, 101.0])
    assert Measurement.of(measured.as_dict()) == measured

    class Empty:
        def times_us(self, *_):
            return []

    with pytest.raises(TuneError, match="timed no launch"):
        measure(lambda: None, lambda: None, Empty(), Turns())
