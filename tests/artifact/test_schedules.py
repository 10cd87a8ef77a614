"""The schedule in an artifact: which one is built, what the manifest says of it, and that a reader finds it again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sparsegen.artifact import fleet
from sparsegen.artifact.archive import export_archive, import_archive
from sparsegen.artifact.build import ask, ensure, load
from sparsegen.artifact.compiler import Compiler
from sparsegen.artifact.key import heads_and_masks, installed
from sparsegen.artifact.rendering import PATTERN, SCHEDULE, outline_of, schedule_of
from sparsegen.artifact.store import Store
from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.errors import ArtifactError
from sparsegen.launch import Binary, Outcome
from sparsegen.report.built import Built, among
from sparsegen.runtime.api import open_kernel
from sparsegen.schedule.dump import dump
from sparsegen.spec.gpu import find_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from sparsegen.spec.shipped import shipped_patterns
from sparsegen.tune import store as tuned
from sparsegen.tune import winners
from sparsegen.tune.schedules import SCHEDULE as KNOB
from sparsegen.tune.schedules import candidates_of, labels_of
from sparsegen.tune.study import Trial
from sparsegen.tune.target import KernelTarget
from sparsegen.tune.tuner import TuneResult

pytestmark = pytest.mark.skipif(installed("triton") is None, reason="needs triton")

H200 = find_gpu("h200")
STRIDED = Pattern.from_dict(
    {
        "name": "strided",
        "mask": {"all_of": ["causal", {"any_of": [{"window": {"size": 64}}, {"strided": {"stride": 64}}]}]},
        "problem": {"head_dim": 16, "heads": 1, "lengths": [2048]},
    }
)  # fmt: skip
SAME = Pattern.from_dict(
    {"name": "same", "mask": {"predicate": "0 <= q - k and (q - k < 64 or (q - k) % 64 == 0)"}}
)


@pytest.fixture(scope="module", autouse=True)
def choice():
    """Several schedules for one pattern, however near the cost model thinks they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sparsegen.schedule.search.WITHIN", 1e9)
        candidates_of.cache_clear()
        yield labels_of(candidates_of(STRIDED, STRIDED.problem))
    candidates_of.cache_clear()


@pytest.fixture(scope="module")
def rows(tmp_path_factory, choice):
    """A ``tuned/`` in which the second schedule won."""
    root = tmp_path_factory.mktemp("tuned")
    target = KernelTarget.of(STRIDED, STRIDED.problem, H200)
    config = LaunchConfig.of(target.starts[0].as_dict() | {"TMA": False})
    assert config[KNOB] == choice[1]
    winners.keep(target, TuneResult(config, 90.0, 100.0, 0.01, (), "best", "memory"), root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuned, "data_dir", lambda name: root)
        yield root


@pytest.fixture(scope="module")
def built(tmp_path_factory, rows):
    """The one real compilation of this file."""
    return ensure(STRIDED, None, H200, store=Store(tmp_path_factory.mktemp("store")))


def test_the_tuned_row_decides_and_the_manifest_says_so(built, choice):
    decision = built.manifest.decision
    assert (decision.label, decision.chosen_by, decision.tune) == (choice[1], "exact GPU", "off")
    assert KNOB not in decision.config.as_dict() and decision.config["TMA"] is False
    listed = candidates_of(STRIDED, STRIDED.problem)
    assert [c.label for c in decision.candidates] == [c.schedule.label for c in listed]
    assert [c.predicted_ms for c in decision.candidates] == [
        round(1e3 * c.cost.seconds, 4) for c in listed
    ]
    assert {c.measured_us for c in decision.candidates} == {None}
    assert (
        decision.predicted_for == "2048 queries, 2048 keys, 1 head of 16 in bfloat16, tiles 128x64"
    )
    wanted = dump(schedule_of(STRIDED, STRIDED.problem, choice[1]))
    assert built.read(SCHEDULE).decode() == wanted


def test_it_holds_a_binary_of_every_launch_of_every_variant(built):
    source = outline_of(STRIDED, STRIDED.problem, built)
    for variant in built.manifest.decision.variants:
        binaries = [n for n in variant.files if n.endswith(".cubin")]
        assert len(binaries) == len(source.grids)
        assert len({Path(n).parent for n in binaries}) == len(binaries)
        assert set(variant.files) <= set(built.files)


def test_what_check_and_the_archive_see(built, tmp_path):
    store = Store(built.path.parents[1])
    assert fleet.check(["h200"], [STRIDED], store=store).results[0].state == "ok"
    export_archive(tmp_path / "a.tar.gz", [built])
    there = Store(tmp_path / "there")
    assert len(import_archive(tmp_path / "a.tar.gz", there).added) == 1
    copy = load(STRIDED, None, H200, store=there)
    assert set(copy.files) == set(built.files)
    binary = max(n for n in copy.files if n.endswith(".cubin"))
    copy.files[binary].unlink()
    (result,) = fleet.check(["h200"], [STRIDED], store=there).results
    assert result.state == "damaged" and f"{binary} is missing" in result.detail


