"""Connections that are cut, servers that lie, uploads that stop half-way, many writers at a time."""

from __future__ import annotations

import gzip
import multiprocessing
import os
import random
import socket
import time
from functools import partial

import pytest

from sparsegen.artifact import remote as transport
from sparsegen.artifact.remote import TRIES, NotThereError, StoreError, fetch, object_name, put
from sparsegen.artifact.remote_entries import fetched, send
from sparsegen.artifact.remote_places import Remote
from sparsegen.artifact.store import Store
from sparsegen.errors import ArtifactError, CacheMiss
from tests.artifact.remote_servers import (
    S3,
    Proxy,
    answers,
    files_of,
    http_server,
    options,
    places,
    push_in_process,
    write_for_ever,
)
from tests.artifact.standin import KEY, build

pytest.importorskip("moto")
NAME = object_name(KEY)
TWICE = 2 * TRIES  # aiohttp sends a request again by itself when no answer began (RFC 9112, 9.3.1)
NOISE = random.Random(1).randbytes(40)  # makes an object of 40 kB: more than buffers hold


@pytest.fixture(scope="module")
def s3():
    server = S3()
    yield server
    server.server.stop()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(transport, "_FIRST_PAUSE_S", 0.01)


@pytest.fixture
def proxied(s3):
    """``proxied(prefix, down=…)``: a store behind a proxy, and the proxy."""
    made = []

    def make(prefix, **limits):
        proxy = Proxy(s3.address, **limits)
        made.append(proxy)
        return s3.remote(address=proxy.address, prefix=prefix), proxy

    yield make
    for proxy in made:
        proxy.close()


def large(store, content=None):
    """An entry that does not compress to nothing."""
    noise = random.Random(7).randbytes(200) if content is None else content
    return build(store, content=noise)


# --- cut connections ---


@pytest.mark.parametrize("after", [0, 700])
def test_a_connection_that_is_always_cut(s3, proxied, tmp_path, after):
    large(Store(tmp_path / "a", places=places(s3.remote(prefix=f"cut{after}"))))
    remote, proxy = proxied(f"cut{after}", down=after)
    with pytest.raises(StoreError, match=rf"{remote.url}: {NAME} could not be read in 3 tries"):
        Store(tmp_path / "b", places=places(remote)).load(KEY)
    assert TRIES <= proxy.connections <= TWICE, "bounded"
    assert not (tmp_path / "b" / "artifacts").exists()


@pytest.mark.parametrize("after", [0, 700])
def test_a_connection_that_is_cut_twice(s3, proxied, tmp_path, after):
    built = large(Store(tmp_path / "a", places=places(s3.remote(prefix=f"twice{after}"))))
    remote, proxy = proxied(f"twice{after}", down=after, cuts=2)
    assert Store(tmp_path / "b", places=places(remote)).load(KEY).manifest == built.manifest
    assert proxy.connections == 3


def test_a_build_goes_on_without_its_store(proxied, tmp_path, caplog):
    remote, _ = proxied("gone", down=0)
    store = Store(tmp_path / "a", places=places(remote))
    assert build(store).path.parent == store.artifacts
    assert "store not used" in caplog.text and "built, but not pushed" in caplog.text


@pytest.mark.parametrize("after", [300, 1500])
def test_an_upload_that_is_cut_is_not_there(s3, proxied, tmp_path, after):
    entry = large(Store(tmp_path / "a"))
    remote, proxy = proxied(f"up{after}", up=after)
    archive = tmp_path / "x"
    archive.write_bytes(entry.read("fast/forward.cubin"))
    with pytest.raises(StoreError, match=r"could not be written in 3 tries"):
        put(remote, NAME, archive)
    assert TRIES <= proxy.connections <= TWICE
    # moto takes a request whose head is cut for one without a body, S3 would refuse its signature
    assert set(s3.objects(remote).values()) <= {b""}
    remote, _ = proxied(f"up{after}", up=after, cuts=1)
    assert send(remote, entry, None, None), "the second try does it"
    with fetched(remote, KEY, None) as there:
        assert there.manifest == entry.manifest


def test_a_cut_upload_leaves_the_old_object(s3, proxied, tmp_path):
    old = large(Store(tmp_path / "a", places=places(s3.remote(prefix="old"))))
    remote, _ = proxied("old", up=900)
    better = build(Store(tmp_path / "b"), content=NOISE, tune="full")
    with pytest.raises(StoreError):
        send(remote, better, None, None)
    assert Store(tmp_path / "c", places=places(s3.remote(prefix="old"))).load(KEY).manifest == (
        old.manifest
    )


