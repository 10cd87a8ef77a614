"""Real servers for the tests of stores: S3 (moto), files over HTTP, ill-behaved ones, and a proxy that cuts."""

from __future__ import annotations

import contextlib
import http.server
import itertools
import logging
import socket
import struct
import tempfile
import threading
from functools import partial
from pathlib import Path

from sparsegen.artifact.remote import object_name, put
from sparsegen.artifact.remote_places import Places, Remote
from sparsegen.artifact.store import Store
from tests.artifact.standin import KEY, build

BUCKET = "kernels"
_NUMBERS = itertools.count()  # all servers of a process show the same buckets


class S3:
    """A running S3-compatible server with one bucket."""

    def __init__(self):
        import boto3
        from moto.server import ThreadedMotoServer

        for name in ("botocore", "werkzeug"):
            logging.getLogger(name).setLevel(logging.ERROR)
        self.server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self.server.start()
        self.address = self.server.get_host_and_port()
        self.client = boto3.client(
            "s3",
            endpoint_url=endpoint(self.address),
            aws_access_key_id="user",
            aws_secret_access_key="secret",
            region_name="us-east-1",
        )
        self.client.create_bucket(Bucket=BUCKET)

    def remote(self, push=True, address=None, prefix=None):
        """A store of its own in the bucket, reached at ``address`` (default: the server itself)."""
        prefix = f"p{next(_NUMBERS)}" if prefix is None else prefix
        return Remote(f"s3://{BUCKET}/{prefix}", push, options(address or self.address))

    def objects(self, remote):
        """Content of the objects of a store by name."""
        prefix = remote.url.partition(f"{BUCKET}/")[2] + "/"
        found = self.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])
        names = [one["Key"] for one in found]
        return {n.removeprefix(prefix): self.get(n) for n in names}

    def get(self, name):
        return self.client.get_object(Bucket=BUCKET, Key=name)["Body"].read()

    def put(self, remote, name, content):
        """Write an object behind the back of the code under test."""
        prefix = remote.url.partition(f"{BUCKET}/")[2]
        self.client.put_object(Bucket=BUCKET, Key=f"{prefix}/{name}", Body=content)


def endpoint(address):
    return f"http://{address[0]}:{address[1]}"


def options(address):
    return {"endpoint_url": endpoint(address), "key": "user", "secret": "secret"}


def places(*remotes, **others):
    return Places(remotes=remotes, **others)


class Proxy:
    """Forwards to ``target``; cuts the first ``cuts`` connections after ``down`` or ``up`` bytes.

    ``down``: bytes to the client, ``up``: bytes from it; None for no limit.  ``requests`` are the request lines seen.
    """

    def __init__(self, target, *, down=None, up=None, cuts=10**6):
        self.target, self.down, self.up, self.cuts = target, down, up, cuts
        self.requests, self.connections = [], 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self.listener.close()

    def _accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            self.connections += 1
            cut = self.connections <= self.cuts
            server = socket.create_connection(self.target)
            both = (client, server)
            pump = partial(threading.Thread, target=self._pump, daemon=True)
            pump(args=(client, server, self.up if cut else None, both, True)).start()
            pump(args=(server, client, self.down if cut else None, both, False)).start()

    def _pump(self, source, sink, limit, both, asks):
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                if asks and data.split(b" ", 1)[0] in (b"GET", b"PUT", b"HEAD", b"POST", b"DELETE"):
                    self.requests.append(data.split(b"\r\n", 1)[0].decode())
                if limit is not None and passed + len(data) > limit:
                    sink.sendall(data[: limit - passed])
                    break
                sink.sendall(data)
                passed += len(data)
        for end in both:
            with contextlib.suppress(OSError):
                # a reset and no polite end, as from a cable that is pulled
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@contextlib.contextmanager
def http_server(handler):
    """A server with ``handler`` on a free port: its URL."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=partial(server.serve_forever, poll_interval=0.02), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def files_of(directory):
    """A handler that serves a folder, as any web server does."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, directory=str(directory), **options)

        def log_message(self, *words):
            pass

    return Handler


def answers(reply):
    """A handler that lets ``reply(handler)`` answer every GET."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            with contextlib.suppress(OSError):
                reply(self)
            self.close_connection = True

        def log_message(self, *words):
            pass

    return Handler


# --- workers: processes of their own ---


def write_for_ever(url, how, number, size):
    """Worker: put objects of one byte value, whole ones each."""
    remote = Remote(url, True, how)
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "x"
        while True:
            file.write_bytes(bytes([number]) * size)
            put(remote, object_name(KEY), file)


def push_in_process(url, how, root, content, start):
    """Worker: build and push the same key with content of its own."""
    start.wait(60)
    for number in range(2):
        store = Store(f"{root}/{number}", places=places(Remote(url, True, how)))
        build(store, content=content)
