"""Line charts as numbers: where lines, marks and ticks stand.  The page's template draws them as SVG.

So that a drawing takes the page's colours, light and dark, its font and its text size, and stays a few hundred bytes.  Where ticks
stand is left to matplotlib.  The vertical axis is logarithmic: twice as fast and half as fast are equally far from 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from sparsegen.report.history_page_series import Series
from sparsegen.report.history_page_studies import Convergence

WIDTH, HEIGHT = 300, 176
LEFT, RIGHT, TOP, BOTTOM = 46, 294, 10, 150  # the plot's edges
STYLES = 6  # colours and marks that the page's style sheet has


@dataclass(frozen=True)
class Tick:
    """``at`` along its axis; ``anchor`` of the text: start, middle or end."""

    at: float
    label: str
    anchor: str = "middle"


@dataclass(frozen=True)
class Mark:
    """One point, and what it says to whoever points at it."""

    x: float
    y: float
    words: str


@dataclass(frozen=True)
class Line:
    """``path``: an SVG path, empty for marks alone.  ``style`` counts colours and mark shapes from 0."""

    name: str
    style: int
    path: str
    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class Chart:
    """``description`` says in words what is to be seen; ``rule``: where a line of reference runs across."""

    title: str
    description: str
    lines: tuple[Line, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    rule: float | None = None


# One series to draw: its name, (x, y, words) of its points, and how they are joined: "line", "step", or "" for a
# cloud of points behind the others.
Drawn = tuple[str, Sequence[tuple[float, float, str]], str]


def speed_chart(series: Series) -> Chart:
    """Times as fast as each baseline, over time; 1 is the line of reference."""
    drawn: list[Drawn] = []
    for baseline in series.baselines:
        points = [
            (p.at, p.speedup, f"{day(p.at)}: {ratio(p.speedup)} {baseline}")
            for p in series.against(baseline)
        ]
        drawn.append((baseline, points, "line"))
    last = "; ".join(f"{name}: {ratio(points[-1][1])}" for name, points, _ in drawn)
    words = f"{series.pattern} on {series.gpu}, newest figures: {last}."
    return _chart("Times as fast as each baseline", words, drawn, ratio, 1.0)


def time_chart(series: Series) -> Chart:
    """Our own time over time: a slow-down shows here whatever the baselines did."""
    points = [(p.at, p.entry.median_us, f"{day(p.at)}: {duration(p.entry.median_us)}") for p in series.ours]  # fmt: skip
    words = (
        f"{series.pattern} on {series.gpu}: {duration(points[0][1])} at first, "
        f"{duration(points[-1][1])} now, {len(points)} measurements."
    )
    return _chart("Our time", words, [("sparsegen", points, "line")], duration)


def convergence_chart(study: Convergence) -> Chart | None:
    """Every measured trial, and the best so far; None where nothing was measured."""
    if not study.measured:
        return None
    every = [(float(n), us, f"trial {n}: {duration(us)}") for n, us in study.measured]
    best = [(float(n), us, f"best up to trial {n}: {duration(us)}") for n, us in study.best_so_far]
    words = (
        f"{len(every)} measured trials; the best so far falls from {duration(best[0][1])} "
        f"to {duration(best[-1][1])}."
    )
    drawn: list[Drawn] = [("best so far", best, "step"), ("a trial", every, "")]
    return _chart("Time by trial", words, drawn, duration, dated=False)


def duration(us: float) -> str:
    """Three figures of µs, ms or s."""
    for limit, unit, scale in ((1e3, "µs", 1.0), (1e6, "ms", 1e3)):
        if us < limit:
            return f"{_three(us / scale)} {unit}"
    return f"{_three(us / 1e6)} s"


def ratio(value: float) -> str:
    """``1.52×``."""
    return f"{_three(value)}×"


def day(at: float) -> str:
    """``2026-11-30 03:22`` in UTC, of seconds since 1970."""
    return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%d %H:%M")


def _three(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _chart(
    title: str,
    description: str,
    drawn: Sequence[Drawn],
    label: Callable[[float], str],
    reference: float | None = None,
    *,
    dated: bool = True,
) -> Chart:
    xs = [x for _, points, _ in drawn for x, _, _ in points]
    ys = [y for _, points, _ in drawn for _, y, _ in points] + [reference] * (reference is not None)
    x_range, y_range = _x_range(xs, dated), _y_range([y for y in ys if y is not None])

    def place(x: float, y: float) -> tuple[float, float]:
        return _x(x, x_range), _y(y, y_range)

    lines = []
    for index, (name, points, joined) in enumerate(drawn):
        at = [place(x, y) for x, y, _ in points]
        marks = tuple(Mark(*xy, words) for xy, (_, _, words) in zip(at, points) if joined != "step")
        style = index % STYLES if joined else STYLES - 1
        lines.append(Line(name, style, _path(at, joined), marks))
    return Chart(
        title,
        description,
        tuple(lines),
        _date_ticks(x_range, xs) if dated else _count_ticks(x_range),
        _y_ticks(y_range, label),
        None if reference is None else _y(reference, y_range),
    )


def _x(x: float, limits: tuple[float, float]) -> float:
    return round(LEFT + (RIGHT - LEFT) * (x - limits[0]) / (limits[1] - limits[0]), 1)


def _y(y: float, limits: tuple[float, float]) -> float:
    low, high = map(math.log, limits)
    return round(BOTTOM - (BOTTOM - TOP) * (math.log(y) - low) / (high - low), 1)


def _x_range(xs: Sequence[float], dated: bool) -> tuple[float, float]:
    """A little room on both sides; an hour, or one trial, where all stand at one place."""
    low, high = min(xs), max(xs)
    room = 0.05 * (high - low) or (3600.0 if dated else 1.0)
    return low - room, high + room


def _y_range(ys: Sequence[float]) -> tuple[float, float]:
    """A little room, and never less than 20 % in all, or noise would look like a change."""
    low, high = min(ys), max(ys)
    room = max((high / low) ** 0.08, math.sqrt(1.2 / min(high / low, 1.2)), 1.02)
    return low / room, high * room


def _path(at: Sequence[tuple[float, float]], joined: str) -> str:
    if not joined or len(at) < 2:
        return ""
    parts = [f"M{at[0][0]:g} {at[0][1]:g}"]
    for x, y in at[1:]:
        parts.append(f"H{x:g}V{y:g}" if joined == "step" else f"L{x:g} {y:g}")
    return "".join(parts)


def _y_ticks(limits: tuple[float, float], label: Callable[[float], str]) -> tuple[Tick, ...]:
    from matplotlib.ticker import LogLocator, MaxNLocator

    low, high = limits
    if high / low < 6:
        values = MaxNLocator(4, steps=(1, 2, 5, 10), min_n_ticks=3).tick_values(low, high)
    else:
        steps = (1.0, 2.0, 5.0) if high / low < 150 else (1.0, 3.0) if high / low < 3e3 else (1.0,)
        values = LogLocator(10, subs=steps).tick_values(low, high)
    inside = [float(v) for v in values if low <= v <= high]
    return tuple(Tick(_y(v, limits), _short(label(v)), "end") for v in inside)


def _short(label: str) -> str:
    """``1.50 ms`` as ``1.5 ms``: round numbers need no zeros."""
    number, mark, unit = (label[:-1], "×", "") if label.endswith("×") else label.partition(" ")
    return f"{float(number):g}{mark}{unit}"


def _count_ticks(limits: tuple[float, float]) -> tuple[Tick, ...]:
    from matplotlib.ticker import MaxNLocator

    values = MaxNLocator(5, integer=True).tick_values(*limits)
    return tuple(
        Tick(_x(v, limits), f"{v:.0f}") for v in map(float, values) if max(limits[0], 0) <= v <= limits[1]
    )  # fmt: skip


def _date_ticks(limits: tuple[float, float], xs: Sequence[float]) -> tuple[Tick, ...]:
    from matplotlib.dates import AutoDateLocator, num2date

    low, high = (datetime.fromtimestamp(t, timezone.utc) for t in limits)
    if len(set(xs)) == 1:
        return (Tick(_x(xs[0], limits), day(xs[0])),)
    locator = AutoDateLocator(tz=timezone.utc, minticks=2, maxticks=3)
    found = [num2date(v, timezone.utc).timestamp() for v in locator.tick_values(low, high)]
    inside = [t for t in found if limits[0] <= t <= limits[1]]
    hours = any(t % 86400 for t in inside)
    ticks = []
    for t in inside:
        x = _x(t, limits)
        anchor = "start" if x < LEFT + 30 else "end" if x > RIGHT - 30 else "middle"
        ticks.append(Tick(x, day(t)[5:] if hours else day(t)[:10], anchor))
    return tuple(ticks)
