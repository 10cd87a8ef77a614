"""``ensure``: load what is stored, build what is not, replace what was tuned less than asked."""

from __future__ import annotations

import pytest

from sparsegen.artifact.build import ensure, load
from sparsegen.artifact.store import Store
from sparsegen.errors import CacheMiss, InputError, ToolchainError, UnsupportedError
from sparsegen.spec.gpu import find_gpu
from sparsegen.spec.pattern import Pattern
from tests.artifact.standin import StandinBuilder

CAUSAL = Pattern.from_dict({"name": "plain", "mask": "causal"})
H200 = find_gpu("h200")


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "cache")


def test_builds_once(store):
    builder, steps = StandinBuilder(), []
    first = ensure(
        CAUSAL, None, H200, store=store, builder=builder, progress=lambda *step: steps.append(step)
    )
    assert ensure(CAUSAL, None, H200, store=store, builder=builder) == first
    assert builder.built == [("plain", "nvidia-h200")]
    assert steps == [(1, 2, "compiled fast")]
    assert first.path.name.startswith("plain-nvidia-h200-")


def test_each_gpu_type_has_its_own(store):
    builder = StandinBuilder()
    paths = {
        ensure(CAUSAL, None, find_gpu(g), store=store, builder=builder).path
        for g in ("h200", "a100")
    }
    assert len(paths) == 2


def test_a_higher_level_is_tuned_again_a_lower_one_is_not(store):
    builder = StandinBuilder()
    levels = []
    for tune in ("off", "quick", "off", "quick", "full", "quick"):
        artifact = ensure(CAUSAL, None, H200, tune=tune, store=store, builder=builder)
        levels.append(artifact.manifest.decision.tune)
    assert levels == ["off", "quick", "quick", "quick", "full", "full"]
    assert len(builder.built) == 3
    assert store.load(artifact.key) == artifact


def test_a_new_tuned_row_replaces_an_untuned_artifact(store):
    builder = StandinBuilder()
    old = ensure(CAUSAL, None, H200, store=store, builder=builder)

    class Newer(StandinBuilder):
        def is_current(self, request, artifact):
            return artifact.path != old.path

    new = ensure(CAUSAL, None, H200, store=store, builder=Newer())
    assert new.path.name == f"{old.path.name}.2"
    assert old.read("kernel.py")


def test_load_never_builds(store):
    builder = StandinBuilder()
    with pytest.raises(CacheMiss, match="plain: no artifact under key"):
        load(CAUSAL, None, H200, store=store, builder=builder)
    built = ensure(CAUSAL, None, H200, store=store, builder=builder)
    assert load(CAUSAL, None, H200, store=store, builder=builder) == built
    with pytest.raises(CacheMiss, match="built for nvidia-h200 and not for nvidia-a100"):
        load(CAUSAL, None, find_gpu("a100"), store=store, builder=builder)
    assert len(builder.built) == 1


def test_default_store_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("SPARSEGEN_CACHE", str(tmp_path / "here"))
    artifact = ensure(CAUSAL, None, H200, builder=StandinBuilder())
    assert artifact.path.parent == tmp_path / "here" / "artifacts"


def test_mistakes_are_told(store, monkeypatch):
    builder = StandinBuilder(unsupported=["plain"])
    with pytest.raises(UnsupportedError, match="plain needs run-time data"):
        ensure(CAUSAL, None, H200, store=store, builder=builder)
    with pytest.raises(InputError, match="tune must be one of off, quick, full, got 'fast'"):
        ensure(CAUSAL, None, H200, tune="fast", store=store, builder=builder)
    monkeypatch.setattr("sparsegen.spec.gpu.current_gpu", lambda: None)
    with pytest.raises(ToolchainError, match=r"no GPU here: name the GPU type .*nvidia-h200"):
        ensure(CAUSAL, store=store, builder=builder)
    assert not store.root.exists()
