"""``compile`` and ``load`` with gradients: real artifacts, cross-compiled; their texts run in Triton's interpreter."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import sparsegen
from sparsegen.artifact.build import ensure
from sparsegen.artifact.gradient_texts import sources_of
from sparsegen.artifact.gradients import GradientCompiler
from sparsegen.artifact.rendering import outline_of
from sparsegen.artifact.store import Store
from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.errors import CacheMiss, InputError
from sparsegen.launch.backward_kernel import InterpretedBackward
from sparsegen.launch.interpreted import Interpreted
from sparsegen.runtime import api
from sparsegen.spec.gpu import current_gpu, find_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from sparsegen.spec.reference import reference

pytestmark = pytest.mark.skipif(current_gpu() is not None, reason="runs in the interpreter so far")

H200 = find_gpu("h200")
SMALL = {"BLOCK_M": 32, "BLOCK_N": 16, "num_warps": 4, "TMA": False, "KERNEL": "portable"}
PATTERN = Pattern.from_dict(
    {
        "name": "learned",
        "mask": {"window": {"left": 9, "right": 0}},
        "sink_logits": True,
        "problem": {"head_dim": 16, "heads": 4, "kv_heads": 2, "dtype": "float32"},
    }
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("cache"))


def small(config: LaunchConfig) -> LaunchConfig:
    return LaunchConfig.of(config.as_dict() | SMALL)


@pytest.fixture(autouse=True)
def an_interpreted_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Artifacts are built and read as for an H200; their texts then run here in small tiles."""

    def forward(pattern: Any, problem: Any, artifact: Any) -> Any:
        source = outline_of(pattern, problem, artifact)
        path = Path(tempfile.mkdtemp()) / "kernel.py"
        return Interpreted(source, small(artifact.manifest.decision.config), path)

    def backward(pattern: Any, problem: Any, artifact: Any) -> Any:
        sources = sources_of(pattern, problem, artifact)
        configs = dict.fromkeys(sources, small(artifact.manifest.decision.config))
        return InterpretedBackward(sources, configs, Path(tempfile.mkdtemp()))

    monkeypatch.setattr("sparsegen.spec.gpu.current_gpu", lambda: H200)
    monkeypatch.setattr("sparsegen.runtime.checks.DEVICE", "cpu")
    monkeypatch.setattr(api, "open_kernel", forward)
    monkeypatch.setattr(api, "open_gradients", backward)


def inputs(dtype: Any = torch.float32) -> list[Any]:
    g = torch.Generator().manual_seed(3)
    shapes = (1, 4, 20, 16), (1, 2, 24, 16), (1, 2, 24, 16), (4,)
    made = [torch.randn(*s, generator=g) for s in shapes]
    return [t.to(dtype).requires_grad_() for t in made]


def gradients(attend: Any) -> None:
    """Asserts that they are those of the reference."""
    leaves = inputs()
    out, lse = attend(*leaves[:3], sink_logits=leaves[3], return_lse=True)
    got = torch.autograd.grad(out.square().sum() + lse.sin().sum(), leaves)
    right, right_lse = reference(PATTERN, *leaves[:3], sink_logits=leaves[3])
    want = torch.autograd.grad(right.square().sum() + right_lse.sin().sum(), leaves)
    for one, w in zip(got, want, strict=True):
        assert torch.allclose(one, w, atol=3e-5) and one.abs().max() > 0


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def templates(store: Store) -> list[str]:
    return sorted(m.key.template for _, m in store.entries())  # type: ignore[union-attr]


