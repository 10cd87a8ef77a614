"""The roof's arithmetic, by hand."""

from __future__ import annotations

import pytest

from sparsegen.bench import roofline
from sparsegen.bench.interleaved import in_turns
from sparsegen.bench.roofline import Roof, Work
from sparsegen.spec.problem import Problem
from sparsegen.tune.measure import Turns
from tests.bench.standin import StandInDevice

ROOF = Roof(matmul=800e12, copy=4e12)


def test_the_roof_bends_at_the_ridge() -> None:
    assert ROOF.ridge == 200
    assert ROOF.attainable(100) == 400e12
    assert ROOF.attainable(200) == ROOF.attainable(5000) == 800e12


def test_work_of_a_problem() -> None:
    """Causal, 4 queries, 4 keys, 2 heads over 1: 20 cells; rows of q, out and LSE, rows of k and v."""
    problem = Problem(head_dim=64, value_dim=32, heads=2, kv_heads=1, batch=3, lengths=((4, 4),))
    work = Work.of(problem, 3 * 2 * 10)
    assert work.flop == 60 * (2 * 64 + 2 * 32)
    assert work.bytes == 3 * (2 * 4 * (2 * 64 + 2 * 32 + 4) + 4 * (2 * 64 + 2 * 32))
    assert work.intensity == work.flop / work.bytes
    wide = Work.of(Problem(head_dim=64, heads=1, dtype="float32", lengths=((1, 1),)), 1)
    assert wide.bytes == 4 * (64 * 4) + 4


@pytest.mark.parametrize(
    ("work", "floor", "tflops", "gbs"),
    [
        (Work(1, 8 * 10**11, 4 * 10**8), 1000.0, 400.0, 200.0),  # the product is the limit
        (Work(1, 8 * 10**9, 4 * 10**9), 1000.0, 4.0, 2000.0),  # the copy is
    ],
)
def test_floor_and_rates_at_two_milliseconds(
    work: Work, floor: float, tflops: float, gbs: float
) -> None:
    assert work.floor_us(ROOF) == pytest.approx(floor)
    assert work.tflops(2000.0) == pytest.approx(tflops)
    assert work.gbs(2000.0) == pytest.approx(gbs)
    attained = ROOF.attainable(work.intensity) / 1e12
    assert work.tflops(2000.0) / attained == pytest.approx(work.floor_us(ROOF) / 2000.0)


def test_rates_from_times() -> None:
    roof = roofline.roof_of({"matmul": 1000.0, "copy": 500.0})
    assert roof.matmul == 2 * 8192**3 * 1000
    assert roof.copy == 2 * 2**30 * 2000


def test_the_roof_is_measured_with_nothing_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 µs for the product, 200 for the copy, of sizes that a CPU can do."""
    monkeypatch.setattr(roofline, "MATRIX", 64)
    monkeypatch.setattr(roofline, "COPIED", 1 << 12)
    device = StandInDevice()
    roof = roofline.measure(device, Turns(rounds=2))
    assert roof == Roof(2e6 * 64**3 / 100, 2e6 * 4096 / 200)
    assert len(device.bare.known) == 2 and not device.clock.known


def test_median_and_spread_of_turns() -> None:
    """Rounds of a: 10, 30, 20, of b always 5; both are called in turns."""

    class Clock:
        def __init__(self) -> None:
            self.order: list[str] = []

        def times_us(self, launch: object, warm_up_ms: float, measured_ms: float) -> list[float]:
            assert (warm_up_ms, measured_ms) == (6.0, 30.0)
            launch()  # type: ignore[operator]
            seen = self.order.count("a")
            middle = [10.0, 30.0, 20.0][seen - 1] if self.order[-1] == "a" else 5.0
            return [middle, 0.0, 99.0]

    clock = Clock()
    launches = {n: lambda n=n: clock.order.append(n) for n in "ab"}
    found = in_turns(launches, clock, Turns(rounds=3), sustained=False)
    assert clock.order == ["a", "b"] * 3
    assert (found["a"].us, found["a"].spread_us) == (20.0, 20.0)
    assert (found["b"].us, found["b"].spread_us) == (5.0, 0.0)
