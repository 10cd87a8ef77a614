"""The warp-specialised kernel around its text: which launches it takes, its configurations, and that it compiles for sm_90."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from sparsegen.codegen import KernelSource, LaunchConfig, hopper, load_template, render
from sparsegen.codegen.hopper import gluon, shared_bytes, starts, unfit
from sparsegen.codegen.plan import SplitPlan
from sparsegen.codegen.planner import make_plan
from sparsegen.launch import Job, Outcome, compile_many, variants
from sparsegen.launch import signature as sig
from sparsegen.launch.binary import _tool, folder_of, read_metadata
from sparsegen.launch.module import HOPPER_MODULE, MODULE, write_modules
from sparsegen.launch.sass import listing_of
from sparsegen.schedule.build import build
from sparsegen.spec.gpu import find_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from tests.kernels.schedules import made, per_head

H200 = find_gpu("h200")
TEMPLATE = load_template()
CAUSAL = Pattern.from_dict({"name": "causal", "mask": "causal"})


def config_of(problem: Problem, **knobs: Any) -> LaunchConfig:
    large = {"KERNEL": "hopper", "BLOCK_M": 128, "BLOCK_N": 128, "STAGES": 2}
    return LaunchConfig.of(TEMPLATE.default(problem, H200).as_dict() | large | knobs)


def source_of(pattern: Pattern, problem: Problem) -> KernelSource:
    return render(pattern, build(pattern, problem), problem)


# ---------------------------------------------------------------------- which text a launch is compiled from
STRIDED = render(*made("strided"), Problem(head_dim=64))
HEADS = render(*per_head(), Problem(head_dim=64))


def test_launches_of_the_fast_variant_that_it_does() -> None:
    config = config_of(Problem(head_dim=64))
    assert STRIDED.hopper.launches == (0, 1)
    for launch in (0, 1):
        assert sig.unit(STRIDED, config, "fast", launch) == (STRIDED.hopper, config)
    assert HEADS.hopper.launches == (0, 1, 2) and len(HEADS.grids) == 4  # a combine launch is not
    assert sig.unit(HEADS, config, "fast", 3)[0] is HEADS


def test_everything_else_is_the_portable_text() -> None:
    """Beside the other launches with the template's tiles: those of the warp-specialised kernel are too large for it."""
    config = config_of(Problem(head_dim=64), BLOCK_N=64, STAGES=4, GROUP_HEADS=4)
    text, beside = sig.unit(HEADS, config, "fast", 3)
    want = {"KERNEL": "portable", "BLOCK_M": 64, "BLOCK_N": 64, "STAGES": 3, "TMA": True}
    assert text is HEADS and beside.as_dict() == config.as_dict() | want
    for launch in range(4):
        text, pointers = sig.unit(HEADS, config, "pointers", launch)
        assert text is HEADS and pointers.as_dict() == beside.as_dict() | {"TMA": False}
        text, general = sig.unit(HEADS, config, "general", launch)
        assert text is HEADS and general.as_dict() == sig.GENERAL_CONFIG
    wide = source_of(CAUSAL, Problem(head_dim=256))
    _, small = sig.unit(wide, config, "pointers", 0)
    assert (small["BLOCK_N"], small["STAGES"]) == (32, 2)


def test_a_portable_configuration_has_nothing_of_it() -> None:
    plain = TEMPLATE.default(Problem(head_dim=64), H200)
    for launch in (0, 1):
        assert sig.unit(STRIDED, plain, "fast", launch) == (STRIDED, plain)
    assert not any(name.startswith("Q_DESC") for name, _ in STRIDED.parameters)


def test_variants() -> None:
    """Descriptors always: so all three, whatever TMA says of the portable text."""
    config = config_of(Problem(head_dim=64), TMA=False)
    assert sig.by_boxes(config) and variants(STRIDED, config) == ("fast", "pointers", "general")
    plain = LaunchConfig.of(config.as_dict() | {"KERNEL": "portable"})
    assert not sig.by_boxes(plain) and variants(STRIDED, plain) == ("fast", "general")


def test_what_has_no_such_text() -> None:
    """float32; keys that no descriptor loads; heads that see nothing."""
    assert source_of(CAUSAL, Problem(dtype="float32")).hopper is None
    assert render(*made("boxes of 4"), Problem(head_dim=64)).hopper is None
    nothing = Pattern.from_dict({"name": "nothing", "mask": {"not": "full"}})
    assert source_of(nothing, Problem()).hopper is None
    first = render(*made("nothing first"), Problem(head_dim=64))
    assert first.hopper.launches == (1,)


