"""Signatures: made on push and export, asked for on pull, import and in shared folders; wrong ones refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from sparsegen.artifact.archive import ArchiveError, export_archive, import_archive
from sparsegen.artifact.entry import read_entry
from sparsegen.artifact.key import ArtifactKey
from sparsegen.artifact.manifest import MANIFEST, SIGNATURE
from sparsegen.artifact.remote import object_name
from sparsegen.artifact.remote_entries import send
from sparsegen.artifact.remote_places import Places, Remote
from sparsegen.artifact.signing import Signer, Trust, UntrustedError, make_keys, read_signature
from sparsegen.artifact.store import Store
from sparsegen.errors import CacheMiss, InputError, ToolchainError
from tests.artifact.standin import KEY, build, key

pytest.importorskip("cryptography")


class Keys:
    def __init__(self, file):
        self.file = file
        self.public, self.name = make_keys(file)
        self.signer, self.trust = Signer.of_file(file), Trust.of_files([self.public])


@pytest.fixture
def ours(tmp_path):
    return Keys(tmp_path / "ours")


@pytest.fixture
def theirs(tmp_path):
    return Keys(tmp_path / "theirs")


@pytest.fixture
def entry(tmp_path):
    return build(Store(tmp_path / "from"))


@pytest.fixture
def other(tmp_path):
    return Store(tmp_path / "to")


# --- keys ---


def test_keys_are_private_and_never_overwritten(ours):
    assert ours.file.stat().st_mode & 0o777 == 0o600
    before = ours.file.read_bytes()
    for taken in (ours.file, ours.public):
        with pytest.raises(InputError, match="is there already"):
            make_keys(taken if taken == ours.file else ours.file)
    assert ours.file.read_bytes() == before
    ours.file.unlink()
    with pytest.raises(InputError, match=r"ours\.pub is there already"):
        make_keys(ours.file)
    assert not ours.file.exists()


def test_what_is_no_key(tmp_path, ours):
    (tmp_path / "text").write_text("no key")
    with pytest.raises(InputError, match="holds no public key"):
        Trust.of_files([tmp_path / "text"])
    with pytest.raises(InputError, match="holds no unencrypted private key"):
        Signer.of_file(tmp_path / "text")
    with pytest.raises(InputError, match="holds no public key"):
        Trust.of_files([ours.file])
    with pytest.raises(InputError, match="cannot be read: No such file"):
        Trust.of_files([tmp_path / "absent"])
    with pytest.raises(InputError, match=r"cannot be written: No such file"):
        make_keys(tmp_path / "absent" / "key")


def test_other_kinds_of_keys(tmp_path):
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import ec

    private = ec.generate_private_key(ec.SECP256R1())
    (tmp_path / "ec").write_bytes(
        private.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    )
    public = private.public_key().public_bytes(
        form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo
    )
    (tmp_path / "ec.pub").write_bytes(public)
    with pytest.raises(InputError, match="must hold an ed25519 key"):
        Signer.of_file(tmp_path / "ec")
    with pytest.raises(InputError, match="must hold an ed25519 key"):
        Trust.of_files([tmp_path / "ec.pub"])


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_openssl_makes_the_same_kind(tmp_path, entry):
    private, public = tmp_path / "k", tmp_path / "k.pub"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", private], check=True)
    subprocess.run(["openssl", "pkey", "-in", private, "-pubout", "-out", public], check=True)
    signature = Signer.of_file(private).sign(entry.manifest)
    Trust.of_files([public]).check(entry.manifest, signature, "it")


def test_without_the_package(monkeypatch, tmp_path, ours, entry):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    for action in (
        lambda: make_keys(tmp_path / "new"),
        lambda: Signer.of_file(ours.file),
        lambda: Trust.of_files([ours.public]),
        lambda: ours.trust.check(entry.manifest, None, "it"),
    ):
        with pytest.raises(ToolchainError, match=r"pip install 'sparsegen\[sign\]'"):
            action()


# --- signatures ---


def test_only_the_manifest_that_was_signed(ours, theirs, entry):
    signature = ours.signer.sign(entry.manifest)
    assert signature == ours.signer.sign(entry.manifest), "the same for the same"
    ours.trust.check(entry.manifest, signature, "it")
    Trust.of_files([theirs.public, ours.public]).check(entry.manifest, signature, "it")
    for changed in (
        replace(entry.manifest, pattern="full"),
        replace(entry.manifest, key=key(arch=80)),
        replace(entry.manifest, files=dict(list(entry.manifest.files.items())[1:])),
        replace(entry.manifest, decision=replace(entry.manifest.decision, tune="full")),
    ):
        with pytest.raises(UntrustedError, match="^it has a wrong signature: key"):
            ours.trust.check(changed, signature, "it")


def changed(content, /, **fields):
    return json.dumps({**json.loads(content), **fields}).encode()


WRONG = {
    "none": (lambda s, ours: None, "is not signed"),
    "empty": (lambda s, ours: b"", "is no ed25519 signature"),
    "list": (lambda s, ours: b"[]", "is no ed25519 signature"),
    "nested": (lambda s, ours: b"[" * 2000, "is no ed25519 signature"),
    "algorithm": (lambda s, ours: changed(s, algorithm="none"), "is no ed25519 signature"),
    "field": (lambda s, ours: changed(s, more=1), "is no ed25519 signature"),
    "short": (lambda s, ours: changed(s, signature="00"), "is damaged"),
    "zeros": (
        lambda s, ours: changed(s, key=ours.signer.public.hex(), signature="0" * 128),
        "has a wrong signature",
    ),
    "claimed": (
        lambda s, ours: changed(s, key=ours.signer.public.hex()),
        "has a wrong signature",
    ),
    "theirs": (lambda s, ours: s, "which is not trusted here: key"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_signatures(ours, theirs, entry, case):
    """``s`` is a good signature of a key that is not trusted."""
    make, message = WRONG[case]
    with pytest.raises(UntrustedError, match=message) as caught:
        ours.trust.check(entry.manifest, make(theirs.signer.sign(entry.manifest), ours), "it")
    assert str(caught.value).startswith("it") and "\n" not in str(caught.value)


# --- archives ---


def test_export_signs_and_import_asks(tmp_path, ours, theirs, entry, other):
    file, again = tmp_path / "signed", tmp_path / "again"
    export_archive(file, [entry], ours.signer)
    with pytest.raises(UntrustedError, match=f"{file}: {entry.path.name} is signed by"):
        import_archive(file, other, theirs.trust)
    assert not other.root.exists()
    assert import_archive(file, other, ours.trust).added == (entry.path.name,)
    assert read_signature(other.load(KEY).path) == ours.signer.sign(entry.manifest)
    # the signature goes on with the entry, so a machine without the private key can hand it on
    export_archive(again, [other.load(KEY)])
    assert again.read_bytes() == file.read_bytes()


def test_unsigned_is_refused_and_nothing_published(tmp_path, ours, entry, other):
    second = build(Store(tmp_path / "from"), key(gpu="nvidia-a100", arch=80))
    (second.path / SIGNATURE).write_bytes(ours.signer.sign(second.manifest))
    export_archive(tmp_path / "x", [entry, second])
    with pytest.raises(UntrustedError, match=f"{entry.path.name} is not signed"):
        import_archive(tmp_path / "x", other, ours.trust)
    assert not other.root.exists()
    assert len(import_archive(tmp_path / "x", other).added) == 2, "nobody asked for signatures"


def test_an_import_asks_for_what_the_cache_trusts(tmp_path, ours, entry, other):
    other.root.mkdir()
    (other.root / "stores.yaml").write_text(f"trust: [{ours.public}]\n")
    export_archive(tmp_path / "x", [entry])
    with pytest.raises(UntrustedError, match="is not signed"):
        import_archive(tmp_path / "x", other)


def test_a_signature_of_one_entry_beside_another(tmp_path, ours, entry, other):
    second = build(Store(tmp_path / "from"), key(gpu="nvidia-a100", arch=80))
    (second.path / SIGNATURE).write_bytes(ours.signer.sign(entry.manifest))
    export_archive(tmp_path / "x", [second])
    with pytest.raises(UntrustedError, match="has a wrong signature"):
        import_archive(tmp_path / "x", other, ours.trust)


def test_a_signed_manifest_with_other_files(tmp_path, ours, entry, other):
    export_archive(tmp_path / "x", [entry], ours.signer)
    from tests.artifact.test_archive import edited, repack

    repack(tmp_path / "x", edited("forward.cubin", lambda c: b"X" + c[1:]))
    with pytest.raises(ArchiveError, match=r"forward\.cubin is damaged"):
        import_archive(tmp_path / "x", other, ours.trust)


def test_a_signature_is_no_file_of_an_entry(entry):
    text = json.loads((entry.path / MANIFEST).read_text())
    text["files"][SIGNATURE] = {"bytes": 0, "sha256": "0" * 64}
    (entry.path / MANIFEST).write_text(json.dumps(text))
    with pytest.raises(Exception, match="'signature.json' is taken"):
        read_entry(entry.path)


def test_a_link_or_a_giant_is_no_signature(entry):
    (entry.path / SIGNATURE).write_bytes(b"x" * 5000)
    with pytest.raises(UntrustedError, match="is no signature"):
        read_signature(entry.path)
    (entry.path / SIGNATURE).unlink()
    os.symlink("/dev/zero", entry.path / SIGNATURE)
    with pytest.raises(UntrustedError, match="is no signature"):
        read_signature(entry.path)


# --- stores and shared folders ---


def test_stores(tmp_path, ours, theirs, caplog):
    remote = Remote(str(tmp_path / "folder"), push=True)
    signing = Places(remotes=(remote,), sign=ours.file)
    build(Store(tmp_path / "builder", places=signing))
    asking = Places(remotes=(remote,), trust=ours.trust)
    assert Store(tmp_path / "a", places=asking).load(KEY)
    strange = Store(tmp_path / "b", places=Places(remotes=(remote,), trust=theirs.trust))
    with pytest.raises(UntrustedError, match=f"{remote}: {object_name(KEY)}.*not trusted here"):
        strange.load(KEY)
    assert not strange.artifacts.exists()
    assert build(strange), "a build goes its own way"
    assert "store not used" in caplog.text and "not trusted" in caplog.text


def test_an_unsigned_object_is_replaced_by_a_signed_one(tmp_path, ours, entry):
    remote = Remote(str(tmp_path / "folder"))
    better = build(Store(tmp_path / "better"), tune="full")
    assert send(remote, better, None, None)
    assert not send(remote, entry, None, None), "the better one stays"
    assert send(remote, entry, ours.signer, None), "but not where it is not signed"
    assert Store(tmp_path / "a", places=Places(remotes=(remote,), trust=ours.trust)).load(KEY)


def test_shared_folders(tmp_path, ours, entry, caplog):
    shared = tmp_path / "from"
    store = Store(tmp_path / "to", places=Places(shared=(shared,)))
    before = sorted(p for p in shared.rglob("*"))
    assert store.load(KEY).path == entry.path and store.try_load(KEY).path == entry.path
    assert not store.root.exists(), "read where it is"
    with pytest.raises(CacheMiss, match=f"{entry.path.name}, differs in arch"):
        store.load(key(arch=80))
    asking = Store(tmp_path / "to", places=Places(shared=(shared,), trust=ours.trust))
    with pytest.raises(UntrustedError, match=f"{entry.path} is not signed"):
        asking.load(KEY)
    assert asking.try_load(KEY) is None and "shared entry not used" in caplog.text
    (entry.path / "kernel.py").write_text("")
    assert store.try_load(KEY) is None
    assert sorted(p for p in shared.rglob("*")) == before, "nothing is moved aside there"
    assert list(store.entries()) == [], "and nothing there is listed, exported or pruned"


def test_a_key_of_another_kind_of_thing_signs_nothing_here(ours, entry):
    """A signature of the same key over the bare manifest is none of ours."""
    bare = ours.signer._private.sign(entry.manifest.to_json().encode()).hex()
    with pytest.raises(UntrustedError, match="wrong signature"):
        ours.trust.check(
            entry.manifest, changed(ours.signer.sign(entry.manifest), signature=bare), "it"
        )


def test_every_field_of_the_key_is_signed(ours, entry):
    signature = ours.signer.sign(entry.manifest)
    for name, value in KEY.as_dict().items():
        new = {str: "x", bool: not value, int: 3, type(None): 5}[type(value)]
        if name in ("scale", "softcap"):
            new = 2.0
        other_key = ArtifactKey.from_dict({**KEY.as_dict(), name: new})
        with pytest.raises(UntrustedError):
            ours.trust.check(replace(entry.manifest, key=other_key), signature, "it")
