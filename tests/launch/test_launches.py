"""Schedules of several launches: their order, their grids, the room for partial results, a binary of its own for each."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sparsegen.codegen import LaunchConfig, load_template, render
from sparsegen.codegen.grids import Grid, launches_of
from sparsegen.launch import Call, Job, Kernel, compile_many
from sparsegen.launch import signature as sig
from sparsegen.launch.binary import from_record, read_metadata, record
from sparsegen.schedule.build import build
from sparsegen.schedule.chunks import chunks_of
from sparsegen.schedule.tiles import entry_keys, query_tiles, tile_count
from sparsegen.schedule.tree import HeadClass, Tiling
from sparsegen.spec.gpu import find_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from tests.kernels.schedules import BAND, COLUMNS, S, boxes, made, per_head, schedule

SMALL = Problem(head_dim=16, dtype="float16")


# ---------------------------------------------------------------------- which sweeps are one launch
def test_one_sweep_is_one_launch_with_nothing_added() -> None:
    one = schedule(HeadClass(None, (BAND,), "window"))
    source = render(made("strided")[0], one, SMALL)
    assert source.grids == (Grid(described=((1, 1),)),)
    assert "SWEEP" not in source.constexprs and "PARTIAL_OUT" not in dict(source.parameters)
    assert "gather_rows" not in source.text and "Launches" not in source.text


def test_sweeps_at_one_place_share_a_launch_where_they_tile_alike() -> None:
    launches = launches_of(per_head()[1])
    taken = [[len(cls.heads or ()) for cls, _ in launch.parts] for launch in launches]
    assert taken == [
        [1, 2, 1, 0],
        [2],
        [1],
        [1],
    ]  # all classes, then strided, few rows, their combine
    assert [launch.chained for launch in launches] == [False, True, True, True]
    described = [launch.grid.described for launch in launches]
    assert described == [((1, 1),), ((8, 1),), ((1, 1),), ()]


def test_first_sweeps_that_tile_differently_are_launches_of_their_own() -> None:
    classes = HeadClass(((0, 1),), (COLUMNS, BAND), "a"), HeadClass(None, (BAND,), "b")
    launches = launches_of(schedule(*classes))
    assert [(x.grid.q_cuts, x.chained, x.grid.heads, x.grid.all_but) for x in launches] == [
        ((S,), False, ((0, 1),), False),
        ((), False, ((0, 1),), True),
        ((), True, ((0, 1),), False),
    ]
    assert [x.grid.heads_of(5) for x in launches] == [2, 3, 2]


# ---------------------------------------------------------------------- how many programs
@pytest.mark.parametrize("sweep", [BAND, COLUMNS, boxes(8), boxes(4)], ids=lambda s: str(s.tiling))
@pytest.mark.parametrize("q_first", [0, 5, -37, 1000])
@pytest.mark.parametrize("q_len", [1, 12, 13, 96, 97, 1000])
def test_a_grid_has_a_program_for_every_query_tile(sweep: Any, q_first: int, q_len: int) -> None:
    """As many as there are digits; where positions are not known, as many as any of them could need."""
    grid = launches_of(schedule(HeadClass(None, (sweep,), "")))[0].grid
    tiles = grid.tiles(q_len, q_first, 32, 1)
    live = tile_count(query_tiles(q_first, q_len, 32, 0, 2000, Tiling(grid.q_cuts, grid.extent)))
    assert live <= tiles <= grid.tiles(q_len, None, 32, 1)
    lower = 1
    for n in grid.lower_tiles:
        lower *= n
    assert tiles - live < lower * 2  # only tiles at the two ends may be dead


def test_few_rows_and_chunks() -> None:
    few = Grid(rows=(10, 109))
    assert [few.tiles(n, 0, 32, 1) for n in (1000, 50, 0)] == [4, 2, 0]
    assert replace(few, split=True).tiles(1000, 0, 32, 7) == 28
    assert replace(few, combine=True).tiles(1000, 0, 32, 7) == 100
    for kv_rows in (0, 1, 255, 256, 257, 5000, 32_768, 1 << 20):
        chunks, chunk = chunks_of(kv_rows)
        assert 1 <= chunks <= 64 and chunk % 128 == 0 and chunks * chunk >= kv_rows
    assert chunks_of(32_768) == (64, 512)


# ---------------------------------------------------------------------- launching
class Recorded(Kernel):
    """Launches nothing, keeps what would be launched."""

    def __init__(self, name: str, tma: bool = False):
        pattern, plan = per_head() if name == "heads" else made(name)
        source = render(pattern, plan, Problem(head_dim=64, heads=7))
        config = load_template().default(Problem(head_dim=64), find_gpu("nvidia-h200")).as_dict()
        super().__init__(source, LaunchConfig.of(config | {"TMA": tma}), {})
        self.ran: list[tuple[int, int, dict[str, Any]]] = []
        self.asked: list[tuple[int, str]] = []

    def loaded(self, variant: str, device: int, launch: int) -> Any:
        names = [name for name, _ in self.source.parameters]
        self.asked.append((launch, variant))

        def prepare(programs: int, args: tuple[Any, ...], moving: int) -> Any:
            def step(addresses: tuple[int, ...]) -> None:
                assert len(addresses) == moving
                given = (*addresses, *args[moving:])
                self.ran.append((launch, programs, dict(zip(names, given, strict=True))))

            return step

        return SimpleNamespace(block_m=64, persistent=False, prepare=prepare)


def tensors(q_len: int, kv_len: int) -> list[torch.Tensor]:
    q, k, v = (torch.zeros(2, 7, n, 64, dtype=torch.bfloat16) for n in (q_len, kv_len, kv_len))
    return [q, k, v, torch.zeros_like(q), torch.zeros(2, 7, q_len)]


def test_launches_run_in_order_each_with_its_grid() -> None:
    kernel = Recorded("heads")
    assert kernel(*tensors(100, 600), Call(q_start=290, relative=0)) == "fast"
    assert [(launch, programs) for launch, programs, _ in kernel.ran] == [
        (0, 2 * 7 * 2),  # two tiles of 64 rows
        (1, 2 * 3 * 8),  # a tile holds one of 8 residue classes
        (2, 2 * 1 * 3),  # 38 rows are one tile, 600 keys are three chunks
        (3, 2 * 1 * 38),
    ]
    for _, programs, args in kernel.ran:
        assert args["tiles"] * args["batch_heads"] == programs and args["heads"] == 7
        assert (args["chunks"], args["chunk"]) == (3, 256)
    rooms = {args["PARTIAL_LSE"] - args["PARTIAL_OUT"] for _, _, args in kernel.ran}
    assert rooms == {4 * 3 * 2 * 7 * 38 * 64}  # float32 [chunks, batch, heads, rows, value_dim]


def test_positions_that_differ_between_entries_get_room_for_any() -> None:
    kernel, call = Recorded("strided"), Call(kv_lengths=torch.tensor([70, 60], dtype=torch.int32))
    kernel(*tensors(512, 600), Call())
    kernel(*tensors(512, 600), call)
    known, unknown = kernel.ran[1][1], kernel.ran[3][1]
    assert (known, unknown) == (2 * 7 * 8 * 1, 2 * 7 * 8 * 2)  # 64 or 65 digits on the top axis


def test_a_launch_without_programs_is_left_out() -> None:
    kernel = Recorded("split rows")
    kernel(*tensors(0, 40), Call())
    assert kernel.ran == []


def test_a_launch_takes_the_descriptors_of_what_it_loads() -> None:
    kernel = Recorded("strided", tma=True)
    kernel(*tensors(100, 600), Call())
    band, columns = (args for _, _, args in kernel.ran)
    assert band["K_DESC0"] is not None and band["K_EVERY8_0"] is None
    assert columns["K_DESC0"] is None and columns["K_EVERY8_0"] is not None
    view = columns["V_EVERY8_0"]
    assert view.shape == (2, 7, 75, 8, 64)
    assert view.strides == (7 * 600 * 64, 600 * 64, 8 * 64, 64, 1)
    assert columns[list(columns)[view.moves]] == columns["V"]
    types = [sig.signature(kernel.source, kernel.config, "fast", i) for i in (0, 1)]
    assert [t["K_DESC0"] for t in types] == ["tensordesc<bf16[1, 1, 64, 64]>", "constexpr"]
    every = [t["K_EVERY8_0"] for t in types]
    assert every == ["constexpr", "tensordesc<bf16[1, 1, 64, 1, 64]>"]
    constants = [sig.constants(kernel.source, kernel.config, "fast", i) for i in (0, 1)]
    assert [(c["SWEEP"], c["TMA"]) for c in constants] == [(0, True), (1, True)]


@pytest.mark.parametrize(
    ("period", "group", "top", "low"), [(8, 1, 2, 3), (32, 4, 0, 28), (128, 8, 1, 120)]
)
def test_the_block_of_a_descriptor_holds_the_keys_of_a_tile(
    period: int, group: int, top: int, low: int
) -> None:
    """In the order of the box's entries, which row limits and tests count by."""
    keys = torch.arange(40 * period).reshape(40, period)
    *_, periods, of_each, columns = sig.block_of(f"desc:{period}:{group}:64", 32)
    block = keys[top : top + periods, low : low + of_each].flatten()
    tiling = Tiling(k_cuts=(period,))
    assert block.tolist() == entry_keys(top, ((low, group),), np.arange(32), tiling)["k"].tolist()
    assert columns == 64