def test_an_upload_in_parts_that_never_ends_is_a_miss(s3, tmp_path):
    """What a killed client leaves of a large object."""
    remote = s3.remote()
    name = f"{remote.url.partition('kernels/')[2]}/{NAME}"
    upload = s3.client.create_multipart_upload(Bucket="kernels", Key=name)["UploadId"]
    s3.client.upload_part(
        Bucket="kernels", Key=name, UploadId=upload, PartNumber=1, Body=b"x" * (5 << 20)
    )
    with pytest.raises(CacheMiss, match="has no v3/"):
        Store(tmp_path, places=places(remote)).load(KEY)


def test_nobody_listens(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    began = time.monotonic()
    for remote in (
        Remote("s3://kernels/x", False, options(address)),
        Remote(f"http://{address[0]}:{address[1]}"),
    ):
        with pytest.raises(StoreError, match=rf"{remote.url}: .* in 3 tries: \w+: \w+"):
            Store(tmp_path, places=places(remote)).load(KEY)
    assert time.monotonic() - began < 60


# --- servers that lie or dawdle ---


def test_http_reads_what_a_folder_holds(tmp_path):
    built = build(Store(tmp_path / "a", remote=str(tmp_path / "www"), push=True))
    with http_server(files_of(tmp_path / "www")) as url:
        assert Store(tmp_path / "b", remote=url).load(KEY).manifest == built.manifest
        with pytest.raises(CacheMiss, match=rf"{url}/sub has no v3/"):
            Store(tmp_path / "c", remote=f"{url}/sub").load(KEY)
        with pytest.raises(StoreError, match="can only be read"):
            send(Remote(url), build(Store(tmp_path / "d"), tune="full"), None, None)


@pytest.mark.parametrize("status", [401, 403])
def test_http_refuses(tmp_path, status):
    asked = []

    def refuse(handler):
        asked.append(1)
        handler.send_error(status)

    with (
        http_server(answers(refuse)) as url,
        pytest.raises(StoreError, match=f"may not be read.*{status}"),
    ):
        Store(tmp_path, remote=url).load(KEY)
    assert len(asked) == 1, "a refusal is no reason to ask again"


def test_http_fails_within(tmp_path):
    asked = []

    def fail(handler):
        asked.append(1)
        handler.send_error(500)

    with http_server(answers(fail)) as url, pytest.raises(StoreError, match="in 3 tries.*500"):
        Store(tmp_path, remote=url).load(KEY)
    assert len(asked) == TRIES


def endless(handler, sent, header=None):
    handler.send_response(200)
    if header:
        handler.send_header("Content-Length", header)
    handler.end_headers()
    while sent[0] < 1 << 30:
        handler.wfile.write(b"x" * 65536)
        sent[0] += 65536


@pytest.mark.parametrize("header", [None, str(1 << 40)])
def test_an_endless_object(tmp_path, monkeypatch, header):
    monkeypatch.setattr(transport, "MAX_OBJECT_BYTES", 1 << 20)
    sent = [0]
    with (
        http_server(answers(partial(endless, sent=sent, header=header))) as url,
        pytest.raises(StoreError, match="holds more than 1048576 bytes"),
    ):
        Store(tmp_path, remote=url).load(KEY)
    assert sent[0] < 64 << 20


def test_an_endless_object_of_s3(tmp_path, monkeypatch):
    monkeypatch.setattr(transport, "MAX_OBJECT_BYTES", 1 << 20)
    sent = [0]
    with http_server(answers(partial(endless, sent=sent, header=str(1 << 40)))) as url:
        host = url.removeprefix("http://").split(":")
        remote = Remote("s3://kernels/x", False, options(host))
        with pytest.raises(StoreError, match="holds more than 1048576 bytes"):
            Store(tmp_path, places=places(remote)).load(KEY)
    assert sent[0] < 64 << 20


def test_a_body_that_ends_early_without_a_length(tmp_path):
    whole = gzip.compress(random.Random(2).randbytes(5000))

    def half(handler):
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(whole[:2500])

    with (
        http_server(answers(half)) as url,
        pytest.raises(ArtifactError, match=f"{url}: {NAME} is damaged"),
    ):
        Store(tmp_path, remote=url).load(KEY)


def test_a_server_that_says_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(transport, "_SILENCE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = mute.getsockname()
        for remote in (
            Remote(f"http://{address[0]}:{address[1]}"),
            Remote("s3://kernels/x", False, options(address)),
        ):
            with pytest.raises(StoreError, match="in 3 tries: "):
                Store(tmp_path, places=places(remote)).load(KEY)


def drip(handler, head, ended):
    if head:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
    else:
        handler.send_response(200)
        handler.end_headers()
    for _ in range(600):  # 30 s, or until nobody reads
        handler.wfile.write(b"x")
        time.sleep(0.05)
    ended.append(True)


@pytest.mark.parametrize("kind", ["http", "s3"])
@pytest.mark.parametrize("head", [True, False])
def test_a_server_that_trickles(tmp_path, monkeypatch, head, kind):
    """Each byte arrives in time, the object never."""
    monkeypatch.setattr(transport, "_DEADLINE_S", 0.5)
    ended = []
    with http_server(answers(partial(drip, head=head, ended=ended))) as url:
        s3 = Remote("s3://kernels/x", False, options(url.removeprefix("http://").split(":")))
        with pytest.raises(StoreError, match=r"could not be read within 0\.5 s"):
            Store(tmp_path, places=places(Remote(url) if kind == "http" else s3)).load(KEY)
        assert not ended


# --- folders: what is there is whole, whoever writes and whoever is killed ---


def test_a_folder_that_breaks_at_the_rename(tmp_path, monkeypatch):
    entry = build(Store(tmp_path / "a"))
    folder = tmp_path / "folder"

    def fail(*names):
        raise OSError(5, "I/O error")

    monkeypatch.setattr(os, "replace", fail)
    packed = tmp_path / "x"
    packed.write_bytes(b"1")
    with pytest.raises(StoreError, match="could not be written in 3 tries"):
        put(Remote(str(folder)), NAME, packed)
    assert [p for p in folder.rglob("*") if p.is_file()] == []
    assert entry


def test_no_plain_file_where_an_object_should_be(tmp_path):
    (tmp_path / "folder" / "v3").mkdir(parents=True)
    os.mkfifo(tmp_path / "folder" / NAME)
    with pytest.raises(StoreError, match="is no plain file"):
        Store(tmp_path / "a", remote=str(tmp_path / "folder")).load(KEY)


def whole_objects(remote, tmp_path, size, reads, writers):
    """Read until that many reads showed that many writers.  Each must be one writer's whole object."""
    seen, ends = set(), time.monotonic() + 60
    while reads > 0 or len(seen) < writers:
        assert time.monotonic() < ends, f"the writers did not meet: {seen}"
        try:
            fetch(remote, NAME, tmp_path / "got")
        except NotThereError:
            continue
        content = (tmp_path / "got").read_bytes()
        assert len(content) == size and len(set(content)) == 1, "half an object"
        seen.add(content[0])
        reads -= 1


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_writers_at_the_same_time(s3, tmp_path, kind):
    remote = Remote(str(tmp_path / "folder"), True) if kind == "folder" else s3.remote()
    context = multiprocessing.get_context("forkserver")
    size = 300_000
    arguments = [(remote.url, dict(remote.options), number, size) for number in (1, 2, 3)]
    workers = [context.Process(target=write_for_ever, args=a, daemon=True) for a in arguments]
    for worker in workers:
        worker.start()
    try:
        whole_objects(remote, tmp_path, size, 40, 3)
    finally:
        for worker in workers:
            worker.kill()
            worker.join(10)
    whole_objects(remote, tmp_path, size, 3, 1)  # kills leave a whole object


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_builders_at_the_same_time(s3, tmp_path, kind):
    """Four machines with caches of their own build one key: all have one, and the store has a whole one."""
    remote = Remote(str(tmp_path / "folder"), True) if kind == "folder" else s3.remote()
    context = multiprocessing.get_context("forkserver")
    start = context.Barrier(4)
    workers = [
        context.Process(
            target=push_in_process,
            args=(remote.url, dict(remote.options), str(tmp_path / str(n)), b"%d" % n * 9, start),
        )
        for n in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    got = Store(tmp_path / "reader", places=places(remote)).load(KEY)
    assert got.read("fast/forward.cubin")[:9] in [b"%d" % n * 9 for n in range(4)]
    for n in range(4):
        assert Store(tmp_path / str(n) / "1").load(KEY)
