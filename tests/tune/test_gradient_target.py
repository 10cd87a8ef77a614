"""Gradient kernels as problems of the tuner: targets, checks on the CPU, studies and rows apart for each."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.tune import standin

pytest.importorskip("triton")

from sparsegen.codegen.gradient_template import PARTS, gradient_template, tuned_templates
from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.codegen.template import load_template
from sparsegen.errors import ToolchainError, TuneError, UnsupportedError
from sparsegen.launch.backward import Gradients, Room, Saved
from sparsegen.report.tuning import stale_rows
from sparsegen.spec.gpu import find_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from sparsegen.tune import history, store, winners
from sparsegen.tune.eager import eager_attention
from sparsegen.tune.gradient_check import (
    GradientCase,
    check_gradients,
    full_of_nan,
    long_case,
    short_case,
)
from sparsegen.tune.gradient_target import GIVES, GradientTarget, part_candidates
from sparsegen.tune.gradient_winners import tune_gradients
from sparsegen.tune.prune import CompilePool, too_much
from sparsegen.tune.space import Space
from sparsegen.tune.target import KernelTarget
from sparsegen.tune.tuner import Budget, TuneResult, tune

H200 = find_gpu("h200")
PROBLEM = Problem(head_dim=64, heads=4, lengths=((1024, 1024), (4096, 4096)))
WINDOW = Pattern.from_dict({"name": "narrow", "mask": {"window": {"left": 255, "right": 0}}})
MASK = {"all_of": ["causal", {"any_of": [{"window": {"size": 40}}, {"sink": {"tokens": 3}}]}]}
FEATURES = {"sink_logits": True, "null_key": True, "softcap": 4.0, "alibi": True}
PLAIN = Pattern.from_dict({"name": "plain", "mask": MASK})
ALL = Pattern.from_dict({"name": "all", "mask": MASK, **FEATURES})
SMALL = Problem(head_dim=16, value_dim=8, heads=4, kv_heads=2, dtype="float32", batch=1)


def target(part: str, pattern: Pattern = WINDOW, problem: Problem = PROBLEM, **options: Any):
    return GradientTarget.for_part(pattern, problem, H200, part, **options)


# ---------------------------------------------------------------------- what is tuned


def test_each_kernel_is_a_study_of_its_own():
    queries, keys = map(target, PARTS)
    forward = KernelTarget.of(WINDOW, PROBLEM, H200)
    assert len({queries.key, keys.key, forward.key}) == 3
    assert " backward-queries triton " in queries.key and " backward-keys triton " in keys.key
    assert target("keys", lengths=(4096, 4096)).key != keys.key
    assert [s.part for _, s in keys.sources] == ["keys"] * len(keys.sources)
    listed = [c.schedule.label for c in part_candidates(WINDOW, PROBLEM, "keys") if c.to_measure]
    assert list(keys.labels) == listed


@pytest.mark.parametrize("part", PARTS)
def test_the_space_is_the_template_s(part: str):
    made = target(part)
    assert set(load_template("backward").knobs) <= set(made.knobs)
    space = Space(made.knobs)
    tried = [made.default, *made.starts]
    assert [space.canonical(c.as_dict()) for c in tried] == tried and len(set(tried)) == len(tried)
    assert not any(map(made.invalid, tried))
    special = [c for c in tried if c["KERNEL"] == "hopper"]
    assert bool(special) == any(s.hopper is not None for _, s in made.sources)
    bare = replace(made, sources=tuple((n, replace(s, hopper=None)) for n, s in made.sources))
    assert all(c["KERNEL"] == "portable" for c in (bare.default, *bare.starts))
    assert all(bare.invalid(c) for c in special)
    wide = LaunchConfig.of(made.default.as_dict() | {"BLOCK_M": 32, "num_warps": 8})
    assert made.invalid(wide)


def test_the_parts_are_named_templates_with_one_digest():
    names = tuned_templates()
    assert sorted(names) == ["backward-keys", "backward-queries", "backward_fused", "forward"]
    assert {gradient_template(p).digest for p in PARTS} == {load_template("backward").digest}
    config = LaunchConfig.of(
        gradient_template("keys").default(PROBLEM, H200).as_dict() | {"BLOCK_M": 48}
    )
    assert "BLOCK_M=48" in gradient_template("keys").invalid(config, PROBLEM, H200)


def test_run_time_data_and_a_missing_gpu_are_clear_errors(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UnsupportedError, match="tuning makes its own inputs"):
        target("keys", Pattern.from_dict({"name": "packed", "mask": "documents"}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ToolchainError, match="no GPU is here"):
        target("queries").bench()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ToolchainError, match="^cannot measure here: no GPU is here"):
        tune(target("keys"))


def test_it_travels_to_a_worker_compiles_there_and_may_spill_a_little(tmp_path):
    made = target("keys", problem=replace(PROBLEM, head_dim=128, value_dim=128))
    assert pickle.loads(pickle.dumps(made)).key == made.key
    pool = CompilePool(made, tmp_path, jobs=1)
    try:
        pool.begin(made.default)
        while (result := pool.next(5.0)) is None:
            pass
    finally:
        pool.stop()
    assert (result.kind, result.reason) == ("", "") and set(result.facts) == {"fast"}
    assert list(result.folder.rglob("*.cubin"))
    assert too_much(result.facts, replace(made.limits, spill_bytes=-1))  # else limits are not asked


# ---------------------------------------------------------------------- checks


def eager(saved: Saved, keywords: Any, make: Any, pattern: Pattern, fault: str = "") -> Gradients:
    """A stand-in for the kernels: eager attention's own autograd, which writes into memory that ``make`` made."""
    rows: Any = {"q": saved.q, "k": saved.k, "v": saved.v}
    extras = {n: t for n, t in keywords.items() if n in ("sink_logits", "null_key")}
    leaf = lambda t: t.detach().clone().requires_grad_()
    leaves = {n: leaf(t) for n, t in rows.items()}
    learned = {n: tuple(map(leaf, t)) if n == "null_key" else leaf(t) for n, t in extras.items()}
    out, _ = eager_attention(pattern, *leaves.values(), **{**keywords, **learned})
    flat = [*leaves.values()]
    for t in learned.values():
        flat += t if isinstance(t, tuple) else [t]
    found = list(torch.autograd.grad(out, flat, saved.dout))
    got = dict(zip(rows, found))
    for name, t in got.items():
        room = make(saved, Room(tuple(t.shape), float32=t.dtype == torch.float32))
        unwritten = 3 if fault == f"holes in {name}" else 0
        room.view(-1)[unwritten:] = t.reshape(-1)[unwritten:]
        got[name] = room * (1.01 if fault == f"wrong {name}" else 1.0)
    if fault == "spoils":
        saved.out.zero_()
    rest = iter(found[3:])
    sinks = next(rest) if "sink_logits" in learned else None
    null = (next(rest), next(rest)) if "null_key" in learned else None
    if fault == "wrong null" and null:
        null = (null[0] + 1.0, null[1])
    return Gradients(got["q"], got["k"], got["v"], sinks, null)


