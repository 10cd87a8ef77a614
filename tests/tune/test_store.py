"""tuned/: the look-up steps, and rows that are stale, wrong or refused."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace

import pytest

from sparsegen.errors import ArtifactError
from sparsegen.tune import store
from tests.tune.standin import DEFAULT
from tests.tune.tuned import (
    A100,
    GPU,
    H100,
    PATTERN,
    PROBLEM,
    TEMPLATE,
    StandInPattern,
    StandInTemplate,
    config,
    row,
)


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(store, "_SAID", set())


def find(
    root,
    problem=PROBLEM,
    gpu=GPU,
    pattern=PATTERN,
    template=TEMPLATE,
    length=4096,
    labels=("runs",),
    refused=None,
):
    given = pattern, problem, gpu, template, labels
    return store.lookup(*given, lengths=(length, length), root=root, refused=refused)


def wrong_rows(root, patterns, templates, labels=None):
    return store.errors(root, "nvidia-h200", patterns, templates, labels or no_analysis)


def no_analysis(row):
    raise AssertionError(f"analysed for a row without a schedule: {row}")


def test_the_steps_in_their_order(tmp_path, caplog):
    caplog.set_level(logging.INFO, "sparsegen.tune")
    assert find(tmp_path) == (DEFAULT, "template default")
    store.write(tmp_path, A100, row(warps=8, stages=1))
    assert find(tmp_path) == (DEFAULT, "template default")  # another architecture
    store.write(tmp_path, H100, row(8192, warps=8, stages=4))
    step = "same architecture (nvidia-h100: q_len 8192, kv_len 8192)"
    assert find(tmp_path) == (config(warps=8, stages=4), step)
    store.write(tmp_path, GPU, row(32768, warps=8))
    store.write(tmp_path, GPU, row(8192, warps=8, stages=3))
    step = "exact GPU, nearest problem (q_len 8192, kv_len 8192)"
    assert find(tmp_path) == (config(warps=8, stages=3), step)
    store.write(tmp_path, GPU, row(4096, block_m=128))
    assert find(tmp_path) == (config(block_m=128), "exact GPU")
    find(tmp_path)
    said = [record.getMessage() for record in caplog.records]
    assert said == [  # each step once, however often it is taken
        "causal on nvidia-h200: configuration by template default",
        "causal on nvidia-h200: configuration by same architecture (nvidia-h100: q_len 8192, kv_len 8192)",
        "causal on nvidia-h200: configuration by exact GPU, nearest problem (q_len 8192, kv_len 8192)",
        "causal on nvidia-h200: configuration by exact GPU",
    ]


@pytest.mark.parametrize(
    "change", [{"head_dim": 64}, {"value_dim": 64}, {"dtype": "float16"}], ids=str
)
def test_rows_of_other_dims_or_dtype_are_never_used(tmp_path, change):
    store.write(tmp_path, GPU, row(warps=8))
    assert find(tmp_path, problem=replace(PROBLEM, **change))[1] == "template default"
    assert find(tmp_path, problem=replace(PROBLEM, heads=8))[1].startswith("exact GPU, nearest")


def test_nearest_is_by_length_then_by_group(tmp_path):
    grouped = replace(PROBLEM, kv_heads=4)
    store.write(tmp_path, GPU, row(4096, problem=grouped, warps=8))
    store.write(tmp_path, GPU, row(8192, stages=3))
    assert find(tmp_path, length=4096)[1] == "exact GPU, nearest problem (kv_heads 4)"
    assert find(tmp_path, length=8000)[0] == config(stages=3)


def test_a_renamed_pattern_is_found_by_its_digest(tmp_path):
    store.write(tmp_path, GPU, row(warps=8))
    renamed = StandInPattern("autoregressive")
    assert find(tmp_path, pattern=renamed) == (config(warps=8), "exact GPU")
    assert find(tmp_path, pattern=StandInPattern("other", "c" * 64))[1] == "template default"


def test_another_version_is_a_warning_for_users_and_an_error_for_check(tmp_path):
    store.write(tmp_path, GPU, row(warps=8))
    pattern, template = StandInPattern(value="c" * 64), StandInTemplate(digest="d" * 64)
    with pytest.warns(store.StaleTuningWarning) as caught:
        assert find(tmp_path, pattern=pattern, template=template)[0] == config(warps=8)
    assert [str(w.message) for w in caught] == [
        "tuned row of causal on nvidia-h200: pattern causal was aaaaaaaaaaaa when measured, now it is "
        "cccccccccccc; its configuration is used all the same",
        "tuned row of causal on nvidia-h200: template forward was bbbbbbbbbbbb when measured, now it is "
        "dddddddddddd; its configuration is used all the same",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        find(tmp_path, pattern=pattern, template=template)  # told once
    path = tmp_path / "nvidia-h200" / "causal.json"
    now = {"causal": "c" * 64}, {"forward": "b" * 64}
    assert wrong_rows(tmp_path, *now) == [
        f"{path}: pattern causal was aaaaaaaaaaaa when measured, now it is cccccccccccc"
    ]
    assert wrong_rows(tmp_path, {"causal": "a" * 64}, {"forward": "b" * 64}) == []
    assert wrong_rows(tmp_path, {}, {}) == [f"{path}: there is no pattern named causal"]


def test_what_the_template_forbids_here_is_passed_over(tmp_path):
    store.write(tmp_path, GPU, row(warps=8))
    store.write(tmp_path, GPU, row(8192, stages=3))
    template = StandInTemplate(forbidden=(config(warps=8),))
    assert find(tmp_path, template=template)[0] == config(stages=3)


def test_a_row_with_unknown_knobs_is_passed_over_with_a_warning(tmp_path):
    store.write(tmp_path, GPU, replace(row(), config={"colour": 1}))
    with pytest.warns(store.StaleTuningWarning, match="unknown knob colour.*it is not used"):
        assert find(tmp_path) == (DEFAULT, "template default")


def scheduled(length, schedule, **values):
    made = row(length, **values)
    return replace(made, config={**made.config, "SCHEDULE": schedule})


def test_a_row_gives_its_schedule_where_there_is_a_choice(tmp_path):
    labels = ("runs + mod 8", "runs")
    start = config(SCHEDULE="runs + mod 8")
    assert find(tmp_path, labels=labels) == (start, "template default")
    store.write(tmp_path, GPU, scheduled(4096, "runs", warps=8))
    assert find(tmp_path, labels=labels) == (config(warps=8, SCHEDULE="runs"), "exact GPU")
    # nothing to choose any more, and it is this one: the knob is gone
    assert find(tmp_path, labels=("runs",)) == (config(warps=8), "exact GPU")
    # measured when there was nothing to choose: for the best prediction
    store.write(tmp_path, GPU, row(4096, warps=8))
    assert find(tmp_path, labels=labels)[0] == config(warps=8, SCHEDULE="runs + mod 8")


def test_a_row_whose_schedule_is_no_candidate_is_passed_over_with_a_warning(tmp_path):
    store.write(tmp_path, GPU, scheduled(4096, "mod 16", warps=8))
    store.write(tmp_path, GPU, scheduled(8192, "runs", stages=3))
    labels = ("runs + mod 8", "runs")
    with pytest.warns(store.StaleTuningWarning) as caught:
        assert find(tmp_path, labels=labels)[0] == config(stages=3, SCHEDULE="runs")
    said = (
        "the row of causal at 4096x4096: schedule 'mod 16' is no candidate; "
        "there are 'runs + mod 8', 'runs'"
    )
    assert [str(w.message) for w in caught] == [
        f"tuned row of causal on nvidia-h200 is not used: {said}"
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        find(tmp_path, labels=labels)  # told once
    path = tmp_path / "nvidia-h200" / "causal.json"
    now = {"causal": "a" * 64}, {"forward": "b" * 64}
    assert wrong_rows(tmp_path, *now, lambda row: labels) == [f"{path}: {said}"]
    assert wrong_rows(tmp_path, *now, lambda row: (*labels, "mod 16")) == []


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"rows": [{}]}', '{"rows": [1]}', '{"rows": null}'], ids=str
)
def test_a_damaged_file_is_one_error_with_its_name(tmp_path, text):
    path = store.write(tmp_path, GPU, row())
    path.write_text(text)
    with pytest.raises(ArtifactError, match="causal.json is damaged .*restore or delete it"):
        find(tmp_path)
    (message,) = wrong_rows(tmp_path, {}, {})
    assert "is damaged" in message


def test_what_the_compiler_refuses_is_passed_over_and_named(tmp_path):
    store.write(tmp_path, GPU, row(warps=8))
    store.write(tmp_path, GPU, row(8192, stages=3))
    store.write(tmp_path, H100, row(block_m=128))
    refused = {("runs", config(warps=8)): "it spills"}
    nearest = "exact GPU, nearest problem (q_len 8192, kv_len 8192)"
    first = "exact GPU, row of causal at 4096x4096"
    with pytest.warns(store.RefusedTuningWarning) as caught:
        found = find(tmp_path, refused=refused)
    assert found == (config(stages=3), f"{nearest}; passed over: {first}: it spills")
    said = [f"tuned row of causal on nvidia-h200 is not used ({first}): it spills"]
    assert [str(w.message) for w in caught] == said
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find(tmp_path, refused=refused) == found  # told once
    refused |= {("runs", config(stages=3)): "crash", ("runs", config(block_m=128)): "a fault"}
    refused |= {("runs", DEFAULT): "never asked"}  # nothing comes after it
    with pytest.warns(store.RefusedTuningWarning) as caught:
        found, step = find(tmp_path, refused=refused)
    other = "same architecture (nvidia-h100: same problem), row of causal at 4096x4096"
    assert found == DEFAULT and len(caught) == 2
    assert step == (
        f"template default; passed over: {first}: it spills; "
        f"passed over: {nearest}, row of causal at 8192x8192: crash; passed over: {other}: a fault"
    )


def test_a_refused_schedule_is_not_the_others(tmp_path):
    """The same launch of another kernel text may compile."""
    labels = ("runs + mod 8", "runs")
    store.write(tmp_path, GPU, scheduled(4096, "runs", warps=8))
    refused = {("runs + mod 8", config(warps=8)): "it spills"}
    assert find(tmp_path, labels=labels, refused=refused)[1] == "exact GPU"
    with pytest.warns(store.RefusedTuningWarning):
        step = find(tmp_path, labels=labels, refused={("runs", config(warps=8)): "no"})[1]
    assert step.startswith("template default; passed over: exact GPU, row of causal at 4096x4096")