def test_it_is_outdated_when_the_row_is_gone(built, monkeypatch, tmp_path):
    """Then the predicted best counts."""
    monkeypatch.setattr(tuned, "data_dir", lambda name: tmp_path)
    store = Store(built.path.parents[1])
    (result,) = fleet.check(["h200"], [STRIDED], store=store).results
    assert result.state == "outdated" and "another schedule" in result.detail


def test_a_reader_finds_the_schedule_again(built, choice):
    kernel = open_kernel(STRIDED, STRIDED.problem, built)
    assert kernel.source.text.encode() == built.read("kernel.py")
    special = kernel.source.hopper
    assert (special is None) == ("hopper.py" not in built.manifest.files)
    assert special is None or special.text.encode() == built.read("hopper.py")
    assert kernel.config == built.manifest.decision.config
    other = schedule_of(STRIDED, STRIDED.problem, choice[0])
    assert dump(other) != built.read(SCHEDULE).decode()


def test_lengths_and_spelling_of_the_reader_do_not_matter(built):
    """Neither is in the key, and both change which candidates there are and what they are predicted to cost."""
    for pattern in (STRIDED, SAME):
        for length in (300, 100_000):
            problem = replace(STRIDED.problem, lengths=((length, length),))
            found = load(pattern, problem, H200, store=Store(built.path.parents[1]))
            assert found.path == built.path
            assert open_kernel(pattern, problem, found).source.digest


def test_another_label_another_text_and_another_pattern_are_refused(built, choice, monkeypatch):
    def says(decision):
        return replace(built, manifest=replace(built.manifest, decision=decision))

    decision = built.manifest.decision
    with pytest.raises(ArtifactError, match="schedule.txt is not what this version renders"):
        outline_of(STRIDED, STRIDED.problem, says(replace(decision, label=choice[0])))
    with pytest.raises(ArtifactError, match="no candidate schedule 'mod 7'.*build it again"):
        outline_of(STRIDED, STRIDED.problem, says(replace(decision, label="mod 7")))
    mask = {
        "all_of": ["causal", {"any_of": [{"window": {"size": 65}}, {"strided": {"stride": 64}}]}]
    }
    other = Pattern.from_dict({"name": "strided", "mask": mask}).to_yaml().encode()
    read = type(built).read
    monkeypatch.setattr(type(built), "read", lambda a, n: other if n == PATTERN else read(a, n))
    with pytest.raises(ArtifactError, match="pattern.yaml is not of the masks of its key"):
        outline_of(STRIDED, STRIDED.problem, built)


def test_a_study_decides_the_schedule(tmp_path, monkeypatch, choice, rows):
    """Seeds: the row of tuned/, then each other schedule.  The manifest keeps what was measured of each."""
    asked = {}

    def tune(target, **options):
        asked.update(options, target=target)
        configs = [target.default, *target.starts]
        trials = tuple(
            Trial(i, c, "complete", time_us=100.0 - i) for i, c in enumerate([*configs, configs[0]])
        )
        return TuneResult(target.starts[-1], 98.0, 100.0, 0.01, trials, "best of 4 trials", "here")

    def compile_many(jobs, workers=None):
        return [
            Outcome(j, Binary(j.variant, "e", j.directory, (), 64, 0, 1024), "", 1) for j in jobs
        ]

    monkeypatch.setattr("sparsegen.tune.tuner.tune", tune)
    monkeypatch.setattr("sparsegen.launch.compile_many", compile_many)
    builder = Compiler(storage=tmp_path / "s.sqlite")
    request = ask(STRIDED, None, H200, "quick")
    decision = builder.build(request, tmp_path, None)
    plain = [c[KNOB] for c in asked["seeds"] if c["KERNEL"] == "portable"]
    assert plain == [choice[1], *choice[1:]]
    assert (decision.label, decision.tune, decision.time_us) == (choice[-1], "quick", 98.0)
    times = {c.label: c.measured_us for c in decision.candidates}
    tried = [asked["target"].default, *asked["target"].starts]
    for label in choice[:2]:  # the default comes once more, at the end
        last = max(i for i, c in enumerate([*tried, tried[0]]) if c[KNOB] == label)
        assert times[label] == 100.0 - last
    assert "; portable " in decision.measured and "; hopper " in decision.measured
    wanted = dump(schedule_of(STRIDED, STRIDED.problem, choice[-1]))
    assert (tmp_path / SCHEDULE).read_text() == wanted


def test_every_candidate_has_the_masks_of_the_key():
    for name, path in shipped_patterns().items():
        pattern = Pattern.from_yaml(path)
        if pattern.position_only:
            found = candidates_of(pattern, pattern.problem or Problem())
            assert len({heads_and_masks(c.schedule) for c in found}) == 1, name


def test_the_line_for_people(built, choice):
    decision = built.manifest.decision
    first, second, *_ = decision.candidates
    measured = replace(second, predicted_ms=0.2104, measured_us=233.0)
    said = among(second.label, [replace(first, predicted_ms=2.099), measured])
    assert said == f"{second.label} (predicted 0.21 ms, measured 0.233 ms; {first.label} 2.1 ms)"
    shown = Built(built, here=False)
    assert f"\nschedule       {choice[1]} (predicted " in shown.text()
    assert shown.as_dict()["schedule"] == choice[1]
