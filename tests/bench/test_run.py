"""A whole run on a stand-in of a GPU: what is checked before it is timed, what is left out, and what is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sparsegen.bench import ours, peers, run
from sparsegen.bench.case import Case, Inputs
from sparsegen.bench.output import failed
from sparsegen.bench.peers import Contender, Peer, Selection
from sparsegen.bench.results import OURS, Results
from sparsegen.errors import SpecError, ToolchainError, UnsupportedError
from sparsegen.schedule import build as schedules
from sparsegen.spec.pattern import Pattern
from sparsegen.tune.measure import Turns
from tests.bench.standin import StandInDevice, build, empty

TURNS = Turns(rounds=3)
WINDOW = {
    "name": "w",
    "mask": {"window": {"size": 24}},
    "problem": {"head_dim": 16, "heads": 2, "batch": 2, "dtype": "float32"},
}


def window(length: int = 128) -> Case:
    return Case.of(Pattern.from_dict(WINDOW), (length, length))


def peer(name: str, change: Any) -> Peer:
    """A peer whose result is the reference's, changed."""

    def make(case: Case, inputs: Inputs, refuse: Any) -> list[Contender]:
        def launch() -> Any:
            out = build(case).attend(inputs.q, inputs.k, inputs.v)
            return change(out)

        return [Contender(name, launch, 2.5, 100)]

    return Peer(name, "torch", "nn", frozenset({"float32"}), lambda c: "", make)


def selection(*chosen: Peer) -> Selection:
    return Selection(chosen, ())


def raises(out: Any) -> Any:
    raise RuntimeError("illegal instruction")


def test_only_equal_results_are_timed() -> None:
    chosen = [
        peer("good", lambda out: out * 1.001),
        peer("bad", lambda out: out * 1.1),
        peer("nan", lambda out: out * float("nan")),
        peer("short", lambda out: out[:, :1]),
        peer("broken", raises),
    ]
    device = StandInDevice()
    one = run.measure_case(window(), build(window()), selection(*chosen), device, TURNS)
    assert [r.contender for r in one.rows] == [OURS, "good"] == ["sparsegen", "good"]
    assert len(device.clock.known) == 2  # nobody else was ever timed
    good = one.rows[1]
    assert (good.us, good.sustained_us, good.host_us) == (200.0, 90.0, 20.0)
    assert (good.setup_ms, good.setup_bytes, good.peak_bytes) == (2.5, 100, 4196)
    assert good.difference == pytest.approx(0.001, rel=0.01) and one.ours.difference == 0
    why = {r.contender: r.reason for r in one.refused}
    assert set(why) == {"bad", "nan", "short", "broken"}
    assert "disagrees, relative error 0.1: not timed" in why["bad"] and "nan" in why["nan"]
    assert (
        "(2, 1, 128, 16)" in why["short"] and why["broken"] == "RuntimeError: illegal instruction"
    )
    assert {r.contender: r.difference for r in one.refused}["bad"] == pytest.approx(0.1, rel=0.01)


def test_cells_are_those_of_the_mask() -> None:
    one = run.measure_case(window(), build(window()), selection(), StandInDevice(), TURNS)
    cells = int(window().pattern.dense_mask(128, 128).sum()) * 2 * 2  # heads, batch entries
    assert one.cells == cells and one.cells_exact and one.all_cells == 4 * 128 * 128
    assert one.computed_cells == 4 * 3 * 64 * 64  # the diagonal tiles and the one beside them
    assert one.flop == 4 * 16 * cells
    assert one.problem == "B2 H2:2 D16:16 float32 128x128"


def test_cells_of_rules_per_head() -> None:
    rules = [{"heads": [0], "mask": {"window": {"size": 9}}}, {"heads": "rest", "mask": "causal"}]
    data = {"heads": rules, "problem": {"heads": 4, "kv_heads": 2}}
    case = Case.of(Pattern.from_dict(data), (96, 96))
    schedule = schedules.build(case.pattern, case.problem)
    found = ours.count(case, schedule, None)
    assert found.visible == int(case.pattern.dense_mask(96, 96, heads=4).sum())
    assert found.computed is None


