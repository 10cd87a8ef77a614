"""Listing and pruning."""

from __future__ import annotations

import json
import os
from datetime import datetime, timedelta, timezone

import pytest

from sparsegen.artifact import cache
from sparsegen.artifact.entry import read_manifest
from sparsegen.artifact.manifest import MANIFEST, DamagedError, Manifest
from sparsegen.artifact.store import Store
from tests.artifact.standin import KEY, VERSIONS, build, key, write_standin

A100 = key(gpu="nvidia-a100", arch=80)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "cache")


def age(path, days):
    """Make an entry look older."""
    manifest = read_manifest(path)
    made = datetime.now(timezone.utc) - timedelta(days=days)
    old = Manifest(**{**vars(manifest), "created": made.isoformat(timespec="seconds")})
    (path / MANIFEST).write_text(old.to_json())


def retune(store):
    return store.build_once(
        KEY,
        "causal",
        lambda d: write_standin(d, tune="full"),
        VERSIONS,
        accept=lambda a: a.manifest.decision.tune == "full",
    )


def test_list(store):
    assert cache.list_entries(store) == []
    path = build(store).path
    build(store, A100, pattern="alpha")
    alpha, causal = cache.list_entries(store)
    assert (alpha.pattern, alpha.gpu, alpha.key) == ("alpha", "nvidia-a100", A100.short())
    assert (causal.dtype, causal.chosen_by, causal.path) == ("bfloat16", "template default", path)
    assert "BLOCK_N=64" in causal.config
    assert causal.size_bytes == sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    assert 0 <= causal.age_s < 60 and not causal.fault and not causal.superseded


def test_list_shows_damage_and_old_generations(store):
    old = build(store).path
    new = retune(store).path
    bad = build(store, A100).path
    (bad / MANIFEST).write_text("{")
    found = {e.path: e for e in cache.list_entries(store)}
    assert "manifest.json is not JSON" in found[bad].fault
    assert found[bad].pattern == "causal-nvidia-a100"
    assert found[old].superseded and not found[new].superseded
    assert os.listdir(store.artifacts).__len__() == 3, "listing changes nothing"


def test_prune_by_age_gpu_and_all(store):
    young, old, other = (
        build(store).path,
        build(store, key(heads=1, kv_heads=1)).path,
        build(store, A100).path,
    )
    age(old, 10)
    assert [e.path for e in cache.prune(store).entries] == []
    week = timedelta(days=7)
    assert [e.path for e in cache.prune(store, older_than=week, dry_run=True).entries] == [old]
    assert old.exists()
    assert [e.path for e in cache.prune(store, older_than=week, gpu="nvidia-a100").entries] == []
    gone = cache.prune(store, older_than=week)
    assert [e.path for e in gone.entries] == [old] and gone.size_bytes > 1000 and not old.exists()
    assert [e.path for e in cache.prune(store, gpu="nvidia-a100").entries] == [other]
    assert [e.path for e in cache.prune(store, everything=True).entries] == [young]
    assert os.listdir(store.artifacts) == []
    assert build(store)


def test_prune_always_takes_damage_leftovers_and_replaced_ones(store):
    old = build(store).path
    new = retune(store).path
    bad = build(store, A100).path
    (bad / MANIFEST).unlink()
    left = store.artifacts / f".build-{A100.short()}-elsewhere-1-x"
    left.mkdir()
    os.utime(left, (0, 0))
    fresh = store.artifacts / f".build-{A100.short()}-elsewhere-2-x"
    fresh.mkdir()
    gone = cache.prune(store)
    assert [e.path for e in gone.entries] == [bad] and gone.leftovers == (left,)
    assert fresh.exists(), "another machine may be at it, if its disk has no locks"
    age(old, 1)
    assert [e.path for e in cache.prune(store).entries] == [old]
    assert sorted(os.listdir(store.artifacts)) == sorted([new.name, fresh.name])


def test_select_gives_verified_newest(store):
    build(store)
    new = retune(store)
    other = build(store, A100)
    assert {a.path for a in cache.select(store)} == {new.path, other.path}
    assert [a.path for a in cache.select(store, gpu="nvidia-a100")] == [other.path]
    assert cache.select(store, pattern="nothing") == []
    (other.path / "kernel.py").write_text("")
    with pytest.raises(DamagedError, match=r"kernel\.py is damaged"):
        cache.select(store)


def test_manifests_are_sorted_json(store):
    text = (build(store).path / MANIFEST).read_text()
    data = json.loads(text)
    assert text == json.dumps(data, sort_keys=True, indent=1) + "\n"
