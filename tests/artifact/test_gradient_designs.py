"""Gradients that need not be the same to the bit: keys, the design that is chosen, what an artifact then holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import sparsegen
from sparsegen.artifact.build import ask, ensure, load
from sparsegen.artifact.gradient_texts import sources_of
from sparsegen.artifact.gradients import GradientCompiler
from sparsegen.artifact.key import installed
from sparsegen.artifact.store import Store
from sparsegen.codegen import load_template
from sparsegen.codegen.backward_stored import OTHER_ROWS, SHARED_BOXES, uncovered
from sparsegen.codegen.gradient_template import gradient_template
from sparsegen.errors import CacheMiss, InputError, UnsupportedError
from sparsegen.launch.backward_boxes import FUSED_GUARD, STORED_GUARD
from sparsegen.runtime.api import open_gradients
from sparsegen.spec.gpu import find_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from sparsegen.tune import gradient_designs as designs
from sparsegen.tune import store as tuned
from sparsegen.tune.gradient_target import GradientTarget, part_candidates
from tests.artifact.compilers import pretend

H200, A100 = find_gpu("h200"), find_gpu("a100")
DIMS = {"head_dim": 32, "heads": 2, "lengths": [512]}
TINY = Pattern.from_dict({"name": "tiny", "mask": "causal", "problem": DIMS})
ANY = GradientCompiler(deterministic=False)
DRAWN = Pattern.from_dict(
    {"name": "drawn", "mask": {"random_blocks": {"block": 64, "per_row": 2, "seed": 1}}}
)
DILATED = Pattern.from_dict(
    {"name": "dilated", "mask": {"all_of": ["causal", {"strided": {"stride": 64}}]}}
)
needs_triton = pytest.mark.skipif(installed("triton") is None, reason="needs triton")


def test_the_key_says_that_any_order_will_do() -> None:
    request = ask(TINY, None, H200)
    exact, free = GradientCompiler().key(request), ANY.key(request)
    assert [n for n, _, _ in free.difference(exact)] == ["template", "template_digest"]
    assert free.template == "backward_fused"
    assert free.template_digest == load_template("backward_fused").digest
    assert free.template_digest != load_template("backward").digest


# ---------------------------------------------------------------------- where it can be
REASONS: list[tuple[Pattern, dict[str, Any], Any, str]] = [
    (TINY, {}, A100, "KERNEL=hopper needs sm_90, nvidia-a100 is another architecture"),
    (TINY, {"dtype": "float32"}, H200, "KERNEL=hopper takes bfloat16 or float16, not float32"),
    (TINY, {"head_dim": 256, "value_dim": 256}, H200, "keeps sums and tiles of DK and DV in registers: 336 a thread, 224 at most"),
    (DRAWN, {}, H200, "rows of its launches sweep0 come in no boxes that a tensor descriptor has"),
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "dims", "gpu", "said"), REASONS, ids=lambda x: str(x)[:20])
def test_why_it_cannot_be(pattern: Pattern, dims: Any, gpu: Any, said: str) -> None:
    problem = replace(Problem(head_dim=32, heads=2), **dims)
    why = designs.why_not_fused(pattern, problem, gpu)
    assert why is not None and said in why
    assert designs.parts(pattern, problem, gpu, deterministic=False) == designs.SPLIT_PARTS
    with pytest.raises(UnsupportedError, match="fused gradient kernel: "):
        GradientTarget.for_part(pattern, problem, gpu, "fused")


def test_where_it_can_be() -> None:
    problem = ask(TINY, None, H200).problem
    assert designs.why_not_fused(TINY, problem, H200) is None
    assert designs.parts(TINY, problem, H200, True) == ("queries", "keys")
    assert designs.parts(TINY, problem, H200, False) == ("queries", "keys", "fused")


def test_schedules_whose_periods_do_not_fit_the_lengths_are_no_candidates() -> None:
    """They could not do the call that they are tuned for."""
    for length, labels in ((4096, {"mod 64", "runs"}), (4000, {"runs"})):
        problem = Problem(head_dim=64, heads=2, lengths=((length, length),))
        found = part_candidates(DILATED, problem, "fused")
        assert {c.schedule.label for c in found} <= labels and found


# ---------------------------------------------------------------------- which is chosen
def test_the_faster_one_is_chosen() -> None:
    problem = Problem(lengths=((16384, 16384),), heads=16)
    before = designs.preparing_us(problem)
    assert 30 < before < 45  # measured: 44 µs on an H200
    times = {"queries": 100.0 + before, "keys": 200.0, "fused": 299.0}
    assert designs.fused_is_chosen(times, problem) == (True, "fused 299.0 µs, split 300.0 µs")
    chosen, why = designs.fused_is_chosen(times | {"fused": 301.0}, problem)
    assert not chosen and why == "split, since fused 301.0 µs, split 300.0 µs"
    chosen, why = designs.fused_is_chosen(times | {"keys": None}, problem)
    assert not chosen and why == "split: fused is allowed, and not all was measured"


def recorded(root: Path, times: dict[str, float]) -> None:
    """Rows of ``tuned/`` with these times."""
    problem = ask(TINY, None, H200).problem
    for part, us in times.items():
        which = gradient_template(part)
        config = which.default(problem, H200).as_dict()
        row = tuned.Row(
            "tiny", TINY.digest(), which.name, which.digest,
            tuned.Measured.of(problem, 512, 512), config, us, us, 0.0, 1, {}, "2026-11-30",
        )  # fmt: skip
        tuned.write(root, H200, row)


@pytest.mark.parametrize("fused", [250.0, 350.0])
def test_times_on_record_decide_where_nothing_is_measured(
    fused: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(tmp_path, {"queries": 100.0, "keys": 200.0, "fused": fused})
    monkeypatch.setattr(designs, "data_dir", lambda name: tmp_path)
    request = ask(TINY, None, H200, "off")
    chosen, why = ANY._designed(request, ANY._looked_up(request))
    assert ("fused" in chosen) == (fused < 300) and f"fused {fused} µs" in why
    assert set(GradientCompiler()._looked_up(request)) == {"queries", "keys"}


# ---------------------------------------------------------------------- what is built
@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("cache"))


@needs_triton
def test_an_artifact_with_the_fused_kernel(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        designs, "fused_is_chosen", lambda times, problem: (True, "fused: it is here")
    )
    artifact = ensure(TINY, None, H200, store=store, builder=ANY)
    decision, problem = artifact.manifest.decision, ask(TINY, None, H200).problem
    assert set(decision.kernels) == {"queries", "keys", "keys-DK", "keys-DV", "fused"}
    assert decision.label == "dQ runs; dK, dV runs; fused runs"
    assert decision.chosen_by.endswith("; design: fused: it is here")
    (fused,) = (v for v in decision.variants if v.name.startswith("fused/"))
    assert fused.name == "fused/fast" and fused.guard.endswith(FUSED_GUARD)
    for name in ("fused.py", "fused.hopper.py", "fused.txt"):
        assert (artifact.path / name).is_file()
    sources = sources_of(TINY, problem, artifact)
    assert sources["fused"].hopper is not None and sources["fused"].design == "fused"
    kernel = open_gradients(TINY, problem, artifact)
    assert kernel.configs["fused"]["KERNEL"] == "hopper"
    again = load(TINY, None, H200, store=store, builder=ANY)
    assert again.path == artifact.path
    with pytest.raises(CacheMiss):  # another answer than the one that is the same to the bit
        load(TINY, None, H200, store=store, builder=GradientCompiler())


@needs_triton
def test_an_artifact_without_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)  # the same kernels as in test_gradients.py
    problem = replace(ask(TINY, None, H200).problem, dtype="float32", head_dim=16, value_dim=16)
    decision = ensure(TINY, problem, H200, store=store, builder=ANY).manifest.decision
    assert "fused" not in decision.kernels and "fused" not in decision.label
    assert decision.chosen_by.endswith(
        "; design: split, KERNEL=hopper takes bfloat16 or float16, not float32"
    )


# ---------------------------------------------------------------------- with a workspace
STORING = GradientCompiler(stored=True)


WIDE = {"head_dim": 128, "value_dim": 128}


def test_why_dS_is_not_stored() -> None:
    problem = Problem(**WIDE, heads=2)
    null = Pattern.from_dict({"name": "null", "mask": "causal", "null_key": True})
    heads = [{"heads": 0, "mask": "full"}, {"heads": "rest", "mask": "causal"}]
    sinks = {"all_of": ["causal", {"any_of": [{"window": {"size": 64}}, {"sink": {"tokens": 4}}]}]}
    for pattern, gpu, said in (
        (TINY, A100, "KERNEL=hopper needs sm_90, nvidia-a100 is another architecture"),
        (null, H200, "stored dS has none of the null key"),
        (DRAWN, H200, OTHER_ROWS),
        (Pattern.from_dict({"name": "h", "heads": heads}), H200, "stored dS is for patterns with one mask for all heads"),
        (Pattern.from_dict({"name": "s", "mask": sinks}), H200, SHARED_BOXES),
    ):  # fmt: skip
        assert designs.why_not_stored(pattern, problem, gpu) == said
    assert designs.why_not_stored(TINY, problem, H200) is None


@pytest.mark.parametrize("head_dim", [32, 64, 96, 120])
def test_narrow_heads_have_the_split_kernels(head_dim: int) -> None:
    problem = Problem(head_dim=head_dim, value_dim=128, heads=2)
    said = "for head_dim below 128 the split kernels are as fast"
    assert designs.why_not_stored(TINY, problem, H200) == said
    assert "needs sm_90" in str(designs.why_not_stored(TINY, problem, A100))


def test_no_schedule_that_visits_more_is_taken_to_store_dS() -> None:
    """dS of this mask could be stored over runs, which have 64 times the tiles of its residue classes."""
    problem = Problem(**WIDE, heads=2, lengths=((4096, 4096),))
    runs = [
        c.schedule
        for c in part_candidates(DILATED, problem, "keys")
        if uncovered(DILATED, c.schedule, problem, "keys") is None
    ]
    assert [s.label for s in runs] == ["runs"]
    assert designs.why_not_stored(DILATED, problem, H200) == OTHER_ROWS


@needs_triton
def test_an_artifact_for_calls_with_a_workspace(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that store and read dS are compiled; the others are those of tests/kernels/test_backward_compile.py."""
    others = pretend(monkeypatch, real=lambda job: job.source.design == "stored")
    problem = replace(ask(TINY, None, H200).problem, **WIDE)
    artifact = ensure(TINY, problem, H200, store=store, builder=STORING)
    decision = artifact.manifest.decision
    assert artifact.key.template == "backward_stored"
    assert {"queries", "keys", *designs.STORES} <= set(decision.kernels)
    assert decision.label == "dQ runs; dK, dV runs; stored dQ runs; dK, dV runs"
    assert decision.chosen_by.endswith("; design: stored: a workspace is given")
    sources = sources_of(TINY, problem, artifact)
    assert all(sources[name].hopper is not None for name in designs.STORES)
    stored = [v for v in decision.variants if v.name.startswith("stored-")]
    assert len(stored) == 2 and all(v.registers > 64 for v in stored) and len(others) == 12
    assert all(f.startswith(v.name) for v in stored for f in v.files if f.endswith(".cubin"))
    (guard,) = {v.guard for v in stored}
    assert guard.endswith(STORED_GUARD)
    assert load(TINY, problem, H200, store=store, builder=STORING).path == artifact.path


@needs_triton
def test_an_artifact_that_stores_nothing_says_why(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch)  # the same kernels as in test_gradients.py
    problem = replace(ask(TINY, None, H200).problem, dtype="float32", head_dim=16, value_dim=16)
    decision = ensure(TINY, problem, H200, store=store, builder=STORING).manifest.decision
    assert not set(designs.STORES) & set(decision.kernels)
    assert "; design: split, KERNEL=hopper takes bfloat16 or float16" in decision.chosen_by


def test_workspaces_that_are_none() -> None:
    for given in (0, -1, 1.5, True, "1G"):
        with pytest.raises(InputError, match="workspace must be a number of bytes, 1 or more, got"):
            sparsegen.compile(TINY, workspace=given)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="leave one of them out"):
        sparsegen.load(TINY, gpu=H200, workspace=1, deterministic=False)


def test_a_flag_is_a_flag(store: Store) -> None:
    with pytest.raises(InputError, match="deterministic must be True or False, got 'no'"):
        sparsegen.compile(TINY, deterministic="no")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="deterministic must be True or False, got 0"):
        sparsegen.load(TINY, gpu=H200, store=store, deterministic=0)  # type: ignore[arg-type]
