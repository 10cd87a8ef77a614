"""Entries as one ``.tar.gz`` that can be carried to a machine without a compiler.

An archive is input from elsewhere: members are plain files with safe names below an entry's name, sizes are bounded,
and nothing is published before its manifest and the digest of every file were checked.  A binary inside is as
trustworthy as whoever made the archive: digests find damage, not intent.  A signature (signing.py) says who made it.
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
from typing import TYPE_CHECKING

from sparsegen.artifact import folder
from sparsegen.artifact.entry import Artifact, read_entry
from sparsegen.artifact.folder import EntryName
from sparsegen.artifact.manifest import MANIFEST, MAX_BYTES, SIGNATURE, safe_name
from sparsegen.artifact.remote import NotThereError
from sparsegen.artifact.signing import Signer, Trust, read_signature
from sparsegen.errors import ArtifactError

if TYPE_CHECKING:
    from sparsegen.artifact.key import ArtifactKey
    from sparsegen.artifact.store import Store

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


def export_archive(
    file: str | Path, artifacts: Iterable[Artifact], signer: Signer | None = None
) -> list[str]:
    """Write verified entries to ``file``, and return their names.

    The same entries give the same bytes.  ``file`` appears whole or not at all.  ``signer`` signs every entry; without
    one, the signatures that entries came with go on.  ArchiveError if ``file`` cannot be written.
    """
    chosen = sorted(artifacts, key=lambda a: a.path.name)
    file = Path(file)
    try:
        descriptor, temporary = tempfile.mkstemp(
            dir=file.absolute().parent, prefix=f".{file.name}-"
        )
    except OSError as error:
        raise ArchiveError(f"{file} cannot be written: {error.strerror}") from error
    try:
        with os.fdopen(descriptor, "wb") as raw:
            # no time and no name in the gzip header, so equal content is an equal file
            with (
                gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0) as packed,
                tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
            ):
                for artifact in chosen:
                    _add_entry(tar, artifact, signer)
            raw.flush()
            os.fsync(raw.fileno())
        os.replace(temporary, file)
    except BaseException as error:
        os.unlink(temporary)
        if isinstance(error, OSError):  # a full disk, a folder of that name
            raise ArchiveError(f"{file} cannot be written: {error.strerror}") from error
        raise
    return [artifact.path.name for artifact in chosen]


def import_archive(
    file: str | Path, store: Store | None = None, trust: Trust | None = None
) -> Imported:
    """Publish the entries of ``file`` in ``store``.

    ArchiveError before anything is published if any member, name, size or digest is wrong.  UntrustedError likewise if
    an entry is not signed by ``trust``; default: what the store's ``stores.yaml`` trusts, if it says.
    """
    from sparsegen.artifact.store import Store

    store = Store() if store is None else store
    trust = store.places.trust if trust is None else trust
    with tempfile.TemporaryDirectory(prefix="sparsegen-import-") as scratch:
        entries = read_archive(Path(file), Path(scratch), str(file), trust)
        added: list[str] = []
        present: list[str] = []
        for entry in entries:
            new = store.adopt(entry)
            (added if new else present).append(entry.path.name)
    return Imported(tuple(added), tuple(present))


def read_archive(
    file: Path, scratch: Path, said: str, trust: Trust | None = None
) -> list[Artifact]:
    """The verified entries of ``file``, unpacked below the empty folder ``scratch``.

    ArchiveError and UntrustedError as for ``import_archive``; both name the archive as ``said``.
    """
    names = _unpack(file, scratch, said)
    if not names:
        raise ArchiveError(f"{said} holds no artifact")
    entries = [_checked(scratch / name, said) for name in names]
    if trust is not None:
        for entry in entries:
            trust.check(entry.manifest, read_signature(entry.path), f"{said}: {entry.path.name}")
    return entries


@contextlib.contextmanager
def entry_of(file: Path, key: ArtifactKey, trust: Trust | None = None) -> Iterator[Artifact]:
    """The verified entry of ``key`` in an archive, unpacked as long as the context lasts.

    NotThereError, which names the GPU types that the archive has it for, else errors as for ``import_archive``.
    """
    with tempfile.TemporaryDirectory(prefix="sparsegen-archive-") as scratch:
        entries = read_archive(file, Path(scratch), str(file), trust)
        for entry in entries:
            if entry.key == key:
                yield entry
                return
    others = sorted({e.key.gpu for e in entries if e.key.like(key)} - {key.gpu})
    has = f"it has that for {', '.join(others)}" if others else f"it holds {len(entries)} other"
    raise NotThereError(f"{file} has no artifact under key {key.short()} ({key.gpu}); {has}")


def _add_entry(tar: tarfile.TarFile, artifact: Artifact, signer: Signer | None) -> None:
    top = str(EntryName.parse(artifact.path.name) or artifact.path.name)
    manifest = folder.read_bytes(artifact.path / MANIFEST, limit=MAX_BYTES)
    contents = {MANIFEST: manifest, **{n: artifact.read(n) for n in artifact.manifest.files}}
    signature = read_signature(artifact.path) if signer is None else signer.sign(artifact.manifest)
    if signature is not None:
        contents[SIGNATURE] = signature
    for name, content in sorted(contents.items()):
        member = tarfile.TarInfo(f"{top}/{name}")
        member.size, member.mode = len(content), 0o644
        tar.addfile(member, io.BytesIO(content))


def _unpack(file: Path, target: Path, said: str) -> list[str]:
    """Unpack all members below ``target``; the entry names found."""
    tops: dict[str, None] = {}
    total = count = 0
    with _reading(said), _Bounded(file) as packed, tarfile.open(fileobj=packed, mode="r:") as tar:
        for member in tar:
            name, size = member.name, member.size
            top, _, rest = name.partition("/")
            count, total = count + 1, total + size
            if not member.isreg() or member.issparse():
                raise ArchiveError(f"{said}: member {name!r} is no plain file")
            if not safe_name(name) or not rest or EntryName.parse(top) is None:
                raise ArchiveError(f"{said}: member {name!r} is not a file of an entry")
            if size > MAX_FILE_BYTES or total > MAX_TOTAL_BYTES or count > MAX_FILES:
                raise ArchiveError(
                    f"{said}: member {name!r} goes beyond {MAX_FILES} files, {MAX_FILE_BYTES} bytes a file "
                    f"or {MAX_TOTAL_BYTES} bytes in all"
                )
            source = tar.extractfile(member)
            assert source is not None  # isreg
            try:
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                with open(target / name, "xb") as out:
                    out.write(source.read(size))
            except (FileExistsError, NotADirectoryError):
                raise ArchiveError(f"{said}: member {name!r} stands twice") from None
            tops[top] = None
    return list(tops)


@contextlib.contextmanager
def _reading(said: str) -> Iterator[None]:
    """Every way in which a stream can be broken is one error that names the file."""
    try:
        yield
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, ValueError) as error:
        raise ArchiveError(f"{said} is damaged or no .tar.gz: {error}") from error
    except OSError as error:
        raise ArchiveError(f"{said} cannot be read or unpacked: {error}") from error


class _Bounded(gzip.GzipFile):
    """Never unpacks more at once than a file may hold: a header can claim any length."""

    def read(self, size: int | None = -1) -> bytes:
        """Like GzipFile.read, but a size is needed and bounded."""
        if size is None or not 0 <= size <= MAX_FILE_BYTES:
            raise tarfile.ReadError(f"a header claims {size} bytes")
        return super().read(size)


def _checked(path: Path, said: str) -> Artifact:
    try:
        entry = read_entry(path)
    except ArtifactError as error:
        raise ArchiveError(f"{said}: {str(error).replace(str(path), path.name)}") from error
    extra = {p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()}
    extra -= {MANIFEST, SIGNATURE, *entry.manifest.files}
    if extra:
        raise ArchiveError(f"{said}: {path.name} holds files without a digest: {sorted(extra)}")
    return entry
