"""Peers: who is chosen, what each refuses, and that it computes what the pattern means."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from sparsegen.bench import flash4, flash_infer, peers
from sparsegen.bench.case import Band, Case, Inputs
from sparsegen.errors import InputError
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.reference import reference
from tests.bench.standin import install_flash4, install_flash_infer

SMALL = {"head_dim": 16, "heads": 4, "kv_heads": 2, "dtype": "float32"}


def case(mask: Any, lengths: tuple[int, int] = (40, 40), problem: Any = None, **more: Any) -> Case:
    data = {"name": "p", "mask": mask, "problem": {**SMALL, **(problem or {})}, **more}
    return Case.of(Pattern.from_dict(data), lengths)


def peer(name: str) -> peers.Peer:
    return next(p for p in peers.PEERS if p.name == name)


# ---- which peers ----


def test_all_peers_that_are_here_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    install_flash4(monkeypatch)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    found = peers.select()
    assert [p.name for p in found.peers] == ["flex", "flex-max", "sdpa", "fa4"]
    ((name, why),) = found.missing
    assert name == "flashinfer" and "flashinfer" in why


def test_a_peer_named_by_hand_that_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", None)
    found = peers.select(["fa4", "sdpa"])
    assert [p.name for p in found.peers] == ["sdpa"]
    assert [n for n, _ in found.missing] == ["fa4"] and "cannot be imported" in found.missing[0][1]


def test_a_broken_or_other_package_is_missing_too(monkeypatch: pytest.MonkeyPatch) -> None:
    install_flash4(monkeypatch)
    monkeypatch.delattr(sys.modules["flash_attn.cute.interface"], "flash_attn_func")
    assert "has no flash_attn_func" in peer("fa4").missing()

    def broken(name: str) -> Any:
        raise OSError("libcudart.so.13 not found")

    monkeypatch.setattr(peers.importlib, "import_module", broken)
    assert "OSError: libcudart" in peer("fa4").missing()


def test_none_is_no_peer() -> None:
    assert peers.select(["none"]).peers == () == peers.select(["none"]).missing


@pytest.mark.parametrize("names", [["flx"], ["none", "flex"], [], [""]])
def test_other_names_are_errors(names: list[str]) -> None:
    with pytest.raises(InputError, match="flex, flex-max, sdpa, fa4, flashinfer"):
        peers.select(names)


# ---- what a mask is ----


@pytest.mark.parametrize(
    ("mask", "lengths", "band"),
    [
        ("causal", (40, 40), Band(None, 0)),
        ("full", (40, 40), Band(None, None)),
        ({"window": {"size": 8}}, (40, 40), Band(7, 0)),
        ({"window": {"left": 3, "right": 5}}, (40, 40), Band(3, 5)),
        ({"all_of": ["causal", {"window": {"radius": 6}}]}, (40, 40), Band(6, 0)),
        ({"window": {"size": 64}}, (40, 40), Band(None, 0)),  # wider than the call: causal
        ({"predicate": "q - k >= 0"}, (1, 40), Band(None, 0)),
        ({"dilated": {"size": 8, "dilation": 2}}, (40, 40), None),
        ({"any_of": ["causal", {"prefix": {"tokens": 9}}]}, (40, 40), None),
    ],
    ids=str,
)
def test_bands(mask: Any, lengths: tuple[int, int], band: Band | None) -> None:
    assert case(mask, lengths).band() == band


@pytest.mark.parametrize(
    ("name", "one", "reason"),
    [
        ("sdpa", case({"window": {"size": 8}}), "causal and full"),
        ("sdpa", case("causal", (8, 40)), "starts at position 32"),
        ("sdpa", case("causal", softcap=20), "has no softcap"),
        ("fa4", case("causal"), "has no float32"),
        ("fa4", case("causal", (8, 40), {"dtype": "float16"}, align="top_left"), "top left"),
        ("fa4", case({"predicate": "q % (abs(k) + 1) == 0"}, problem={"dtype": "float16"}), "mask_mod"),
        ("fa4", case("causal", problem={"dtype": "float16"}, alibi=True), "has no ALiBi"),
        ("flashinfer", case({"window": {"radius": 8}}, problem={"dtype": "float16"}), "to the left"),
        ("flashinfer", case("causal", problem={"dtype": "float16", "batch": 2}), "one batch entry"),
        ("flex", case("causal", sink_logits=True, null_key=True), "no sink logits and no null key"),
    ],
)  # fmt: skip
def test_refusals(name: str, one: Case, reason: str) -> None:
    assert reason in peer(name).refusal(one)


def test_what_is_not_refused() -> None:
    assert peer("sdpa").refusal(case("causal", (8, 40), align="top_left")) == ""
    assert peer("sdpa").refusal(case("full", (8, 40))) == ""
    assert peer("flex").refusal(Case.of(Pattern.from_yaml("bigbird"), (256, 256))) == ""
    assert peer("fa4").refusal(Case.of(Pattern.from_yaml("gpt_oss_window_128"), (256, 256))) == ""
    assert "random blocks" in peer("fa4").refusal(Case.of(Pattern.from_yaml("bigbird"), (256, 256)))


def test_block_sizes_of_flash4() -> None:
    assert [flash4.sparse_block(*d) for d in ((64, 64), (128, 128), (192, 128))] == [(128, 128)] * 3
    assert [flash4.sparse_block(*d) for d in ((192, 192), (256, 256))] == [(128, 64)] * 2


def test_windows_of_flash_infer() -> None:
    assert flash_infer.arguments(Band(None, 0)) == {"causal": True}
    assert flash_infer.arguments(Band(7, 0)) == {"causal": True, "window_left": 7}
    assert flash_infer.arguments(Band(None, None)) == {"causal": False}
    assert flash_infer.arguments(Band(7, 7)) is None


# ---- that they compute it ----


def differs(one: Case, name: str) -> dict[str, float]:
    """Relative error of each contender of a peer against the float64 reference; a refusal raises."""
    inputs = Inputs.of(one, "cpu")
    want, _ = reference(one.pattern, inputs.q, inputs.k, inputs.v, **inputs.extras)

    def refuse(who: str, why: str) -> None:
        if who != "cudnn":  # never on a CPU
            raise AssertionError(f"{who}: {why}")

    found = peers.contenders(one, inputs, [peer(name)], refuse)
    assert found
    return {c.name: float((c.launch().double() - want).norm() / want.norm()) for c in found}


MASKS: list[Any] = [
    "causal",
    "full",
    {"window": {"size": 8}},
    {"window": {"left": 3, "right": 5}},
    {"dilated": {"size": 8, "dilation": 2}},
    {"any_of": [{"window": {"radius": 6}}, {"global": {"tokens": 3}}]},
]


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flex as Python: its compiler takes half a minute a mask."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_flex_computes_the_pattern(mask: Any, uncompiled: None) -> None:
    for lengths in ((160, 160), (33, 160)):
        one = case(mask, lengths, softcap=5, alibi=True, scale=0.3)
        assert all(e < 1e-5 for e in differs(one, "flex").values())


@pytest.mark.filterwarnings("ignore")
def test_flex_counts_what_its_mask_keeps(uncompiled: None) -> None:
    one = case("causal", (300, 300))
    found = peers.contenders(one, Inputs.of(one, "cpu"), [peer("flex")], print)
    assert [c.name for c in found] == ["flex", "flex USE_TMA"]
    assert all(c.setup_bytes >= 3 * 3 * 4 and c.setup_ms > 0 for c in found)


def test_sdpa_computes_the_pattern() -> None:
    for one in (case("causal"), case("full", (8, 40)), case("causal", (8, 40), align="top_left")):
        found = differs(one, "sdpa")
        assert set(found) == {"flash-2"} and found["flash-2"] < 1e-5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_flash4_is_asked_for_the_pattern(
    mask: Any, monkeypatch: pytest.MonkeyPatch, uncompiled: None
) -> None:
    """Windows and block lists as its documents say them, on a stand-in that computes densely."""
    install_flash4(monkeypatch)
    for lengths in ((300, 300), (140, 300)):
        half = {"dtype": "float16"}
        one = case(mask, lengths, half, softcap=5, sink_logits=True, scale=0.3)
        assert differs(one, "fa4")["fa4"] < 2e-3


@pytest.mark.filterwarnings("ignore")
def test_flash4_knows_masks_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cache looks at byte code, which does not hold the constants."""
    install_flash4(monkeypatch)
    masks = [case({"dilated": {"size": 8, "dilation": d}}) for d in (2, 3)]
    assert len({flash4._mask_mod(one).__cute_hash__ for one in masks}) == 2


def test_flash_infer_is_asked_for_the_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    install_flash_infer(monkeypatch)
    for mask in MASKS[:3]:
        one = case(mask, (30, 40), {"dtype": "float16"}, softcap=5, scale=0.3)
        assert differs(one, "flashinfer")["flashinfer"] < 2e-3


def test_a_peer_that_fails_is_said_by_name() -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no kernel image\nsecond line")

    bad = peers.Peer("bad", "torch", "nn", frozenset({"float32"}), lambda c: "", fails)
    told: list[tuple[str, str]] = []
    one = case("causal")
    assert peers.contenders(one, Inputs.of(one, "cpu"), [bad], lambda *x: told.append(x)) == []
    assert told == [("bad", "RuntimeError: no kernel image")]
