"""The warp-specialised gradient kernels around their text: launches, configurations, and that they compile for sm_90."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from sparsegen.codegen import LaunchConfig, hopper
from sparsegen.codegen.backward import (
    KEYS,
    QUERIES,
    BackwardSource,
    beside,
    default_config,
    render_backward,
    starts,
    unfit,
)
from sparsegen.codegen.backward_hopper import shared_bytes
from sparsegen.codegen.backward_planner import OUTPUTS
from sparsegen.launch import Job, Outcome, compile_many
from sparsegen.launch import signature as sig
from sparsegen.launch.backward import Saved
from sparsegen.launch.backward_boxes import arguments, variant_of, view
from sparsegen.launch.binary import _resources, _tool, folder_of, read_metadata
from sparsegen.launch.kernel import Call
from sparsegen.launch.sass import listing_of
from sparsegen.schedule.build import build
from sparsegen.schedule.transpose import transpose
from sparsegen.spec.gpu import find_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from tests.launch.hopper_gradients import (
    CAUSAL,
    H200,
    STREAMING,
    STRIDED,
    inner_loops,
    long,
    saved_of,
)

DQ, BOTH, DK, DV = ("DQ",), ("DK", "DV"), ("DK",), ("DV",)


def config_of(problem: Problem, **knobs: Any) -> LaunchConfig:
    own = {"KERNEL": "hopper", "num_warps": 4, "BLOCK_M": 128, "BLOCK_N": 64, "STAGES": 2}
    return LaunchConfig.of(default_config(problem, H200).as_dict() | own | knobs)


def source_of(
    pattern: Pattern, problem: Problem, part: str, outputs: tuple[str, ...] | None = None
) -> BackwardSource:
    if part == QUERIES:
        return render_backward(pattern, build(pattern, problem), problem)
    found = transpose(pattern, problem)
    return render_backward(pattern, found.schedule, problem, KEYS, found.shift, outputs)


# ---------------------------------------------------------------------- which text a launch is compiled from
@pytest.fixture(scope="module")
def streaming() -> dict[str, BackwardSource]:
    """Keys: a band, then sinks in chunks of the queries, then the launch that adds those up."""
    return {part: source_of(STREAMING, long(64), part) for part in (QUERIES, KEYS)}


def test_launches_that_it_does(streaming: dict[str, BackwardSource]) -> None:
    """The launch that prepares, and the one that adds partial sums, are portable, with the template's own tiles."""
    config = config_of(long(64))
    for part, special, others in ((QUERIES, (1,), (0,)), (KEYS, (0, 1), (2,))):
        source = streaming[part]
        assert source.hopper is not None and source.hopper.launches == special
        for launch in special:
            assert sig.unit(source, config, "fast", launch) == (source.hopper, config)
            for variant in ("pointers", "general"):
                text, chosen = sig.unit(source, config, variant, launch)
                assert text is source and not sig.by_boxes(chosen)
        for launch in others:
            assert sig.unit(source, config, "fast", launch) == (source, beside(source))
    assert sig.variants(streaming[KEYS], config) == ("fast", "pointers", "general")


def test_a_dtype_that_it_does_not_take() -> None:
    assert source_of(CAUSAL, Problem(head_dim=64, dtype="float32"), QUERIES).hopper is None


def test_the_portable_text_has_no_knob_of_the_other(streaming: dict[str, BackwardSource]) -> None:
    for source in streaming.values():
        assert "TEST_ALL" not in source.constexprs and "TEST_ALL" not in source.text
        assert "TEST_ALL" in source.hopper.constexprs  # type: ignore[union-attr]


# ---------------------------------------------------------------------- calls that descriptors cannot view
LENGTHS = torch.tensor([9], dtype=torch.int32)
CALLS: list[tuple[dict[str, Any], str, str]] = [
    # arguments of the call, variants of the launch of queries and of the first one of keys
    ({}, "fast", "fast"),
    ({"kv_starts": LENGTHS}, "fast", "fast"),
    ({"kv_lengths": LENGTHS}, "pointers", "fast"),
    ({"q_lengths": LENGTHS}, "fast", "pointers"),
]


@pytest.mark.parametrize(("given", "queries", "keys"), CALLS, ids=lambda x: "-".join(x) or "plain")
def test_variants_of_ragged_calls(
    given: dict[str, Any], queries: str, keys: str, streaming: dict[str, BackwardSource]
) -> None:
    """Rows that it visits must be rows of the call."""
    config, call, saved = config_of(long(64)), Call(**given), saved_of()
    assert variant_of(streaming[QUERIES], config, "fast", 1, saved, call) == queries
    assert variant_of(streaming[KEYS], config, "fast", 0, saved, call) == keys
    for launch in (1, 0):
        asked = variant_of(streaming[QUERIES], config, "general", launch, saved, call)
        assert asked == "general"
    plain = default_config(long(64), H200)
    assert variant_of(streaming[QUERIES], plain, "fast", 1, saved, call) == "fast"


