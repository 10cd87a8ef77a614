"""Results as PNG: visible operations against the measured roof, and times beside the peers'."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from sparsegen.bench.results import OURS, Measured, Results
from sparsegen.errors import InputError
from sparsegen.report import files

# Told apart by people with the common colour-vision deficiencies; ours is the first.
_COLOURS = ("#d55e00", "#0072b2", "#56b4e9", "#009e73", "#cc79a7", "#e69f00", "#777777", "#000000")
_MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")


def save_png(results: Results, path: Path) -> None:
    """Two panels: achieved TF/s over operations a byte with the roof, and µs per contender, a group a case.

    Raises:
        InputError: nothing was measured, or the file cannot be written.
    """
    if not results.cases:
        raise InputError(f"{path}: nothing was measured, so there is nothing to draw")
    drawn = io.BytesIO()
    draw(results).savefig(drawn, format="png")
    files.write(path, drawn.getvalue())


def draw(results: Results) -> Any:
    """The figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = contender_names(results)
    style = {n: (_COLOURS[i % 8], _MARKS[i % 8]) for i, n in enumerate(names)}
    height = max(4.8, 0.16 * sum(len(c.rows) + 1 for c in results.cases) + 1.5)
    figure = Figure(figsize=(13, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _roofline(left, results, style)
    _times(right, results, style)
    figure.suptitle(f"{results.gpu}, {results.date[:10]}: {results.protocol}", fontsize=9)
    return figure


def contender_names(results: Results) -> list[str]:
    """Everyone who was timed, ourselves first, then in the order of appearance."""
    seen = dict.fromkeys(r.contender for c in results.cases for r in c.rows)
    return [OURS, *(n for n in seen if n != OURS)]


def _roofline(axes: Any, results: Results, style: dict[str, tuple[str, str]]) -> None:
    roof = results.roof
    at = [c.work.intensity for c in results.cases]
    low, high = min([*at, roof.ridge]) / 2, max([*at, roof.ridge]) * 2
    points = [low, roof.ridge, high]
    roof_line = [roof.attainable(x) / 1e12 for x in points]
    axes.plot(points, roof_line, color="black", linewidth=1.2, label="measured roof")
    for name, (colour, mark) in style.items():
        found = [(c.work.intensity, c.work.tflops(r.us)) for c in results.cases for r in c.rows if r.contender == name]  # fmt: skip
        axes.plot(*zip(*found), mark, color=colour, markersize=5, linestyle="none", label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    _plain_numbers(axes.xaxis)
    _plain_numbers(axes.yaxis)
    axes.set_xlabel("visible operations a byte of q, k, v, out and LSE")
    axes.set_ylabel("TF/s of visible operations")
    said = f"{roof.matmul / 1e12:.0f} TF/s, {roof.copy / 1e9:,.0f} GB/s"
    axes.set_title(f"roofline: {said}, both measured in this run", fontsize=10)
    axes.grid(True, which="both", linewidth=0.3)
    axes.legend(fontsize=8)


def _times(axes: Any, results: Results, style: dict[str, tuple[str, str]]) -> None:
    place, ticks, words = 0, [], []
    for one in results.cases:
        first = place
        for row in one.rows:
            colour, mark = style[row.contender]
            half = row.spread_us / 2
            axes.errorbar(row.us, place, xerr=half, fmt=mark, color=colour, markersize=5)
            place += 1
        ticks.append((first + place - 1) / 2)
        words.append(_label(one))
        place += 1
    axes.set_yticks(ticks, words, fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    _plain_numbers(axes.xaxis)
    axes.set_xlabel("µs, median of the rounds; a line through a mark is the spread")
    axes.set_title("times (marks as on the left)", fontsize=10)
    axes.grid(True, axis="x", which="both", linewidth=0.3)


def _plain_numbers(axis: Any) -> None:
    """1,000 and not 10³, and the steps between only where there are few others."""
    from matplotlib.ticker import LogFormatter

    class Plain(LogFormatter):  # type: ignore[misc]
        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:,g}" if super().__call__(x, pos) else ""

    axis.set_major_formatter(Plain())
    axis.set_minor_formatter(Plain())


def _label(one: Measured) -> str:
    size = str(one.q_len) if one.q_len == one.kv_len else f"{one.q_len}x{one.kv_len}"
    return f"{one.pattern}\n{size}"
