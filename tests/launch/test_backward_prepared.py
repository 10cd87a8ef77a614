"""A backward pass is prepared once a layout: what a call brings anew, what it does not, and when it is prepared again."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparsegen.codegen.backward import KEYS, default_config, render_backward
from sparsegen.launch import backward_kernel
from sparsegen.launch import signature as sig
from sparsegen.launch.backward import ALL, Gradients, Room, Saved, make_room
from sparsegen.launch.backward_kernel import BackwardKernel
from sparsegen.launch.kernel import Call, Kernel
from sparsegen.runtime import backward as operators
from sparsegen.schedule.build import build
from sparsegen.schedule.transpose import transpose
from sparsegen.spec.gpu import find_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem

MASK = {"all_of": ["causal", {"any_of": [{"window": {"size": 8}}, {"sink": {"tokens": 2}}]}]}
PATTERN = Pattern.from_dict({"name": "p", "mask": MASK, "sink_logits": True})
PROBLEM = Problem(head_dim=16, heads=2, dtype="float32")
H200 = find_gpu("h200")


class Stub(BackwardKernel):
    """Binaries that note what they are launched with: (kernel, launch, addresses)."""

    def __init__(self, pattern: Pattern = PATTERN):
        turned = transpose(pattern, PROBLEM)
        made = [render_backward(pattern, build(pattern, PROBLEM), PROBLEM)]
        for outputs in (("DK", "DV"), ("DK",)):
            made.append(
                render_backward(pattern, turned.schedule, PROBLEM, KEYS, turned.shift, outputs)
            )
        sources = {s.name: s for s in made}
        config = default_config(PROBLEM, H200)
        super().__init__(sources, dict.fromkeys(sources, config), {})
        self.made: list[tuple[str, int, list[Any]]] = []
        self.launched: list[tuple[str, int, list[int]]] = []

    def loaded(self, source: Any, variant: str, device: Any, launch: int) -> Any:
        text, chosen = sig.unit(source, self.configs[source.name], variant, launch)

        def prepare(programs: int, args: Any, moving: int) -> Any:
            assert programs > 0 and len(args) == len(text.parameters) + len(text.constexprs)
            pointers = [k.startswith("*") for _, k in text.parameters[: moving + 1]]
            assert all(pointers[:-1]) and not pointers[-1] and not any(args[:moving])
            self.made.append((source.name, launch, list(args)))
            return lambda addresses: self.launched.append((source.name, launch, list(addresses)))

        return SimpleNamespace(
            block_m=int(chosen["BLOCK_M"]),
            constants=(None,) * len(text.constexprs),
            prepare=prepare,
        )


def saved_of(rows: int = 40, dlse: bool = False) -> Saved:
    q, k, v, out, dout = (torch.randn(1, 2, rows, 16) for _ in range(5))
    lse = torch.zeros(1, 2, rows)
    return Saved(q, k, v, out, lse, dout, torch.zeros_like(lse) if dlse else None)


def call_of(**given: Any) -> Call:
    return Call(**{"sink_logits": torch.zeros(2), "scale": 0.25, **given})


def test_a_second_pass_brings_addresses_and_nothing_else() -> None:
    kernel, call = Stub(), call_of()
    first, second = saved_of(), saved_of()
    kernel(first, call)
    made = len(kernel.made)
    assert [(n, i) for n, i, _ in kernel.launched] == [(n, i) for n, i, _ in kernel.made]
    assert {n for n, _, _ in kernel.made} == {"queries", "keys"} and made == 3
    held = kernel(second, call)
    assert len(kernel.made) == made and len(kernel.launched) == 2 * made
    for name, launch, addresses in kernel.launched[made:]:
        names = [n for n, _ in kernel.sources[name].parameters][: len(addresses)]
        at = dict(zip(names, addresses))
        assert at["Q"] == second.q.data_ptr() and at["DO"] == second.dout.data_ptr()
        wanted = {"DQ": held.q, "DK": held.k, "DV": held.v}
        for grad, t in wanted.items():
            if grad in at and (name, launch) != ("queries", 0) and not kernel.sources[name].sums:
                assert at[grad] == t.data_ptr()
        if name == "queries" and launch == 0:
            assert at["LSE"] == at["DLSE"] == second.lse.data_ptr() and at["DQ"] == at["STATS"]


@pytest.mark.parametrize(
    "other",
    [
        lambda s, c: (saved_of(48), c, ALL),
        lambda s, c: (saved_of(dlse=True), c, ALL),
        lambda s, c: (replace(s, k=s.k.transpose(1, 2).contiguous().transpose(1, 2)), c, ALL),
        lambda s, c: (s, replace(c, scale=0.5), ALL),
        lambda s, c: (s, replace(c, q_start=3), ALL),
        lambda s, c: (s, replace(c, joins=0), ALL),
        lambda s, c: (s, replace(c, sink_logits=torch.zeros(2)), ALL),
        lambda s, c: (s, c, ("q",)),
        lambda s, c: (replace(s, q=torch.randn(1, 2, 40 * 16 + 1).flatten()[1:][: 2 * 640].view(1, 2, 40, 16)), c, ALL),
    ],
    ids=["length", "dlse", "strides", "scale", "start", "joins", "sinks", "wanted", "alignment"],
)  # fmt: skip
def test_what_decides_a_launch_is_prepared_anew(other: Any) -> None:
    kernel, saved, call = Stub(), saved_of(), call_of()
    kernel(saved, call)
    made = len(kernel.made)
    kernel(*other(saved, call))
    assert len(kernel.made) > made
    again = len(kernel.made)
    kernel(saved, call)
    assert len(kernel.made) == again  # the first is still there


def test_memory_of_the_call_s_tensors_is_kept() -> None:
    """Else another tensor might come to lie where a prepared launch reads."""
    kernel, saved = Stub(), saved_of()
    kernel(saved, call_of())
    calls = [p._plan.call for p in kernel._prepared.values()]
    assert len(calls) == 1 and calls[0].sink_logits is not None


def test_few_layouts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_kernel, "KEPT", 2)
    kernel, call = Stub(), call_of()
    for rows in (33, 34, 35, 36, 37):
        kernel(saved_of(rows), call)
        assert len(kernel._prepared) <= 2


def test_nothing_of_a_capture_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables that a capture computes are there at replays alone."""
    kernel, saved, call = Stub(), saved_of(), call_of()
    monkeypatch.setattr(backward_kernel, "capturing", lambda: True)
    kernel(saved, call)
    assert kernel.launched and not kernel._prepared


