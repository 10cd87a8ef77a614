"""The page in a real browser: Chromium, headless, driven by Playwright.  Skipped by name where either is not installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sparsegen.report.history_page import Page, gather, render
from tests.report.reading import entry, write_history

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# As root, and with nothing that a browser does on its own: it must not ask the network for anything.
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
SCHEMES, WIDTHS = ("light", "dark"), (1280, 390)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Playwright's own Chromium, else one of the system."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        own = started.chromium.executable_path
        found = own if Path(own).exists() else next(filter(None, map(shutil.which, NAMES)), None)
        if found is None:
            pytest.skip("no Chromium is installed")
        opened = started.chromium.launch(executable_path=found, args=FLAGS.split())
        yield opened
        opened.close()


@dataclass
class Visit:
    """A page that was opened, what its console said and what it asked for."""

    page: Any
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)


def visit(browser: Any, file: Path, width: int = 1280, scheme: str = "light", **more: Any) -> Visit:
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, **more
    )
    seen = Visit(context.new_page())
    seen.page.on("console", lambda m: seen.said.append(m.text))
    seen.page.on("pageerror", lambda e: seen.said.append(str(e)))
    seen.page.on("request", lambda r: seen.asked.append(r.url))
    seen.page.goto(file.as_uri(), wait_until="load")
    return seen


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_it_is_whole(browser: Any, shipped_page: Page, width: int, scheme: str) -> None:
    seen = visit(browser, shipped_page.path, width, scheme)
    page = seen.page
    images = page.evaluate("[...document.images].map(i => i.complete && i.naturalWidth > 0)")
    assert len(images) > 15 and all(images)
    for _ in range(2):  # as it comes, then with every table of figures opened
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert seen.said == []
    assert [a for a in seen.asked if not a.startswith("data:")] == [shipped_page.path.as_uri()]
    page.context.close()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_text_stands_out_from_its_ground(browser: Any, shipped_page: Page, scheme: str) -> None:
    """WCAG's contrast of 4.5 for every text, and that the two schemes differ."""
    page = visit(browser, shipped_page.path, scheme=scheme).page
    faint = page.evaluate(CONTRAST)
    assert faint == []
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 19, 24)"
    assert dark is (scheme == "dark")
    page.context.close()


CONTRAST = """() => {
  const rgb = (c) => (c.match(/[0-9.]+/g) || []).map(Number);
  const light = (c) => { const [r, g, b] = c.map((v) => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b; };
  const found = new Set();
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let n; (n = walk.nextNode()); ) {
    const e = n.parentElement;
    if (!n.data.trim() || e.closest("script,style,title,.skip") || !e.getClientRects().length) continue;
    const style = getComputedStyle(e);
    const ink = rgb(e.namespaceURI.endsWith("svg") ? style.fill : style.color).slice(0, 3);
    let under = e;
    while (under && !(rgb(getComputedStyle(under).backgroundColor)[3] !== 0)) under = under.parentElement;
    const [a, b] = [light(ink), light(rgb(getComputedStyle(under).backgroundColor))].sort((x, y) => y - x);
    if ((a + .05) / (b + .05) < 4.5) found.add(`${e.className} ${n.data.trim().slice(0, 30)} ${((a + .05) / (b + .05)).toFixed(2)}`);
  }
  return [...found];
}"""


def test_a_header_sorts_its_table(browser: Any, shipped_page: Page) -> None:
    page = visit(browser, shipped_page.path).page
    table = page.locator("table.sortable").first
    values = "t => [...t.tBodies[0].rows].map(r => Number(r.cells[1].dataset.value))"
    head = table.locator("thead th").nth(1)
    head.get_by_role("button").click()
    up = table.evaluate(values)
    assert head.get_attribute("aria-sort") == "ascending" and up == sorted(up) and up[0] < up[-1]
    head.get_by_role("button").press("Enter")
    assert table.evaluate(values) == up[::-1] and head.get_attribute("aria-sort") == "descending"
    page.context.close()


def test_without_scripts_it_says_the_same(browser: Any, shipped_page: Page) -> None:
    seen = visit(browser, shipped_page.path, java_script_enabled=False)
    assert seen.page.locator("thead button").count() == 0
    assert "winners" in seen.page.locator("caption").first.inner_text()
    seen.page.context.close()


def test_markup_from_a_file_does_nothing(browser: Any, tmp_path: Path) -> None:
    evil = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
    write_history(tmp_path, entry(pattern=evil, baseline=evil, problem=evil))
    file = tmp_path / "evil.html"
    file.write_text(render(gather({}, studies=tmp_path, tuned=tmp_path), []), encoding="utf-8")
    seen = visit(browser, file)
    assert seen.page.title() == "sparsegen: what was measured" and seen.said == []
    assert evil in seen.page.locator("article h3").first.inner_text()
    seen.page.context.close()


def test_the_policy_would_stop_a_script_that_slipped_in(
    browser: Any, shipped_page: Page, tmp_path: Path
) -> None:
    text = shipped_page.path.read_text(encoding="utf-8")
    file = tmp_path / "bad.html"
    added = "<script>document.title='taken'</script><img src='http://127.0.0.1:9/x.png'>"
    file.write_text(text.replace("</main>", added + "</main>"), encoding="utf-8")
    seen = visit(browser, file)
    assert seen.page.title() != "taken" and len(seen.said) == 2
    assert all("Content Security Policy" in line for line in seen.said)
    seen.page.context.close()
