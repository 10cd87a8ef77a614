"""Rows of ``tuned/`` that the compiler of this machine refuses: the next one is taken, and each is named."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

import sparsegen.launch
from sparsegen.artifact import fleet
from sparsegen.artifact.build import ask, ensure
from sparsegen.artifact.compiler import Compiler
from sparsegen.artifact.gradients import GradientCompiler
from sparsegen.artifact.key import installed
from sparsegen.artifact.refused import REFUSED, refused_by
from sparsegen.artifact.store import Store
from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.errors import ArtifactError
from sparsegen.launch import Binary, CompileError, Outcome, compile_many
from sparsegen.report.built import Built
from sparsegen.spec.gpu import find_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.shipped import shipped_patterns
from sparsegen.tune import store as tuned
from sparsegen.tune import winners
from sparsegen.tune.gradient_target import GradientTarget
from sparsegen.tune.space import Space
from sparsegen.tune.store import RefusedTuningWarning
from sparsegen.tune.target import KernelTarget
from sparsegen.tune.tuner import TuneResult

pytestmark = pytest.mark.skipif(installed("triton") is None, reason="needs triton")

H200 = find_gpu("h200")
SHORT, LONG = (512, 512), (8192, 8192)
WIDE = Pattern.from_dict(
    {"name": "wide", "mask": "causal", "problem": {"head_dim": 128, "heads": 2, "lengths": [512]}}
)
GEMMA = Pattern.from_yaml(shipped_patterns()["gemma2_local"])
SPILLS = {"BLOCK_M": 128, "BLOCK_N": 128, "TMA": True, "num_warps": 4}  # 800 bytes a thread
# more than a thousand bytes a thread where rows have 256 columns
WIDER = {"KERNEL": "portable", "BLOCK_M": 128, "BLOCK_N": 32, "STAGES": 2, "num_warps": 4}


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """An empty ``tuned/``; warnings are told anew."""
    found = tmp_path / "tuned"
    found.mkdir()
    monkeypatch.setattr(tuned, "_SAID", set())
    monkeypatch.setattr(tuned, "data_dir", lambda name: found)
    monkeypatch.setattr("sparsegen.tune.gradient_designs.data_dir", lambda name: found)
    return found


def keep(root: Path, target: KernelTarget, time_us: float = 90.0, **change) -> LaunchConfig:
    """A row for a target, with its configuration."""
    config = LaunchConfig.of(target.default.as_dict() | change)
    assert target.invalid(config) is None
    config = Space(target.knobs).canonical(config.as_dict())
    result = TuneResult(config, time_us, 100.0, 0.02, (), "best of 40 trials", "memory")
    winners.keep(target, result, root)
    return config


def forward(root: Path, lengths: tuple[int, int] = SHORT, **change) -> LaunchConfig:
    """A row of WIDE."""
    return keep(root, KernelTarget.of(WIDE, WIDE.problem, H200, lengths=lengths), **change)


def refusing(monkeypatch, *refused: LaunchConfig, every: bool = False) -> list[LaunchConfig]:
    """Stand-ins for compilers that refuse these configurations; what they were asked for."""
    asked: list[LaunchConfig] = []

    def stand_in(jobs, workers=None):
        asked.extend(job.config for job in jobs)
        return [outcome(job) for job in jobs]

    def outcome(job):
        if every or job.config in refused:
            return Outcome(job, None, f"{job.source.entry} ({job.variant}): too odd", 1)
        job.directory.mkdir(parents=True)
        (job.directory / "k.cubin").write_bytes(b"x")
        binary = Binary(job.variant, "e", job.directory, ("k.cubin",), 64, 0, 1024)
        return Outcome(job, binary, "", 1)

    monkeypatch.setattr("sparsegen.launch.compile_many", stand_in)
    return asked


def really(monkeypatch, config: LaunchConfig) -> list[Outcome]:
    """The compiler itself for the fast variant of a configuration, stand-ins for all else; what it said."""
    said: list[Outcome] = []
    refusing(monkeypatch)
    pretend = sparsegen.launch.compile_many

    def compile_some(jobs, workers=None):
        real = [job for job in jobs if (job.config, job.variant) == (config, "fast")]
        said.extend(found := compile_many(real, 1) if real else [])
        known = {outcome.job: outcome for outcome in found}
        others = pretend([job for job in jobs if job not in real])
        known |= {outcome.job: outcome for outcome in others}
        return [known[job] for job in jobs]

    monkeypatch.setattr("sparsegen.launch.compile_many", compile_some)
    return said


def told(caught) -> list[str]:
    """What was said of refused rows; Triton's own resource warnings come as they like."""
    return [str(w.message) for w in caught if w.category is RefusedTuningWarning]


