"""``warm`` and ``check`` over several patterns and GPU types."""

from __future__ import annotations

import pytest

from sparsegen.artifact import fleet
from sparsegen.artifact.store import CacheWarning, Store
from sparsegen.errors import InputError
from sparsegen.spec.pattern import Pattern
from tests.artifact.standin import KEY, StandinBuilder

NAMES = ("alpha", "beta", "documents", "gamma")
PATTERNS = [
    Pattern.from_dict({"name": name, "mask": {"window": {"size": 10 + i}}})
    for i, name in enumerate(NAMES)
]


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "cache")


def states(report):
    return {(r.gpu, r.pattern): r.state for r in report.results}


def warm(store, builder, gpus=("h200",), patterns=PATTERNS, **options):
    return fleet.warm(gpus, patterns, store=store, builder=builder, **options)


def check(store, builder, gpus=("h200",), patterns=PATTERNS):
    return fleet.check(gpus, patterns, store=store, builder=builder)


@pytest.mark.parametrize("jobs", [1, 4])
def test_warm_builds_all_and_the_second_run_is_all_hits(store, jobs):
    builder, seen = StandinBuilder(unsupported=["documents"]), []
    first = warm(store, builder, ("h200", "a100"), jobs=jobs, progress=lambda *s: seen.append(s))
    assert first.counts() == {"built": 6, "unsupported": 2} and first.ok
    assert [(r.gpu, r.pattern) for r in first.results] == [
        (g, n) for g in ("nvidia-h200", "nvidia-a100") for n in NAMES
    ], "in the order asked, whichever finished first"
    assert [s[:2] for s in seen] == [(i, 8) for i in range(1, 9)]
    second = warm(store, builder, ("h200", "a100"), jobs=jobs)
    assert second.counts() == {"hit": 6, "unsupported": 2}
    assert len(builder.built) == 6


def test_one_failure_does_not_stop_the_others(store):
    report = warm(store, StandinBuilder(failing=["beta"], unsupported=["documents"]))
    assert not report.ok
    assert states(report)[("nvidia-h200", "beta")] == "failed"
    assert report.counts() == {"built": 2, "unsupported": 1, "failed": 1}
    assert "nvidia-h200 beta: failed (the assembler refused it)" in str(report)
    assert "documents: unsupported (documents needs run-time data)" in str(report)
    healed = warm(store, StandinBuilder(unsupported=["documents"]))
    assert healed.counts() == {"hit": 2, "built": 1, "unsupported": 1}


def test_a_broken_pattern_file_is_named(store, tmp_path):
    (tmp_path / "odd.yaml").write_text("mask: {window: {size: -1}}\n")
    for run in (warm, check):
        report = run(store, StandinBuilder(), patterns=[tmp_path / "odd.yaml"])
        assert [r.state for r in report.results] == ["failed"]
        assert "odd.yaml:1:" in report.results[0].detail


def test_an_alias_is_the_same_gpu(store):
    report = warm(store, StandinBuilder(), ("h200", "nvidia-h200"), patterns=PATTERNS[:1])
    assert len(report.results) == 1
    again = warm(store, StandinBuilder(), patterns=[PATTERNS[0], PATTERNS[0]])
    assert len(again.results) == 1, "a pattern named twice is one"
    with pytest.raises(InputError, match="nvidia-h200"):
        warm(store, StandinBuilder(), ("h2000",))


def test_check_proves_a_warm_store_and_builds_nothing(store):
    builder = StandinBuilder(unsupported=["documents"])
    missing = check(store, builder)
    assert missing.counts() == {"unsupported": 1, "missing": 3} and not missing.ok
    assert not store.root.exists() and builder.built == []
    warm(store, builder)
    built = list(builder.built)
    report = check(store, builder)
    assert report.counts() == {"ok": 3, "unsupported": 1} and report.ok
    assert builder.built == built


def test_check_says_which_field_differs(store):
    builder = StandinBuilder()
    warm(store, builder, patterns=PATTERNS[:2])
    builder.triton = "3.12.0"
    for result in check(store, builder, patterns=PATTERNS[:2]).results:
        assert result.state == "missing"
        assert f"{result.pattern}-nvidia-h200-" in result.detail, "the nearest is the pattern's own"
        assert f"triton: asked 3.12.0, stored {KEY.triton}" in result.detail


def test_check_names_damage_and_leaves_it(store):
    builder = StandinBuilder()
    path = warm(store, builder, patterns=PATTERNS[:2]).results[0].path
    (path / "kernel.py").write_text("import os\n")
    report = check(store, builder, patterns=PATTERNS[:2])
    assert states(report) == {("nvidia-h200", "alpha"): "damaged", ("nvidia-h200", "beta"): "ok"}
    assert "kernel.py is damaged" in report.results[0].detail
    assert path.exists()
    assert warm(store, builder, patterns=PATTERNS[:2]).counts() == {"hit": 1, "built": 1}
    assert check(store, builder, patterns=PATTERNS[:2]).ok


def test_check_tells_outdated(store):
    builder = StandinBuilder()
    warm(store, builder, patterns=PATTERNS[:1])
    builder.outdated = True
    report = check(store, builder, patterns=PATTERNS[:1])
    assert [r.state for r in report.results] == ["outdated"] and not report.ok


def test_a_store_that_cannot_be_written_is_a_failure(tmp_path):
    """What goes to a private folder is gone when the command ends: that is not a warm cache."""
    (tmp_path / "file").write_text("")
    store, builder = Store(tmp_path / "file" / "x"), StandinBuilder()
    with pytest.warns(CacheWarning):
        report = warm(store, builder, patterns=PATTERNS[:1])
    assert [r.state for r in report.results] == ["failed"] and builder.built == []
    assert report.results[0].detail == f"{store.root} cannot be written"


def test_an_unexpected_error_is_raised_not_hidden(store):
    class Broken(StandinBuilder):
        def build(self, request, directory, progress):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        warm(store, Broken())