def test_one_gradient_alone_has_its_own_kernel() -> None:
    kernel = Stub()
    got = kernel(saved_of(), call_of(), ("k",))
    assert {n for n, _, _ in kernel.made} == {"queries", "keys-DK"}
    assert got.q is None and got.v is None and got.k is not None
    other = kernel(saved_of(), call_of(), ("v",))  # there is no kernel for it alone here
    assert other.k is None and other.v is not None and other.sink_logits is not None


def test_room_is_made_as_asked() -> None:
    kernel, asked = Stub(), []

    def make(saved: Saved, room: Room) -> Any:
        asked.append(room)
        return make_room(saved, room)

    got = kernel(saved_of(), call_of(), ALL, None, make)
    assert isinstance(got, Gradients) and sum(room.zero for room in asked) == 1  # parts of sinks
    assert Room((1, 2, 40, 4)) in asked


def test_a_forward_launch_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    kernel = object.__new__(Kernel)
    launched: list[Any] = []
    monkeypatch.setattr(
        Kernel, "prepare", lambda self, *given: made.append(given) or launched_of(launched)
    )
    engine = operators.Engine(kernel, None)
    call = call_of()
    for rows in (8, 8, 16, 8):
        q, k, v, out = (torch.zeros(1, 2, rows, 16) for _ in range(4))
        engine.run_forward(q, k, v, out, q[..., 0], call)
        assert launched[-1][0] is q
    assert len(made) == 2 and len(launched) == 4
    engine.run_forward(q, k, v, out, q[..., 0], replace(call, k_start=1))
    assert len(made) == 3


def launched_of(launched: list[Any]) -> Any:
    return lambda *tensors: launched.append(tensors)
