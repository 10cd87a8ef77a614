"""``sparsegen report``: everything that was measured, as one static HTML page that needs nothing beside it.

Equal input gives an equal page: no clock, no machine, no random names in it.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsegen.paths import data_dir
from sparsegen.report import files
from sparsegen.report import history_page_charts as charts
from sparsegen.report.history_page_series import (
    Series,
    Standing,
    geometric_mean,
    read_series,
    standings,
)
from sparsegen.report.history_page_studies import Convergence, read_studies
from sparsegen.report.history_page_winners import Winner, winners

if TYPE_CHECKING:
    import jinja2

    from sparsegen.report.history_page_pictures import Picture
    from sparsegen.spec.pattern import Pattern

_HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Facts:
    """All that the page tells, read from ``tuned/``, its ``history.csv`` and studies."""

    winners: tuple[Winner, ...]
    series: tuple[Series, ...]
    studies: tuple[Convergence, ...]
    shipped: tuple[str, ...]  # names of the patterns that positions alone decide

    @property
    def standings(self) -> list[Standing]:
        """The newest figures against each baseline."""
        return standings(self.series)

    @property
    def summary(self) -> dict[str, Any]:
        """The figures at the top of the page."""
        dates = [p.entry.date for s in self.series for p in s.points]
        dates += [w.date for w in self.winners]
        measured = {w.pattern for w in self.winners} & set(self.shipped)
        return {
            "gpus": sorted({w.gpu for w in self.winners} | {s.gpu for s in self.series}),
            "winners": len(self.winners),
            "stale": sum(bool(w.stale) for w in self.winners),
            "patterns_measured": len(measured),
            "patterns_shipped": len(self.shipped),
            "mean_speedup": geometric_mean(w.speedup for w in self.winners),
            "history_lines": sum(len(s.points) for s in self.series),
            "first": min(dates, default=""),
            "last": max(dates, default=""),
            "studies": len(self.studies),
            "trials": sum(s.trials for s in self.studies),
        }

    def as_dict(self) -> dict[str, Any]:
        """The object of ``report --json``."""
        return {
            "summary": self.summary,
            "winners": [asdict(w) | {"speedup": w.speedup} for w in self.winners],
            "standings": [asdict(s) for s in self.standings],
            "series": [
                {
                    "gpu": s.gpu,
                    "pattern": s.pattern,
                    "problem": s.problem,
                    "points": [asdict(p.entry) | {"speedup": p.speedup} for p in s.points],
                }
                for s in self.series
            ],
            "studies": [asdict(s) | {"trials": s.trials, "near": s.near} for s in self.studies],
        }


@dataclass(frozen=True)
class Page:
    """What was read and where the page was written."""

    path: Path
    size_bytes: int
    facts: Facts

    def as_dict(self) -> dict[str, Any]:
        """The object of ``report --json``."""
        return {
            "page": str(self.path),
            "size_bytes": self.size_bytes,
            "figures": self.facts.as_dict(),
        }

    def text(self) -> str:
        """One paragraph for a person."""
        s = self.facts.summary
        stale = f", {s['stale']} of them stale" if s["stale"] else ""
        return (
            f"{self.path} ({self.size_bytes / 1024:.0f} KiB)\n"
            f"{s['winners']} winners{stale}, {s['patterns_measured']} of {s['patterns_shipped']} shipped patterns measured\n"
            f"{s['history_lines']} lines of history, {s['studies']} studies with {s['trials']} trials"
        )


def report(
    out: Path,
    *,
    studies: str | Path | None = None,
    tuned: Path | None = None,
    progress: Callable[[int, int, str], None] = lambda done, total, message: None,
) -> Page:
    """Read everything, write the page to ``out``.

    Args:
        studies: a folder of SQLite files, one file, or a database URL; default: those of the cache.
        tuned: the folder to read; default the one that comes with the package.
        progress: hears of steps done, steps in all, and one line about the newest; it takes seconds.

    Raises:
        ArtifactError: a file of ``tuned/`` is damaged.
        TuneError: a study cannot be read.
        InputError: ``studies`` names nothing, or ``out`` cannot be written.
    """
    from sparsegen.report.history_page_pictures import pictures

    files.check_writable(out)
    patterns = _patterns()
    steps = 1 + len(patterns)
    progress(0, steps, "tuned/ and studies")
    facts = gather(patterns, studies=studies, tuned=tuned)
    drawn: list[Picture] = []
    for name, one in zip(patterns, pictures(patterns)):
        drawn.append(one)
        progress(1 + len(drawn), steps, f"picture of {name}")
    page = render(facts, drawn).encode()
    files.write(out, page)
    return Page(out, len(page), facts)


def gather(
    patterns: Mapping[str, Pattern],
    *,
    studies: str | Path | None = None,
    tuned: Path | None = None,
) -> Facts:
    """Read ``tuned/``, the history and the studies; arguments and errors as for ``report``."""
    root = tuned or data_dir("tuned")
    return Facts(
        tuple(winners(root, patterns)),
        tuple(read_series(root / "history.csv")),
        tuple(read_studies(studies)),
        tuple(name for name, pattern in patterns.items() if pattern.position_only),
    )


def render(facts: Facts, drawn: Sequence[Picture]) -> str:
    """The page's text.  Whatever comes from files is escaped by the template's environment."""
    from sparsegen import __version__

    style, script = _part("css"), _part("js")
    return (
        _environment()
        .get_template("history_page.html.jinja")
        .render(
            version=__version__,
            summary=facts.summary,
            gpus=_by_gpu(facts),
            standings=facts.standings,
            series=[(s, charts.time_chart(s), charts.speed_chart(s)) for s in facts.series],
            studies=[(s, charts.convergence_chart(s)) for s in facts.studies],
            pictures=drawn,
            places=_places(p.pattern for p in drawn),
            knobs=_knobs(),
            style=style,
            script=script,
            policy=_policy(style, script),
        )
    )


def _patterns() -> dict[str, Pattern]:
    from sparsegen.spec.pattern import Pattern
    from sparsegen.spec.shipped import shipped_patterns

    return {name: Pattern.from_yaml(path) for name, path in shipped_patterns().items()}


def _by_gpu(facts: Facts) -> list[tuple[str, list[Winner]]]:
    names = dict.fromkeys(w.gpu for w in facts.winners)
    return [(name, [w for w in facts.winners if w.gpu == name]) for name in names]


def _places(names: Iterable[str]) -> dict[str, str]:
    """Name → id of its picture: names may hold what an id must not."""
    return {name: f"picture-{number}" for number, name in enumerate(names, 1)}


def _knobs() -> list[tuple[str, str, str]]:
    """(template, knob, what it does) of everything that may be tuned."""
    from sparsegen.codegen import load_template

    folders = sorted(p.name for p in data_dir("templates").iterdir() if p.is_dir())
    return [(name, k.name, k.summary) for name in folders for k in load_template(name).knobs]


def _part(kind: str) -> str:
    return (_HERE / f"history_page.{kind}").read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    """Nothing from outside, and no style or script but the page's own: even markup that slipped in could do nothing."""

    def digest(text: str) -> str:
        return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    return (
        f"default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"style-src 'sha256-{digest(style)}'; script-src 'sha256-{digest(script)}'"
    )


def _environment() -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"duration": charts.duration, "ratio": charts.ratio, "day": charts.day}
    environment.filters["date"] = _date
    environment.globals |= {"marks": MARKS, "plot": charts}
    return environment


# Mark shapes around 0,0, by a line's style: told apart without colours.
MARKS = (
    "M-3.6 0a3.6 3.6 0 1 0 7.2 0a3.6 3.6 0 1 0-7.2 0Z",
    "M-3.2-3.2H3.2V3.2H-3.2Z",
    "M0-4.2L4.2 3.4H-4.2Z",
    "M0-4.6L4.6 0L0 4.6L-4.6 0Z",
    "M-4.2-3.4H4.2L0 4.2Z",
    "M-1.4-4.2H1.4V-1.4H4.2V1.4H1.4V4.2H-1.4V1.4H-4.2V-1.4H-1.4Z",
)


def _date(text: str) -> str:
    """``2026-11-30 03:22``; what is no date stays as it is."""
    from sparsegen.report.history_page_series import seconds

    try:
        return charts.day(seconds(text))
    except ValueError:
        return text