def test_periods_are_whole_or_go_by_pointers() -> None:
    """Residue classes of queries and of keys, which begin anywhere."""
    source, config = source_of(STRIDED, long(64), KEYS), config_of(long(64))
    assert source.grids[1].described == ((128, 1),) and source.grids[1].queries == (128, 1)

    def variant(call: Call, *lengths: int) -> str:
        return variant_of(source, config, "fast", 1, saved_of(*lengths), call)

    assert variant(Call()) == variant(Call(q_start=128, relative=0)) == "fast"
    assert variant(Call(), 128, 256) == "fast"
    assert variant(Call(), 130, 130) == variant(Call(), 256, 300) == "pointers"
    assert variant(Call(q_start=5, relative=0)) == variant(Call(k_start=64)) == "pointers"
    assert variant(Call(kv_starts=LENGTHS)) == "pointers"


def test_zero_strides_and_nothing_at_all_go_by_pointers(
    streaming: dict[str, BackwardSource],
) -> None:
    config, saved = config_of(long(64)), saved_of()
    one = torch.zeros(1, 1, 1, 64).expand(1, 2, 256, 64)
    expanded = Saved(saved.q, saved.k, saved.v, saved.out, saved.lse, one)
    for given in (expanded, saved_of(0, 256), saved_of(256, 0)):
        assert variant_of(streaming[KEYS], config, "fast", 0, given, Call()) == "pointers"


def test_arguments_have_descriptors_in_their_places(streaming: dict[str, BackwardSource]) -> None:
    source, config = streaming[KEYS], config_of(long(64))
    names = [name for name, _ in source.parameters]
    moving = [n for n in ("Q", "K", "V", "DO", "STATS") if n in names]
    tensors = {n: torch.zeros(2, 3, 256, 64 if n != "STATS" else 4) for n in moving}
    values = {n: tensors.get(n, f"<{n}>") for n in names}
    args = arguments(source, config, "fast", 0, values, moving)
    text = source.hopper
    assert text is not None and len(args) == len(text.parameters)
    given = dict(zip((n for n, _ in text.parameters), args))
    assert given["scale"] == "<scale>" and given["Q"] is tensors["Q"]
    for name in moving:
        found = given[f"{name}_DESC0"]
        parts = 2 if name == "STATS" else 1  # 4 numbers are 8 of bf16
        assert found == view(tensors[name], 1, moving.index(name), parts)
    assert given["STATS_DESC0"].shape[-1] == 8 and given["STATS_DESC0"].strides[2:] == (8, 1)
    assert view(tensors["Q"], 128, 0).shape == (2, 3, 2, 128, 64)


# ---------------------------------------------------------------------- configurations
UNFIT: list[tuple[dict[str, Any], Problem, str, tuple[str, ...], str]] = [
    ({}, Problem(), "a100", BOTH, "KERNEL=hopper needs sm_90, nvidia-a100 is another architecture"),
    ({}, Problem(dtype="float32"), "h200", DQ, "KERNEL=hopper takes bfloat16 or float16, not float32"),
    ({"BLOCK_M": 32}, Problem(), "h200", DQ, "KERNEL=hopper has consumers of 64 rows, one or two: BLOCK_M is 64 or 128"),
    ({"BLOCK_N": 16}, Problem(), "h200", DQ, "KERNEL=hopper visits tiles of 32 rows or more: BLOCK_N is 32, 64 or 128"),
    ({"BLOCK_N": 128}, Problem(), "h200", BOTH, "KERNEL=hopper keeps sums and tiles of DK and DV in registers: 288 a thread with BLOCK_N=128, 224 at most"),
    ({"BLOCK_N": 32}, Problem(head_dim=256), "h200", BOTH, "KERNEL=hopper keeps sums and tiles of DK and DV in registers: 296 a thread with BLOCK_N=32, 224 at most"),
    ({"BLOCK_N": 128, "STAGES": 3}, Problem(), "h200", DQ, "tiles take 263168 bytes of shared memory, nvidia-h200 has 232448"),
]  # fmt: skip


