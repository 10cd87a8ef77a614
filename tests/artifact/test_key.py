"""The key: what is in it, what a difference says."""

from __future__ import annotations

import dataclasses

import pytest

from sparsegen.artifact.key import ArtifactKey, code_version, describe_difference, installed
from tests.artifact.standin import KEY, key

OTHER = {
    "int": 7,
    "bool": True,
    "float | None": 0.5,
    "int | None": 5,
    "str": "other",
    "int | str": "gfx942",
}


@pytest.mark.parametrize("field", dataclasses.fields(ArtifactKey), ids=lambda f: f"field {f.name}")
def test_every_field_changes_the_digest_and_is_named(field):
    changed = key(**{field.name: OTHER[field.type]})
    assert changed.digest() != KEY.digest()
    mine = getattr(KEY, field.name)
    assert KEY.difference(changed) == [(field.name, mine, OTHER[field.type])]


def test_every_field_is_explained():
    for field in dataclasses.fields(ArtifactKey):
        assert f"\n    {field.name} " in ArtifactKey.__doc__, field.name


def test_nothing_decided_is_in_the_key():
    names = {f.name.lower() for f in dataclasses.fields(ArtifactKey)}
    assert not names & {"block_m", "block_n", "num_warps", "num_stages", "tma", "config"}


def test_digest_is_pinned():
    """It names folders on people's disks: whoever changes it makes every cache cold."""
    assert KEY.digest() == "d2a11e5ad7a569459c2043aa51719e2b79b49784a00b15a73a598e6bed6bce63"


def test_round_trip_and_refusals():
    assert ArtifactKey.from_dict(KEY.as_dict()) == KEY
    assert list(KEY.as_dict()) == [f.name for f in dataclasses.fields(ArtifactKey)]
    data = {**KEY.as_dict(), "tile": 1}
    del data["arch"]
    with pytest.raises(ValueError, match=r"missing: \['arch'\], unknown: \['tile'\]"):
        ArtifactKey.from_dict(data)
    with pytest.raises(TypeError, match="key field heads must be int, got '8'"):
        key(heads="8")
    with pytest.raises(TypeError, match="head_dim"):
        key(head_dim=True)


def test_difference_in_words():
    other = key(triton="3.6.0", mask="d" * 64)
    assert (
        describe_difference(KEY.difference(other))
        == "mask: asked c0ffee000000…, stored dddddddddddd…; triton: asked 3.9.0, stored 3.6.0"
    )


def test_installed_versions(monkeypatch, tmp_path):
    """The metadata decides, so a key is the same before and after an import."""
    import sys
    from types import ModuleType

    assert installed("pytest") == pytest.__version__
    assert installed("no-such-package") is None
    module = ModuleType("pytest")
    module.__version__ = "0.0.1"
    monkeypatch.setitem(sys.modules, "pytest", module)
    assert installed("pytest") == pytest.__version__
    (tmp_path / "bare_package.py").write_text("__version__ = '4.5'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installed("bare_package") == "4.5"


def test_code_version_follows_the_code(monkeypatch, tmp_path):
    import shutil
    from pathlib import Path

    import sparsegen

    package = tmp_path / "sparsegen"
    shutil.copytree(Path(sparsegen.__file__).parent, package)
    monkeypatch.setattr(sparsegen, "__file__", str(package / "__init__.py"))

    def version():
        code_version.cache_clear()
        return code_version()

    try:
        first = version()
        assert first.startswith(f"{sparsegen.__version__}+") and first == version()
        (package / "artifact" / "store.py").write_text("")
        (package / "cli" / "new.py").write_text("")
        assert version() == first, "what only stores and shows keeps the cache warm"
        (package / "codegen" / "new.py").write_text("")
        assert version() != first
    finally:
        code_version.cache_clear()
