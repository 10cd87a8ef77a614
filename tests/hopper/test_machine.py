"""The machine itself: barriers as the hardware has them, boxes, deadlocks that are named, races that are found."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.hopper.machine import Machine
from tests.hopper.registers import OutOfBounds, Pointer, Value
from tests.hopper.schedulers import Deadlock, Scheduler
from tests.hopper.shared import Barrier, Misuse, Race, box_of, check_aligned

HEAD = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait,
)
"""
KERNEL = """
def first(tile, ready, empty, X, BOX):
    {first}

def second(tile, ready, empty, X, BOX):
    {second}

def kernel(X, BOX):
    tile = gl.allocate_shared_memory(gl.float16, [64, 64], gl.NVMMASharedLayout())
    ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready.index(0), count=1)
    mbarrier.init(empty.index(0), count=1)
    fence_async_shared()
    gl.warp_specialize([(first, (tile, ready, empty, X, BOX)), (second, (tile, ready, empty, X, BOX))], [1], [24])
"""
ASK = "mbarrier.expect(ready.index(0), 64 * 64 * 2)", "tma.async_load(BOX, [0, 0], ready.index(0), tile)"  # fmt: skip
WAIT = "mbarrier.wait(ready.index(0), 0)"
PRODUCT = (
    "zero = gl.zeros([64, 64], gl.float32, None)",
    "s = warpgroup_mma(tile, tile.permute((1, 0)), zero, use_acc=False, is_async=True)",
)
DONE = "s = warpgroup_mma_wait(0, deps=(s,))"
COLUMNS = "x = X + gl.arange(0, 64, None)[:, None] * 64 + gl.arange(0, 64, None)[None, :]"


def run(first: tuple[str, ...], second: tuple[str, ...], seed: int = 0) -> torch.Tensor:
    """What two partitions leave in X [64, 64], which a descriptor describes as well."""
    text = HEAD + KERNEL.format(first="\n    ".join(first), second="\n    ".join(second))
    x = torch.arange(64 * 64, dtype=torch.float32).reshape(64, 64) / 4096
    box = SimpleNamespace(base=x.clone(), shape=[64, 64], strides=[64, 1], block_shape=[64, 64])
    Machine(text, seed).launch("kernel", 1, {"X": x, "BOX": box}, {})
    return x


def found(kind: type[AssertionError], first: Any, second: Any, said: str, seeds: int = 20) -> None:
    """Some order of events shows the fault, under its name."""
    for seed in range(seeds):
        try:
            run(first, second, seed)
        except kind as error:
            assert said in str(error), str(error)
            return
    raise AssertionError(f"{seeds} seeds show nothing")


@pytest.mark.parametrize("seed", range(5))
def test_a_box_a_product_and_a_store(seed: int) -> None:
    got = run(ASK, (WAIT, *PRODUCT, DONE, COLUMNS, "gl.store(x, s)"), seed)
    x = torch.arange(64 * 64, dtype=torch.float32).reshape(64, 64) / 4096
    assert torch.equal(got, x @ x.T)


def test_a_deadlock_names_who_waits_for_what() -> None:
    again = "mbarrier.wait(empty.index(0), 0)"
    with pytest.raises(Deadlock) as error:
        run((*ASK, again), (WAIT, "mbarrier.wait(ready.index(0), 1)"))
    assert str(error.value) == (
        "first waits for empty[0], phase 0 of parity 0; second waits for ready[0], phase 1 of parity 1"
    )


def test_what_is_read_before_it_lands() -> None:
    store = (COLUMNS, "gl.store(x, tile.load(None))")
    assert any(run(ASK, (*store, WAIT), seed).isnan().any() for seed in range(20))
    found(Race, ASK, (*PRODUCT, WAIT, DONE), "tile changes under a product of second")


def test_a_product_that_nobody_waited_for() -> None:
    with pytest.raises(Race, match="second uses a product that it has not waited for"):
        run(ASK, (WAIT, *PRODUCT, COLUMNS, "gl.store(x, s)"))
    with pytest.raises(AssertionError, match="a product that nobody waits for"):
        run(ASK, (WAIT, *PRODUCT))


def test_stores_without_a_fence() -> None:
    write = ("tile.store(gl.zeros([64, 64], gl.float32, None))",)
    with pytest.raises(Race, match="a product of second takes tile, which was stored to and not"):
        run(ASK, (WAIT, *write, *PRODUCT, DONE))
    run(ASK, (WAIT, *write, "fence_async_shared()", *PRODUCT, DONE))
    other = ("mbarrier.arrive(empty.index(0), count=1)", "fence_async_shared()")
    found(Race, (*ASK, "mbarrier.wait(empty.index(0), 0)", ASK[0], ASK[1]), (WAIT, *write, *other), "takes tile")  # fmt: skip


FILL = "tile.store(gl.full([64, 64], 2.0, gl.float32, None))", "fence_async_shared()"
SEND = "tma.async_atomic_add(BOX, [0, 0], tile)"
READ = "tma.store_wait(0)"