def test_a_row_that_spills_gives_way_to_the_nearest_one(root, tmp_path, monkeypatch):
    """It is compiled for real."""
    spills = forward(root, **SPILLS)
    tried = really(monkeypatch, spills)
    good = forward(root, LONG, BLOCK_N=32)
    store = Store(tmp_path / "cache")
    with pytest.warns(RefusedTuningWarning) as caught:
        built = ensure(WIDE, None, H200, store=store)
    (said,) = told(caught)
    assert tried[0].binary is not None and tried[0].binary.spill_bytes > 64
    step = "exact GPU, row of wide at 512x512"
    assert said.startswith(f"tuned row of wide on nvidia-h200 is not used ({step}): wide (fast) ")
    assert "bytes a thread, at most 64 are allowed; it was compiled with BLOCK_M=128" in said
    decision = built.manifest.decision
    assert decision.config == good and decision.tune == "off"
    why = said.split("): ", 1)[1]
    nearest = "exact GPU, nearest problem (q_len 8192, kv_len 8192)"
    assert decision.chosen_by == f"{nearest}; passed over: {step}: {why}"
    assert f"chosen by      {decision.chosen_by}\n" in Built(built, here=False).text()
    assert refused_by(built) == {"forward": {("runs", spills): why}}
    assert json.loads(built.read(REFUSED))[0]["config"] == spills.as_dict()
    assert {Path(name).parts[0] for name in built.files if "/" in name} == {
        v.name for v in decision.variants
    }
    # found again, without a compiler
    assert ensure(WIDE, None, H200, store=store) == built and len(tried) == 1
    (result,) = fleet.check(["h200"], [WIDE], store=store).results
    assert (result.state, result.detail) == ("ok", decision.chosen_by)
    # until there is another row
    forward(root, BLOCK_M=128, num_warps=8)
    assert fleet.check(["h200"], [WIDE], store=store).results[0].state == "outdated"


def test_a_gradient_row_that_spills(root, tmp_path, monkeypatch):
    """It is compiled for real; of the other kernels a stand-in compiles."""
    target = GradientTarget.for_part(GEMMA, GEMMA.problem, H200, "queries")
    spills = keep(root, target, **WIDER)
    tried = really(monkeypatch, spills)
    store, builder = Store(tmp_path / "cache"), GradientCompiler(jobs=1)
    with pytest.warns(RefusedTuningWarning) as caught:
        built = ensure(GEMMA, None, H200, store=store, builder=builder)
    assert len(tried) == 1 and tried[0].binary is not None and tried[0].binary.spill_bytes > 1024
    step = "exact GPU, row of gemma2_local at 8192x8192"
    (said,) = told(caught)
    assert said.startswith(f"tuned row of gemma2_local on nvidia-h200 is not used ({step}): ")
    why = said.split("): ", 1)[1]
    assert "bytes a thread, at most 1024 are allowed" in why
    decision = built.manifest.decision
    assert decision.kernels["queries"] == target.default
    assert decision.chosen_by == (
        f"queries: template default; passed over: {step}: {why}; keys: template default"
    )
    assert refused_by(built) == {"queries": {("runs", spills): why}}
    assert ensure(GEMMA, None, H200, store=store, builder=builder) == built and len(tried) == 1


