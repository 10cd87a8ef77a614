"""Entries as one ``.tar.gz`` that can be carried to a machine without a compiler.

An archive is input from elsewhere: members are plain files with safe names below an entry's name, sizes are bounded,
and nothing is published before its manifest and the digest of every file were checked.  A binary inside is as
trustworthy as whoever made the archive: digests find damage, not intent.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import tarfile
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sparsegen.artifact import folder
from sparsegen.artifact.entry import Artifact, read_entry
from sparsegen.artifact.folder import EntryName
from sparsegen.artifact.manifest import MANIFEST, MAX_BYTES, safe_name
from sparsegen.artifact.store import Store
from sparsegen.errors import ArtifactError

MAX_FILE_BYTES = 256 << 20  # a binary has some hundred kilobytes
MAX_TOTAL_BYTES = 4 << 30
MAX_FILES = 100_000


class ArchiveError(ArtifactError):
    """An archive that is refused: damaged, or holding what no export writes."""


@dataclass(frozen=True)
class Imported:
    """Result of an import, by entry name."""

    added: tuple[str, ...]
    present: tuple[str, ...]  # a valid entry of the same key was stored already


def export_archive(file: str | Path, artifacts: Iterable[Artifact]) -> list[str]:
    """Write verified entries to ``file``, and return their names.

    The same entries give the same bytes.  ``file`` appears whole or not at all.
    """
    chosen = sorted(artifacts, key=lambda a: a.path.name)
    file = Path(file)
    descriptor, temporary = tempfile.mkstemp(dir=file.absolute().parent, prefix=f".{file.name}-")
    try:
        with os.fdopen(descriptor, "wb") as raw:
            # no time and no name in the gzip header, so equal content is an equal file
            with (
                gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0) as packed,
                tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
            ):
                for artifact in chosen:
                    _add_entry(tar, artifact)
            raw.flush()
            os.fsync(raw.fileno())
        os.replace(temporary, file)
    except BaseException:
        os.unlink(temporary)
        raise
    return [artifact.path.name for artifact in chosen]


def import_archive(file: str | Path, store: Store | None = None) -> Imported:
    """Publish the entries of ``file`` in ``store``.

    ArchiveError before anything is published if any member, name, size or digest is wrong.
    """
    store = Store() if store is None else store
    with tempfile.TemporaryDirectory(prefix="sparsegen-import-") as scratch:
        names = _unpack(Path(file), Path(scratch))
        if not names:
            raise ArchiveError(f"{file} holds no artifact")
        entries = [_checked(Path(scratch) / name, file) for name in names]
        added: list[str] = []
        present: list[str] = []
        for entry in entries:
            new = store.adopt(entry)
            (added if new else present).append(entry.path.name)
    return Imported(tuple(added), tuple(present))


def _add_entry(tar: tarfile.TarFile, artifact: Artifact) -> None:
    top = str(EntryName.parse(artifact.path.name) or artifact.path.name)
    manifest = folder.read_bytes(artifact.path / MANIFEST, limit=MAX_BYTES)
    contents = {MANIFEST: manifest, **{n: artifact.read(n) for n in artifact.manifest.files}}
    for name, content in sorted(contents.items()):
        member = tarfile.TarInfo(f"{top}/{name}")
        member.size, member.mode = len(content), 0o644
        tar.addfile(member, io.BytesIO(content))


def _unpack(file: Path, target: Path) -> list[str]:
    """Unpack all members below ``target``; the entry names found."""
    tops: dict[str, None] = {}
    total = count = 0
    with _reading(file), _Bounded(file) as packed, tarfile.open(fileobj=packed, mode="r:") as tar:
        for member in tar:
            name, size = member.name, member.size
            top, _, rest = name.partition("/")
            count, total = count + 1, total + size
            if not member.isreg() or member.issparse():
                raise ArchiveError(f"{file}: member {name!r} is no plain file")
            if not safe_name(name) or not rest or EntryName.parse(top) is None:
                raise ArchiveError(f"{file}: member {name!r} is not a file of an entry")
            if size > MAX_FILE_BYTES or total > MAX_TOTAL_BYTES or count > MAX_FILES:
                raise ArchiveError(
                    f"{file}: member {name!r} goes beyond {MAX_FILES} files, {MAX_FILE_BYTES} bytes a file "
                    f"or {MAX_TOTAL_BYTES} bytes in all"
                )
            source = tar.extractfile(member)
            assert source is not None  # isreg
            try:
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                with open(target / name, "xb") as out:
                    out.write(source.read(size))
            except (FileExistsError, NotADirectoryError):
                raise ArchiveError(f"{file}: member {name!r} stands twice") from None
            tops[top] = None
    return list(tops)


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Every way in which a stream can be broken is one error that names the file."""
    try:
        yield
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, ValueError) as error:
        raise ArchiveError(f"{file} is damaged or no .tar.gz: {error}") from error
    except OSError as error:
        raise ArchiveError(f"{file} cannot be read or unpacked: {error}") from error


class _Bounded(gzip.GzipFile):
    """Never unpacks more at once than a file may hold: a header can claim any length."""

    def read(self, size: int | None = -1) -> bytes:
        """Like GzipFile.read, but a size is needed and bounded."""
        if size is None or not 0 <= size <= MAX_FILE_BYTES:
            raise tarfile.ReadError(f"a header claims {size} bytes")
        return super().read(size)


def _checked(path: Path, file: str | Path) -> Artifact:
    try:
        entry = read_entry(path)
    except ArtifactError as error:
        raise ArchiveError(f"{file}: {str(error).replace(str(path), path.name)}") from error
    extra = {p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()}
    extra -= {MANIFEST, *entry.manifest.files}
    if extra:
        raise ArchiveError(f"{file}: {path.name} holds files without a digest: {sorted(extra)}")
    return entry
