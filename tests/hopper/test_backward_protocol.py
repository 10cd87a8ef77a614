"""Every barrier operation of the gradient kernels' text is needed, and the machine notices when one is missing or wrong."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparsegen.launch.backward import Gradients
from tests.hopper.backward_runs import GradientsOnMachine, gradients_of, kernel_of, saved_of
from tests.hopper.operations import Operation, operations_of
from tests.hopper.runs import Run
from tests.hopper.small_patterns import WINDOW, causal_and, pattern_of

SEEDS = 6
# Two segments of several tiles each; two query heads to a key head.
QUERIES = Run("queries", pattern_of(causal_and(WINDOW, {"sink": {"tokens": 90}})), 140, 230, heads=2, kv_heads=1, knobs={"GROUP_HEADS": 1})  # fmt: skip
KEYS = Run("keys", pattern_of("causal"), 200, 140, heads=2, kv_heads=1, knobs={"GROUP_HEADS": 1})
RUNS = {"queries": QUERIES, "keys": KEYS, "keys-DK": KEYS, "keys-DV": KEYS}
WANTED = {"queries": "q", "keys": "kv", "keys-DK": "k", "keys-DV": "v"}


class Alone(GradientsOnMachine):
    """Gradients of one kernel; LSE and delta are those of an earlier pass."""

    stats: torch.Tensor

    def loaded(self, source: Any, variant: str, device: Any, launch: int) -> Any:
        found = super().loaded(source, variant, device, launch)
        if source.name != "queries" or launch or not hasattr(self, "stats"):
            return found
        place = [name for name, _ in source.parameters].index("STATS")

        def prepare(programs: int, args: Any, moving: int) -> Any:
            return lambda addresses: self._memory[addresses[place]].copy_(self.stats)

        return SimpleNamespace(block_m=found.block_m, constants=found.constants, prepare=prepare)


@cache
def text_of(name: str) -> str:
    kernel = kernel_of(RUNS[name])
    special = kernel.sources[name].hopper
    assert special is not None
    return special.text


@cache
def right(name: str, stages: int) -> tuple[Any, Any, tuple[Any, ...]]:
    """What a pass saves, its LSE and delta, and the gradients of the text as it is."""
    run = with_stages(RUNS[name], stages)
    saved, want, _ = saved_of(run)
    kernel = kernel_of(run)
    given = kernel.sources, kernel.configs
    one = Alone(*given, seed=run.seed)
    got = tensors(gradients_of(one, run, saved, WANTED[name]))
    letters = ["qkv".index(x) for x in WANTED[name]]
    assert all((a - want[i]).abs().max() < 1e-4 for a, i in zip(got, letters))
    (stats,) = (t for t in one._memory.values() if t.ndim == 4 and t.shape[3] == 4)
    return saved, stats.clone(), got


def with_stages(run: Run, stages: int) -> Run:
    return replace(run, knobs={**run.knobs, "STAGES": stages})


def tensors(found: Gradients) -> tuple[Any, ...]:
    return tuple(t for t in (found.q, found.k, found.v) if t is not None)


def fault_of(name: str, text: str) -> str:
    """What the machine finds wrong with a text, with rings of two slots and of four, in several seeds; "" if nothing."""
    for seed, stages in product(range(SEEDS), (2, 4)):
        saved, stats, want = right(name, stages)
        run = replace(with_stages(RUNS[name], stages), seed=seed)
        plain = kernel_of(run)
        kernel = Alone(plain.sources, plain.configs, seed=seed)
        kernel.stats, kernel.texts = stats, {name: text}
        try:
            got = tensors(gradients_of(kernel, run, saved, WANTED[name]))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        if not all(torch.equal(a, b) for a, b in zip(got, want)):
            return "other gradients"
    return ""


@pytest.mark.parametrize("name", RUNS)
def test_the_text_as_it_is(name: str) -> None:
    assert fault_of(name, text_of(name)) == ""


OPERATIONS = [(name, o) for name in RUNS for o in operations_of(text_of(name).split("\n"))]


@pytest.mark.parametrize(("name", "operation"), OPERATIONS, ids=str)
def test_no_operation_can_be_left_out(name: str, operation: Operation) -> None:
    lines = text_of(name).split("\n")
    indent = re.match(" *", lines[operation.line])
    assert indent is not None
    lines[operation.line] = f"{indent[0]}pass"
    assert fault_of(name, "\n".join(lines))


def test_the_protocol_has_all_kinds_of_operations() -> None:
    """The test above looks at something."""
    for name, seen in (("queries", "kv"), ("keys", ("q", "do"))):
        names = " ".join(str(o) for own, o in OPERATIONS if own == name)
        for tensor in seen:
            assert re.search(rf"produce_sweep\d-expect-{tensor}_ready", names)
            assert re.search(rf"consume_sweep\d-wait-{tensor}_ready", names)
        assert re.search(r"produce_sweep\d-wait-empty", names)
        for what in ("arrive-empty", "warpgroup_mma_wait"):
            assert re.search(rf"consume_sweep\d-{what}", names)
        assert "expect-own_ready" in names and "wait-own_ready" in names


# ---------------------------------------------------------------------- wrong operations
WAITED = r"^( *)(.* = warpgroup_mma_wait\(.*)\n((?:\1mbarrier\.arrive\(.*\n)+)"
CHANGES = {
    "a count too low": (r"init\(empty(.*)count=CONSUMERS", r"init(empty\1count=1"),
    "a count too high": (r"init\(empty(.*)count=CONSUMERS", r"init(empty\1count=CONSUMERS + 1"),
    "bytes too many": (r"expect\((\w+_ready.*)\)$", r"expect(\1 * 2)"),
    "bytes too few": (r"expect\((\w+_ready.*)\)$", r"expect(\1 // 2)"),
    "the producer waits for its own round": (r"round \^ 1", "round"),
    "consumers wait for the round before": (r"(wait\(\w+_ready.*), round\)", r"\1, round ^ 1)"),
    "always the first slot": (r"slot = turn % STAGES$", r"slot = turn * 0"),
    "arrivals before the product is done": (WAITED, r"\3\1\2\n"),
    "a wait for one product too few": (r"warpgroup_mma_wait\((\d),", r"warpgroup_mma_wait(\1 + 1,"),
    "a tile too many": (r"^( +)turn \+= 1$", r"\1turn += 2"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["queries", "keys"])
def test_wrong_operations_are_found(name: str, change: str) -> None:
    """Each place where the text has it, alone."""
    pattern, new = re.compile(CHANGES[change][0], re.M), CHANGES[change][1]
    text = text_of(name)
    places = list(pattern.finditer(text))
    assert places, "the text has no such line: write this change anew"
    for place in places:
        changed = text[: place.start()] + place.expand(new) + text[place.end() :]
        assert fault_of(name, changed), f"{change}: {place[0].strip()}"
