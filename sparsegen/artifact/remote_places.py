"""Where artifacts come from and go to beyond the local folder: ``stores.yaml`` in the root of a cache.

    stores:                          asked in this order when the cache lacks an artifact
      - url: s3://bucket/kernels     any fsspec URL, or an absolute path
        push: true                   what is built here goes there; default: false
        options: {anon: true}        arguments of the fsspec file system
    shared: [/opt/kernels]           caches that are read where they are, never written
    trust: [fleet.pub]               public keys; what comes from elsewhere must be signed by one of them
    sign: fleet                      private key that signs what goes elsewhere

Paths of keys are relative to the file.  The reader is strict: a field that it does not know might be a misspelt
``trust``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sparsegen.artifact.signing import Signer, Trust
from sparsegen.errors import InputError

FILE = "stores.yaml"
_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#].*|file:///.*|/.*", re.DOTALL)
_USER = re.compile(r"(?<=://)[^/@]*@")
_MAX_BYTES = 256 << 10


@dataclass(frozen=True)
class Remote:
    """One store behind a URL; ``push``: what is built here goes there.  ``options`` go to fsspec and are not shown."""

    url: str
    push: bool = False
    options: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.url, str) or not _URL.fullmatch(self.url):
            raise InputError(
                f"a store must be an absolute path or a URL such as s3://bucket/folder, got {self.url!r}"
            )
        if self.url.startswith("http") and re.search("[?#]", self.url):
            raise InputError(f"{self}: the URL of a store must have neither ? nor #")

    def __str__(self) -> str:
        return _USER.sub("", self.url)  # a message must not show a password


@dataclass(frozen=True)
class Places:
    """Everything that ``stores.yaml`` says.  ``trust`` is None where signatures are not asked for."""

    remotes: tuple[Remote, ...] = ()
    shared: tuple[Path, ...] = ()
    trust: Trust | None = None
    sign: Path | None = None

    @property
    def signer(self) -> Signer | None:
        """The private key, read now; ``None`` where none is named."""
        return None if self.sign is None else Signer.of_file(self.sign)

    def with_remote(self, url: str | None, push: bool = False) -> Places:
        """With the store of ``url``, if any, asked first, and ``push`` for it."""
        if url is None:
            return self
        named = self.remote(url)
        first = replace(named, push=push or named.push)
        return replace(self, remotes=(first, *(r for r in self.remotes if r != named)))

    def remote(self, url: str) -> Remote:
        """The store of that URL with its options, or a new one without."""
        return next((r for r in self.remotes if r.url == url), Remote(url))


def read_places(root: Path) -> Places:
    """What ``stores.yaml`` below ``root`` says; nothing where it is not there.

    InputError says what is wrong in it; PermissionError where nobody may look.
    """
    file = root / FILE
    try:
        with open(file, "rb") as opened:
            text = opened.read(_MAX_BYTES + 1).decode()
    except (FileNotFoundError, NotADirectoryError):
        return Places()
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not UTF-8: {error}") from None
    if all(line.strip() == "" or line.lstrip().startswith("#") for line in text.splitlines()):
        return Places()
    from sparsegen.spec.yaml_tree import read_tree

    tree = read_tree(text, str(file))
    if tree.mistakes:
        raise InputError("\n".join(map(str, tree.mistakes)))
    return _places(file, {} if tree.data is None else tree.data)


def _places(file: Path, data: Any) -> Places:
    known = {"stores": list, "shared": list, "trust": list, "sign": str}
    found = _fields(data, known, str(file))
    stores = found.get("stores", [])
    remotes = [_remote(one, f"{file}: stores[{number}]") for number, one in enumerate(stores)]
    shared = [Path(path) for path in _texts(found, "shared", file)]
    if relative := [path for path in shared if not path.is_absolute()]:
        raise InputError(f"{file}: shared must hold absolute paths, got {str(relative[0])!r}")
    trust = None
    if "trust" in found:
        keys = [file.parent / path for path in _texts(found, "trust", file)]
        if not keys:
            raise InputError(f"{file}: trust must name a public key; leave it out to trust anyone")
        trust = Trust.of_files(keys)
    sign = file.parent / found["sign"] if "sign" in found else None
    return Places(tuple(remotes), tuple(shared), trust, sign)


def _remote(data: Any, where: str) -> Remote:
    found = _fields(data, {"url": str, "push": bool, "options": dict}, where)
    if "url" not in found:
        raise InputError(f"{where} must have a url")
    try:
        return Remote(**found)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _fields(data: Any, known: Mapping[str, type], where: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise InputError(f"{where} must be a mapping, got {type(data).__name__}")
    for name, value in data.items():
        if name not in known:
            raise InputError(f"{where}: {name!r} is not known; allowed: {', '.join(known)}")
        if type(value) is not known[name]:
            # the value is not shown: options may hold a password
            raise InputError(f"{where}: {name} must be a {known[name].__name__}")
    return data


def _texts(found: Mapping[str, Any], name: str, file: Path) -> list[str]:
    values: list[str] = found.get(name, [])
    if not all(isinstance(value, str) for value in values):
        raise InputError(f"{file}: {name} must be a list of paths")
    return values