def test_key_groups_have_a_descriptor_of_their_own() -> None:
    columns = {"columns": {"stride": 32, "width": 4}}
    any_of = [{"chunks": {"size": 32}}, columns]
    pattern = Pattern.from_dict({"name": "f", "mask": {"all_of": ["causal", {"any_of": any_of}]}})
    problem = Problem(head_dim=64, lengths=((4096, 4096),))
    source = render(pattern, build(pattern, problem), problem)
    assert source.grids[0].described == ((1, 1), (32, 4)) and source.periods == (32,)
    assert dict(source.parameters)["K_4OF32_0"] == "desc:32:4:64"
    assert "top = (y1_first + j // 4 - (k_first >> 5)).to(tl.int32)" in source.text


@pytest.mark.parametrize(
    ("kv_len", "call"),
    [
        (5, Call()),  # less than a period: there is no view at all
        (601, Call()),  # one key beyond a whole period
        (600, Call(k_start=4)),  # the first key is not the first of its period
        (600, Call(kv_starts=torch.tensor([0, 8], dtype=torch.int32))),
    ],
)
def test_a_launch_whose_keys_are_no_whole_periods_goes_by_pointers(kv_len: int, call: Call) -> None:
    kernel = Recorded("strided", tma=True)
    assert kernel(*tensors(100, kv_len), call) == "fast"
    assert kernel.asked == [(0, "fast"), (1, "pointers")]
    (_, _, band), (_, _, columns) = kernel.ran
    assert band["K_DESC0"] is not None
    assert columns["K_DESC0"] is None and columns["K_EVERY8_0"] is None


# ---------------------------------------------------------------------- compiling
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("gpu", ["h200", "a100", "mi300x"])
def test_every_launch_is_compiled(gpu: str, tmp_path: Path) -> None:
    """Files of each in a folder of its own; what is said of the variant is the most that any of them takes."""
    kind = find_gpu(gpu)
    source = render(*per_head(), SMALL)
    config = load_template().default(SMALL, kind)
    (outcome,) = compile_many([Job(source, config, "fast", kind, tmp_path / "fast")])
    assert outcome.error == "" and outcome.binary is not None
    binary, code = outcome.binary, "cubin" if kind.backend == "cuda" else "hsaco"
    folders = [f"sweep{i}" for i in range(4)]
    assert {f"{f}/attend_forward.{code}" for f in folders} <= set(binary.files)
    files = [p for p in binary.directory.rglob("*") if p.is_file()]
    assert sorted(p.relative_to(binary.directory).as_posix() for p in files) == list(binary.files)
    shared = [read_metadata(binary.directory / f, binary.entry)["shared"] for f in folders]
    assert binary.shared_bytes == max(shared) > min(shared)
    if kind.backend == "cuda":
        assert 16 <= binary.registers <= 255 and binary.spill_bytes == 0
    assert from_record(record(binary)) == binary