@pytest.mark.parametrize(("knobs", "problem", "gpu", "outputs", "said"), UNFIT)
def test_unfit(
    knobs: dict[str, Any], problem: Problem, gpu: str, outputs: tuple[str, ...], said: str
) -> None:
    config = config_of(problem, **knobs)
    assert unfit(config, problem, find_gpu(gpu), outputs) == said
    assert unfit(config, problem, find_gpu(gpu)) is not None  # no kernel may be unfit


def test_the_triton_that_it_is_written_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "_triton", lambda: (3, 10))
    said = unfit(config_of(Problem()), Problem(), H200)
    assert said is not None and said.endswith("which changes between versions; 3.10 is installed")


# What has no configuration: sums of 256 columns twice do not fit a thread's registers.
DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (80, 40), (256, 256)]
NOTHING = {((256, 256), BOTH)}


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("outputs", [DQ, BOTH, DK, DV], ids="-".join)
def test_starts(dims: tuple[int, int], outputs: tuple[str, ...]) -> None:
    """The default, and configurations of the other text that work, largest first."""
    problem = Problem(*dims)
    default, *special = starts(problem, H200, outputs)
    assert default == default_config(problem, H200) and default["KERNEL"] == "portable"
    assert len(set(special)) == len(special)
    assert all(c["KERNEL"] == "hopper" for c in special)
    assert [unfit(c, problem, H200, outputs) for c in special] == [None] * len(special)
    assert bool(special) == ((dims, outputs) not in NOTHING)
    assert starts(problem, find_gpu("a100"), outputs) == (
        default_config(problem, find_gpu("a100")),
    )


# ---------------------------------------------------------------------- compiled for sm_90
# (pattern, problem, part, gradients, knobs, bytes spilled at most, with Triton 3.6 and with 3.9)
KERNELS: dict[str, tuple[Pattern, Problem, str, tuple[str, ...] | None, dict[str, Any], int]] = {
    "dQ causal 128": (CAUSAL, long(), QUERIES, None, {"BLOCK_N": 128}, 32),
    "keys causal 128": (CAUSAL, long(), KEYS, None, {"STAGES": 3}, 64),
    "keys causal 128, all tested": (CAUSAL, long(), KEYS, None, {"STAGES": 3, "TEST_ALL": True}, 32),
    "keys causal 64, one consumer": (CAUSAL, long(64), KEYS, None, {"BLOCK_M": 64}, 0),
    "keys causal 192-128": (CAUSAL, long(192, 128), KEYS, None, {"BLOCK_N": 32}, 32),
    "dK causal 256": (CAUSAL, long(256), KEYS, DK, {"BLOCK_N": 32}, 32),
    "dQ sinks 128": (STREAMING, long(), QUERIES, None, {"BLOCK_N": 128}, 128),
    "keys strided 128": (STRIDED, long(dtype="float16"), KEYS, None, {}, 64),
}  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    root, jobs = tmp_path_factory.mktemp("backward"), {}
    for name, (pattern, problem, part, outputs, knobs, _) in KERNELS.items():
        config = config_of(problem, **knobs)
        assert unfit(config, problem, H200, outputs or OUTPUTS[part]) is None
        source = source_of(pattern, problem, part, outputs)
        jobs[name] = Job(source, config, "fast", H200, root / name.replace(" ", "_"))
    return dict(zip(jobs, compile_many(list(jobs.values()))))


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("name", KERNELS)
def test_compiled(name: str, outcomes: dict[str, Outcome]) -> None:
    """Few spills, no more shared memory than promised, and products that run side by side."""
    outcome, (_, problem, _, _, _, most) = outcomes[name], KERNELS[name]
    assert outcome.error == "" and outcome.binary is not None
    source, config = outcome.job.source, outcome.job.config
    assert isinstance(source, BackwardSource) and source.hopper is not None
    promised = shared_bytes(config.as_dict(), problem, source.outputs)
    for launch in source.hopper.launches:
        folder = folder_of(source, outcome.binary.directory, launch)
        taken = read_metadata(folder, source.hopper.entry)["shared"]
        assert promised - 1024 < taken <= promised <= H200.shared_bytes
        ptx = (folder / f"{source.hopper.entry}.ptx").read_text()
        assert ptx.count("setmaxnreg.inc") and ptx.count("setmaxnreg.dec")
        cubin = folder / f"{source.hopper.entry}.cubin"
        _, spills = _resources(folder, source.hopper.entry)
        assert spills is not None and spills <= most
        loops = inner_loops(listing_of(cubin, _tool("nvdisasm")))
        assert loops
        for products, waits in loops:
            # one before and one after each product of whole tiles; ptxas that puts their instructions in a row has
            # these around every single one
            assert waits <= 11 < products, f"{waits} WARPGROUP beside {products} HGMMA"
