"""Where the marks, lines and ticks of the page's charts stand."""

from __future__ import annotations

import pytest

from sparsegen.report import history_page_charts as charts
from sparsegen.report.history_page_series import Point, Series, seconds
from sparsegen.report.history_page_studies import Convergence
from tests.report.reading import entry


def series(*points: tuple[str, float, str, float]) -> Series:
    """Of (date, our µs, baseline, its µs)."""
    made = [
        Point(seconds(d), entry(date=d, median_us=us, baseline=b, baseline_us=base))
        for d, us, b, base in points
    ]
    return Series("nvidia-h200", "causal", "B1", tuple(sorted(made, key=lambda p: p.at)))


THREE = series(
    ("2026-01-01T00:00:00+00:00", 200.0, "flex", 200.0),
    ("2026-02-01T00:00:00+00:00", 100.0, "flex", 200.0),
    ("2026-02-01T00:00:00+00:00", 100.0, "sdpa", 50.0),
)


def test_speed_is_a_line_a_baseline_over_its_dates() -> None:
    chart = charts.speed_chart(THREE)
    flex, sdpa = chart.lines
    assert (flex.name, sdpa.name) == ("flex", "sdpa") and flex.style != sdpa.style
    assert len(flex.marks) == 2 and len(sdpa.marks) == 1 and sdpa.path == ""
    first, last = flex.marks
    assert first.x < last.x == sdpa.marks[0].x
    assert first.y == chart.rule, "1 times as fast lies on the line of reference"
    assert last.y < chart.rule < sdpa.marks[0].y, "upwards is faster"
    assert chart.rule - last.y == pytest.approx(sdpa.marks[0].y - chart.rule, abs=0.11)
    assert flex.path == f"M{first.x:g} {first.y:g}L{last.x:g} {last.y:g}"
    assert last.words == "2026-02-01 00:00: 2.00× flex"
    assert "flex: 2.00×; sdpa: 0.50×" in chart.description


def test_our_time_is_one_point_a_measurement() -> None:
    chart = charts.time_chart(THREE)
    (line,) = chart.lines
    assert len(line.marks) == 2 and line.marks[0].y < line.marks[1].y, "downwards is less time"
    assert "200 µs at first, 100 µs now, 2 measurements" in chart.description


def test_every_mark_and_tick_lies_in_the_plot() -> None:
    single = series(("2026-01-01T00:00:00+00:00", 5.0, "flex", 5e5))
    decades = series(*((f"20{y}-06-01T00:00:00", 10.0 * y, "flex", 2000.0) for y in range(20, 60)))
    for one in (THREE, single, decades):
        for chart in (charts.speed_chart(one), charts.time_chart(one)):
            marks = [m for line in chart.lines for m in line.marks]
            assert all(charts.LEFT <= m.x <= charts.RIGHT for m in marks)
            assert all(charts.TOP <= m.y <= charts.BOTTOM for m in marks)
            assert 1 <= len(chart.x_ticks) <= 4 and 2 <= len(chart.y_ticks) <= 8
            assert all(charts.LEFT <= t.at <= charts.RIGHT for t in chart.x_ticks)
            assert all(charts.TOP <= t.at <= charts.BOTTOM for t in chart.y_ticks)


def test_ticks_name_dates() -> None:
    days = [t.label for t in charts.time_chart(THREE).x_ticks]
    assert days == ["2026-01-01", "2026-01-15", "2026-02-01"]
    hours = series(*((f"2026-01-01T0{h}:00:00", 9.0, "flex", 9.0) for h in (1, 7)))
    labels = [t.label for t in charts.time_chart(hours).x_ticks]
    assert labels and all(label.startswith("01-01 0") and label.endswith(":00") for label in labels)


def test_noise_does_not_fill_the_chart() -> None:
    still = series(
        ("2026-01-01T00:00:00", 100.0, "flex", 9.0), ("2026-02-01T00:00:00", 100.5, "flex", 9.0)
    )
    a, b = charts.time_chart(still).lines[0].marks
    assert abs(a.y - b.y) < 0.05 * (charts.BOTTOM - charts.TOP)


def test_convergence_is_a_falling_step_line() -> None:
    study = Convergence("s", "f", ((0, 9.0), (2, 12.0), (5, 6.0)), (("complete", 3),), "")
    chart = charts.convergence_chart(study)
    assert chart is not None
    best, every = chart.lines
    assert best.marks == () and len(every.marks) == 3 and every.path == ""
    x0, x2, x5 = (m.x for m in every.marks)
    y0, y5 = every.marks[0].y, every.marks[2].y
    assert best.path == f"M{x0:g} {y0:g}H{x2:g}V{y0:g}H{x5:g}V{y5:g}"
    assert charts.convergence_chart(Convergence("s", "f", (), (("hang", 1),), "")) is None


def test_numbers_for_people() -> None:
    said = [charts.duration(us) for us in (0.5, 49.7, 999.4, 1553.0, 96602.8, 2.5e6)]
    assert said == ["0.50 µs", "49.7 µs", "999 µs", "1.55 ms", "96.6 ms", "2.50 s"]
    assert [charts.ratio(x) for x in (0.98, 12.34, 312.0)] == ["0.98×", "12.3×", "312×"]