def test_the_producer_is_told_whether_rows_live() -> None:
    """It has no rows: where only a sum over them tells, as for boxes of three digits, the launch is not taken."""
    template = load_template()
    pattern, schedule = made("strided")
    plan = make_plan(
        pattern, schedule, Problem(head_dim=64), template.name, template.entry, template.constexprs
    )
    for launch in plan.launches:
        assert hopper.covers(launch)
        by_sum = tuple(x for x in launch.rows.scalars if not x.startswith("live_rows = "))
        assert len(by_sum) == len(launch.rows.scalars) - 1
        assert not hopper.covers(replace(launch, rows=replace(launch.rows, scalars=by_sum)))


@pytest.mark.parametrize(
    ("kinds", "want"),
    [
        ("nw", ["n+w"]),  # sinks and a window
        ("wn", ["w", "n"]),
        ("nnw", ["n", "n+w"]),
        ("nww", ["n+w", "w"]),
        ("nbw", ["n", "b", "w"]),  # a narrow box of key digits is nobody's guest
        ("bw", ["b", "w"]),
        ("nwnw", ["n+w", "n+w"]),
        ("n", ["n"]),
        ("", []),
    ],
)
def test_who_is_a_guest(kinds: str, want: list[str]) -> None:
    problem = Problem(head_dim=64)
    (launch,) = make_plan(CAUSAL, build(CAUSAL, problem), problem, "t", "e", ()).launches
    (one,) = launch.classes[0].segments
    made_of = {
        "w": one,
        "n": replace(one, block="16"),
        "b": replace(one, block="16", box_lines=("y0_first = 0",)),
    }
    segments = tuple(replace(made_of[kind], name=kind) for kind in kinds)
    cls = replace(launch.classes[0], segments=segments)

    def said(launch: Any) -> list[str]:
        found = hopper.steps(cls, launch)
        return [f"{x.guest.name}+{x.segment.name}" if x.guest else x.segment.name for x in found]

    assert said(launch) == want
    split = replace(launch, split=SplitPlan("0", "1", ""))
    assert said(split) == list(kinds)  # chunks of keys start where they like


def test_the_digest_follows_both_texts() -> None:
    changed = replace(STRIDED, hopper=replace(STRIDED.hopper, text="#"))
    assert STRIDED.digest != changed.digest != replace(STRIDED, hopper=None).digest


def test_types_of_the_arguments() -> None:
    """Descriptors of a launch have layouts, those of other launches are no arguments."""
    config = config_of(Problem(head_dim=64))
    texts = STRIDED.hopper.parameters
    assert [name for name, kind in texts if kind.startswith("desc:")] == [
        "Q_DESC0", "Q_EVERY8_0", "K_DESC0", "V_DESC0", "K_EVERY8_0", "V_EVERY8_0"
    ]  # fmt: skip
    runs, columns = (sig.signature(STRIDED, config, "fast", i) for i in (0, 1))
    assert list(runs) == [name for name, _ in texts] + list(STRIDED.hopper.constexprs)
    blocks = {"Q_DESC0": "[1, 1, 64, 64]", "K_DESC0": "[1, 1, 128, 64]", "V_DESC0": "[1, 1, 128, 64]"}  # fmt: skip
    digits = {"Q_EVERY8_0": "[1, 1, 64, 1, 64]", "K_EVERY8_0": "[1, 1, 128, 1, 64]"}
    for types, taken, others in ((runs, blocks, digits), (columns, digits, blocks)):
        for name, block in taken.items():
            assert types[name].startswith(f"tensordesc<bf16{block},NVMMASharedLayout("), name
        assert all(types[name] == "constexpr" for name in others)
    assert sig.constants(STRIDED, config, "fast", 1)["SWEEP"] == 1


@pytest.mark.parametrize(
    ("block_m", "value_dim", "registers"), [(128, 64, 168), (64, 64, 128), (64, 128, 128), (64, 192, 168)]
)  # fmt: skip
def test_options(block_m: int, value_dim: int, registers: int) -> None:
    """One warpgroup by Triton's count, as the others are its partitions; registers for one program or two."""
    problem = Problem(head_dim=64, value_dim=value_dim)
    config = config_of(problem, BLOCK_M=block_m, BLOCK_N=64, num_warps=8)
    options = sig.options(source_of(CAUSAL, problem), config, "fast")
    assert options == {"num_warps": 4, "maxnreg": registers, "enable_fp_fusion": True}


def test_both_texts_are_written(tmp_path: Path) -> None:
    assert write_modules(tmp_path / "new", STRIDED) == tmp_path / "new" / MODULE
    assert (tmp_path / "new" / MODULE).read_text() == STRIDED.text
    assert (tmp_path / "new" / HOPPER_MODULE).read_text() == STRIDED.hopper.text
    write_modules(tmp_path / "plain", replace(STRIDED, hopper=None))
    assert [p.name for p in (tmp_path / "plain").iterdir()] == [MODULE]