def test_nothing_refused_leaves_no_trace(root, tmp_path, monkeypatch):
    good = forward(root, BLOCK_N=32)
    asked = refusing(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        built = ensure(WIDE, None, H200, store=Store(tmp_path / "cache"))
    assert built.manifest.decision.chosen_by == "exact GPU" and set(asked) == {good}
    assert REFUSED not in built.files and refused_by(built) == {}


def test_the_default_is_the_last_one_and_its_refusal_is_the_builds(root, tmp_path, monkeypatch):
    rows = [forward(root, BLOCK_N=32), forward(root, LONG, BLOCK_N=128)]
    asked = refusing(monkeypatch, every=True)
    store = Store(tmp_path / "cache")
    with (
        pytest.warns(RefusedTuningWarning) as caught,
        pytest.raises(CompileError, match=r"wide \(fast\) for nvidia-h200 does not compile: .*odd"),
    ):
        ensure(WIDE, None, H200, store=store)
    assert [text.split("): ")[0] for text in told(caught)] == [
        "tuned row of wide on nvidia-h200 is not used (exact GPU, row of wide at 512x512",
        "tuned row of wide on nvidia-h200 is not used (exact GPU, nearest problem (q_len 8192, kv_len 8192), "
        "row of wide at 8192x8192",
    ]
    default = KernelTarget.of(WIDE, WIDE.problem, H200).default
    assert list(dict.fromkeys(asked)) == [*rows, default]
    assert list(store.entries()) == []


def test_a_row_that_is_the_default_is_refused_once(root, tmp_path, monkeypatch):
    """It may spill as the default: there is nothing else to take."""
    forward(root)
    spilling = lambda job: Binary(job.variant, "e", job.directory, (), 64, 800, 1024)
    monkeypatch.setattr(
        "sparsegen.launch.compile_many",
        lambda jobs, workers=None: [Outcome(job, spilling(job), "", 1) for job in jobs],
    )
    folder = tmp_path / "entry"
    folder.mkdir()
    with pytest.warns(RefusedTuningWarning, match="spills 800 bytes"):
        decision = Compiler().build(ask(WIDE, None, H200), folder, None)
    assert decision.chosen_by.startswith("template default; passed over: exact GPU, row of wide")


def test_each_pair_of_lengths_passes_over_what_is_refused(root, tmp_path, monkeypatch):
    bad, good = forward(root, BLOCK_N=32), forward(root, LONG, BLOCK_N=128)
    refusing(monkeypatch, bad)
    problem = replace(WIDE.problem, lengths=(LONG, SHORT))
    with pytest.warns(RefusedTuningWarning, match="row of wide at 512x512"):
        built = ensure(WIDE, problem, H200, store=Store(tmp_path / "cache"))
    decision = built.manifest.decision
    assert decision.buckets == () and decision.config == good  # both take the row of the longer one
    assert decision.chosen_by == "exact GPU" and bad.as_dict() in [
        one["config"] for one in json.loads(built.read(REFUSED))
    ]


def test_a_fused_row_that_is_refused_leaves_the_split_design(root, tmp_path, monkeypatch):
    """Its time on record is that of a kernel that there is not."""
    part = lambda name: GradientTarget.for_part(WIDE, WIDE.problem, H200, name)
    for name in ("queries", "keys"):
        keep(root, part(name))
    fused = keep(root, part("fused"), time_us=1.0, HEAVY_FIRST=False)
    refusing(monkeypatch, fused)
    store, builder = Store(tmp_path / "cache"), GradientCompiler(deterministic=False)
    with pytest.warns(RefusedTuningWarning, match=r"row of wide at 512x512\): wide \(fused/fast\)"):
        built = ensure(WIDE, None, H200, store=store, builder=builder)
    decision = built.manifest.decision
    assert "fused" not in decision.kernels
    assert (
        "; design: split: fused is allowed, and not all was measured; fused: template default; passed over: "
        in (decision.chosen_by)
    )
    assert ensure(WIDE, None, H200, store=store, builder=builder) == built


def test_what_was_measured_now_is_not_passed_over(root, tmp_path, monkeypatch):
    """A tuning has compiled its winner: where that fails afterwards, something else is wrong."""
    bad = forward(root, BLOCK_N=32)
    refusing(monkeypatch, bad)
    result = TuneResult(bad, 90.0, 100.0, 0.02, (), "best of 40 trials", "memory")
    monkeypatch.setattr("sparsegen.tune.tuner.tune", lambda target, **options: result)
    with pytest.raises(CompileError, match="does not compile"):
        Compiler(storage="s").build(ask(WIDE, None, H200, "quick"), tmp_path, None)


@pytest.mark.parametrize(
    ("error", "stopped"),
    [
        ("took over 300 s", True),
        ("compiler died with exit code -9", True),
        ("compiler died with exit code 1", True),
        ("compiler died with exit code -11", False),  # LLVM's own fault, and it will be so again
        ("attend (fast): a fault of ptxas", False),
    ],
)
def test_a_compiler_that_was_stopped_refuses_nothing(root, tmp_path, monkeypatch, error, stopped):
    bad = forward(root, BLOCK_N=32)
    refusing(monkeypatch)
    pretend = sparsegen.launch.compile_many
    monkeypatch.setattr(
        "sparsegen.launch.compile_many",
        lambda jobs, workers=None: [
            Outcome(job, None, error, 1) if job.config == bad else pretend([job])[0] for job in jobs
        ],
    )
    store = Store(tmp_path / "cache")
    expected = (
        pytest.raises(CompileError, match=error) if stopped else pytest.warns(RefusedTuningWarning)
    )
    with expected:
        ensure(WIDE, None, H200, store=store)
    assert bool(list(store.entries())) is not stopped


def test_warm_says_what_was_passed_over(root, tmp_path, monkeypatch):
    refusing(monkeypatch, forward(root, BLOCK_N=32))
    with pytest.warns(RefusedTuningWarning):
        report = fleet.warm(["h200"], [WIDE], store=Store(tmp_path / "cache"), jobs=1)
    assert report.ok
    assert "built (template default; passed over: exact GPU, row of wide at 512x512: " in str(
        report
    )


def test_a_damaged_record_is_named(root, tmp_path, monkeypatch):
    refusing(monkeypatch, forward(root, BLOCK_N=32))
    with pytest.warns(RefusedTuningWarning):
        built = ensure(WIDE, None, H200, store=Store(tmp_path / "cache"))
    monkeypatch.setattr(type(built), "read", lambda artifact, name: b'[{"part": "forward"}]')
    with pytest.raises(ArtifactError, match=r"refused.json is damaged \('label'\); build it again"):
        refused_by(built)
