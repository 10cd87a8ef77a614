"""A store behind a URL: push after a build, pull on a miss, and every object checked.  Against a real S3 server."""

from __future__ import annotations

import logging
import os
import random

import pytest

from sparsegen.artifact import remote as transport
from sparsegen.artifact.archive import ArchiveError, export_archive
from sparsegen.artifact.publish import CacheWarning
from sparsegen.artifact.remote import StoreError, object_name
from sparsegen.artifact.remote_places import Remote
from sparsegen.artifact.store import Store
from sparsegen.errors import ArtifactError, CacheMiss, InputError, ToolchainError
from tests.artifact.remote_servers import S3, Proxy, places
from tests.artifact.standin import KEY, build, key

pytest.importorskip("moto")
NAME = object_name(KEY)


@pytest.fixture(scope="module")
def s3():
    server = S3()
    yield server
    server.server.stop()


@pytest.fixture
def remote(s3):
    return s3.remote()


@pytest.fixture
def here(tmp_path, remote):
    """The machine that builds."""
    return Store(tmp_path / "here", places=places(remote))


@pytest.fixture
def there(tmp_path, remote):
    """A machine that must not build."""
    return Store(tmp_path / "there", places=places(remote))


def no_build(*arguments):
    raise AssertionError("nothing may be built")


# --- what it is for ---


def test_built_here_loads_there(s3, remote, here, there):
    built = build(here)
    assert list(s3.objects(remote)) == [NAME] and KEY.digest() in NAME
    loaded = there.load(KEY)
    assert loaded.manifest == built.manifest and loaded.path.parent == there.artifacts
    assert loaded.read("fast/forward.cubin") == built.read("fast/forward.cubin")
    assert loaded.path.stat().st_mode & 0o777 == 0o700
    s3.client.delete_object(Bucket="kernels", Key=remote.url.partition("kernels/")[2] + "/" + NAME)
    assert there.load(KEY).path == loaded.path, "from the cache now"


def test_a_build_takes_what_the_store_has(here, there):
    built = build(here)
    got = there.build_once(KEY, "causal", no_build, {})
    assert got.manifest == built.manifest


def test_only_pushed_where_asked(s3, remote, tmp_path):
    build(Store(tmp_path, places=places(Remote(remote.url, False, remote.options))))
    assert s3.objects(remote) == {}


def test_url_as_an_argument(tmp_path):
    url = str(tmp_path / "folder")
    build(Store(tmp_path / "a", remote=url, push=True))
    assert (tmp_path / "folder" / NAME).is_file()
    assert Store(tmp_path / "b", remote=f"file://{url}").load(KEY)


def test_nothing_is_listed(s3, tmp_path):
    """A load of an exact key is one GET, so a store needs no right to list."""
    proxy = Proxy(s3.address)
    remote = s3.remote(address=proxy.address)
    build(Store(tmp_path / "a", places=places(remote)))
    asked = len(proxy.requests)
    Store(tmp_path / "b", places=places(remote)).load(KEY)
    path = f"/{remote.url.removeprefix('s3://')}/{NAME}"
    assert [r.split("?")[0].split(" HTTP")[0] for r in proxy.requests[asked:]] == [f"GET {path}"]
    assert not [r for r in proxy.requests if "list-type" in r]
    proxy.close()


def test_first_store_that_has_it(s3, here, tmp_path, remote):
    build(here)
    empty = s3.remote()
    assert Store(tmp_path / "x", places=places(empty, remote)).load(KEY)


def test_a_cache_that_cannot_be_written(here, remote, tmp_path):
    build(here)
    (tmp_path / "file").write_text("")
    with pytest.warns(CacheWarning, match="cannot be written"):
        got = Store(tmp_path / "file" / "x", places=places(remote)).load(KEY)
    assert got.read("kernel.py")


# --- misses and failures are said by name ---


def test_a_miss_names_the_store(here, there, remote):
    build(here, key(head_dim=64))
    with pytest.raises(CacheMiss, match="the store is empty; s3://kernels/p.* has no v3/") as miss:
        there.load(KEY)
    assert KEY.digest() in str(miss.value)


def test_no_such_bucket(tmp_path, remote, caplog):
    store = Store(tmp_path, places=places(Remote("s3://absent/x", True, remote.options)))
    with pytest.raises(CacheMiss, match="s3://absent/x has no .*bucket does not exist"):
        store.load(KEY)
    with caplog.at_level(logging.WARNING):
        assert build(store), "the artifact is there all the same"
    assert "built, but not pushed: s3://absent/x" in caplog.text


@pytest.mark.parametrize("url", ["kernels", "s3:/kernels", "", "http://host/a?b=c", "../x"])
def test_no_url(url):
    with pytest.raises(InputError, match="a store must be|URL of a store"):
        Remote(url)


def test_a_package_that_is_missing(tmp_path):
    pytest.importorskip("fsspec")
    with pytest.raises(ToolchainError, match=r"pip install 'sparsegen\[gcs\]'"):
        _hidden("gcsfs", lambda: Store(tmp_path, remote="gs://bucket/x")._pull(KEY))
    with pytest.raises(ToolchainError, match=r"pip install 'sparsegen\[remote\]'"):
        _hidden("fsspec.core", lambda: Store(tmp_path, remote="s3://bucket/x")._pull(KEY))