def test_inputs_have_what_the_pattern_asks_for() -> None:
    data = {**WINDOW, "alibi": True, "sink_logits": True, "null_key": True, "softcap": 10}
    case = Case.of(Pattern.from_dict(data), (40, 40))
    one = run.measure_case(case, build(case), selection(), StandInDevice(), TURNS)
    assert one.ours.us == 100.0
    inputs = Inputs.of(case, "cpu")
    assert set(inputs.extras) == {"alibi_slopes", "sink_logits", "null_key"}
    assert torch.equal(inputs.q, Inputs.of(case, "cpu").q)


def test_a_wrong_result_of_ours_is_left_out_and_fails() -> None:
    def off(case: Case, say: Any) -> Any:
        made = build(case)
        return replace(made, attend=lambda *a, **b: made.attend(*a, **b) + 0.01)

    found = run.measured(empty(), [window()], selection(), StandInDevice(), off, TURNS)
    assert found.cases == () and found.left_out[0].wrong
    assert "wrong result: max-abs error" in found.left_out[0].reason and failed(found)


def test_a_run_goes_on_after_a_case_that_cannot_be_built() -> None:
    def some(case: Case, say: Any) -> Any:
        say("1 of 2, tuning")
        if case.q_len == 64:
            raise UnsupportedError("no template does this")
        return build(case)

    kept: list[Results] = []
    told: list[str] = []
    device = StandInDevice()
    found = run.measured(
        empty(),
        [window(64), window()],
        selection(),
        device,
        some,
        TURNS,
        lambda done, total, message: told.append(f"{done}/{total} {message}"),
        kept.append,
    )
    assert [c.q_len for c in found.cases] == [128] and not failed(found)
    assert [(x.pattern, x.lengths, x.wrong) for x in found.left_out] == [("w", "64", False)]
    assert [(len(k.cases), len(k.left_out)) for k in kept] == [(0, 0), (0, 1), (1, 1)]
    assert told[:2] == ["0/2 w 64", "0/2 w 64: 1 of 2, tuning"]
    assert told[2:] == ["1/2 w 128", "1/2 w 128: 1 of 2, tuning", "2/2 done"]
    assert device.released == 2


def test_default_is_every_shipped_pattern_at_its_lengths() -> None:
    cases, left_out = run.planned(None, None)
    shown = [(c.pattern.name, c.q_len) for c in cases]
    assert ("bigbird", 4096) in shown and ("bigbird", 16384) in shown
    assert ("axial_image", 32768) in shown
    lost = {x.pattern: x.reason for x in left_out}
    assert set(lost) == {"block_mask", "moba", "packed_documents"}
    assert "block_mask" in lost["block_mask"] and "data at run time" in lost["moba"]
    assert {c.pattern.name for c in cases}.isdisjoint(lost)


def test_lengths_for_all_patterns_may_be_too_long_for_a_grid() -> None:
    cases, left_out = run.planned(["causal", "axial_image"], [(64, 64), (1, 65536)])
    assert [(c.pattern.name, c.q_len, c.kv_len) for c in cases] == [
        ("causal", 64, 64), ("causal", 1, 65536), ("axial_image", 64, 64),
    ]  # fmt: skip
    ((name, at, reason),) = [(x.pattern, x.lengths, x.reason) for x in left_out]
    assert (name, at) == ("axial_image", "1x65536") and "32768 cells" in reason


def test_a_pattern_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(SpecError, match="causal"):
        run.planned(["causl"], None)


@pytest.mark.filterwarnings("ignore")
def test_no_gpu_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsegen.spec.gpu.current_gpu", lambda: None)
    asked: list[Any] = []
    monkeypatch.setattr(peers, "select", asked.append)
    with pytest.raises(ToolchainError, match="needs|measures on a GPU"):
        run.bench(["causal"])
    assert asked == []  # peers load for seconds
