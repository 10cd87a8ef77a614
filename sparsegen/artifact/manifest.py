"""The manifest: what was decided for a key, with the digest of every file beside it.

``manifest_json`` writes and reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from sparsegen.artifact.key import ArtifactKey, describe_difference
from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.errors import ArtifactError

SCHEMA = 3  # 1 knew one schedule a pattern, 2 one configuration an entry
MANIFEST = "manifest.json"
SIGNATURE = "signature.json"  # of the manifest; it may stand beside it and has no digest there
MAX_BYTES = 4 << 20  # a manifest is some kilobytes; a larger file is not one
LEVELS = ("off", "quick", "full")  # tuning, in rising order


class DamagedError(ArtifactError):
    """An entry is not what was written: a file is missing, cut, changed or unreadable."""


class MismatchError(ArtifactError):
    """A sound entry that was made for something else; the message names both sides."""


@dataclass(frozen=True)
class Variant:
    """One compiled kernel of the artifact.

    ``registers`` per thread, ``spill_bytes`` per thread and ``shared_bytes`` per block are ``None``
    where the backend's tools do not tell.  ``guard`` says in words when this variant may be launched.
    ``files`` are its files, relative to the entry.
    """

    name: str
    guard: str
    registers: int | None
    spill_bytes: int | None
    shared_bytes: int | None
    files: tuple[str, ...]


@dataclass(frozen=True)
class Considered:
    """A candidate schedule: its predicted time, and the best that was measured with it, None where nothing was."""

    label: str
    predicted_ms: float
    measured_us: float | None


@dataclass(frozen=True)
class Bucket:
    """What was decided for calls of about these lengths; fields as in ``Decision``.

    ``folder`` holds its files inside the entry, ``""`` is the entry itself.  Buckets of one decision share a folder.
    """

    q_len: int
    kv_len: int
    folder: str
    label: str
    config: LaunchConfig
    chosen_by: str
    variants: tuple[Variant, ...]


@dataclass(frozen=True)
class Decision:
    """What a builder decided for a key.

    ``label`` names the schedule; it is one of ``candidates``, best prediction first, which were predicted for the call
    ``predicted_for``.  ``config`` is the template's; of an artifact of several kernels ``kernels`` has that of each by name, and ``config``
    is the first one's.  ``chosen_by`` says how the configuration was found (a study, a step of the ``tuned/`` look-up, the template's default);
    ``tune`` is the level that was reached, one of ``LEVELS``.  ``time_us`` and
    ``baseline_us`` are medians where something was measured, ``measured`` says what and when.
    ``problem`` is the problem that the configuration was chosen for (its lengths are not in the key).
    ``schedule`` names the file with the schedule dump, ``source`` the generated kernel.
    ``buckets``: where pairs of lengths of the problem were decided differently, all of them, the first one first; a call takes the
    nearest (``launch.buckets``).  Empty: one decision for all lengths.
    """

    label: str
    candidates: tuple[Considered, ...]
    predicted_for: str
    config: LaunchConfig
    chosen_by: str
    tune: str
    variants: tuple[Variant, ...]
    schedule: str
    source: str
    problem: Mapping[str, Any]
    time_us: float | None = None
    baseline_us: float | None = None
    measured: str = ""
    buckets: tuple[Bucket, ...] = ()
    kernels: Mapping[str, LaunchConfig] = field(default_factory=dict)


@dataclass(frozen=True)
class FileRecord:
    """Size and sha256 (hex) of one file of an entry."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Everything that is known about an entry: the key asked, the decision, versions, digests.

    ``versions`` has python, sparsegen, triton, torch and ptxas (``""`` = not known).  ``created`` is
    UTC, ISO 8601.  ``files`` maps every file but the manifest itself to its record.
    """

    key: ArtifactKey
    pattern: str
    decision: Decision
    versions: Mapping[str, str]
    created: str
    files: Mapping[str, FileRecord]

    def to_json(self) -> str:
        """The text of ``manifest.json``."""
        from sparsegen.artifact.manifest_json import written

        return written(self)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Inverse of ``to_json``; DamagedError says what is wrong, MismatchError what it was made for."""
        from sparsegen.artifact.manifest_json import read

        return read(text)

    def check(self, key: ArtifactKey) -> None:
        """MismatchError unless this manifest was made for ``key``, by the versions it names."""
        different = self.key.difference(key)
        if different:
            said = describe_difference(different, "made for", "asked")
            raise MismatchError(f"the entry was made for something else: {said}")
        triton, torch = self.versions.get("triton", ""), self.versions.get("torch", "")
        if triton != key.triton:
            raise MismatchError(f"the entry was made by triton {triton}, asked: {key.triton}")
        if ".".join(torch.split(".")[:2]) != key.torch:
            raise MismatchError(f"the entry was made with torch {torch}, asked: {key.torch}")


class AlteredError(DamagedError):
    """A well-formed manifest whose digest is not its own: somebody changed it after it was written.

    ``manifest`` holds what it says now, so that a message can name both sides.
    """

    def __init__(self, manifest: Manifest):
        self.manifest = manifest
        super().__init__(f"{MANIFEST} was changed after it was written (its digest does not fit)")


def level_at_least(have: str, asked: str) -> bool:
    """Whether tuning level ``have`` covers ``asked``."""
    return LEVELS.index(have) >= LEVELS.index(asked)


def safe_name(name: str) -> bool:
    """Whether ``name`` is a plain relative path that stays below its folder, in normal form."""
    path = PurePosixPath(name)
    return (
        bool(path.parts)
        and not path.is_absolute()
        and str(path) == name
        and ".." not in path.parts
        and "\\" not in name
        and "\0" not in name
    )
