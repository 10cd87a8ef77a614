"""Every barrier operation of the rendered text is needed, and the machine notices when one is missing or wrong."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from tests.hopper.operations import Operation, operations_of
from tests.hopper.runs import OnMachine, Run, judge
from tests.hopper.small_patterns import MASKS, gathered_queries, pattern_of

SEEDS = 5
# A narrow segment, which is a guest of a window.  Many key tiles a query tile, and rings of two; or fewer than the rings hold,
# so that the producer can be two query tiles ahead; or queries behind the last window, which see the sinks alone.
LONG = Run("long", pattern_of(MASKS["sinks"], align="top_left"), 200, 300, heads=5, kv_heads=5, knobs={"PERSISTENT": True, "GROUP_HEADS": 1})  # fmt: skip
SHORT = replace(LONG, name="short", knobs={**LONG.knobs, "BLOCK_N": 128, "STAGES": 4})
TIGHT = replace(LONG, name="tight", knobs={**LONG.knobs, "BLOCK_N": 128, "STAGES": 2})
BEHIND = replace(LONG, name="behind", q_len=300, kv_len=100)
MIXED = replace(LONG, name="mixed", q_len=384, kv_len=192, heads=3, kv_heads=3, knobs={**LONG.knobs, "GROUP_HEADS": 8, "STAGES": 3})  # fmt: skip
LATE = replace(LONG, name="late", knobs={**LONG.knobs, "LATE_VALUES": True})
LATE_SHORT = replace(MIXED, name="late short", knobs={**MIXED.knobs, "LATE_VALUES": True})
LATE_BEHIND = replace(BEHIND, name="late behind", knobs=LATE.knobs)
# the one that finds most faults goes first
ALL = (BEHIND, LONG, SHORT, TIGHT, MIXED, LATE, LATE_BEHIND, LATE_SHORT)
# The operand of the scores: few columns of queries in registers, more in shared memory; these in two products each.
COLUMNS = {"registers": 16, "shared": 144}
# consumers that gather their queries, which are then an operand in shared memory
PATTERN, SCHEDULE = gathered_queries()
GATHERED = replace(LONG, name="gathered", pattern=PATTERN, schedule=SCHEDULE, head_dim=144)


@cache
def lines_of(run: Run) -> tuple[str, ...]:
    return tuple(run.source().hopper.text.split("\n"))


def operations(run: Run) -> list[Operation]:
    return operations_of(lines_of(run))


def with_operand(run: Run, operand: str) -> Run:
    return replace(run, head_dim=COLUMNS[operand], value_dim=COLUMNS[operand])


def fault_in_any(text: str, operand: str) -> str:
    return fault_of(text, tuple(with_operand(run, operand) for run in ALL))


def fault_of(text: str, runs: tuple[Run, ...]) -> str:
    """What the machine finds wrong with a text in any of several runs and seeds; "" if nothing."""
    for seed, run in product(range(SEEDS), runs):
        run = replace(run, seed=seed)
        source = run.source()
        changed = replace(source, hopper=replace(source.hopper, text=text))
        q, k, v = run.tensors()
        try:
            judge(run, q, k, v, *OnMachine(changed, run.config(), seed).attend(q, k, v, run.call()))
        except AssertionError as error:
            return f"{type(error).__name__}: {error}"
    return ""


def without(run: Run, line: int) -> str:
    lines = list(lines_of(run))
    lines[line] = re.match(r"\s*", lines[line])[0] + "pass"
    return "\n".join(lines)


@pytest.mark.parametrize("operand", COLUMNS)
def test_the_text_as_it_is(operand: str) -> None:
    assert fault_in_any("\n".join(lines_of(with_operand(LONG, operand))), operand) == ""
    gathered = replace(GATHERED, head_dim=COLUMNS[operand])
    assert fault_of("\n".join(lines_of(gathered)), (gathered,)) == ""


# For the assembler alone: this phase has ended, and the wait begins a new block of code (`new_block` in hopper_tiles.jinja).
FOR_THE_ASSEMBLER = "begins a new block of code"
OPERATIONS = [
    (operand, o)
    for operand in COLUMNS
    for o in operations(with_operand(LONG, operand))
    if FOR_THE_ASSEMBLER not in lines_of(with_operand(LONG, operand))[o.line]
]


@pytest.mark.parametrize(("operand", "operation"), OPERATIONS, ids=str)
def test_no_operation_can_be_left_out(operand: str, operation: Operation) -> None:
    assert fault_in_any(without(with_operand(LONG, operand), operation.line), operand)


@pytest.mark.parametrize("operand", COLUMNS)
def test_one_wait_is_for_the_assembler_alone(operand: str) -> None:
    """The one of a key loop: it passes at once, so that nothing changes without it."""
    run = with_operand(LONG, operand)
    (line,) = (i for i, x in enumerate(lines_of(run)) if FOR_THE_ASSEMBLER in x)
    assert fault_in_any(without(run, line), operand) == ""


FENCES = [o for o in operations(GATHERED) if "fence" in o.name]


@pytest.mark.parametrize("operation", FENCES, ids=str)
def test_no_fence_can_be_left_out(operation: Operation) -> None:
    assert fault_of(without(GATHERED, operation.line), (GATHERED,))


def test_the_protocol_has_all_kinds_of_operations() -> None:
    """The two tests above look at something."""
    names = " ".join(o.name for o in operations(LONG))
    for waits, answers, barriers in (
        ("consume", "produce_attend_tile-expect", ("q_ready", "ready", "values_ready")),
        ("produce", "consume_attend_tile-arrive", ("q_empty", "free")),
    ):
        for barrier in barriers:
            assert f"{waits}_attend_tile-wait-{barrier}-" in names
            assert f"{answers}-{barrier}-" in names
    assert any("consume" in o.name for o in FENCES)


# ---------------------------------------------------------------------- wrong operations
EARLY = re.compile(r"^( *)(.* = warpgroup_mma_wait\(.*)\n((?:\1mbarrier\.arrive\(.*\n)+)", re.M)
CHANGES = {
    "a count too low": (r"init\((\w_empty.*|free.*)count=CONSUMERS", r"init(\1count=1"),
    "a count too high": (
        r"init\((\w_empty.*|free.*)count=CONSUMERS",
        r"init(\1count=CONSUMERS + 1",
    ),
    "bytes too many": (r"expect\((\w*ready.*) \* 2\)", r"expect(\1 * 4)"),
    "bytes too few": (r"expect\((\w*ready.*) \* 2\)", r"expect(\1)"),
    "the producer waits for its own round": (r"& 1 \^ 1", "& 1"),
    "consumers wait for the round before": (r"(wait\(\w*ready.*) & 1\)", r"\1 & 1 ^ 1)"),
    "as many value slots as key slots": (r"return (.*) else stages \+ 1", r"return \1 else stages"),
    "late values a tile too early": (
        r"\(t \+ 1\) % STAGES\), \(\(t \+ 1\) // STAGES",
        "t % STAGES), (t // STAGES",
    ),
    "always the first slot": (r"slot = t % STAGES$", r"slot = t * 0"),
    "arrivals before the product is done": (EARLY.pattern, r"\3\1\2\n"),
    "scores that are not waited for": (r"(s = warpgroup_mma_wait)\((\d)", r"\1(\2 + 1"),
    "a key tile too many": (r"(        t \+= 1\n\n    return t)", r"        t += 1\n\1"),
}


@pytest.mark.parametrize("operand", COLUMNS)
@pytest.mark.parametrize("change", CHANGES)
def test_wrong_operations_are_found(change: str, operand: str) -> None:
    """Each place where the text has it, alone."""
    pattern, new = (re.compile(CHANGES[change][0], re.M), CHANGES[change][1])
    text = "\n".join(lines_of(with_operand(LONG, operand)))
    places = list(pattern.finditer(text))
    assert places, "the text has no such line: write this change anew"
    for place in places:
        changed = text[: place.start()] + place.expand(new) + text[place.end() :]
        assert fault_in_any(changed, operand), f"{change}: {place[0].strip()}"
