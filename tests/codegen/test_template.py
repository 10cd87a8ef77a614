"""Templates: declared knobs, which configurations fit which GPU, one whitespace policy, no silent holes."""

from __future__ import annotations

import itertools
import re
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import jinja2
import pytest

from sparsegen.codegen import KernelSource, LaunchConfig, load_template, render
from sparsegen.codegen import source as source_module
from sparsegen.codegen.plan import ForwardPlan
from sparsegen.codegen.planner import chunks, make_plan
from sparsegen.codegen.source import render_text
from sparsegen.errors import SparsegenError, UnsupportedError
from sparsegen.launch.signature import GENERAL_CONFIG
from sparsegen.schedule.build import build
from sparsegen.spec.gpu import Gpu, all_gpus, find_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from tests.kernels.schedules import per_head

pytestmark = pytest.mark.one_triton  # texts alone

TEMPLATES = sorted((Path(__file__).parents[2] / "templates").glob("*/*.jinja"))
H200, A100 = find_gpu("h200"), find_gpu("a100")
DIMS = [(64, 64), (128, 128), (192, 128), (256, 256)]


def problem_of(dims: tuple[int, int], dtype: str = "bfloat16") -> Problem:
    return Problem(head_dim=dims[0], value_dim=dims[1], dtype=dtype)


def every_configuration() -> list[LaunchConfig]:
    knobs = load_template().knobs
    return [
        LaunchConfig.of(dict(zip([k.name for k in knobs], chosen)))
        for chosen in itertools.product(*(k.choices for k in knobs))
    ]


ALL = every_configuration()


# ---------------------------------------------------------------------- knobs
def test_declared_knobs_are_consistent() -> None:
    for knob in load_template().knobs:
        assert knob.default in knob.choices and len(set(knob.choices)) == len(knob.choices)
        assert knob.summary.endswith(".")
    assert {*GENERAL_CONFIG} == {k.name for k in load_template().knobs}


def test_an_unknown_template_lists_those_there_are() -> None:
    with pytest.raises(SparsegenError, match=r"^no template 'backwards'; there are .*forward"):
        load_template("backwards")


# ---------------------------------------------------------------------- what fits (B04)
@pytest.mark.parametrize("gpu", all_gpus(), ids=lambda g: g.name)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_the_default_works_on_every_gpu(gpu: Gpu, dtype: str, dims: tuple[int, int]) -> None:
    template, problem = load_template(), problem_of(dims, dtype)
    assert template.invalid(template.default(problem, gpu), problem, gpu) is None


@pytest.mark.parametrize("limit", [101_376, 65_536])
@pytest.mark.parametrize("dims", DIMS[1:], ids=str)
def test_there_are_candidates_under_a_tight_limit(dims: tuple[int, int], limit: int) -> None:
    """99 KiB and 64 KiB of shared memory: never none, and never one whose key and value tiles do not fit."""
    template, problem, gpu = load_template(), problem_of(dims), replace(A100, shared_bytes=limit)
    assert template.invalid(template.default(problem, gpu), problem, gpu) is None
    valid = [c for c in ALL if template.invalid(c, problem, gpu) is None]
    assert len(valid) >= 50
    for c in valid:
        assert c["BLOCK_N"] * c["STAGES"] * sum(dims) * 2 <= limit


def test_a_refused_configuration_names_need_and_limit() -> None:
    template, problem = load_template(), problem_of((256, 256))
    small = replace(A100, shared_bytes=65_536)
    values = template.default(problem, small).as_dict()
    large = LaunchConfig.of(values | {"BLOCK_N": 128, "STAGES": 4})
    assert template.invalid(large, problem, small) == (
        "key and value tiles take 524288 bytes of shared memory, nvidia-a100 has 65536"
    )
    assert template.invalid(LaunchConfig.of(values | {"TMA": True}), problem, A100) == (
        "TMA needs sm_90 or newer, nvidia-a100 has none"
    )
    assert template.invalid(LaunchConfig.of(values | {"BLOCK_M": 48}), problem, A100) == (
        "BLOCK_M=48 is not one of [32, 64, 128]"
    )
    assert template.invalid(LaunchConfig.of({}), problem, A100) is not None


