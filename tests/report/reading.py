"""An HTML page read by a parser, and small inputs for the history page."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

from sparsegen.tune import history

VOID = {"meta", "link", "img", "br", "input", "hr"}
ADDRESSES = ("src", "href", "srcset", "poster", "data", "action", "xlink:href", "style")


@dataclass
class Element:
    """A tag with its attributes, its text (that of all inside it) and the tags around it, outermost first."""

    tag: str
    attributes: dict[str, str]
    around: tuple[str, ...]
    text: str = ""


@dataclass
class Read(HTMLParser):
    """Every element in document order; ``faults``: tags that do not close what was opened."""

    elements: list[Element] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._open: list[Element] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        around = tuple(e.tag for e in self._open)
        element = Element(tag, {n: v or "" for n, v in attrs}, around)
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open[-1].tag != tag:
            self.faults.append(f"</{tag}> at {self.getpos()} in {self._open[-1:]}")
            return
        self._open.pop()

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data

    def all(self, tag: str) -> list[Element]:
        return [e for e in self.elements if e.tag == tag]


def read(text: str) -> Read:
    page = Read()
    page.feed(text)
    page.close()
    page.faults += [f"<{e.tag}> is not closed" for e in page._open]
    return page


def entry(**values: object) -> history.Entry:
    """A line of history."""
    fields = {
        "date": "2026-11-30T03:22:12+00:00",
        "commit": "0.1.0",
        "gpu": "nvidia-h200",
        "driver": "580.1",
        "torch": "2.11.0",
        "triton": "3.6.0",
        "pattern": "causal",
        "problem": "B1 H8:8 D128:128 bfloat16 4096x4096",
        "config": "forward: BLOCK_M=64",
        "median_us": 100.0,
        "spread_us": 1.0,
        "baseline": "flex",
        "baseline_us": 150.0,
    }
    return history.Entry(**{**fields, **values})  # type: ignore[arg-type]


def write_history(folder: Path, *entries: history.Entry) -> Path:
    """``folder`` as a ``tuned/`` that holds these lines alone."""
    history.append(folder / "history.csv", entries)
    return folder