@pytest.mark.parametrize("operation", ["async_atomic_add", "async_store"])
def test_boxes_on_their_way_out(operation: str) -> None:
    """They must be fenced, be left alone until they are read, be waited for, and lie in the tensor at least in part."""
    send = SEND.replace("async_atomic_add", operation)
    for seed in range(10):
        run((*FILL, send, READ, *FILL), ("pass",), seed)
        run((*FILL, send.replace("[0, 0]", "[40, -32]"), READ), ("pass",), seed)
    found(Race, (FILL[0], send, READ), ("pass",), "not fenced")
    other = FILL[0].replace("2.0", "3.0")
    found(Race, (*FILL, send, other, FILL[1], READ), ("pass",), "the box at [0, 0], on its way out")
    found(AssertionError, (*FILL, send), ("pass",), "nobody waited for the box")
    outside = send.replace("[0, 0]", "[64, 0]")
    found(Misuse, (*FILL, outside, READ), ("pass",), "lies outside of")


@pytest.mark.parametrize(
    "ask",
    [ASK[1], SEND, SEND.replace("async_atomic_add", "async_store")],
    ids=["load", "add", "store"],
)
def test_the_innermost_coordinate_of_a_box(ask: str) -> None:
    """A multiple of 16 bytes, 8 elements here; the others are any."""
    loads = ask == ASK[1]
    before, after = ((ASK[0],), ()) if loads else (FILL, (READ,))
    waits = (WAIT,) if loads else ("pass",)
    for corner in ("[0, 0]", "[3, 0]", "[-5, 8]", "[0, -16]"):
        run((*before, ask.replace("[0, 0]", corner), *after), waits)
    for corner, said in (
        ("[8, 4]", "innermost coordinate 4 is byte 8"),
        ("[0, -1]", "-1 is byte -2"),
    ):
        found(Misuse, (*before, ask.replace("[0, 0]", corner), *after), waits, said, 1)


def test_strides_of_a_described_tensor() -> None:
    box = SimpleNamespace(strides=[9 * 64, 65, 1])
    with pytest.raises(
        Misuse, match=r"a box: strides \[576, 65, 1\] of 2 bytes, no multiples of 16"
    ):
        check_aligned(box, [0, 0, 8], 2, "a box")


def test_boxes_that_are_left_over() -> None:
    found(AssertionError, ASK, ("pass",), "nobody waited for the box at [0, 0] into tile")


# ---------------------------------------------------------------------- barriers
def barrier(count: int) -> Barrier:
    out = Barrier("b", Scheduler(0))
    out.init(count)
    out.fenced = True
    return out


def test_phases() -> None:
    """A fresh barrier lets waiters of parity 1 pass; a phase ends with its last arrival, and the next one starts."""
    b = barrier(2)
    assert b.passed(1) and not b.passed(0)
    b.arrive()
    assert b.passed(1) and not b.passed(0)
    b.arrive()
    assert b.passed(0) and not b.passed(1)
    b.arrive(2)
    assert b.passed(1) and b.ended == 2


def test_bytes() -> None:
    """Arrivals and bytes in any order: both must be complete."""
    b = barrier(1)
    b.arrive(expected=64)
    b.land(32)
    assert not b.passed(0)
    b.land(32)
    assert b.passed(0)
    b.land(16)  # before it is expected
    assert not b.at_rest and not b.passed(1)
    b.arrive(expected=16)
    assert b.passed(1) and b.at_rest


def test_misuse() -> None:
    b = barrier(1)
    b.arrive(expected=8)
    with pytest.raises(Misuse, match="arrives at b beyond its count"):
        b.arrive()
    b.fenced = False
    with pytest.raises(Misuse, match="b is used before it is there for all"):
        b.arrive()


# ---------------------------------------------------------------------- memory and arithmetic
def test_boxes_outside_of_a_tensor_read_zero() -> None:
    t = torch.arange(1.0, 13.0).reshape(3, 4)
    made = SimpleNamespace(base=t, shape=[3, 4], strides=[4, 1], block_shape=[2, 4])
    assert box_of(made, [2, 2]).tolist() == [[11, 12, 0, 0], [0, 0, 0, 0]]
    assert box_of(made, [-1, -1]).tolist() == [[0, 0, 0, 0], [0, 1, 2, 3]]
    assert not box_of(made, [7, 0]).any()


def test_addresses_are_checked() -> None:
    """Where the mask holds; a view starts where its first element is."""
    t = torch.arange(12.0).reshape(3, 4)
    p = Pointer.to(t[1:])
    assert p.load().data == 4.0 and (p + 7).load().data == 11.0
    at = Value(torch.arange(6, 10))
    assert (p + at).load(at < 8, -1.0).data.tolist() == [10, 11, -1, -1]
    with pytest.raises(OutOfBounds):
        (p + at).load()
    with pytest.raises(OutOfBounds):
        (p + (-5)).store(1.0)


@pytest.mark.parametrize("a", [7, -7])
def test_division_truncates(a: int) -> None:
    for x in (Value(a), Value(torch.tensor([a]))):
        assert int((x // 2).data) == math.trunc(a / 2) and int((x % 2).data) == math.fmod(a, 2)
        assert int((x >> 1).data) == a >> 1
