"""Signatures of entries: ed25519 over the manifest, which holds the digest of every other file.

    signature.json   beside the manifest, outside its digests: algorithm, public key, signature

What is signed is the manifest as it was understood (its canonical JSON), so what was verified is what is used.  Keys are
files in PEM: PKCS 8 for the private one, SubjectPublicKeyInfo for the public one, as openssl writes and reads them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsegen.artifact import folder
from sparsegen.artifact.manifest import SIGNATURE, Manifest
from sparsegen.errors import ArtifactError, InputError, ToolchainError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

MAX_BYTES = 4096  # of a signature or key file; both have some hundred
_DOMAIN = b"sparsegen artifact, ed25519, 1\n"  # a signature of ours means nothing elsewhere
_ALGORITHM = "ed25519"
_HEX_KEY, _HEX_SIGNATURE = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{128}")


class UntrustedError(ArtifactError):
    """An artifact from elsewhere that no trusted key has signed."""


@dataclass(frozen=True)
class Trust:
    """The public keys (32 bytes each) of which one must have signed what comes from elsewhere."""

    keys: tuple[bytes, ...]

    @classmethod
    def of_files(cls, files: Iterable[str | Path]) -> Trust:
        """Of public keys in PEM; InputError names a file that holds none."""
        return cls(tuple(_public_key(Path(file)) for file in files))

    def check(self, manifest: Manifest, signature: bytes | None, where: str) -> None:
        """UntrustedError, which begins with ``where``, unless ``signature`` is a trusted key's and fits ``manifest``.

        ``signature``: content of ``signature.json``, ``None`` where there is none.
        """
        _require_cryptography()
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        trusted = " or ".join(map(name_of, self.keys))
        if signature is None:
            raise UntrustedError(f"{where} is not signed; trusted here: {trusted}")
        public, signed = _parse(signature, where)
        if public not in self.keys:
            raise UntrustedError(
                f"{where} is signed by {name_of(public)}, which is not trusted here: {trusted}"
            )
        try:
            Ed25519PublicKey.from_public_bytes(public).verify(signed, _message(manifest))
        except InvalidSignature:
            raise UntrustedError(
                f"{where} has a wrong signature: {name_of(public)} did not sign this manifest"
            ) from None


class Signer:
    """A private key in memory."""

    def __init__(self, private: Ed25519PrivateKey):
        self._private = private
        self.public = private.public_key().public_bytes_raw()

    @classmethod
    def of_file(cls, file: str | Path) -> Signer:
        """Of an unencrypted ed25519 key in PEM; InputError where ``file`` holds none."""
        _require_cryptography()
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            private = load_pem_private_key(_content(Path(file), "private key"), password=None)
        except (ValueError, TypeError) as error:
            raise InputError(f"{file} holds no unencrypted private key in PEM: {error}") from None
        if not isinstance(private, Ed25519PrivateKey):
            raise InputError(f"{file} must hold an ed25519 key, got {type(private).__name__}")
        return cls(private)

    @property
    def trust(self) -> Trust:
        """Trust in this key alone."""
        return Trust((self.public,))

    def sign(self, manifest: Manifest) -> bytes:
        """Content of ``signature.json``; the same for the same manifest."""
        signed = self._private.sign(_message(manifest))
        data = {"algorithm": _ALGORITHM, "key": self.public.hex(), "signature": signed.hex()}
        return (json.dumps(data, sort_keys=True, indent=1) + "\n").encode()


def read_signature(entry: Path) -> bytes | None:
    """Content of ``signature.json`` of the entry at ``entry``, or ``None``; UntrustedError if it cannot be one."""
    try:
        return folder.read_bytes(entry / SIGNATURE, limit=MAX_BYTES)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UntrustedError(f"{entry / SIGNATURE} is no signature: {error}") from None


def make_keys(file: str | Path) -> tuple[Path, str]:
    """Write a new private key to ``file`` (mode 0600) and its public one to ``file``.pub: that path, the key's name.

    InputError where one of them is there already: a key is never overwritten.
    """
    _require_cryptography()
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private = Ed25519PrivateKey.generate()
    secret = private.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    open_ = private.public_key().public_bytes(
        form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo
    )
    public_file = Path(f"{file}.pub")
    for path in (Path(file), public_file):
        if os.path.lexists(path):
            raise InputError(f"{path} is there already; a key is never overwritten")
    _write_new(Path(file), secret, 0o600)
    _write_new(public_file, open_, 0o644)
    return public_file, name_of(Signer(private).public)


def name_of(public: bytes) -> str:
    """A public key for messages: its first 16 hex digits."""
    return f"key {public.hex()[:16]}"


def _message(manifest: Manifest) -> bytes:
    return _DOMAIN + manifest.to_json().encode()


def _parse(signature: bytes, where: str) -> tuple[bytes, bytes]:
    """(public key, signature) of ``signature.json``."""
    try:
        data: Any = json.loads(signature.decode())
    except (ValueError, RecursionError):
        data = None
    names = {"algorithm", "key", "signature"}
    if not isinstance(data, dict) or set(data) != names or data["algorithm"] != _ALGORITHM:
        raise UntrustedError(f"{where}: {SIGNATURE} is no {_ALGORITHM} signature")
    key, signed = str(data["key"]), str(data["signature"])
    if not _HEX_KEY.fullmatch(key) or not _HEX_SIGNATURE.fullmatch(signed):
        raise UntrustedError(f"{where}: {SIGNATURE} is damaged")
    return bytes.fromhex(key), bytes.fromhex(signed)


def _public_key(file: Path) -> bytes:
    _require_cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        public = load_pem_public_key(_content(file, "public key"))
    except ValueError as error:
        raise InputError(f"{file} holds no public key in PEM: {error}") from None
    if not isinstance(public, Ed25519PublicKey):
        raise InputError(f"{file} must hold an ed25519 key, got {type(public).__name__}")
    return public.public_bytes_raw()


def _content(file: Path, what: str) -> bytes:
    try:
        with open(file, "rb") as opened:
            return opened.read(MAX_BYTES)
    except OSError as error:
        raise InputError(f"the {what} {file} cannot be read: {error.strerror or error}") from None


def _write_new(file: Path, content: bytes, mode: int) -> None:
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(descriptor, "wb") as opened:
            opened.write(content)
    except OSError as error:
        raise InputError(f"{file} cannot be written: {error.strerror or error}") from None


def _require_cryptography() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise ToolchainError(
            "signatures need the package cryptography: pip install 'sparsegen[sign]'"
        ) from None
