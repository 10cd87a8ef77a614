"""Recordings and replays: what a killed run leaves, what is refused, and that a replay finds what is on record."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.errors import ArtifactError, ToolchainError, TuneError
from sparsegen.tune import recording
from sparsegen.tune.recording import Entry, Recorded, Recorder
from sparsegen.tune.replay import ReplayLane, ReplaySource, find
from sparsegen.tune.space import Space
from sparsegen.tune.store import Measured
from sparsegen.tune.tuner import Budget, tune
from tests.tune.recordings import origin, write_grids
from tests.tune.standin import DEFAULT, KNOBS, time_of

MEASURED = Measured(128, 128, 8, 8, 1, "bfloat16", 4096, 4096)
PROBLEM = Recorded("one", "causal", "0" * 64, MEASURED, KNOBS, DEFAULT, (), {"row_keys": 9.5})
OTHER = LaunchConfig.of({**DEFAULT.as_dict(), "warps": 8})


def entry(config=DEFAULT, us=5.0, **values):
    return Entry("one", config, us, (us, us), 0.01, **values)


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "r.jsonl"
    recorder = Recorder(path, origin())
    assert recorder.problem(PROBLEM) == {}
    wrong = Entry("one", OTHER, kind="wrong result", reason="max-abs error")
    recorder.trial(entry())
    recorder.trial(wrong)
    recorder.close()
    found = recording.read(path)
    assert found.origin == origin() and found.problems == {"one": PROBLEM}
    assert found.trials["one"] == {DEFAULT: entry(), OTHER: wrong}
    assert found.times("one") == {DEFAULT: 5.0}


@pytest.mark.parametrize("cut", [1, 7, 40])
def test_a_killed_run_leaves_a_cut_line_and_the_next_goes_on(tmp_path, cut):
    path = tmp_path / "r.jsonl"
    recorder = Recorder(path, origin())
    recorder.problem(PROBLEM)
    recorder.trial(entry())
    recorder.trial(entry(OTHER))
    recorder.close()
    path.write_bytes(path.read_bytes()[:-cut])
    assert set(recording.read(path).trials["one"]) == {DEFAULT}
    again = Recorder(path, origin())
    assert set(again.problem(PROBLEM)) == {DEFAULT}
    again.trial(entry(OTHER, 7.0))
    again.close()
    assert recording.read(path).times("one") == {DEFAULT: 5.0, OTHER: 7.0}


def test_cut_in_the_first_line_starts_anew(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text('{"format": "spar')
    Recorder(path, origin()).close()
    assert recording.read(path).origin == origin()


@pytest.mark.parametrize("name", ["gpu", "template_digest", "versions", "synthetic"])
def test_other_conditions_go_into_another_file(tmp_path, name):
    path = tmp_path / "r.jsonl"
    Recorder(path, origin()).close()
    other = {"versions": {"triton": "9"}, "synthetic": False}.get(name, "other")
    with pytest.raises(TuneError, match=f"was recorded with {name} .* record into another file"):
        Recorder(path, replace(origin(), **{name: other}))


def test_a_later_date_is_no_other_condition(tmp_path):
    path = tmp_path / "r.jsonl"
    Recorder(path, origin()).close()
    Recorder(path, replace(origin(), date="2027-01-01T00:00:00+00:00")).close()
    assert recording.read(path).origin.date == origin().date


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no first line"),
        ("{}\n", ":1: no line of a recording"),
        ('{"format": "sparsegen recording 9"}\n', ":1: no line of a recording"),
        ("not json\n", ":1: no line of a recording"),
        ("HEADER[1]\n", ":2: no line of a recording"),
        (
            'HEADER{"problem": "absent", "config": {}, "rounds_us": []}\n',
            ":2: no line of a recording",
        ),
    ],
)
def test_what_is_no_recording_is_one_sentence_with_the_line(tmp_path, text, words):
    path = tmp_path / "r.jsonl"
    Recorder(path, origin()).close()
    path.write_text(text.replace("HEADER", path.read_text()))
    with pytest.raises(ArtifactError) as caught:
        recording.read(path)
    assert words in str(caught.value) and str(path) in str(caught.value)


def test_a_file_that_is_not_there_or_never_ends(tmp_path, monkeypatch):
    with pytest.raises(ArtifactError, match="cannot read the recording .*absent: .*No such file"):
        recording.read(tmp_path / "absent")
    monkeypatch.setattr(recording, "MOST_BYTES", 1000)
    with pytest.raises(ArtifactError, match="recording /dev/zero: is longer than 1000 bytes"):
        recording.read(Path("/dev/zero"))


def replayed(tmp_path, **changes):
    path = write_grids(tmp_path / "g.jsonl", {"causal": 1})
    whole = recording.read(path)
    (name,) = whole.problems
    source = ReplaySource(whole.problems[name], whole.trials[name])
    return replace(source, **changes)


def test_a_replay_finds_the_best_on_record(tmp_path):
    source = replayed(tmp_path)
    lane = ReplayLane(source)
    result = tune(source, budget=Budget(1000, 600), seeds=source.starts, lane=lane)
    assert result.time_us == min(map(time_of, Space(KNOBS).enumerate()))
    assert result.complete == Space(KNOBS).cardinality
    assert source.key.startswith("replay ")


def test_a_replay_asks_only_for_what_is_on_record(tmp_path):
    source = replayed(tmp_path)
    some = dict(list(source.entries.items())[::3])
    kinds = ("spills", "compile error", "wrong result", "invalid")
    for config, kind in zip(list(some), kinds):
        some[config] = replace(some[config], time_us=None, kind=kind, reason="as recorded")
    source = replace(source, entries=some)
    result = tune(source, budget=Budget(1000, 600), lane=ReplayLane(source))
    assert result.complete == len(some) - len(kinds)
    assert {t.config for t in result.trials} <= set(some)
    found = {t.kind for t in result.trials if t.kind}
    assert found == {
        "spills",
        "compile error",
        "wrong result",
    }  # the invalid one is never asked for


def test_a_replay_compiles_and_measures_nothing(tmp_path):
    source = replayed(tmp_path)
    with pytest.raises(ToolchainError, match="compiles nothing"):
        source.compile(DEFAULT, tmp_path)
    with pytest.raises(ToolchainError, match="no GPU"):
        source.bench()


def test_a_problem_that_is_not_on_record_is_listed_against_what_is(tmp_path):
    whole = recording.read(write_grids(tmp_path / "g.jsonl", {"causal": 1}))
    with pytest.raises(TuneError, match="replay: bigbird at 4096x4096 .*there is causal"):
        find(whole, "bigbird", MEASURED)


def test_the_lines_are_json_for_anybody(tmp_path):
    path = write_grids(tmp_path / "g.jsonl", {"causal": 1})
    first, second, third, *_ = map(json.loads, path.read_text().splitlines())
    assert first["synthetic"] is True and first["format"] == recording.FORMAT
    assert second["knobs"][0]["name"] and third["time_us"] > 0
