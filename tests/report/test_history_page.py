"""The page of ``sparsegen report``: structure, escaping, numbers, and what a broken or absent input does."""

from __future__ import annotations

import csv
import json
import re
import shutil
import sqlite3
from collections import Counter
from pathlib import Path

import pytest

from sparsegen.errors import ArtifactError, InputError, TuneError
from sparsegen.paths import data_dir
from sparsegen.report import history_page
from sparsegen.report.history_page import Page, gather, render, report
from sparsegen.report.history_page_charts import duration, ratio
from sparsegen.spec.pattern import Pattern
from sparsegen.tune import store
from tests.report import studies as made
from tests.report.reading import ADDRESSES, Read, entry, read, write_history

NOTHING: dict[str, Pattern] = {}
CAUSAL = {"causal": Pattern.from_yaml("causal")}


def page_of(
    tuned: Path, studies: Path | None = None, patterns: dict[str, Pattern] = NOTHING
) -> str:
    """The page of a folder, without pictures; studies only where they are given."""
    none = tuned / "no-studies"
    none.mkdir(exist_ok=True)
    return render(gather(patterns, studies=studies or none, tuned=tuned), [])


@pytest.fixture(scope="module")
def shipped(shipped_page: Page) -> Read:
    return read(shipped_page.path.read_text(encoding="utf-8"))


# --- structure ---


def test_tags_close_and_ids_are_unique(shipped: Read) -> None:
    assert shipped.faults == []
    ids = Counter(e.attributes["id"] for e in shipped.elements if "id" in e.attributes)
    assert [i for i, count in ids.items() if count > 1] == []
    named = [e.attributes[n] for e in shipped.elements for n in ("aria-labelledby",) if n in e.attributes]  # fmt: skip
    links = [a.attributes["href"] for a in shipped.all("a")]
    assert links and all(link.startswith("#") for link in links)
    assert {*named, *(link[1:] for link in links)} <= set(ids)


def test_it_can_be_read_aloud(shipped: Read) -> None:
    assert shipped.all("html")[0].attributes["lang"] == "en"
    assert len(shipped.all("title")) >= 1 and len(shipped.all("h1")) == 1
    levels = [int(e.tag[1]) for e in shipped.elements if re.fullmatch("h[1-6]", e.tag)]
    assert all(b <= a + 1 for a, b in zip(levels, levels[1:])), "no level of heading is left out"
    assert all(e.attributes.get("alt") for e in shipped.all("img"))
    drawings = [e for e in shipped.all("svg") if e.attributes.get("role") == "img"]
    assert drawings and all(len(e.attributes["aria-label"]) > 30 for e in drawings)
    others = [e for e in shipped.all("svg") if e.attributes.get("role") != "img"]
    assert all(e.attributes.get("aria-hidden") == "true" for e in others)
    tables, captions = shipped.all("table"), shipped.all("caption")
    assert len(tables) == len(captions) > 30 and all(c.text.strip() for c in captions)
    assert all(e.attributes.get("scope") in ("col", "row") for e in shipped.all("th"))


def test_nothing_is_fetched(shipped_page: Page, shipped: Read) -> None:
    for element in shipped.elements:
        for name in ADDRESSES:
            value = element.attributes.get(name, "data:")
            assert value.startswith(("data:", "#")), f"<{element.tag} {name}={value[:60]!r}>"
    text = shipped_page.path.read_text(encoding="utf-8")
    assert "http://" not in text and "https://" not in text
    assert "url(" not in text and "@import" not in text
    policy = next(e for e in shipped.all("meta") if "http-equiv" in e.attributes)
    assert policy.attributes["content"].startswith("default-src 'none'; img-src data:;")
    assert [e.tag for e in shipped.elements if e.tag in ("iframe", "object", "embed", "form")] == []


def test_size_is_bounded(shipped_page: Page) -> None:
    """About 100 KB, and 1.1 KB for each line of history (2026-12-01): a row of a table, a point of a curve."""
    size = shipped_page.path.stat().st_size
    lines = len((data_dir("tuned") / "history.csv").read_text(encoding="utf-8").splitlines())
    assert size == shipped_page.size_bytes < 120_000 + 1_200 * lines