def verdict(pattern: Pattern, part: str, fault: str = "", problem: Problem = SMALL) -> str:
    make = torch.Generator().manual_seed(0)
    case = short_case(pattern, problem, 33, 50, "cpu", make, batch=2)
    run = lambda saved, keywords, room: eager(saved, keywords, room, pattern, fault)
    return check_gradients(run, case, pattern, GIVES[part])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pattern", [PLAIN, ALL], ids=["plain", "all"])
@pytest.mark.parametrize("part", PARTS)
def test_right_gradients_pass(part: str, pattern: Pattern, dtype: str):
    assert verdict(pattern, part, problem=replace(SMALL, dtype=dtype)) == ""


@pytest.mark.parametrize(
    ("part", "fault", "said"),
    [
        ("queries", "wrong q", "33 queries, 50 keys: dq: max-abs error"),
        ("queries", "holes in q", "33 queries, 50 keys: 3 values of dq are NaN or infinite"),
        ("queries", "spoils", "33 queries, 50 keys: the kernel changed its input out"),
        ("queries", "wrong null", "33 queries, 50 keys: dnull_k: max-abs error"),
        ("queries", "wrong k", ""),  # not of this part
        ("keys", "wrong k", "33 queries, 50 keys: dk: max-abs error"),
        ("keys", "wrong v", "33 queries, 50 keys: dv: max-abs error"),
        ("keys", "holes in v", "33 queries, 50 keys: 3 values of dv are NaN or infinite"),
        ("keys", "wrong q", ""),
    ],
)
def test_wrong_ones_do_not(part: str, fault: str, said: str):
    found = verdict(ALL, part, fault)
    assert found.startswith(said) and bool(found) == bool(said)


