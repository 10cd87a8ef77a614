"""The cost model: parts worked out by hand, and cells that agree with the count."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sparsegen.schedule import count
from sparsegen.schedule.build import build_from_exprs
from sparsegen.schedule.chunks import chunks_of
from sparsegen.schedule.cost import cost_of, sweep_cost
from sparsegen.schedule.loads import Load, load
from sparsegen.schedule.machine import H200, Machine, Sizes
from sparsegen.schedule.search import candidates
from sparsegen.spec.problem import Problem
from tests.schedule.formulas import mask, random_blocks

TILE = (128, 64)
ROUND = Machine(
    sms=100,
    flops=1e12,
    bandwidth=1e9,
    launch=1.0,
    tile_rate=((0, 1.0),),
    program=0.0,
    segment=0.0,
)
ONE = Sizes(heads=1, dim=1, value_dim=1, kv_heads=1)  # a tile of 10 x 10 is 400 operations


def loads(*tiles: int) -> list[Load]:
    return [Load(np.array(tiles), np.array(tiles, float))]


def test_work_is_spread_over_the_machine_and_the_longest_program_is_not() -> None:
    even = sweep_cost(loads(*[5] * 200), 1, (10, 10), ONE, first=True, machine=ROUND)
    assert even.key_tiles == 1000 and even.rows == 2000
    assert even.matmul == pytest.approx(1000 * 400 / 1e12)
    assert even.longest == pytest.approx(5 * 400 * 100 / 1e12)  # one of 100 processors
    assert even.seconds(ROUND) == pytest.approx(even.matmul + 1.0)
    heavy = sweep_cost(loads(500, 5), 1, (10, 10), ONE, first=True, machine=ROUND)
    assert heavy.seconds(ROUND) == pytest.approx(heavy.longest + 1.0)
    assert heavy.longest == pytest.approx(500 * 400 * 100 / 1e12) and heavy.longest > heavy.matmul


def test_every_query_tile_with_keys_starts_a_program() -> None:
    machine = replace(ROUND, program=3.0)
    some = sweep_cost(loads(5, 0, 5), 1, (10, 10), ONE, first=True, machine=machine)
    assert some.matmul == pytest.approx((5 + 3 + 5 + 3) * 400 / 1e12)
    assert some.key_tiles == 10


def test_later_sweeps_pay_for_the_rows_that_they_enter() -> None:
    later = sweep_cost(loads(5, 0, 5), 1, (10, 10), ONE, first=False, machine=ROUND)
    # 20 rows: q, OUT read and written, 2 bytes an element; LSE read and written, 4 bytes
    assert later.rows == 20 and later.state == 20 * (3 * 2 + 8)
    assert later.seconds(ROUND) == pytest.approx(later.longest + 280 / 1e9 + 1.0)


def test_a_split_sweep_waits_for_a_chunk_and_joins() -> None:
    # 5,000 keys are 20 chunks of 256 each, of which 7 rows get a partial state each
    one = sweep_cost(loads(500), 1, (10, 10), ONE, first=False, split=(7, 5000), machine=ROUND)
    assert chunks_of(5000) == (20, 256)
    assert one.longest == pytest.approx(25.6 * 400 * 100 / 1e12)
    assert one.workspace == 20 * 7 * (1 + 1) * 4 and one.launches == 2
    moved = one.state + 2 * one.workspace
    assert one.seconds(ROUND) == pytest.approx(one.longest + moved / 1e9 + 2.0)


def test_a_chunk_is_cut_from_every_segment() -> None:
    both = [*loads(500, 0), *loads(10, 0)]
    machine = replace(ROUND, program=3.0)
    one = sweep_cost(both, 2, (10, 10), ONE, first=False, split=(7, 5000), machine=machine)
    # the first program takes 25.6 tiles of one segment and all 10 of the other; 20 programs find keys
    assert one.longest == pytest.approx((25.6 + 10 + 3) * 400 * 100 / 1e12)
    assert one.matmul == pytest.approx((500 + 10 + 20 * 3) * 400 / 1e12)


def test_sizes_of_a_problem_weigh_work_and_bytes() -> None:
    grouped = Sizes.of(Problem(heads=32, kv_heads=4, head_dim=64, value_dim=32, dtype="float32"))
    assert grouped == Sizes(32, 64, 32, 4, "float32")
    assert str(grouped) == "32 query and 4 key heads of 64 and 32 in float32"
    assert Sizes.of(Problem()) == Sizes() and str(Sizes()) == "8 heads of 128 in bfloat16"
    causal = build_from_exprs([(None, mask("k <= q"))])
    plain, got = (cost_of(causal, 8192, 8192, TILE, s) for s in (Sizes(), grouped))
    assert got.matmul_seconds == pytest.approx(plain.matmul_seconds * 4 * (64 + 32) / 256)
    q, out, keys = 32 * 64 * 4, 32 * (32 * 4 + 4), 4 * (64 + 32) * 4
    assert got.bytes == 8192 * (q + out + keys)
    assert grouped.state(10) == 10 * 32 * (64 * 4 + 2 * 32 * 4 + 8)
    assert grouped.partial(10) == 10 * 32 * (32 + 1) * 4


def test_tiles_weigh_by_what_they_test() -> None:
    call = (0, 1024, 0, 1024)
    (full,) = build_from_exprs([(None, mask("all"))]).classes[0].sweeps[0].segments
    got = load(full, call, TILE)
    assert got.tiles.tolist() == [16] * 8
    assert got.weighted == pytest.approx(16 + H200.start)
    (causal,) = build_from_exprs([(None, mask("k <= q"))]).classes[0].sweeps[0].segments
    got = load(causal, call, TILE)
    assert got.tiles.tolist() == [2 * i for i in range(1, 9)]
    # the last two tiles of each are tested
    assert got.weighted == pytest.approx(got.tiles - 2 + 2 * H200.partial + H200.start)


def test_blocks_of_a_table_are_counted_by_block_rows() -> None:
    (s,) = build_from_exprs([(None, random_blocks(64, 3))]).classes[0].sweeps[0].segments
    assert load(s, (0, 1024, 0, 1024), TILE).tiles.tolist() == [6] * 8


@pytest.mark.parametrize("tile", [(128, 64), (64, 64), (16, 32)])
@pytest.mark.parametrize(
    "text",
    [
        "k <= q and (q - k < 1024 or k < 4)",
        "k <= q and (q - k < 128 or (q - k) % 128 == 0)",
        "k <= q and (q // 128 == k // 128 or k % 128 >= 120)",
        "abs(q // 256 - k // 256) <= 8 and abs(q % 256 - k % 256) <= 8",
        "abs(q - k) <= 256 or k < 64 or 0 <= q and q < 64",
    ],
)
def test_cells_are_those_of_the_count(text: str, tile: tuple[int, int]) -> None:
    for c in candidates([(None, mask(text))], lengths=[(8192, 8192)]):
        for q_len, kv_len in ((8192, 8192), (1000, 5000), (1, 777)):
            got = cost_of(c.schedule, q_len, kv_len, tile)
            assert got.tile_cells == count.computed_cells(c.schedule, q_len, kv_len, *tile)


def test_parts_add_up_and_bytes_are_named() -> None:
    rules = [(None, mask("k <= q and (q - k < 128 or (q - k) % 128 == 0)"))]
    best = candidates(rules, lengths=[(32_768, 32_768)])[0]
    cost = best.cost
    assert cost.sweeps == 2 and cost.launches == 2
    assert sum(cost.parts().values()) == pytest.approx(1e3 * cost.seconds)
    once = 8 * 32_768 * (4 * 128 * 2 + 4)
    assert cost.bytes == once + cost.state_bytes
    rows = cost.state_bytes / (8 * (3 * 128 * 2 + 8))  # nearly all rows are in the later sweep
    assert 32_000 <= rows <= 32_768


def test_classes_weigh_by_their_heads() -> None:
    causal, window = mask("k <= q"), mask("0 <= q - k and q - k < 128")
    call = (32_768, 32_768, TILE)
    alone = [cost_of(build_from_exprs([(None, m)]), *call) for m in (causal, window)]
    both = cost_of(build_from_exprs([(((0, 1),), causal), (None, window)]), *call)
    work = alone[0].matmul_seconds / 4 + alone[1].matmul_seconds * 3 / 4
    assert both.matmul_seconds == pytest.approx(work, rel=1e-3)


def test_a_slower_rate_makes_it_dearer() -> None:
    schedule = build_from_exprs([(None, mask("k <= q"))])
    slow = replace(H200, flops=H200.flops / 2)
    fast = cost_of(schedule, 8192, 8192, TILE)
    assert cost_of(schedule, 8192, 8192, TILE, machine=slow).matmul_seconds == pytest.approx(
        2 * fast.matmul_seconds
    )