def test_every_shipped_pattern_has_a_picture(shipped: Read) -> None:
    names = {p.stem for p in data_dir("patterns").glob("*.yaml")}
    cards = [e for e in shipped.all("article") if e.attributes.get("id", "").startswith("picture-")]
    images = shipped.all("img")
    assert len(cards) == len(images) == len(names)
    assert {
        n for n in names if any(f"Mask of {n}:" in i.attributes["alt"] for i in images)
    } == names
    assert all(i.attributes["src"].startswith("data:image/png;base64,iVBOR") for i in images)


def test_equal_input_gives_an_equal_page(shipped_page: Page, tmp_path: Path) -> None:
    again = report(tmp_path / "again.html", studies=shipped_page.path.parent / "studies")
    assert again.path.read_bytes() == shipped_page.path.read_bytes()


# --- numbers ---


def test_numbers_are_those_of_the_history(shipped_page: Page, shipped: Read) -> None:
    with (data_dir("tuned") / "history.csv").open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    points = [p for s in shipped_page.facts.as_dict()["series"] for p in s["points"]]
    assert len(points) == len(lines) == shipped_page.facts.summary["history_lines"]
    key = ("date", "pattern", "problem", "baseline", "config")
    wanted = {tuple(line[k] for k in key): line for line in lines}
    assert len(wanted) == len(lines)
    for point in points:
        line = wanted[tuple(point[k] for k in key)]
        assert (point["median_us"], point["baseline_us"]) == (
            float(line["median_us"]),
            float(line["baseline_us"]),
        )
        assert point["speedup"] == pytest.approx(
            float(line["baseline_us"]) / float(line["median_us"])
        )
    rows = Counter(" ".join(e.text.split()) for e in shipped.all("tr"))
    for line in lines:
        median, base = float(line["median_us"]), float(line["baseline_us"])
        start = f"{line['date'][:10]} {line['date'][11:16]}{duration(median)}"
        found = [r for r in rows if r.startswith(start) and ratio(base / median) in r]
        assert found, f"no row of the page says {start}"


def test_winners_are_those_of_tuned(shipped_page: Page, shipped: Read) -> None:
    root = data_dir("tuned")
    files = sorted(root.glob("*/*.json"))
    rows = [r for f in files for r in store.read(root, f.parent.name, f.stem)]
    told = {(w.pattern, w.template, w.problem): w for w in shipped_page.facts.winners}
    assert len(told) == len(rows) == shipped_page.facts.summary["winners"] > 0
    table = next(e for e in shipped.all("table") if "winner" in e.text)
    for row in rows:
        mine = [w for (name, template, _), w in told.items() if (name, template) == (row.pattern, row.template)]  # fmt: skip
        winner = next(w for w in mine if w.time_us == row.time_us)
        assert winner.speedup == row.baseline_us / row.time_us
        assert winner.kernel == row.config.get("KERNEL", "")
        assert f"{winner.problem.split()[-1]}" == f"{row.problem.q_len}x{row.problem.kv_len}"
        assert all(part in table.text for part in (row.pattern, duration(row.time_us), ratio(winner.speedup)))  # fmt: skip
    assert shipped_page.facts.summary["stale"] == sum(bool(w.stale) for w in told.values())


def test_standing_is_of_the_newest_line(tmp_path: Path) -> None:
    write_history(
        tmp_path,
        entry(date="2026-12-02T00:00:00+00:00", baseline_us=400.0),  # newest, though not last
        entry(date="2026-12-01T00:00:00+00:00", baseline_us=900.0),
        entry(pattern="other", baseline_us=100.0),
        entry(baseline="sdpa", baseline_us=50.0),
    )
    facts = gather(NOTHING, studies=tmp_path, tuned=tmp_path)
    found = {s.baseline: s for s in facts.standings}
    assert found["flex"].count == 2 and found["flex"].mean == pytest.approx(2.0)
    assert found["flex"].least == ("other", 1.0) and found["flex"].most == ("causal", 4.0)
    assert found["sdpa"].mean == 0.5
    assert facts.summary["last"] == "2026-12-02T00:00:00+00:00"


