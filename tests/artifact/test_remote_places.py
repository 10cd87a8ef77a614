"""stores.yaml: what it says, and that no mistake in it passes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sparsegen.artifact import fleet
from sparsegen.artifact.remote_places import Places, Remote, read_places
from sparsegen.artifact.store import Store
from sparsegen.errors import ArtifactError, CacheMiss, InputError
from tests.artifact.standin import KEY, build


def read(tmp_path, text):
    (tmp_path / "stores.yaml").write_text(text)
    return read_places(tmp_path)


def test_nothing_there(tmp_path):
    assert read_places(tmp_path) == Places() == read_places(tmp_path / "absent")
    assert read(tmp_path, "") == Places() == read(tmp_path, "# trust: [a.pub]\n\n")


def test_everything(tmp_path):
    pytest.importorskip("cryptography")
    from sparsegen.artifact.signing import make_keys

    make_keys(tmp_path / "fleet")
    found = read(
        tmp_path,
        """
stores:
  - url: s3://bucket/kernels
    push: true
    options: {anon: true, client_kwargs: {region_name: eu-west-1}}
  - {url: "https://example.org/kernels"}
shared: [/opt/kernels]
trust: [fleet.pub]
sign: fleet
""",
    )
    first, second = found.remotes
    assert (first.url, first.push, first.options["anon"]) == ("s3://bucket/kernels", True, True)
    assert (second.push, second.options) == (False, {})
    assert found.shared == (Path("/opt/kernels"),) and found.sign == tmp_path / "fleet"
    assert found.trust == found.signer.trust, "paths are relative to the file"
    assert found.remote("s3://bucket/kernels") is first


WRONG = {
    "trsut: [a.pub]": r"stores\.yaml: 'trsut' is not known; allowed: stores, shared, trust, sign",
    "trust: []": "trust must name a public key",
    "trust: fleet.pub": "trust must be a list",
    "trust: [1]": "trust must be a list of paths",
    "trust: [absent.pub]": r"public key .*absent\.pub cannot be read",
    "trust:": "trust must be a list",
    "trust: [a]\ntrust: [b]": "trust",
    "stores: [s3://x/y]": r"stores\[0\] must be a mapping",
    "stores: [{push: true}]": r"stores\[0\] must have a url",
    "stores: [{url: s3://x/y, psuh: true}]": r"stores\[0\]: 'psuh' is not known",
    "stores: [{url: s3://x/y, push: 1}]": r"stores\[0\]: push must be a bool",
    "stores: [{url: kernels}]": r"stores\[0\]: a store must be an absolute path or a URL",
    "shared: [kernels]": "shared must hold absolute paths, got 'kernels'",
    "- a": r"must be a mapping, got list",
    "stores: {": "is not YAML",
}


@pytest.mark.parametrize("text", WRONG)
def test_mistakes(tmp_path, text):
    with pytest.raises(InputError, match=WRONG[text]) as caught:
        read(tmp_path, text)
    assert str(tmp_path / "stores.yaml") in str(caught.value) or "public key" in str(caught.value)


def test_a_mistake_stops_every_use(tmp_path):
    """A misspelt ``trust`` must not be the end of signatures."""
    (tmp_path / "stores.yaml").write_text("trsut: [a.pub]")
    with pytest.raises(InputError, match="trsut"):
        Store(tmp_path).load(KEY)
    with pytest.raises(InputError, match="trsut"):
        build(Store(tmp_path))


def test_secrets_are_not_shown(tmp_path):
    with pytest.raises(InputError) as caught:
        read(tmp_path, "stores: [{url: s3://x/y, options: hunter2}]")
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(Remote("s3://x/y", options={"secret": "hunter2"}))


def test_the_file_is_used(tmp_path):
    build(Store(tmp_path / "a", remote=str(tmp_path / "folder"), push=True))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "stores.yaml").write_text(f"stores: [{{url: {tmp_path / 'folder'}}}]")
    assert Store(tmp_path / "b").load(KEY)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "stores.yaml").write_text(f"shared: [{tmp_path / 'a'}]")
    assert Store(tmp_path / "c").load(KEY).path.parent == tmp_path / "a" / "artifacts"


def test_an_argument_comes_first_and_keeps_the_options_of_the_file(tmp_path):
    store = Store(tmp_path, remote="s3://x/y")
    (tmp_path / "stores.yaml").write_text(
        "stores: [{url: file:///a}, {url: s3://x/y, options: {anon: true}}]"
    )
    assert [r.url for r in store.places.remotes] == ["s3://x/y", "file:///a"]
    assert store.places.remotes[0].options == {"anon": True}
    assert Store(tmp_path, remote="s3://x/y", push=True).places.remotes[0].push


def test_push_needs_a_store(tmp_path):
    with pytest.raises(InputError, match="push needs the URL of a store"):
        Store(tmp_path, push=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_nobody_may_look_into(tmp_path):
    (tmp_path / "x").mkdir(mode=0)
    with pytest.raises(CacheMiss):
        Store(tmp_path / "x").load(KEY)
    with pytest.raises(ArtifactError, match="cannot be read"):
        Store(tmp_path / "x", remote=str(tmp_path)).load(KEY)


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    """Nothing is known of it, so nothing comes from elsewhere; a store that is asked for by name is an error."""
    from sparsegen.artifact import store as module

    def refuse(root):
        raise PermissionError(13, "Permission denied", str(root / "stores.yaml"))

    monkeypatch.setattr(module, "read_places", refuse)
    assert Store(tmp_path).try_load(KEY) is None
    with pytest.raises(ArtifactError, match=r"stores\.yaml cannot be read: Permission denied"):
        Store(tmp_path, remote=str(tmp_path / "f")).load(KEY)
    with pytest.raises(ArtifactError, match="cannot be read"):
        Store(tmp_path).places  # noqa: B018  (what import, push and pull ask)


def test_a_mistake_is_said_once_of_all_patterns(tmp_path):
    (tmp_path / "stores.yaml").write_text("trsut: [a.pub]")
    for does in (fleet.warm, fleet.check):
        with pytest.raises(InputError, match="trsut"):  # in place of a report
            does(["h200"], ["causal", "bigbird"], store=Store(tmp_path))