def test_compile_builds_what_it_is_asked_for_or_needs(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    attend = sparsegen.compile(PATTERN, tune="off", store=store)
    assert templates(store) == ["forward"] and not warnings(caplog)
    gradients(attend)  # first without being named: built now, and said
    (said,) = warnings(caplog)
    assert said.startswith("building gradients of learned, untuned, for Problem(head_dim=16,")
    assert templates(store) == ["backward", "forward"]
    gradients(attend)
    assert len(warnings(caplog)) == 1
    named = sparsegen.compile(PATTERN, tune="off", passes=("forward", "backward"), store=store)
    gradients(named)
    assert len(warnings(caplog)) == 1 and len(templates(store)) == 2


@pytest.mark.parametrize("where", ["argument", "problem"])
def test_named_passes_are_built_at_once(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class Asked(Exception):
        pass

    def build(pattern: Any, problem: Any, gpu: Any, *, builder: Any, **_: Any) -> Any:
        asked.append(type(builder).__name__)
        if len(asked) == 2:
            raise Asked

    monkeypatch.setattr(api.artifacts, "ensure", build)
    monkeypatch.setattr(api, "open_kernel", lambda *given: None)
    passes = ("forward", "backward")
    given: Any = {"passes": passes}
    if where == "problem":
        given = {"problem": Problem(head_dim=16, heads=4, kv_heads=2, passes=passes)}
    with pytest.raises(Asked):
        sparsegen.compile(PATTERN, tune="off", store=Store(tmp_path), **given)
    assert asked == ["Compiler", "GradientCompiler"]


def test_load_opens_what_is_stored_and_builds_nothing(store: Store) -> None:
    ensure(PATTERN, None, H200, store=store)
    ensure(PATTERN, None, H200, store=store, builder=GradientCompiler())
    before = {p.name for p in store.artifacts.iterdir()}
    attend = sparsegen.load(PATTERN, store=store)
    gradients(attend)
    leaves = inputs(torch.float16)
    with pytest.raises(InputError, match="this artifact was built for float32"):
        attend(*leaves[:3], sink_logits=leaves[3].detach().float())
    assert {p.name for p in store.artifacts.iterdir()} == before


def test_load_without_gradients_says_how_they_are_built(store: Store, tmp_path: Path) -> None:
    forward = ensure(PATTERN, None, H200, store=store)
    other = Store(tmp_path)
    other.adopt(forward)
    attend = sparsegen.load(PATTERN, store=other)
    leaves = inputs()
    for _ in range(2):
        with pytest.raises(CacheMiss) as error:
            attend(*leaves[:3], sink_logits=leaves[3])
        said = str(error.value)
        assert said.startswith("gradients are not built (learned: no artifact under key ")
        assert "template: asked backward, stored forward" in said and "\n" not in said
        assert "`sparsegen compile PATTERN --passes forward,backward` builds them" in said
    assert templates(other) == ["forward"]
    with pytest.raises(CacheMiss):
        attend(*[t.detach() for t in leaves[:3]], sink_logits=leaves[3])


@pytest.mark.one_triton
def test_gradients_in_any_order_are_an_artifact_of_their_own(store: Store) -> None:
    ensure(PATTERN, None, H200, store=store, builder=GradientCompiler())
    attend = sparsegen.load(PATTERN, store=store, deterministic=False)
    leaves = inputs()
    with pytest.raises(CacheMiss) as error:
        attend(*leaves[:3], sink_logits=leaves[3])
    said = str(error.value)
    assert "`sparsegen compile PATTERN --passes forward,backward --no-deterministic` builds" in said
    assert said.endswith("passes=('forward', 'backward'), deterministic=False)")
    gradients(sparsegen.compile(PATTERN, tune="off", store=store, deterministic=False))
    gradients(sparsegen.load(PATTERN, store=store, deterministic=False))


@pytest.mark.one_triton
def test_a_workspace_reaches_the_kernels(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = api.open_gradients
    made: list[Any] = []

    def opens(*given: Any) -> Any:
        made.append(opened(*given))
        return made[-1]

    monkeypatch.setattr(api, "open_gradients", opens)
    gradients(sparsegen.compile(PATTERN, tune="off", store=store, workspace=1 << 20))
    gradients(sparsegen.load(PATTERN, store=store, workspace=1 << 30))
    assert [kernel.workspace for kernel in made] == [1 << 20, 1 << 30]
    with pytest.raises(CacheMiss, match="--workspace 7` builds them"):
        leaves = inputs()
        other = Store(store.root.parent / "other")
        other.adopt(ensure(PATTERN, None, H200, store=store))
        sparsegen.load(PATTERN, store=other, workspace=7)(*leaves[:3], sink_logits=leaves[3])


def test_passes_that_do_not_exist() -> None:
    with pytest.raises(
        InputError, match="^passes must be some of forward, backward, got 'decode'$"
    ):
        sparsegen.compile(PATTERN, passes=("forward", "decode"))