# ---------------------------------------------------------------------- configurations
WIDE = Problem(head_dim=192, value_dim=256)
UNFIT: list[tuple[dict[str, Any], Problem, str, str]] = [
    ({}, Problem(), "a100", "KERNEL=hopper needs sm_90, nvidia-a100 is another architecture"),
    ({}, Problem(), "b200", "KERNEL=hopper needs sm_90, nvidia-b200 is another architecture"),
    ({}, Problem(dtype="float32"), "h200", "KERNEL=hopper takes bfloat16 or float16, not float32"),
    ({"BLOCK_M": 32}, Problem(), "h200", "KERNEL=hopper has consumers of 64 query rows, one or two: BLOCK_M is 64 or 128"),
    ({}, WIDE, "h200", "KERNEL=hopper keeps scores and output in registers: fewer keys beside so many columns"),
    ({"STAGES": 4}, Problem(), "h200", "queries and rings take 328704 bytes of shared memory, nvidia-h200 has 232448"),
    ({"PERSISTENT": True, "STAGES": 3}, Problem(), "h200", "queries and rings take 295936 bytes of shared memory, nvidia-h200 has 232448"),
]  # fmt: skip


@pytest.mark.parametrize(("knobs", "problem", "gpu", "said"), UNFIT)
def test_unfit(knobs: dict[str, Any], problem: Problem, gpu: str, said: str) -> None:
    """Each rule in one sentence, which the template says too."""
    config = config_of(problem, **knobs)
    assert unfit(config.as_dict(), problem, find_gpu(gpu)) == said
    assert TEMPLATE.invalid(config, problem, find_gpu(gpu)) == said


@pytest.mark.parametrize(
    ("installed", "fits"), [((3, 5), False), ((3, 6), True), ((3, 9), True), ((3, 10), False)]
)
def test_the_triton_that_it_is_written_for(
    monkeypatch: pytest.MonkeyPatch, installed: tuple[int, int], fits: bool
) -> None:
    monkeypatch.setattr(hopper, "_triton", lambda: installed)
    said = unfit(config_of(Problem()).as_dict(), Problem(), H200)
    want = (
        "KERNEL=hopper is written for the Gluon of triton 3.6 to 3.9, which changes between versions; "
        f"3.{installed[1]} is installed"
    )
    assert said == (None if fits else want)


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
def test_starts_fit(dims: tuple[int, int]) -> None:
    """What is measured first works, and has one consumer and two, one program a tile and fewer."""
    problem = Problem(head_dim=dims[0], value_dim=dims[1])
    found = starts(TEMPLATE.default(problem, H200).as_dict(), problem, H200)
    configs = [LaunchConfig.of(x) for x in found]
    assert len(set(configs)) == len(configs) >= 2
    assert [TEMPLATE.invalid(c, problem, H200) for c in configs] == [None] * len(configs)
    assert {c["BLOCK_M"] for c in configs} == {64, 128}
    assert starts(found[0], problem, find_gpu("a100")) == ()


# ---------------------------------------------------------------------- the planner's text in Gluon
@pytest.mark.parametrize(
    ("triton", "at", "want"),
    [
        ("tl.maximum(k_first, q_pos - 3)", "", "gl.maximum(k_first, q_pos - 3)"),
        ("rows = tl.arange(0, BLOCK_M)", "", "rows = FIRST_ROW + gl.arange(0, 64, ROWS)"),
        ("rows = tl.arange(0, BLOCK_M)", "_at16", "rows_at16 = FIRST_ROW + gl.arange(0, 64, ROWS_at16)"),
        ("n = tl.arange(0, BLOCK_N)", "", "n = gl.arange(0, BLOCK_N, KEYS)"),
        ("n = tl.arange(0, 16)", "_at16", "n = gl.arange(0, 16, KEYS_at16)"),
        ("row_hi = tl.minimum(k_last, q_pos)", "_64", "row_hi_64 = gl.minimum(k_last, q_pos_64)"),
        ("live = (rows >= 0) & (rows < q_rows)", "_64", "live = (rows_64 >= 0) & (rows_64 < q_rows)"),
        ("x.to(tl.int32)", "", "x.to(gl.int32)"),
    ],
)  # fmt: skip
def test_gluon(triton: str, at: str, want: str) -> None:
    """Whole names alone are marked: q_rows is not rows."""
    assert gluon(triton, at, ("rows", "q_pos", "row_hi")) == want


@pytest.mark.parametrize(("head_dim", "few"), [(16, True), (64, True), (96, True), (104, False)])
def test_few_columns_of_queries_are_in_registers(head_dim: int, few: bool) -> None:
    """Then no segment derives their address anew: no product reads them there."""
    text = source_of(STREAMING, Problem(head_dim=head_dim)).hopper.text
    assert ("warpgroup_mma(q0, " in text) == few
    assert ("warpgroup_mma(queries0, " in text) == (not few)
    assert ("The address of the queries" in text) == (not few)