@pytest.mark.parametrize("part", PARTS)
def test_long_inputs_are_judged_by_rows(part: str, tmp_path):
    """Rows by the formula of docs/backward.md, against the kernels in the interpreter: OUT and LSE are made up there."""
    from sparsegen.launch import Call
    from sparsegen.launch.backward_kernel import InterpretedBackward

    pattern = Pattern.from_dict({"name": "p", "mask": MASK, "softcap": 4.0, "alibi": True})
    made = {p: target(p, pattern, SMALL) for p in PARTS}
    tiles = {"BLOCK_M": 32, "BLOCK_N": 16, "num_warps": 4}
    sources = {p: t.sources[0][1] for p, t in made.items()}
    configs = {p: LaunchConfig.of(t.default.as_dict() | tiles) for p, t in made.items()}
    kernel = InterpretedBackward(sources, configs, tmp_path)
    make = torch.Generator().manual_seed(0)
    case = long_case(pattern, SMALL, 70, 90, "cpu", make)
    rows = torch.tensor([0, 1, 33, 69])

    def run(saved: Saved, keywords: Any, room: Any, factor: float = 1.0) -> Gradients:
        call = Call(scale=0.25, **keywords)
        got = kernel(saved, call, GIVES[part], None, room)
        return replace(got, **{n: getattr(got, n) * factor for n in GIVES[part]})

    given = GradientCase(case.saved, case.keywords, rows), pattern, GIVES[part]
    assert check_gradients(run, *given) == ""
    wrong = check_gradients(lambda *a: run(*a, factor=1.01), *given)
    assert wrong.startswith(f"70 queries, 90 keys: d{GIVES[part][0]}: max-abs error")


def test_room_is_full_of_nan_but_where_zeros_are_needed():
    case = long_case(PLAIN, SMALL, 8, 8, "cpu", torch.Generator().manual_seed(0))
    assert full_of_nan(case.saved, Room((2, 3))).isnan().all()
    assert not full_of_nan(case.saved, Room((2, 3), zero=True)).any()


# ---------------------------------------------------------------------- studies and rows


def test_both_kernels_share_a_storage_and_nothing_else(tmp_path, monkeypatch):
    """Two studies in one file: each has its own winner, and goes on alone."""
    monkeypatch.setattr(
        standin, "time_of", lambda config: 100.0 + config["BLOCK_N"] - 9 * (config["STAGES"] == 3)
    )
    storage, lanes = tmp_path / "study.sqlite", {}
    for part in PARTS:
        lanes[part] = standin.InProcessLane(standin.StandInSource())
        made, result = tune_gradients(
            WINDOW, PROBLEM, H200, part, budget=Budget(6, 600), storage=storage, lane=lanes[part],
            tuned=tmp_path,
        )  # fmt: skip
        tried = [made.default, *made.starts]
        assert list(dict.fromkeys(lanes[part].measured))[: len(tried)] == tried[:6]
        assert result.complete == 6
        winners.keep(made, result, tmp_path)
    again = standin.InProcessLane(standin.StandInSource())
    _, result = tune_gradients(
        WINDOW, PROBLEM, H200, "keys", budget=Budget(6, 600), storage=storage, lane=again,
        tuned=tmp_path,
    )  # fmt: skip
    assert result.complete == 6 and again.measured == []
    rows = store.read(tmp_path, H200.name, "narrow")
    assert [r.template for r in rows] == ["backward-keys", "backward-queries"]
    lines = history.read(tmp_path / "history.csv")
    assert [line.config.split(":")[0] for line in lines] == ["backward-queries", "backward-keys"]
    for part in PARTS:
        which, labels = gradient_template(part), target(part).labels
        found, step = store.lookup(WINDOW, PROBLEM, H200, which, labels, root=tmp_path)
        (row,) = (r for r in rows if r.template == which.name)
        assert (found, step) == (LaunchConfig.of(row.config), "exact GPU")
    _, step = store.lookup(
        WINDOW, PROBLEM, H200, load_template(), target("queries").labels, root=tmp_path
    )
    assert step != "exact GPU"  # rows of gradients are none of the forward kernel's


def test_stale_rows_are_named(tmp_path, monkeypatch):
    made = target("keys")
    result = TuneResult(made.default, 90.0, 100.0, 0.02, (), "best of 40 trials", "memory")
    winners.keep(made, result, tmp_path)
    shipped = {"narrow": tmp_path / "narrow.yaml"}
    shipped["narrow"].write_text(WINDOW.to_yaml())
    monkeypatch.setattr("sparsegen.spec.shipped.shipped_patterns", lambda: shipped)
    real = __import__("sparsegen.paths", fromlist=["data_dir"]).data_dir
    monkeypatch.setattr(
        "sparsegen.report.tuning.data_dir", lambda name: tmp_path if name == "tuned" else real(name)
    )
    assert stale_rows(["h200"]) == []
    (row,) = store.read(tmp_path, H200.name, "narrow")
    store.write(tmp_path, H200, replace(row, template_digest="0" * 64))
    (said,) = stale_rows(["h200"])
    assert "template backward-keys was 000000000000 when measured" in said


def test_nothing_measured_is_not_kept(tmp_path):
    result = TuneResult(target("keys").default, None, None, None, (), "no trial", "memory")
    with pytest.raises(TuneError, match="nothing to keep for narrow: no trial"):
        winners.keep(target("keys"), result, tmp_path)
