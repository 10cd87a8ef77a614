"""Archives: a round trip, and everything that an import must refuse."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import tarfile

import pytest

from sparsegen.artifact import archive, cache
from sparsegen.artifact.archive import ArchiveError, export_archive, import_archive
from sparsegen.artifact.manifest import MANIFEST
from sparsegen.artifact.store import Store
from sparsegen.errors import ArtifactError
from tests.artifact.standin import KEY, build, key


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "from")


@pytest.fixture
def other(tmp_path):
    return Store(tmp_path / "to")


@pytest.fixture
def packed(store, tmp_path):
    """An archive with two entries."""
    build(store)
    build(store, key(gpu="nvidia-a100", arch=80))
    file = tmp_path / "entries.tar.gz"
    export_archive(file, cache.select(store))
    return file


def test_round_trip(store, other, packed):
    done = import_archive(packed, other)
    assert sorted(done.added) == sorted(os.listdir(store.artifacts)) and done.present == ()
    assert other.load(KEY).manifest == store.load(KEY).manifest
    assert other.load(KEY).read("fast/forward.cubin") == store.load(KEY).read("fast/forward.cubin")
    again = import_archive(packed, other)
    assert again.added == () and len(again.present) == 2
    assert len(os.listdir(other.artifacts)) == 2
    assert other.load(KEY).path.stat().st_mode & 0o777 == 0o700


def test_equal_entries_are_equal_bytes(store, packed, tmp_path):
    export_archive(tmp_path / "again.tar.gz", reversed(cache.select(store)))
    assert (tmp_path / "again.tar.gz").read_bytes() == packed.read_bytes()


def test_a_damaged_entry_is_not_exported(store, packed):
    chosen = cache.select(store)
    (chosen[0].path / "kernel.py").write_text("")
    before = packed.read_bytes()
    with pytest.raises(ArtifactError, match=r"kernel\.py is damaged"):
        export_archive(packed, chosen)
    assert packed.read_bytes() == before
    assert [n for n in os.listdir(packed.parent) if n.startswith(".")] == []


def test_an_imported_entry_replaces_a_damaged_one(other, packed):
    import_archive(packed, other)
    (other.load(KEY).path / "kernel.py").unlink()
    done = import_archive(packed, other)
    assert len(done.added) == 1 and len(done.present) == 1
    assert other.load(KEY)


def members(file):
    with tarfile.open(file) as tar:
        return [(m, tar.extractfile(m).read()) for m in tar]


def repack(file, change):
    """Rewrite an archive; ``change`` gets its list of [member, content]."""
    parts = [[m, c] for m, c in members(file)]
    change(parts)
    with tarfile.open(file, "w:gz") as tar:
        for member, content in parts:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def special(kind, name="causal-nvidia-h200-0123456789ab/x", target="/etc/passwd"):
    def change(parts):
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, target
        parts.insert(0, [member, b""])

    return change


def named(name):
    def change(parts):
        parts.insert(0, [tarfile.TarInfo(name), b"x"])

    return change


def edited(name, content):
    def change(parts):
        for part in parts:
            if part[0].name.endswith(name):
                part[1] = content(part[1])

    return change


def other_arch(text):
    data = json.loads(text)
    data["key"]["arch"] = 86
    return json.dumps(data).encode()


def dropped(name):
    return lambda parts: parts.__setitem__(
        slice(None), [p for p in parts if not p[0].name.endswith(name)]
    )


def renamed(parts):
    for part in parts:
        part[0].name = part[0].name.replace(KEY.short(), "0" * 12)


REFUSED = {
    "symbolic link": (special(tarfile.SYMTYPE), "no plain file"),
    "hard link": (special(tarfile.LNKTYPE), "no plain file"),
    "device": (special(tarfile.CHRTYPE), "no plain file"),
    "fifo": (special(tarfile.FIFOTYPE), "no plain file"),
    "folder": (special(tarfile.DIRTYPE), "no plain file"),
    "up": (named("../outside"), "not a file of an entry"),
    "up inside": (
        named(f"causal-nvidia-h200-{KEY.short()}/../../outside"),
        "not a file of an entry",
    ),
    "absolute": (named("/tmp/outside"), "not a file of an entry"),
    "top level": (named("file"), "not a file of an entry"),
    "hidden": (named(".build-0123456789ab-x-1-x/file"), "not a file of an entry"),
    "no entry": (named("folder/file"), "not a file of an entry"),
    "twice": (lambda parts: parts.append(parts[0]), "stands twice"),
    "file and folder": (named(f"causal-nvidia-h200-{KEY.short()}/kernel.py/x"), "stands twice"),
    "changed file": (
        edited("kernel.py", lambda c: c + b"import os\n"),
        "kernel.py holds more than",
    ),
    "flipped file": (edited("forward.cubin", lambda c: b"X" + c[1:]), "forward.cubin is damaged"),
    "changed manifest": (edited(MANIFEST, other_arch), "was changed after it was written"),
    "no manifest": (dropped(MANIFEST), f"{MANIFEST} is missing"),
    "missing file": (dropped("kernel.py"), "kernel.py is missing"),
    "extra file": (named(f"causal-nvidia-h200-{KEY.short()}/extra.py"), "files without a digest"),
    "foreign name": (renamed, "stored under 000000000000"),
    "nothing": (lambda parts: parts.clear(), "holds no artifact"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_and_nothing_published(packed, other, tmp_path, case):
    change, message = REFUSED[case]
    repack(packed, change)
    with pytest.raises(ArchiveError, match=message) as caught:
        import_archive(packed, other)
    assert str(packed) in str(caught.value)
    assert not other.root.exists() or os.listdir(other.artifacts) == []
    assert not (tmp_path / "outside").exists()


def test_oversized_is_refused_before_it_is_unpacked(packed, other, monkeypatch):
    repack(packed, named("causal-nvidia-h200-0123456789ab/big"))
    monkeypatch.setattr(archive, "MAX_TOTAL_BYTES", 100)
    with pytest.raises(ArchiveError, match="bytes in all"):
        import_archive(packed, other)
    monkeypatch.setattr(archive, "MAX_TOTAL_BYTES", 1 << 30)
    monkeypatch.setattr(archive, "MAX_FILES", 2)
    with pytest.raises(ArchiveError, match="goes beyond 2 files"):
        import_archive(packed, other)


def test_a_header_that_claims_a_huge_member(other, tmp_path):
    """A long-name header of many gigabytes must not be unpacked into memory."""
    for kind in (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.REGTYPE):
        member = tarfile.TarInfo(f"causal-nvidia-h200-{KEY.short()}/x")
        member.type, member.size = kind, 8 << 30
        file = tmp_path / "bomb.tar.gz"
        file.write_bytes(gzip.compress(member.tobuf() + bytes(2048)))
        with pytest.raises(ArchiveError):
            import_archive(file, other)


def test_a_long_header_is_not_unpacked_into_memory(packed, other, monkeypatch):
    repack(packed, named(f"causal-nvidia-h200-{KEY.short()}/" + "x" * 100_000))
    monkeypatch.setattr(archive, "MAX_FILE_BYTES", 20_000)
    with pytest.raises(ArchiveError, match=r"a header claims \d{6} bytes"):
        import_archive(packed, other)


def test_damage_anywhere_is_one_error(packed, other, tmp_path):
    whole, draw = packed.read_bytes(), random.Random(3)
    file = tmp_path / "damaged.tar.gz"
    for _ in range(60):
        data = bytearray(whole)
        if draw.random() < 0.3:
            del data[draw.randrange(len(data)) :]
        else:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        file.write_bytes(data)
        try:
            import_archive(file, other)
        except ArchiveError:
            continue
        # only bytes that carry nothing (the gzip header's time, padding) may change unnoticed
        assert other.load(KEY).manifest and len(os.listdir(other.artifacts)) == 2


# Names of their own: gzip writes the time, and test processes must agree on the names of tests.
NO_ARCHIVES = {"nothing": b"", "text": b"text", "empty": gzip.compress(b""), "bytes": gzip.compress(b"x" * 2000)}  # fmt: skip


@pytest.mark.parametrize("content", NO_ARCHIVES.values(), ids=NO_ARCHIVES)
def test_no_archive_at_all(other, tmp_path, content):
    (tmp_path / "x.tar.gz").write_bytes(content)
    with pytest.raises(ArchiveError):
        import_archive(tmp_path / "x.tar.gz", other)


def test_file_is_not_there(other, tmp_path):
    with pytest.raises(ArchiveError, match=r"cannot be read or unpacked: .*No such file"):
        import_archive(tmp_path / "absent.tar.gz", other)


def test_a_store_that_cannot_be_written_is_said(packed, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="cannot be written"):
        import_archive(packed, Store(tmp_path / "file" / "x"))


def test_an_archive_that_cannot_be_written_is_one_error(store, tmp_path):
    build(store)
    (tmp_path / "taken").mkdir()
    for file in (tmp_path / "absent" / "x.tar.gz", tmp_path / "taken"):
        with pytest.raises(ArchiveError, match=r"cannot be written: (No such file|Is a directory)"):
            export_archive(file, cache.select(store))
    assert os.listdir(tmp_path / "taken") == [] and not list(tmp_path.glob(".taken-*"))
