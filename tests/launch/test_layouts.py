"""Layouts of users' tensors and the variant that takes each, types of the arguments, errors of a launch; nothing runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparsegen.codegen import LaunchConfig, load_template, render
from sparsegen.errors import ArtifactError
from sparsegen.launch import Call, Kernel, loading, variants
from sparsegen.launch import signature as sig
from sparsegen.launch.kernel import last_position
from sparsegen.schedule.build import build
from sparsegen.spec.gpu import find_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem

PROBLEM = Problem(head_dim=64, dtype="float16")
PATTERN = Pattern.from_dict({"name": "p", "mask": "causal", "sink_logits": True})
SOURCE = render(PATTERN, build(PATTERN), PROBLEM)
DEFAULT = load_template().default(PROBLEM, find_gpu("h200"))


class Dry(Kernel):
    """Chooses a variant and packs the arguments, and launches nothing."""

    def loaded(self, variant: str, device: int, launch: int) -> Any:
        return SimpleNamespace(
            block_m=64,
            persistent=False,
            prepare=lambda programs, args, moving: lambda addresses: None,
        )


def kernel_of(tma: bool = False, kind: type[Kernel] = Dry) -> Kernel:
    config = LaunchConfig.of(DEFAULT.as_dict() | {"TMA": tma})
    return kind(SOURCE, config, {v: Path(v) for v in variants(SOURCE, config)})


def laid_out(heads: int, length: int, *strides: int, dim: int = 64) -> torch.Tensor:
    """A [2, heads, length, dim] tensor of these strides (batch, head, row) that has no memory."""
    return torch.empty_strided(
        (2, heads, length, dim), (*strides, 1), dtype=torch.float16, device="meta"
    )


def plain(heads: int, length: int) -> torch.Tensor:
    return laid_out(heads, length, heads * length * 64, length * 64, 64)


def variant_of(tma: bool = False, call: Call | None = None, **changes: Any) -> str:
    given = {"q": plain(4, 8), "k": plain(2, 40), "v": plain(2, 40), "out": plain(4, 8)} | changes
    lse = torch.empty(2, 4, 8, device="meta")
    return kernel_of(tma)(**given, lse=lse, call=call or Call())


# ---------------------------------------------------------------------- layouts (B08, B17)
FUSED = laid_out(2, 40, 40 * 3 * 2 * 64, 64, 3 * 2 * 64)  # a slice of [B, S, 3, H, D]
TRANSPOSED = laid_out(2, 40, 40 * 2 * 64, 64, 2 * 64)  # [B, S, H, D] seen as [B, H, S, D]
LAYOUTS = [
    # changes, variant without TMA, with TMA
    ({}, "fast", "fast"),
    ({"k": FUSED}, "fast", "fast"),
    ({"v": TRANSPOSED}, "fast", "fast"),
    ({"k": laid_out(2, 40, 5360, 2680, 67)}, "general", "general"),  # rows 67 apart
    ({"k": laid_out(2, 40, 2 * 40 * 64 + 4, 40 * 64, 64)}, "general", "general"),
    ({"v": laid_out(2, 40, 40 * 64, 0, 64)}, "fast", "pointers"),  # heads expanded with stride 0
    ({"k": laid_out(2, 40, 0, 40 * 64, 64)}, "fast", "pointers"),
    ({"q": laid_out(4, 8, 0, 0, 64)}, "fast", "fast"),  # the portable kernel reads q by pointers
    ({"k": laid_out(2, 40, 1 << 29, 1 << 28, (1 << 23) - 8)}, "fast", "fast"),
    ({"k": laid_out(2, 40, 1 << 30, 1 << 29, 1 << 23)}, "general", "general"),
    ({"k": laid_out(2, 40, 1 << 33, 1 << 32, 1 << 26)}, "general", "general"),  # 32 rows pass 2^31
    ({"k": laid_out(2, 40, 1 << 31, 40 * 64, 64)}, "general", "general"),  # batches 2^31 apart
    ({"out": laid_out(4, 8, 1 << 31, 8 * 64, 64)}, "general", "general"),
    ({"out": laid_out(4, 8, 4 * 8 * 65, 8 * 65, 65)}, "general", "general"),
]


@pytest.mark.parametrize(("changes", "pointers", "tma"), LAYOUTS)
def test_layouts_and_their_variants(changes: dict, pointers: str, tma: str) -> None:
    assert (variant_of(False, **changes), variant_of(True, **changes)) == (pointers, tma)


def test_a_single_entry_has_a_free_stride() -> None:
    """torch gives axes of one entry any stride at all: it must not cost the fast variant."""
    odd = torch.empty_strided((1, 1, 40, 64), (7, 3, 64, 1), dtype=torch.float16, device="meta")
    one = torch.empty_strided((1, 4, 1, 64), (9, 64, 5, 1), dtype=torch.float16, device="meta")
    assert variant_of(True, q=one, k=odd, v=odd, out=one) == "fast"


@pytest.mark.parametrize(
    ("lengths", "call", "far"),
    [
        ((8, 40), Call(), 40),
        ((40, 8), Call(), 40),
        ((8, 40), Call(q_start=100, relative=0), 108),
        ((8, 40), Call(q_start=-100, relative=0), 100),
        ((8, 40), Call(q_start=70, k_start=70), 110),
        ((1, 1 << 32), Call(), 1 << 32),
    ],
)
def test_how_far_a_call_reaches(lengths: tuple, call: Call, far: int) -> None:
    assert last_position(*lengths, call) == far


# ---------------------------------------------------------------------- types of the arguments (B05)
@pytest.mark.parametrize("variant", ["fast", "pointers", "general"])
def test_no_length_is_a_constant_of_the_program(variant: str) -> None:
    """One binary serves every length, head count and stride: none of them is specialised, on 1 or on 16."""
    config = LaunchConfig.of(DEFAULT.as_dict() | {"TMA": True})
    types = sig.signature(SOURCE, config, variant)
    names = [name for name, _ in SOURCE.parameters]
    assert list(types) == [*names, *SOURCE.constexprs]
    fixed = {n for n, t in types.items() if t == "constexpr"}
    unused = {n for n in names if "DESC" in n} if variant != "fast" else set()
    assert fixed == {*SOURCE.constexprs} | unused
    assert set(sig.constants(SOURCE, config, variant)) == fixed
    wide = variant == "general"
    strides = {f"stride_{t}{a}" for t in "qkvo" for a in "bhs"}
    assert {types[n] for n in strides} == {"i64" if wide else "i32"}
    assert {types[n] for n in ("q_start", "k_start")} == {"i64"}
    assumed = {names[i] for (i,) in sig.attributes(SOURCE, config, variant)}
    assert assumed == (set() if wide else {"Q", "K", "V", "OUT", "LSE"} | strides)


def test_the_general_variant_is_one_for_all_configurations() -> None:
    other = LaunchConfig.of(DEFAULT.as_dict() | {"BLOCK_M": 128, "num_warps": 8, "STAGES": 4})
    assert sig.variant_config(SOURCE, DEFAULT, "general") == sig.variant_config(
        SOURCE, other, "general"
    )
    assert sig.variant_config(SOURCE, other, "fast") == other
    assert not sig.constants(SOURCE, other, "general")["TMA"]


# ---------------------------------------------------------------------- what a machine may lack (B12)
def test_an_artifact_that_was_removed_is_named(tmp_path: Path) -> None:
    kernel, gone = kernel_of(kind=Kernel), tmp_path / "entry" / "fast"
    with pytest.raises(ArtifactError, match="is gone since the artifact was opened"):
        loading.DriverLoaded(kernel.source, kernel.config, "fast", gone, 0)


def test_random_tables_of_a_call() -> None:
    """Rows from the first query's block on; queries before position 0 have none; empty ones behind the last."""
    from sparsegen.launch.tables import LARGEST_TILE, random_table

    node = {"random_blocks": {"block": 4, "per_row": 2, "seed": 7}}
    pattern = Pattern.from_dict({"name": "r", "mask": node})
    (table,) = render(pattern, build(pattern), PROBLEM).tables
    made, first = random_table(table, 9, 10, 40, "cpu")
    whole, start = random_table(table, 0, 40, 40, "cpu")
    behind = LARGEST_TILE // 4  # what the dead rows of a last tile may read
    assert (first, start, made.shape) == (2, 0, (3 + behind, 2)) and made.dtype == torch.int32
    assert torch.equal(made[:3], whole[2:5]) and (made[3:] == -1).all()
    assert (whole[:10] >= 0).all() and (whole[10:] == -1).all()
    assert random_table(table, -6, 9, 40, "cpu")[0].shape == (1 + behind, 2)
    assert (
        max(next(k.choices for k in load_template().knobs if k.name == "BLOCK_M")) == LARGEST_TILE
    )
    few, _ = random_table(SimpleNamespace(block=4, per_row=5, term=table.term), 0, 8, 8, "cpu")
    assert sorted(few[0].tolist()) == [-1, -1, -1, 0, 1]  # fewer blocks than are drawn: -1 fills up
