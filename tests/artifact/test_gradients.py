"""Artifacts of gradients: keys, what they hold, and what a reader refuses; cross-compiled, no GPU is needed."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest

from sparsegen.artifact import fleet
from sparsegen.artifact.archive import export_archive, import_archive
from sparsegen.artifact.build import ask, ensure, load
from sparsegen.artifact.compiler import Compiler
from sparsegen.artifact.gradient_texts import TRANSPOSED, schedules_of, sources_of
from sparsegen.artifact.gradients import GradientCompiler, _kernels, passes_of
from sparsegen.artifact.key import installed
from sparsegen.artifact.manifest import MANIFEST
from sparsegen.artifact.rendering import PATTERN, SCHEDULE
from sparsegen.artifact.store import Store
from sparsegen.codegen import load_template
from sparsegen.codegen.gradient_template import gradient_template
from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.errors import ArtifactError, CacheMiss, InputError, UnsupportedError
from sparsegen.launch import Binary, CompileError, Outcome
from sparsegen.paths import data_dir
from sparsegen.report.built import Built
from sparsegen.runtime.api import open_gradients
from sparsegen.schedule.dump import dump
from sparsegen.spec.gpu import find_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from sparsegen.tune import winners
from sparsegen.tune.gradient_target import GradientTarget
from sparsegen.tune.tuner import TuneResult
from tests.artifact.compilers import pretend
from tests.artifact.standin import StandinBuilder

H200, MI300X = find_gpu("h200"), find_gpu("mi300x")
DIMS = {"head_dim": 16, "heads": 2, "lengths": [512]}
MASK = {"all_of": ["causal", {"any_of": [{"window": {"size": 64}}, {"sink": {"tokens": 2}}]}]}
TINY = Pattern.from_dict({"name": "tiny", "mask": MASK, "problem": DIMS})
BOTH = Pattern.from_dict(
    {"name": "both", "mask": MASK, "problem": {**DIMS, "passes": ["forward", "backward"]}}
)
KERNELS = {"queries", "keys", "keys-DK", "keys-DV"}
needs_triton = pytest.mark.skipif(installed("triton") is None, reason="needs triton")


def key(pattern, problem=None, gpu=H200):
    return GradientCompiler().key(ask(pattern, problem, gpu))


# ---- passes ----


@pytest.mark.parametrize(
    ("asked", "named", "wanted"),
    [
        (None, ["forward"], ["forward"]),
        (None, ["forward", "backward"], ["forward", "backward"]),
        (None, ["decode", "backward"], ["forward", "backward"]),  # decoding is the forward kernel
        (["forward"], ["forward", "backward"], ["forward"]),
        (("backward",), ["forward"], ["forward", "backward"]),  # needs the forward one
        (["forward", "backward"], ["forward"], ["forward", "backward"]),
    ],
)
def test_passes(asked, named, wanted):
    assert list(passes_of(asked, Problem(passes=named))) == wanted


@pytest.mark.parametrize(
    ("asked", "odd"), [(["decode"], "decode"), (["forward", "back"], "back"), ("", "")]
)
def test_passes_that_do_not_exist(asked, odd):
    with pytest.raises(InputError) as error:
        passes_of(asked, Problem())
    assert str(error.value) == f"passes must be some of forward, backward, got {odd!r}"


# ---- keys ----


def test_the_key_is_that_of_the_forward_pass_but_for_the_template():
    mine, other = key(TINY), Compiler().key(ask(TINY, None, H200))
    assert [n for n, _, _ in mine.difference(other)] == ["template", "template_digest"]
    assert mine.template_digest == load_template("backward").digest
    assert key(BOTH).digest() == mine.digest()  # which passes were asked for is no part of it
    names = [n for n, _, _ in mine.difference(key(TINY, Problem(head_dim=32, heads=2)))]
    assert names == ["head_dim", "value_dim"]


def test_what_the_forward_pass_refuses_is_refused():
    with pytest.raises(UnsupportedError, match="documents is decided by run-time data"):
        key(Pattern.from_dict({"name": "p", "mask": {"all_of": ["causal", "documents"]}}))
    heads = Pattern.from_dict({"name": "h", "heads": [{"heads": [0], "mask": "causal"}]})
    with pytest.raises(InputError, match="has no rule"):
        key(heads, Problem(heads=2, kv_heads=2))


def test_what_is_current():
    request = ask(TINY, None, H200)
    label = schedules_of(TINY, request.problem).label
    builder = GradientCompiler()
    config = gradient_template("keys").default(request.problem, H200)
    other = LaunchConfig.of(config.as_dict() | {"BLOCK_M": 32})
    same = dict.fromkeys(KERNELS, config)
    cases = [
        (label, same, "off", True),
        (label, same | {"keys": other}, "off", False),
        (label, same | {"keys-DV": other}, "off", False),
        ("x", same, "off", False),
        (label, same | {"keys": other}, "quick", True),  # measured: newer than any row
    ]
    for label_, kernels, level, current in cases:
        decision = SimpleNamespace(label=label_, kernels=kernels, tune=level)
        artifact = SimpleNamespace(manifest=SimpleNamespace(decision=decision, files={}))
        assert builder.is_current(request, artifact) is current
        full = builder.is_current(replace(request, tune="full"), artifact)
        assert full is False  # tuned at a lower level


def tuned(tmp_path, monkeypatch, part, **change):
    """A row of ``tuned/`` for a part of TINY, and its configuration."""
    made = GradientTarget.for_part(TINY, TINY.problem, H200, part)
    config = LaunchConfig.of(made.default.as_dict() | change)
    assert made.invalid(config) is None
    result = TuneResult(config, 90.0, 100.0, 0.02, (), "best of 40 trials", "memory")
    winners.keep(made, result, tmp_path)
    real = data_dir
    monkeypatch.setattr(
        "sparsegen.tune.store.data_dir", lambda n: tmp_path if n == "tuned" else real(n)
    )
    return config


def test_every_kernel_has_the_winner_of_its_part(tmp_path, monkeypatch):
    queries = tuned(tmp_path, monkeypatch, "queries", BLOCK_M=32, num_warps=4)
    request, builder = ask(TINY, None, H200), GradientCompiler()
    chosen = builder._looked_up(request)
    assert (chosen["queries"].config, chosen["queries"].how) == (queries, "exact GPU")
    assert chosen["keys"].how == "template default"
    keys = tuned(tmp_path, monkeypatch, "keys", BLOCK_N=16)
    chosen = builder._looked_up(request)
    kernels = _kernels(chosen, request.problem, H200)
    assert kernels == {"queries": queries, "keys": keys, "keys-DK": keys, "keys-DV": keys}
    plain = gradient_template("keys").default(request.problem, H200)
    assert queries != plain != keys != queries

    def unfit(config, problem, gpu, outputs=None):
        return "too large" if (config, outputs) == (keys, ("DK",)) else None

    monkeypatch.setattr("sparsegen.codegen.backward.unfit", unfit)
    assert _kernels(chosen, request.problem, H200) == kernels | {"keys-DK": plain}


@needs_triton
def test_tuned_kernels_are_built_each_with_its_own(tmp_path, monkeypatch):
    pretend(monkeypatch)
    store, builder = Store(tmp_path / "cache"), GradientCompiler()
    first = ensure(TINY, None, H200, store=store, builder=builder)
    queries = tuned(tmp_path / "tuned", monkeypatch, "queries", BLOCK_M=32, num_warps=4)
    made = ensure(TINY, None, H200, store=store, builder=builder)
    assert made.manifest.decision != first.manifest.decision  # the older one is not current
    decision = made.manifest.decision
    assert decision.kernels["queries"] == decision.config == queries
    assert decision.kernels["keys"] == first.manifest.decision.kernels["keys"]
    assert decision.chosen_by == "queries: exact GPU; keys: template default"
    assert open_gradients(TINY, TINY.problem, made).configs == decision.kernels
    text = Built(made, here=False).text()
    assert f"configuration  queries: {queries}\n" in text and "configuration  keys-DK: " in text
    few = altered(made, tmp_path / "a", lambda d: replace(d, kernels={"queries": queries}))
    with pytest.raises(ArtifactError, match="its kernels are not those of this version"):
        sources_of(TINY, TINY.problem, few)


def test_a_tuning_of_both_kernels(tmp_path, monkeypatch):
    """Each part is tuned in the storage that is asked for, and the lower level of the two is what was reached."""
    asked, complete = [], []

    def tune_gradients(pattern, problem, gpu, part, **given):
        asked.append((part, given["storage"], given["budget"].trials))
        given["progress"](SimpleNamespace(done=1, total=40))
        made = GradientTarget.for_part(pattern, problem, gpu, part)
        trial = SimpleNamespace(state="complete", config=made.default, time_us=90.0)
        trials = (trial,) if part == "queries" or complete[0] else ()
        how = "best of 1 trials"
        return made, TuneResult(made.default, 90.0, 100.0, 0.02, trials, how, "study.sqlite")

    monkeypatch.setattr("sparsegen.tune.gradient_winners.tune_gradients", tune_gradients)
    monkeypatch.setattr("sparsegen.artifact.gradients.compiled", lambda *given: {})
    request, said = ask(TINY, None, H200, "quick"), []
    builder = GradientCompiler(storage="studies")
    for both, level in ((True, "quick"), (False, "off")):
        complete[:] = [both]
        decision = builder.build(request, tmp_path, lambda *line: said.append(line[2]))
        assert decision.tune == level
        assert (decision.time_us, decision.baseline_us) == (180.0, 200.0)
        assert decision.chosen_by == "study: best of 1 trials"
        assert decision.measured.startswith("queries: q_len, kv_len (512, 512); study in study.sq")
    assert asked[:2] == [("queries", "studies", 40), ("keys", "studies", 40)]
    assert said[0].startswith("gradients of queries: ")


def test_a_configuration_that_fits_nowhere_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("sparsegen.codegen.backward.unfit", lambda *given: "tiles take too much")
    with pytest.raises(
        UnsupportedError, match="no configuration of the gradient kernels fits: tiles"
    ):
        ensure(TINY, None, H200, store=Store(tmp_path), builder=GradientCompiler())


# ---- what is built ----


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return Store(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def built(store):
    return ensure(TINY, None, H200, store=store, builder=GradientCompiler())


@needs_triton
def test_cross_compile_and_load(store, built):
    decision, both = built.manifest.decision, schedules_of(TINY, TINY.problem)
    assert {f"{name}.py" for name in KERNELS} | {SCHEDULE, TRANSPOSED, PATTERN} < set(built.files)
    assert {v.name for v in decision.variants} == {
        f"{name}/{variant}" for name in KERNELS for variant in ("fast", "general")
    }
    for variant in decision.variants:
        assert variant.registers and any(f.endswith(".cubin") for f in variant.files)
        assert all(f.startswith(f"{variant.name}/") for f in variant.files)
        assert "descriptors" not in variant.guard  # the default is portable
    assert built.read(SCHEDULE).decode() == dump(both.queries.schedule)
    assert built.read(TRANSPOSED).decode() == dump(both.keys.schedule)
    assert Pattern.from_yaml_text(built.read(PATTERN).decode()) == TINY
    assert decision.label == "dQ runs; dK, dV runs" and decision.chosen_by == "template default"
    assert decision.candidates[0].predicted_ms > 0 and decision.tune == "off"
    assert load(TINY, None, H200, store=store, builder=GradientCompiler()) == built
    assert ensure(TINY, None, H200, store=store, builder=GradientCompiler()) == built
    assert set(decision.kernels) == KERNELS and decision.kernels["queries"] == decision.config


@needs_triton
def test_binaries_of_another_maker(tmp_path, monkeypatch):
    """Real ones are in tests/launch/test_hip_artifacts.py."""
    jobs = pretend(monkeypatch)
    made = ensure(TINY, None, MI300X, store=Store(tmp_path), builder=GradientCompiler())
    assert made.key.backend == "hip" and {job.gpu for job in jobs} == {MI300X} and len(jobs) == 8
    assert set(sources_of(TINY, TINY.problem, made)) == KERNELS


@needs_triton
def test_the_callable_of_an_artifact(built):
    kernel = open_gradients(TINY, TINY.problem, built)
    assert set(kernel.sources) == KERNELS
    assert kernel.configs == built.manifest.decision.kernels
    for name, source in kernel.sources.items():
        assert (built.path / f"{name}.py").read_text() == source.text
        assert all(list(folder.rglob("*.cubin")) for folder in kernel._directories[name].values())


@needs_triton
def test_another_spelling_finds_it_again(store, built):
    window = "0 <= q - k and (q - k < 64 or k < 2)"
    same = Pattern.from_dict({"name": "same", "mask": {"predicate": window}, "problem": DIMS})
    found = load(same, None, H200, store=store, builder=GradientCompiler())
    assert found == built and set(sources_of(same, same.problem, found)) == KERNELS


@needs_triton
def test_by_archive(store, built, tmp_path):
    export_archive(tmp_path / "a.tar.gz", [built])
    other = Store(tmp_path / "other")
    import_archive(tmp_path / "a.tar.gz", other)
    found = load(TINY, None, H200, store=other, builder=GradientCompiler())
    assert found.manifest == built.manifest


@needs_triton
def test_damage_is_named_and_built_again(built, tmp_path, monkeypatch):
    store = Store(tmp_path)
    path = store.artifacts / built.path.name
    shutil.copytree(built.path, path)
    (path / "keys.py").write_text("import os\n")
    with pytest.raises(ArtifactError, match=r"keys\.py is damaged"):
        load(TINY, None, H200, store=store, builder=GradientCompiler())

    class Asked(Exception):
        pass

    def compile_many(jobs, workers=None):
        assert len(jobs) == 8
        raise Asked

    monkeypatch.setattr("sparsegen.launch.compile_many", compile_many)
    with pytest.raises(Asked):
        ensure(TINY, None, H200, store=store, builder=GradientCompiler())


@needs_triton
def test_missing_says_in_what_the_forward_one_differs(store, built, tmp_path):
    empty = Store(tmp_path)
    with pytest.raises(CacheMiss, match="the store is empty"):
        load(TINY, None, H200, store=empty, builder=GradientCompiler())
    with pytest.raises(CacheMiss, match="template: asked forward, stored backward"):
        load(TINY, None, H200, store=store, builder=Compiler())


def altered(built, tmp_path, change, texts=None):
    """A copy of the artifact whose record was changed, all digests made right again."""
    path = tmp_path / built.path.name
    shutil.copytree(built.path, path)
    manifest = built.manifest
    files = dict(manifest.files)
    for name, text in (texts or {}).items():
        import hashlib

        (path / name).write_text(text)
        digest = hashlib.sha256(text.encode()).hexdigest()
        files[name] = replace(files[name], bytes=len(text.encode()), sha256=digest)
    manifest = replace(manifest, decision=change(manifest.decision), files=files)
    (path / MANIFEST).write_text(manifest.to_json())
    return replace(built, manifest=manifest, path=path)


@needs_triton
def test_what_a_reader_refuses(built, tmp_path):
    same = lambda decision: decision
    text = altered(built, tmp_path / "a", same, {"keys-DV.py": "import os\n"})
    with pytest.raises(ArtifactError, match=r"keys-DV\.py is not what this version renders"):
        sources_of(TINY, TINY.problem, text)
    wide = replace(
        TINY, name="wide", rules=Pattern.from_dict({"name": "w", "mask": "causal"}).rules
    )
    other = altered(built, tmp_path / "b", same, {PATTERN: wide.to_yaml()})
    with pytest.raises(ArtifactError, match=r"pattern\.yaml is not of the masks of its key"):
        sources_of(TINY, TINY.problem, other)

    def relabelled(decision):
        only = replace(decision.candidates[0], label="dQ runs; dK, dV mod 7")
        return replace(decision, label=only.label, candidates=(only,))

    label = altered(built, tmp_path / "c", relabelled)
    with pytest.raises(ArtifactError, match="no candidate schedules 'dQ runs; dK, dV mod 7'"):
        sources_of(TINY, TINY.problem, label)
    fewer = altered(built, tmp_path / "d", lambda d: replace(d, variants=d.variants[1:]))
    with pytest.raises(ArtifactError, match="its variants are not those of this version"):
        sources_of(TINY, TINY.problem, fewer)


def test_a_kernel_that_does_not_fit_is_named(tmp_path, monkeypatch):
    def compile_many(jobs, workers=None):
        return [
            Outcome(j, Binary(j.variant, "e", j.directory, (), 64, 0, 300_000), "", 1) for j in jobs
        ]

    monkeypatch.setattr("sparsegen.launch.compile_many", compile_many)
    with pytest.raises(
        CompileError, match=r"^tiny \(queries/fast\) for nvidia-h200 needs 300000 bytes"
    ):
        ensure(TINY, None, H200, store=Store(tmp_path), builder=GradientCompiler())


@needs_triton
def test_what_compile_prints(built):
    one = Built(built, here=False, gradients=built)
    assert one.as_dict()["gradients"]["path"] == str(built.path)
    assert "\ngradients\nschedule       dQ runs; dK, dV runs (predicted" in one.text()
    assert "variant        keys-DV/general: " in one.text()
    assert Built(built, here=False).as_dict()["gradients"] is None
    json.dumps(one.as_dict())


# ---- many patterns ----


class Gradients(StandinBuilder):
    """Keys of their own."""

    def key(self, request):
        return replace(super().key(request), template="backward")


def test_warm_and_check_cover_the_passes_of_a_problem(tmp_path):
    store, forward, backward = Store(tmp_path), StandinBuilder(), Gradients()
    given = {"store": store, "builder": forward, "gradients": backward}
    plain = replace(
        TINY, name="plain", rules=Pattern.from_dict({"name": "w", "mask": "causal"}).rules
    )
    patterns = [plain, BOTH]
    said = lambda report: [(r.pattern, r.part, r.state) for r in report.results]
    wanted = [("plain", "forward"), ("both", "forward"), ("both", "backward")]
    assert said(fleet.check(["h200"], patterns, **given)) == [(*w, "missing") for w in wanted]
    first = fleet.warm(["h200"], patterns, tune="quick", **given)
    assert said(first) == [(*w, "built") for w in wanted]
    tuned = [json.loads((r.path / "manifest.json").read_text())["decision"] for r in first.results]
    assert [d["tune"] for d in tuned] == ["quick"] * 3  # of gradients too
    assert "\nnvidia-h200 both gradients: built" in str(first)
    assert sorted(forward.built) == [("both", "nvidia-h200"), ("plain", "nvidia-h200")]
    assert backward.built == [("both", "nvidia-h200")]
    assert said(fleet.check(["h200"], patterns, **given)) == [(*w, "ok") for w in wanted]
    backward.outdated = True
    last = fleet.check(["h200"], patterns, **given).results[-1]
    assert last.state == "outdated" and last.detail.startswith("this version chooses another")
