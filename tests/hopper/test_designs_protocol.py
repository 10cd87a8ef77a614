"""Every barrier operation of the fused kernel and of those with stored dS is needed: the machine notices when one is missing
or wrong."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from tests.hopper.backward_runs import GradientsOnMachine, gradients_of, saved_of
from tests.hopper.fused_runs import fused_kernel_of
from tests.hopper.operations import Operation, operations_of
from tests.hopper.runs import Run
from tests.hopper.small_patterns import pattern_of
from tests.hopper.stored_runs import stored_kernel_of
from tests.kernels.gradients import flat

SEEDS = 6
MANY = 60  # for what has one chance a program to show
COMMON: dict[str, Any] = {"heads": 2, "kv_heads": 1, "knobs": {"GROUP_HEADS": 1}}
RUNS = {
    # dS exchanged between the consumers, of which each gives half of dQ's columns
    "halves": Run("halves", pattern_of("causal"), 330, 140, head_dim=128, **COMMON),
    # each gives dQ of its own keys
    "whole": Run("whole", pattern_of("causal"), 330, 140, head_dim=16, **COMMON),
    # the kernel that stores dS, and the one that multiplies it with K
    "stored-keys": Run("stored", pattern_of("causal"), 400, 437, head_dim=16, **COMMON),
    "stored-queries": Run("stored", pattern_of("causal"), 140, 470, head_dim=16, **COMMON),
}
# one consumer, whose boxes of dS have one place
ALONE = "stored-alone"
RUNS[ALONE] = replace(
    RUNS["stored-keys"], q_len=330, kv_len=200, knobs={"GROUP_HEADS": 1, "BLOCK_M": 64}
)
SOURCES = {"halves": "fused", "whole": "fused", ALONE: "stored-keys"}  # else of its name
NEAR = 1e-4  # sums of dQ come in any order


@cache
def plain(name: str, stages: int) -> tuple[GradientsOnMachine, Any, tuple[torch.Tensor, ...]]:
    """The kernel, what a pass saves, and the gradients in float64."""
    run = with_stages(RUNS[name], stages)
    saved, want, _ = saved_of(run)
    made = (fused_kernel_of if SOURCES.get(name) == "fused" else stored_kernel_of)(run)
    return made, saved, tuple(want)


def with_stages(run: Run, stages: int) -> Run:
    return replace(run, knobs={**run.knobs, "STAGES": stages})


@cache
def text_of(name: str) -> str:
    special = plain(name, 2)[0].sources[SOURCES.get(name, name)].hopper
    assert special is not None
    return special.text


def lines_of(name: str) -> list[str]:
    return text_of(name).split("\n")


def fault_of(name: str, text: str, seeds: int = SEEDS) -> str:
    """What the machine finds wrong with a text, with rings of two slots and of four, in several seeds; "" if nothing."""
    for seed, stages in product(range(seeds), (2, 4)):
        made, saved, want = plain(name, stages)
        run = replace(with_stages(RUNS[name], stages), seed=seed)
        kernel = GradientsOnMachine(made.sources, made.configs, seed)
        kernel.workspace, kernel.texts = made.workspace, {SOURCES.get(name, name): text}
        try:
            got = flat(gradients_of(kernel, run, saved))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        assert SOURCES.get(name, name) in kernel.ran
        if not all((a - b).abs().max() < NEAR for a, b in zip(got, want)):
            return "other gradients"
    return ""


def all_operations(lines: Sequence[str]) -> list[Operation]:
    """Those of any kernel, and what boxes added to memory need."""
    found = operations_of(lines)
    for i, line in enumerate(lines):
        if m := re.match(r"(tma\.store_wait|reduce_add|store_box)\((\w*)", line.strip()):
            same = sum(o.name.startswith(m[1]) for o in found)
            found.append(Operation(i, f"{m[1]}-{m[2]}-{same}"))
    return sorted(found, key=lambda o: o.line)


@pytest.mark.parametrize("name", RUNS)
def test_the_text_as_it_is(name: str) -> None:
    assert fault_of(name, text_of(name)) == ""


OPERATIONS = [(name, o) for name in RUNS for o in all_operations(lines_of(name))]


@pytest.mark.parametrize(("name", "operation"), OPERATIONS, ids=str)
def test_no_operation_can_be_left_out(name: str, operation: Operation) -> None:
    lines = lines_of(name)
    indent = re.match(" *", lines[operation.line])
    assert indent is not None
    lines[operation.line] = f"{indent[0]}pass"
    assert fault_of(name, "\n".join(lines))


def test_the_protocol_has_all_kinds_of_operations() -> None:
    """The test above looks at something."""
    names = " ".join(str(o) for own, o in OPERATIONS if own == "halves")
    for what in ("wait-ds_ready", "arrive-ds_ready", "wait-own_done", "arrive-own_done", "fence_async_shared"):  # fmt: skip
        assert re.search(rf"consume_sweep\d-{what}", names)
    assert "reduce_add-" in names and "tma.store_wait-" in names
    assert not any("ds_ready" in str(o) for own, o in OPERATIONS if own == "whole")
    names = " ".join(str(o) for own, o in OPERATIONS if own == "stored-keys")
    assert "store_box-" in names and "tma.store_wait-" in names and "fence_async_shared" in names
    names = " ".join(str(o) for own, o in OPERATIONS if own == "stored-queries")
    for what in ("wait-ready", "arrive-empty", "expect-ready", "load_box-DS", "fence_async_shared"):
        assert what in names


# ---------------------------------------------------------------------- wrong operations
WAITED = r"^( *)(.* = warpgroup_mma_wait\(.*)\n((?:\1mbarrier\.arrive\(.*\n)+)"
CHANGES = {
    "a count too low": (r"init\((empty|ds_ready|own_done)(.*)count=CONSUMERS", r"init(\1\2count=1"),
    "bytes too few": (r"expect\(((?:\w+_)?ready.*)\)$", r"expect(\1 // 2)"),
    "the producer waits for its own round": (r"round \^ 1", "round"),
    "consumers wait for the round before": (r"(wait\((?:q_|do_|)ready.*), round\)", r"\1, round ^ 1)"),
    "dS of the wrong round": (r"\(turn >> 1\) & 1\)$", "((turn >> 1) + 1) & 1)"),
    "the other place of dS": (r"\((turn|\(turn \+ 1\)) & 1\) \* 2", r"((\1 + 1) & 1) * 2"),
    "something in place of no dS": (r"^( +)ds_smem\.index\(\(0 & 1\) .*$", r"\1pass"),
    "always the first slot": (  # not the function's own line for rings of three
        r"(?<!else:\n)^( +)(slot = turn % STAGES|slot, round = place\(turn, STAGES\))$",
        r"\1\2\n\1slot = turn * 0",
    ),
    "arrivals before the product is done": (WAITED, r"\3\1\2\n"),
    "dS announced before it is fenced": (
        r"^( *)fence_async_shared\(\)\n( *mbarrier\.arrive\(ds_ready.*)$",
        r"\2\n\1fence_async_shared()",
    ),
    "a wait for one product too few": (r"warpgroup_mma_wait\((\d),", r"warpgroup_mma_wait(\1 + 1,"),
    "a tile too many": (r"^( +)turn \+= 1$", r"\1turn += 2"),
    "dQ to the rows of this tile": (r"last_top, 0", r"last_top + BLOCK_N, 0"),
    "a box of dQ not waited for": (r"tma\.store_wait\(0\)", "tma.store_wait(1)"),
    "one place for boxes of dS": (r"boxes % PLACES", "0"),
    "a box of dS not waited for": (r"tma\.store_wait\((PLACES - 1|0)\)", r"tma.store_wait(\1 + 1)"),
}  # fmt: skip
ONLY = {  # texts that have such a line; else all
    "dS of the wrong round": ["halves"],
    "dS announced before it is fenced": ["halves"],
    "the other place of dS": ["halves", "whole"],
    "something in place of no dS": ["halves", "whole"],
    "dQ to the rows of this tile": ["halves", "whole"],
    "a box of dQ not waited for": ["halves", "whole"],
    "one place for boxes of dS": ["stored-keys"],
    "a box of dS not waited for": ["stored-keys", ALONE],
    "a wait for one product too few": ["halves", "whole", "stored-keys", ALONE],
    "a count too low": ["halves", "whole", "stored-keys", "stored-queries"],
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", RUNS)
def test_wrong_operations_are_found(name: str, change: str) -> None:
    """Each place where the text has it, alone."""
    if name not in ONLY.get(change, RUNS):
        return
    pattern, new = re.compile(CHANGES[change][0], re.M), CHANGES[change][1]
    text = text_of(name)
    places = list(pattern.finditer(text))
    assert places, "the text has no such line: write this change anew"
    for place in places:
        changed = text[: place.start()] + place.expand(new) + text[place.end() :]
        assert fault_of(name, changed, MANY), f"{change}: {place[0].strip()}"
