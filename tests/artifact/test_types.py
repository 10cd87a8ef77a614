"""Several GPU types in one place: which entry is taken, and what is said, or done, where there is none for the GPU here."""

from __future__ import annotations

import logging
import os

import pytest

import sparsegen
from sparsegen.artifact import cache as listing
from sparsegen.artifact.archive import export_archive
from sparsegen.artifact.key import installed
from sparsegen.artifact.publish import CacheWarning
from sparsegen.artifact.signing import Signer, make_keys
from sparsegen.artifact.store import Store
from sparsegen.errors import ArtifactError, CacheMiss, InputError
from sparsegen.runtime import api
from sparsegen.spec.gpu import find_gpu
from tests.artifact.standin import KEY, build, key

A100 = key(gpu="nvidia-a100", arch=80)
L4 = key(gpu="nvidia-l4", arch=89)


@pytest.fixture
def packed(tmp_path):
    """One file with an entry for each of two GPU types, and one of another mask."""
    store = Store(tmp_path / "from")
    for which in (KEY, A100, key(mask="e" * 64)):
        build(store, which)
    export_archive(tmp_path / "kernels.tar.gz", listing.select(store))
    return tmp_path / "kernels.tar.gz"


def test_the_type_of_the_gpu_decides(packed, tmp_path):
    store = Store(tmp_path / "cache", archive=packed)
    for which in (KEY, A100):
        found = store.load(which)
        assert found.key == which and found.path.parent == store.artifacts
    assert len(os.listdir(store.artifacts)) == 2  # nothing but what was asked for
    packed.unlink()
    assert store.load(A100).key == A100  # from the cache from now on


def test_a_missing_type_names_those_that_are_there(packed, tmp_path):
    store = Store(tmp_path / "from", archive=packed)
    with pytest.raises(CacheMiss) as error:
        store.load(L4, "causal")
    said = str(error.value)
    assert "it is built for nvidia-a100, nvidia-h200 and not for nvidia-l4" in said
    assert "`sparsegen warm --gpu nvidia-l4 PATTERN`" in said
    assert (
        f"{packed} has no artifact" in said and "it has that for nvidia-a100, nvidia-h200" in said
    )
    with pytest.raises(CacheMiss, match="it holds 3 other"):
        store.load(key(mask="f" * 64))


def test_another_difference_is_still_named(packed, tmp_path):
    store = Store(tmp_path / "from")
    older = store.explain_miss(key(gpu="nvidia-l4", arch=89, triton="3.10.1"))
    assert "differs in" in older and "triton: asked 3.10.1, stored 3.9.0" in older
    assert "built for" not in older


@pytest.mark.parametrize("damage", ["cut", "absent", "text"])
def test_a_bad_archive_is_an_error_and_not_a_miss(packed, tmp_path, damage):
    if damage == "absent":
        packed.unlink()
    else:
        packed.write_bytes(packed.read_bytes()[:500] if damage == "cut" else b"no archive")
    with pytest.raises(ArtifactError, match="kernels.tar.gz"):
        Store(tmp_path / "cache", archive=packed).load(KEY)
    assert not (tmp_path / "cache" / "artifacts").exists()


def test_a_build_goes_on_without_a_bad_archive(packed, tmp_path, caplog):
    packed.write_bytes(b"no archive")
    store = Store(tmp_path / "cache", archive=packed)
    assert build(store, KEY).key == KEY
    assert "store not used" in caplog.text and "kernels.tar.gz" in caplog.text


def test_a_cache_that_cannot_be_written(packed, tmp_path):
    """What is taken from the file goes to a folder of this process."""
    (tmp_path / "blocked").write_text("")
    store = Store(tmp_path / "blocked" / "cache", archive=packed)
    with pytest.warns(CacheWarning):
        assert store.load(KEY).key == KEY


@pytest.mark.skipif(installed("cryptography") is None, reason="needs cryptography")
def test_signatures_count_for_a_file_too(packed, tmp_path):
    root = tmp_path / "cache"
    root.mkdir()
    private = tmp_path / "fleet"
    public, _ = make_keys(private)
    (root / "stores.yaml").write_text(f"trust: [{public}]\n")
    with pytest.raises(ArtifactError, match="sign"):
        Store(root, archive=packed).load(KEY)
    export_archive(packed, listing.select(Store(tmp_path / "from")), Signer.of_file(private))
    assert Store(root, archive=packed).load(KEY).key == KEY


# ---------------------------------------------------------------------- what the caller chose


@pytest.fixture
def missing(monkeypatch, cache):
    """A store without the artifact; what a build would be."""
    built = []

    def ensure(pattern, problem, gpu, **options):
        built.append((pattern.name, gpu.name, options["builder"]))
        return "artifact"

    monkeypatch.setattr(api.artifacts, "ensure", ensure)
    monkeypatch.setattr(api, "open_kernel", lambda pattern, problem, artifact: artifact)
    monkeypatch.setattr(api, "Attend", lambda *given, **more: given)
    return built


def test_a_miss_is_an_error_unless_a_build_is_asked_for(missing, caplog):
    with pytest.raises(CacheMiss):
        sparsegen.load("causal", gpu=find_gpu("l4"))
    assert not missing
    with caplog.at_level(logging.WARNING):
        found = sparsegen.load("causal", gpu=find_gpu("l4"), missing="build")
    assert found[2] == "artifact" and [m[:2] for m in missing] == [("causal", "nvidia-l4")]
    (record,) = [r for r in caplog.records if "building it now" in r.message]
    assert record.levelname == "WARNING" and "no artifact under key" in record.message


def test_an_unknown_choice(cache):
    with pytest.raises(InputError, match="missing must be one of error, build, got 'jit'"):
        sparsegen.load("causal", gpu=find_gpu("l4"), missing="jit")