# ---------------------------------------------------------------------- compiled for sm_90
STREAMING, LONGFORMER = (Pattern.from_yaml(n) for n in ("streaming_llm", "longformer_base"))
COLUMNS = Pattern.from_yaml("sparse_transformer_strided")
KERNELS: dict[str, tuple[Pattern, Problem, dict[str, Any]]] = {
    "causal 128": (CAUSAL, Problem(), {}),
    "causal 64, one consumer": (CAUSAL, Problem(head_dim=64), {"BLOCK_M": 64, "BLOCK_N": 64}),
    "causal 96": (CAUSAL, Problem(head_dim=96), {"BLOCK_N": 64}),
    "causal 192-128": (CAUSAL, Problem(head_dim=192, value_dim=128), {"BLOCK_N": 64}),
    "causal 192-128, late": (
        CAUSAL,
        Problem(head_dim=192, value_dim=128),
        {"BLOCK_N": 128, "STAGES": 2, "LATE_VALUES": True},
    ),
    "causal 256": (CAUSAL, Problem(head_dim=256), {"BLOCK_N": 32}),
    "sinks, persistent": (STREAMING, Problem(), {"PERSISTENT": True}),
    "sinks 64": (STREAMING, Problem(head_dim=64), {}),  # queries in registers, keys in two sizes
    "strided": (COLUMNS, COLUMNS.problem, {"BLOCK_N": 64}),
    "longformer": (LONGFORMER, LONGFORMER.problem, {"BLOCK_M": 64, "BLOCK_N": 64}),
}
LAUNCHES = {"strided": "hopper hopper", "longformer": "hopper hopper portable"}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    root = tmp_path_factory.mktemp("hopper")
    jobs = {}
    for name, (pattern, problem, knobs) in KERNELS.items():
        config = config_of(problem, **knobs)
        assert TEMPLATE.invalid(config, problem, H200) is None
        jobs[name] = Job(source_of(pattern, problem), config, "fast", H200, root / name)
    return dict(zip(jobs, compile_many(list(jobs.values()))))


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("name", KERNELS)
def test_compiled(name: str, outcomes: dict[str, Outcome]) -> None:
    """No spills to speak of, no more shared memory than promised, and the instructions that it is about."""
    outcome, problem = outcomes[name], KERNELS[name][1]
    assert outcome.error == "" and outcome.binary is not None
    binary, job = outcome.binary, outcome.job
    assert binary.spill_bytes <= 64
    promised, texts = shared_bytes(job.config.as_dict(), problem), []
    for launch in range(len(job.source.grids)):
        text, _ = sig.unit(job.source, job.config, "fast", launch)
        special = text is job.source.hopper
        texts.append("hopper" if special else "portable")
        folder = folder_of(job.source, binary.directory, launch)
        ptx = (folder / f"{text.entry}.ptx").read_text()
        if special:
            taken = read_metadata(folder, text.entry)["shared"]
            assert promised - 1024 < taken <= promised <= H200.shared_bytes
            consumers = int(job.config["BLOCK_M"]) // 64
            most = sig.options(job.source, job.config, "fast", launch)["maxnreg"]
            assert most == sig.MAX_REGISTERS[consumers] and f".maxnreg {most}" in ptx
            assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx
            assert ptx.count("setmaxnreg.inc") and ptx.count("setmaxnreg.dec")
    assert " ".join(texts) == LAUNCHES.get(name, "hopper")
    assert not (binary.directory / MODULE).exists()
    assert not (binary.directory / HOPPER_MODULE).exists()


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("name", ["causal 128", "causal 64, one consumer"])
def test_borders_are_compared_with_numbers(name: str, outcomes: dict[str, Outcome]) -> None:
    """A cell of a tile at the edge takes one comparison, of its row's border with the number of its column."""
    job = outcomes[name].job
    (cubin,) = job.directory.rglob("*.cubin")
    listing = listing_of(cubin, _tool("nvdisasm"))
    with_numbers = re.findall(r"ISETP\.[GL][ET]\S* P\d, PT, R\d+\S*, (?:-?0x|RZ)", listing)
    consumers, block = int(job.config["BLOCK_M"]) // 64, int(job.config["BLOCK_N"])
    cells = 64 * block // 128  # of a thread
    assert len(with_numbers) >= 2 * consumers * (cells - 4)  # the first tile and the others


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.usefixtures("compiles_anew")
def test_a_compilation_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Bindings of Triton 3.9 complain at the end of a process that compiled Gluon."""
    config = config_of(Problem(head_dim=64), BLOCK_M=64, BLOCK_N=64)
    source = source_of(CAUSAL, Problem(head_dim=64))
    (outcome,) = compile_many([Job(source, config, "fast", H200, tmp_path)])
    assert outcome.binary is not None
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "")