def test_a_stale_winner_says_why(tmp_path: Path) -> None:
    source = data_dir("tuned") / "nvidia-h200" / "causal.json"
    (tmp_path / "nvidia-h200").mkdir()
    text = source.read_text()
    (digest,) = (r["template_digest"] for r in json.loads(text)["rows"] if r["template"] == "forward")  # fmt: skip
    target = tmp_path / "nvidia-h200" / "causal.json"
    target.write_text(text.replace(digest, "0" * 64))
    table = next(
        e for e in read(page_of(tmp_path, patterns=CAUSAL)).all("table") if "winner" in e.text
    )
    assert "stale" in table.text and "template forward was 000000000000 when measured" in table.text
    target.write_text(text.replace(digest, _template_digest()))
    table = next(
        e for e in read(page_of(tmp_path, patterns=CAUSAL)).all("table") if "winner" in e.text
    )
    assert "stale" not in table.text and "current" in table.text
    gone = next(e for e in read(page_of(tmp_path)).all("table") if "winner" in e.text)
    assert "there is no shipped pattern named causal" in gone.text


def _template_digest() -> str:
    from sparsegen.codegen import load_template

    return load_template("forward").digest


# --- studies ---


def test_studies_are_drawn(shipped_page: Page, shipped: Read) -> None:
    by_name = {s.name: s for s in shipped_page.facts.studies}
    good, odd = by_name[made.GOOD], by_name[made.ODD]
    assert len(good.measured) == made.TRIALS and dict(good.outcomes) == {"complete": made.TRIALS}
    assert dict(odd.outcomes)["wrong result"] == 1
    best = [us for _, us in good.best_so_far]
    assert best == sorted(best, reverse=True) and best[-1] == min(us for _, us in good.measured)
    assert good.near is not None and 1 <= good.near <= made.TRIALS
    cards = [e for e in shipped.all("article") if "Within 3 % of the best" in e.text]
    assert len(cards) == 2 and made.GOOD in cards[1].text
    assert f"after {good.near} of {made.TRIALS} measured trials" in " ".join(cards[1].text.split())


def test_reading_a_study_leaves_it_alone(tmp_path: Path) -> None:
    folder = made.write_studies(tmp_path / "studies")
    file = folder / "nvidia-h200.sqlite"
    sqlite3.connect(file).execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    before = file.read_bytes()
    (
        folder / "nvidia-h200.sqlite.lock"
    ).unlink()  # the tuner's; whoever opens a study to write makes it
    holder = sqlite3.connect(file)  # somebody is writing
    holder.execute("BEGIN IMMEDIATE")
    facts = gather(NOTHING, studies=folder, tuned=tmp_path)
    holder.close()
    assert len(facts.studies) == 2 and file.read_bytes() == before
    assert not list(folder.glob("*.lock"))
    by_file = gather(NOTHING, studies=file, tuned=tmp_path)
    by_url = gather(NOTHING, studies=f"sqlite:///{file}", tuned=tmp_path)
    assert by_file == facts and [s.name for s in by_url.studies] == [s.name for s in facts.studies]


def test_the_studies_of_the_cache_are_the_default(cache: Path, tmp_path: Path) -> None:
    assert gather(NOTHING, tuned=tmp_path).studies == () and not cache.exists()
    made.write_studies(cache / "studies")
    assert len(gather(NOTHING, tuned=tmp_path).studies) == 2


def test_what_is_no_study_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere' is no folder, no SQLite file and no database"):
        gather(NOTHING, studies="nowhere", tuned=tmp_path)
    (tmp_path / "x.sqlite").write_text("plain words, and more of them than a header has")
    with pytest.raises(TuneError, match="cannot read the study .*x.sqlite"):
        gather(NOTHING, studies=tmp_path, tuned=tmp_path)
    (tmp_path / "x.sqlite").unlink()
    import optuna

    optuna.create_study(
        storage=f"sqlite:///{tmp_path / 'y.sqlite'}", study_name="two", directions=["minimize"] * 2
    )
    with pytest.raises(TuneError, match="'two' in y.sqlite has several objectives"):
        gather(NOTHING, studies=tmp_path, tuned=tmp_path)


# --- hostile, broken and absent input ---

EVIL = "<img src=x onerror=alert(1)>\"'&</script><script>alert(2)</script>"


