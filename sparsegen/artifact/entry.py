"""One entry on the disk: read strictly, every byte verified, every fault named."""

from __future__ import annotations

import errno
import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path

from sparsegen.artifact import folder
from sparsegen.artifact.folder import EntryName
from sparsegen.artifact.key import ArtifactKey, describe_difference
from sparsegen.artifact.manifest import (
    MANIFEST,
    MAX_BYTES,
    AlteredError,
    DamagedError,
    FileRecord,
    Manifest,
    MismatchError,
)
from sparsegen.errors import ArtifactError

log = logging.getLogger(__name__)


class GoneError(ArtifactError):
    """The entry vanished while it was read: a cleaner took it, or a newer generation replaced it."""


class MissingError(DamagedError):
    """A file of an entry is not there."""


class UnreadableError(ArtifactError):
    """An entry is there but the file system refuses to give it (permission, lost network disk)."""


@dataclass(frozen=True)
class Artifact:
    """A verified entry: the key asked, what was decided, and where its files are."""

    key: ArtifactKey
    manifest: Manifest
    path: Path

    @property
    def files(self) -> dict[str, Path]:
        """Absolute path of every file by its name inside the entry (``fast/forward.cubin``)."""
        return {name: self.path / name for name in self.manifest.files}

    def read(self, name: str) -> bytes:
        """Content of one file, checked against its digest once more; ArtifactError if it changed."""
        return read_file(self.path, name, self.manifest.files[name])

    def require(self, backend: str, arch: int | str) -> None:
        """MismatchError unless the binaries are for ``backend`` and ``arch``; both sides are named."""
        if (self.key.backend, self.key.arch) != (backend, arch):
            raise MismatchError(
                f"{self.path.name} was made for {self.key.backend} {self.key.arch} ({self.key.gpu}), "
                f"this GPU is {backend} {arch}: its binary does not run here"
            )


def read_manifest(path: Path) -> Manifest:
    """The manifest of the entry at ``path``; DamagedError or UnreadableError."""
    try:
        text = folder.read_bytes(path / MANIFEST, limit=MAX_BYTES).decode()
    except FileNotFoundError:
        if not path.is_dir():
            raise GoneError(f"{path} was removed") from None
        raise MissingError(f"{path}: {MANIFEST} is missing") from None
    except ValueError as error:  # too large, or not UTF-8
        raise DamagedError(f"{path}: {MANIFEST} is damaged: {error}") from None
    except OSError as error:
        raise _os_fault(path / MANIFEST, error) from error
    try:
        return Manifest.from_json(text)
    except AlteredError as error:
        raise error
    except DamagedError as error:
        raise DamagedError(f"{path}: {error}") from None


def read_entry(path: Path, key: ArtifactKey | None = None) -> Artifact:
    """The entry at ``path`` with every file verified.

    With ``key``, MismatchError unless it was made for exactly that.  DamagedError names the file.
    """
    try:
        manifest = read_manifest(path)
    except AlteredError as error:
        raise _altered(path, error, key) from None
    try:
        manifest.check(manifest.key if key is None else key)
    except MismatchError as error:
        raise MismatchError(f"{path}: {error}") from None
    name = EntryName.parse(path.name)
    if name is not None and name.key12 != manifest.key.short():
        raise MismatchError(
            f"{path}: made for key {manifest.key.short()}, stored under {name.key12}"
        )
    for file, record in manifest.files.items():
        read_file(path, file, record)
    return Artifact(manifest.key, manifest, path)


def read_file(path: Path, name: str, record: FileRecord) -> bytes:
    """Content of file ``name`` of the entry at ``path``; DamagedError unless size and digest fit."""
    try:
        content = folder.read_bytes(path / name, limit=record.bytes)
    except FileNotFoundError:
        if not path.is_dir():
            raise GoneError(f"{path} was removed") from None
        raise MissingError(f"{path}: {name} is missing") from None
    except ValueError:
        raise DamagedError(f"{path}: {name} holds more than {record.bytes} bytes") from None
    except OSError as error:
        raise _os_fault(path / name, error) from error
    found = hashlib.sha256(content).hexdigest()
    if len(content) != record.bytes or found != record.sha256:
        raise DamagedError(
            f"{path}: {name} is damaged: {record.bytes} bytes with sha256 {record.sha256[:12]}… were written, "
            f"{len(content)} bytes with {found[:12]}… are there"
        )
    return content


def _altered(path: Path, error: AlteredError, key: ArtifactKey | None) -> ArtifactError:
    """What a changed manifest says, against what was asked and what its binaries were made by."""
    sides = [] if key is None else error.manifest.key.difference(key)
    if key is not None and not sides:
        want = {"triton": key.triton, "torch": key.torch}
        have = error.manifest.versions
        sides = [(n, have.get(n), w) for n, w in want.items() if not have.get(n, "").startswith(w)]
    said = describe_difference(sides, "it says", "asked") if sides else ""
    return MismatchError(f"{path}: {error}; {said}") if said else DamagedError(f"{path}: {error}")


def _os_fault(path: Path, error: OSError) -> ArtifactError:
    if error.errno in (errno.ELOOP, errno.EISDIR):  # a link or a folder where a file was written
        return DamagedError(f"{path} is no regular file")
    return UnreadableError(f"{path} cannot be read: {error.strerror or error}")


def look_up(root: Path, key: ArtifactKey) -> tuple[Artifact | None, list[ArtifactError]]:
    """The newest valid entry of ``key`` below ``root``, and what is wrong with newer ones."""
    faults: list[ArtifactError] = []
    for name in names_of(root, key.short()):
        try:
            return read_entry(root / "artifacts" / str(name), key), faults
        except GoneError:
            continue
        except ArtifactError as error:
            faults.append(error)
    return None, faults


def names_of(root: Path, key12: str) -> list[EntryName]:
    """Names of the entries of a short key below ``root``, newest generation first."""
    try:
        return [n for n in folder.entry_names(root / "artifacts") if n.key12 == key12]
    except OSError as error:  # another user's folder: nothing of ours is in it
        log.debug("cannot list %s: %s", root, error)
        return []