# ---------------------------------------------------------------------- columns
@pytest.mark.parametrize("columns", [*range(8, 257, 8)])
def test_columns_are_covered_once_and_never_padded_to_the_next_power(columns: int) -> None:
    """96 and 192 are computed as 64 + 32 and 128 + 64."""
    got = chunks(columns)
    assert [c.first for c in got] == [0, *itertools.accumulate(c.cols for c in got[:-1])]
    assert sum(c.cols for c in got) == columns
    assert all(
        c.width >= 16 and c.width & (c.width - 1) == 0 and 0 < c.cols <= c.width for c in got
    )
    widths = {96: (64, 32), 192: (128, 64), 48: (32, 16), 128: (128,), 256: (256,), 72: (64, 16)}
    if columns in widths:
        assert tuple(c.width for c in got) == widths[columns]
    assert sum(c.width for c in got) <= max(16, 1.5 * columns)


def test_columns_that_no_kernel_has_are_refused() -> None:
    pattern = Pattern.from_dict({"name": "p", "mask": "causal"})
    with pytest.raises(UnsupportedError, match="head_dim or value_dim 512"):
        render(pattern, build(pattern), Problem(head_dim=512))


# ---------------------------------------------------------------------- Jinja
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda p: p.name)
def test_one_whitespace_policy(path: Path) -> None:
    """With trim_blocks and lstrip_blocks on, a dash in a tag joins two lines of a kernel now and then."""
    text = path.read_text(encoding="utf-8")
    dashes = re.findall(r".*(?:\{%-|-%\}|\{\{-|-\}\}|\{#-|-#\}).*", text)
    assert not dashes, dashes


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda p: p.name)
def test_tags_stand_alone_or_inside_one_line(path: Path) -> None:
    """A block that opens on a line of its own closes on one: the shape of the text is the shape of the kernel."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        tags = re.findall(r"\{%\s*(\w+)", line)
        opened = sum(t in ("if", "for", "macro") for t in tags)
        closed = sum(t.startswith("end") for t in tags)
        alone = re.fullmatch(r"\s*\{%.*%\}", line) is not None
        assert opened == closed or (alone and len(tags) == 1), f"{path.name}:{number}: {line}"


class _Without:
    """The plan without one of its fields."""

    def __init__(self, plan: ForwardPlan, missing: str):
        self.__dict__.update({f.name: getattr(plan, f.name) for f in fields(plan)})
        del self.__dict__[missing]


def plan_of(**settings: object) -> ForwardPlan:
    """Many features at once, so that most branches of the template are taken."""
    rules = [
        {"heads": 0, "mask": {"random_blocks": {"block": 16, "per_row": 2, "seed": 1}}},
        {"heads": "rest", "mask": "causal"},
    ]
    pattern = Pattern.from_dict({"name": "p", "heads": rules, **settings})
    template, problem = load_template(), Problem(head_dim=96, value_dim=24)
    return make_plan(
        pattern, build(pattern), problem, "forward", template.entry, template.constexprs
    )


def plan_of_sweeps() -> ForwardPlan:
    """Gathered rows, chained and split sweeps."""
    pattern, schedule = per_head()
    template, problem = load_template(), Problem(head_dim=96, value_dim=24)
    return make_plan(pattern, schedule, problem, "forward", template.entry, template.constexprs)


PLANS = [
    plan_of(alibi=True, sink_logits=True, null_key=True, softcap=5.0),
    plan_of(alibi=True),
    plan_of_sweeps(),
]
ELSEWHERE = ("types", "constexprs", "parameters")  # read by ``render``; by the template as lines


@pytest.mark.parametrize("name", [f.name for f in fields(ForwardPlan) if f.name not in ELSEWHERE])
def test_a_name_that_is_missing_is_an_error(name: str) -> None:
    """StrictUndefined: a hole in the plan never becomes an empty string in a kernel."""
    template, said = load_template(), []
    for plan in PLANS:
        assert "def attend_forward" in render_text(template, "kernel.py.jinja", plan=plan)
        try:
            render_text(template, "kernel.py.jinja", plan=_Without(plan, name))
        except jinja2.UndefinedError as error:
            said.append(str(error))
    assert said and all(f"has no attribute '{name}'" in s for s in said)


def test_a_rendered_text_that_is_no_python_is_caught(tmp_path: Path) -> None:
    (tmp_path / "kernel.py.jinja").write_text("def broken(:\n")
    with pytest.raises(SyntaxError):
        render_text(SimpleNamespace(folder=tmp_path, imports=()), "kernel.py.jinja")


def test_digest_follows_the_text() -> None:
    pattern = Pattern.from_dict({"name": "p", "mask": "causal"})
    one = render(pattern, build(pattern), Problem(head_dim=64))
    assert isinstance(one, KernelSource) and one.digest == replace(one).digest
    assert one.digest != replace(one, text=one.text + "#").digest
    assert source_module.render is render