def _hidden(name, action):
    import sys

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, None)
        action()


def test_a_protocol_that_nobody_knows(tmp_path):
    with pytest.raises(StoreError, match="nonsense://x: .*nonsense"):
        Store(tmp_path, remote="nonsense://x").load(KEY)


def test_a_password_is_not_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(transport, "_FIRST_PAUSE_S", 0.01)
    store = Store(tmp_path, remote="http://user:hunter2@127.0.0.1:9/x")
    with pytest.raises(StoreError) as caught:
        store.load(KEY)
    assert "hunter2" not in str(caught.value) and "http://127.0.0.1:9/x" in str(caught.value)


# --- what lies there is not trusted ---


def packed(tmp_path, *keys):
    """The bytes of an archive with an entry a key."""
    store = Store(tmp_path / "packing")
    export_archive(tmp_path / "x.tar.gz", [build(store, k) for k in keys])
    return (tmp_path / "x.tar.gz").read_bytes()


BAD = {
    "empty": (lambda tmp: b"", " is damaged or no .tar.gz"),
    "text": (lambda tmp: b"<html>not found</html>", " is damaged or no .tar.gz"),
    "cut": (lambda tmp: packed(tmp, KEY)[:-300], " is damaged or no .tar.gz"),
    "wiped": (lambda tmp: packed(tmp, KEY)[:600] + bytes(200) + packed(tmp, KEY)[800:], ""),
    "of another key": (
        lambda tmp: packed(tmp, key(arch=86)),
        " holds another artifact: arch: asked 90, stored 86",
    ),
    "two": (lambda tmp: packed(tmp, KEY, key(arch=86)), " holds 2 artifacts, must hold one"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_object_is_refused_and_built_over(s3, remote, here, there, tmp_path, caplog, case):
    make, message = BAD[case]
    s3.put(remote, NAME, make(tmp_path))
    with pytest.raises(ArchiveError, match=f"{remote.url}: {NAME}{message}"):
        there.load(KEY)
    assert not there.artifacts.exists()
    with caplog.at_level(logging.WARNING):
        assert build(here)
    assert f"store not used: {remote.url}" in caplog.text
    assert there.load(KEY), "the next push made it good"


def test_damage_anywhere(s3, remote, there, tmp_path):
    whole, draw = packed(tmp_path, KEY), random.Random(5)
    good = Store(tmp_path / "packing").load(KEY)
    for _ in range(25):
        data = bytearray(whole)
        data[draw.randrange(10, len(data))] ^= 1 << draw.randrange(8)
        s3.put(remote, NAME, bytes(data))
        try:
            got = there.load(KEY)
        except ArtifactError:
            assert not there.artifacts.exists()
            continue
        assert got.manifest == good.manifest  # a bit of padding
        break


def test_a_damaged_entry_here_is_replaced_from_the_store(here, there):
    build(here)
    (there.load(KEY).path / "kernel.py").write_text("import os")
    assert there.load(KEY).read("kernel.py") == b"# generated\n"


def test_too_large(here, there, monkeypatch):
    build(here)
    monkeypatch.setattr(transport, "MAX_OBJECT_BYTES", 500)
    with pytest.raises(StoreError, match="holds more than 500 bytes"):
        there.load(KEY)
    assert os.listdir(there.root.parent) == ["here"]


def test_nothing_from_elsewhere_is_unpickled():
    """``pickle`` stands only where a process talks to workers that it started."""
    import ast
    from pathlib import Path

    import sparsegen

    root = Path(sparsegen.__file__).parent
    kinds = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        and kinds & {a.name for a in node.names} | kinds & {getattr(node, "module", None)}
    }
    assert found == {
        "launch/compile_worker.py",
        "launch/pool.py",
        "tune/serve.py",
        "tune/worker.py",
    }


# --- which one stays ---


def level(store):
    return store.load(KEY).manifest.decision.tune


def test_a_better_tuned_object_stays(s3, remote, here, tmp_path):
    build(here, tune="full")
    before = s3.objects(remote)
    lone = build(Store(tmp_path / "lone"))
    from sparsegen.artifact.remote_entries import send

    assert not send(remote, lone, None, None) and s3.objects(remote) == before
    better = build(Store(tmp_path / "better"), tune="full", content=b"newer")
    assert send(remote, better, None, None) == (
        better.manifest.created > here.load(KEY).manifest.created
    )


def test_better_tuned_replaces(here, there, tmp_path, remote):
    from sparsegen.artifact.remote_entries import send

    build(here)
    assert level(there) == "off"
    assert send(remote, build(Store(tmp_path / "tuned"), tune="full"), None, None)
    assert level(Store(tmp_path / "new", places=places(remote))) == "full"


def test_a_tuned_one_of_the_store_is_taken_for_an_untuned_one_here(here, there, tmp_path, remote):
    from sparsegen.artifact.remote_entries import send

    build(there)
    send(remote, build(Store(tmp_path / "tuned"), tune="full"), None, None)
    got = there.build_once(
        KEY, "causal", no_build, {}, accept=lambda a: a.manifest.decision.tune == "full"
    )
    assert got.manifest.decision.tune == "full"