def test_everything_from_files_is_escaped(tmp_path: Path) -> None:
    words = (
        "commit",
        "gpu",
        "driver",
        "torch",
        "triton",
        "pattern",
        "problem",
        "config",
        "baseline",
    )
    write_history(tmp_path, entry(**dict.fromkeys(words, EVIL)))
    text = (data_dir("tuned") / "nvidia-h200" / "causal.json").read_text()
    rows = json.loads(text)
    row = rows["rows"][0]
    row |= {"pattern": EVIL, "template": EVIL, "date": EVIL, "versions": {EVIL: EVIL}}
    row["config"] = {"KERNEL": EVIL, EVIL: EVIL, "SCHEDULE": EVIL}
    row["problem"]["dtype"] = EVIL
    (tmp_path / "nvidia-h200").mkdir()
    (tmp_path / "nvidia-h200" / "evil.json").write_text(json.dumps(rows))
    page = read(page_of(tmp_path, made.write_studies(tmp_path / "studies")))
    assert page.faults == [] and page.all("img") == []
    assert len(page.all("script")) == 1 and "alert" not in page.all("script")[0].text
    assert [e for e in page.elements if any(n.startswith("on") for n in e.attributes)] == []
    body = page.all("body")[0].text
    assert body.count(EVIL) > 15 and made.ODD in body
    assert any(EVIL in e.attributes.get("aria-label", "") for e in page.all("svg"))


def test_an_empty_folder_gives_a_page(tmp_path: Path) -> None:
    page = read(page_of(tmp_path))
    text = " ".join(page.all("body")[0].text.split())
    assert page.faults == [] and "Nothing has been measured yet" in text
    assert "No winner is kept yet" in text and "history.csv has no lines yet" in text
    assert "There are no studies here" in text
    missing = tmp_path / "missing"
    assert render(gather(NOTHING, studies=tmp_path, tuned=missing), []) == page_of(tmp_path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("2026,1", r"history.csv:3: the line has 2 fields; expected 13$"),
        (None, r"history.csv:3: median_us must be a number, got 'soon'$"),
    ],
)
def test_a_broken_line_is_one_sentence_with_its_place(
    tmp_path: Path, line: str | None, said: str
) -> None:
    path = write_history(tmp_path, entry()) / "history.csv"
    good = path.read_text().splitlines()[1]
    path.write_text(path.read_text() + (line or good.replace("100.0", "soon")) + "\n")
    with pytest.raises(ArtifactError, match=said) as raised:
        gather(NOTHING, studies=tmp_path, tuned=tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"date": "yesterday"}, "entry 1 .causal.: date must be ISO 8601, .*'yesterday'"),
        ({"median_us": 0.0}, "median_us must be a number above 0, got 0.0"),
        ({"baseline_us": float("nan")}, "baseline_us must be a number above 0, got nan"),
    ],
    ids=str,
)
def test_figures_that_are_none_are_named(tmp_path: Path, values: dict, said: str) -> None:
    write_history(tmp_path, entry(**values))
    with pytest.raises(ArtifactError, match=said):
        gather(NOTHING, studies=tmp_path, tuned=tmp_path)


def test_a_cut_file_and_other_encodings_are_named(tmp_path: Path) -> None:
    path = write_history(tmp_path, entry()) / "history.csv"
    whole = path.read_bytes()
    path.write_bytes(whole[:-2])
    with pytest.raises(ArtifactError, match="the last line is cut off"):
        gather(NOTHING, studies=tmp_path, tuned=tmp_path)
    path.write_bytes(whole + b"\xff\xfe\n")
    with pytest.raises(ArtifactError, match="not readable as CSV in UTF-8"):
        gather(NOTHING, studies=tmp_path, tuned=tmp_path)


def test_a_damaged_winner_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "nvidia-h200"
    shutil.copytree(data_dir("tuned") / "nvidia-h200", folder)
    (folder / "causal.json").write_text("{")
    with pytest.raises(ArtifactError, match="causal.json is damaged"):
        gather(NOTHING, studies=tmp_path, tuned=tmp_path)


def test_a_page_that_cannot_be_written_is_said_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_page, "gather", lambda *_, **__: pytest.fail("worked first"))
    with pytest.raises(InputError, match="gone.*page.html: there is no folder"):
        report(tmp_path / "gone" / "page.html")
