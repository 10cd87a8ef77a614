"""What network disks and full disks do: injected errors at rename, rmdir and read-back, and a real size limit."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest

from sparsegen.artifact import folder, publish
from sparsegen.artifact.store import CacheWarning, Store
from sparsegen.errors import ArtifactError
from tests.artifact.standin import KEY, VERSIONS, build, write_standin

CODES = [errno.EBUSY, errno.ENOENT, errno.ESTALE]
ids = errno.errorcode.get


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "cache")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(folder, "_FIRST_PAUSE_S", 0.0005)


@pytest.fixture(autouse=True)
def own_scratch(monkeypatch):
    monkeypatch.setattr(publish, "_SCRATCH", {})


class Failing:
    """Stands for an ``os`` function: fails ``times`` times where ``when`` holds, then works."""

    def __init__(self, real, code, times, when=lambda *a, **k: True, after=False):
        self.real, self.code, self.left, self.when, self.after = real, code, times, when, after
        self.failed = 0

    def __call__(self, *arguments, **options):
        if self.left and self.when(*arguments, **options):
            self.left, self.failed = self.left - 1, self.failed + 1
            if self.after:  # done, but reported as failed: a lost answer of a network disk
                self.real(*arguments, **options)
            raise OSError(self.code, os.strerror(self.code))
        return self.real(*arguments, **options)


@pytest.mark.parametrize("code", CODES, ids=ids)
@pytest.mark.parametrize("after", [False, True], ids=["refused", "answer lost"])
def test_rename_fails_at_first(store, monkeypatch, code, after):
    failing = Failing(os.rename, code, 1 if after else 3, after=after)
    monkeypatch.setattr(os, "rename", failing)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        artifact = build(store)
    assert failing.failed
    assert artifact.path.parent == store.artifacts
    assert store.load(KEY) == artifact
    assert os.listdir(store.artifacts) == [artifact.path.name]


@pytest.mark.parametrize("code", CODES, ids=ids)
@pytest.mark.parametrize("again", [False, True], ids=["then works", "goes on failing"])
def test_rename_fails_because_somebody_published(store, monkeypatch, code, again):
    other = Store(store.root)
    real = os.rename

    def fail(source, target):
        raise OSError(code, os.strerror(code))

    def lose(source, target):
        monkeypatch.setattr(os, "rename", real)
        monkeypatch.setattr(
            folder, "builder_lock", lambda *a, **k: __import__("contextlib").nullcontext()
        )
        build(other, content=b"theirs")
        if again:
            monkeypatch.setattr(os, "rename", fail)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "rename", lose)
    artifact = build(store, content=b"ours")
    assert artifact.read("fast/forward.cubin")[:6] == b"theirs"
    assert os.listdir(store.artifacts) == [artifact.path.name]


@pytest.mark.parametrize("code", CODES, ids=ids)
@pytest.mark.parametrize("times", [1, 10_000], ids=["once", "always"])
def test_cleaning_up_never_kills_a_finished_build(store, monkeypatch, code, times):
    for tune in ("off", "quick"):
        retune(store, tune)
    failing = Failing(os.rmdir, code, times)
    monkeypatch.setattr(os, "rmdir", failing)
    artifact = retune(store, "full")  # removes the first generation
    assert failing.failed
    assert store.load(KEY) == artifact
    monkeypatch.undo()
    from sparsegen.artifact import cache

    cache.prune(store)
    assert not [n for n in os.listdir(store.artifacts) if n.startswith(".")]


def retune(store, tune):
    return store.build_once(
        KEY,
        "causal",
        lambda d: write_standin(d, tune=tune),
        VERSIONS,
        accept=lambda a: a.manifest.decision.tune == tune,
    )


@pytest.mark.parametrize("code", [*CODES, errno.EIO], ids=ids)
@pytest.mark.parametrize("times", [1, 3, 10_000], ids=["once", "thrice", "always"])
def test_read_back_fails(store, monkeypatch, code, times):
    """The entry is published: a disk that cannot show it yet does not undo the build."""

    def published(path, *arguments, **options):
        return Path(path).name == "manifest.json" and Path(path).parent.name.startswith("causal-")

    failing = Failing(os.open, code, times, published)
    monkeypatch.setattr(os, "open", failing)
    artifact = build(store)
    assert failing.failed
    monkeypatch.undo()
    assert store.load(KEY) == artifact
    assert os.listdir(store.artifacts) == [artifact.path.name]


@pytest.mark.parametrize("code", [errno.EBUSY, errno.ESTALE], ids=ids)
def test_loading_is_patient(store, monkeypatch, code):
    artifact = build(store)
    failing = Failing(os.open, code, 3, lambda p, *a, **k: str(p).endswith("forward.cubin"))
    monkeypatch.setattr(os, "open", failing)
    assert store.load(KEY) == artifact
    assert failing.failed == 3


def test_a_lost_disk_is_no_damage(store, monkeypatch):
    """An entry that cannot be read now is a miss, but stays where it is."""
    artifact = build(store)
    failing = Failing(os.open, errno.EIO, 10_000, lambda p, *a, **k: str(p).endswith("kernel.py"))
    monkeypatch.setattr(os, "open", failing)
    assert store.try_load(KEY) is None
    with pytest.raises(ArtifactError, match=r"kernel\.py cannot be read"):
        store.load(KEY)
    monkeypatch.undo()
    assert store.load(KEY) == artifact


@pytest.mark.parametrize("code", CODES, ids=ids)
def test_rename_never_works(store, monkeypatch, code):
    def into_root(source, target):
        return str(target).startswith(str(store.root))

    monkeypatch.setattr(os, "rename", Failing(os.rename, code, 10_000, into_root))
    with pytest.warns(CacheWarning, match="cannot be written"):
        artifact = build(store)
    assert not str(artifact.path).startswith(str(store.root))
    assert store.load(KEY) == artifact, "this process finds what it had to keep apart"
    assert os.listdir(store.artifacts) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT], ids=ids)
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped by the compiler"])
def test_disk_full_in_the_builder(store, code, wrapped):
    def write(directory):
        if directory.is_relative_to(store.root):
            try:
                raise OSError(code, os.strerror(code))
            except OSError as error:
                if wrapped:
                    raise RuntimeError("the assembler failed") from error
                raise
        return write_standin(directory)

    with pytest.warns(CacheWarning, match=os.strerror(code)) as caught:
        first = store.build_once(KEY, "causal", write, VERSIONS)
        assert store.build_once(KEY, "causal", write, VERSIONS) == first
    assert len(caught) == 1
    assert os.listdir(store.artifacts) == []


def test_no_place_at_all(store, monkeypatch):
    def full(directory):
        raise OSError(errno.ENOSPC, "No space left on device")

    with (
        pytest.warns(CacheWarning),
        pytest.raises(ArtifactError, match=r"neither to .* nor to .*: .*No space.*SPARSEGEN_CACHE"),
    ):
        store.build_once(KEY, "causal", full, VERSIONS)
    monkeypatch.setattr(publish, "_SCRATCH", {})
    monkeypatch.setattr("tempfile.mkdtemp", Failing(None, errno.EROFS, 10))
    with pytest.raises(ArtifactError, match="nor a temporary folder"):
        build(store)


def test_a_real_size_limit(tmp_path):
    """A file-size limit of the process stands for the full disk: mounting a small one needs rights tests lack."""
    code = f"""
        import resource, signal, sys, warnings
        from tests.artifact import standin
        from sparsegen.artifact.store import Store, CacheWarning
        from sparsegen.errors import ArtifactError
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                standin.build(Store({str(tmp_path)!r}))
            except ArtifactError as error:
                print(error)
        print(*[w.message for w in caught if w.category is CacheWarning])
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    error, warning = run.stdout.strip().splitlines()
    assert "can be written neither to" in error and "File too large" in error
    assert warning.count("File too large") == 1
    assert os.listdir(tmp_path / "artifacts") == []
