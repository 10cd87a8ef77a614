"""Whole entries between a cache and a store behind a URL: verified before anything is published, packed as archives."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sparsegen.artifact.archive import ArchiveError, export_archive, read_archive
from sparsegen.artifact.entry import Artifact
from sparsegen.artifact.key import ArtifactKey, describe_difference
from sparsegen.artifact.manifest import LEVELS
from sparsegen.artifact.remote import NotThereError, fetch, object_name, put
from sparsegen.artifact.remote_places import Remote
from sparsegen.artifact.signing import Signer, Trust, UntrustedError

log = logging.getLogger(__name__)


@contextlib.contextmanager
def fetched(remote: Remote, key: ArtifactKey, trust: Trust | None) -> Iterator[Artifact]:
    """The verified entry of ``key`` from ``remote``, in a scratch folder that is removed afterwards.

    NotThereError where there is none, StoreError where it cannot be read, ArchiveError where it is damaged or another
    key's, UntrustedError where ``trust`` does not know who signed it.
    """
    with tempfile.TemporaryDirectory(prefix="sparsegen-pull-") as scratch:
        yield _checked(remote, key, trust, Path(scratch))


def _checked(remote: Remote, key: ArtifactKey, trust: Trust | None, scratch: Path) -> Artifact:
    name = object_name(key)
    packed, unpacked = scratch / "object", scratch / "entries"
    fetch(remote, name, packed)
    unpacked.mkdir()
    said = f"{remote}: {name}"
    entries = read_archive(packed, unpacked, said, trust)
    if len(entries) != 1:
        raise ArchiveError(f"{said} holds {len(entries)} artifacts, must hold one")
    if different := key.difference(entries[0].key):
        raise ArchiveError(f"{said} holds another artifact: {describe_difference(different)}")
    return entries[0]


def send(remote: Remote, artifact: Artifact, signer: Signer | None, trust: Trust | None) -> bool:
    """Put ``artifact`` into ``remote``; False where what lies there is as good.

    As good is: the same, or tuned at a higher level, or at the same level and made later; and signed by ``signer``'s
    key or a trusted one, where there is one.  Damaged and untrusted objects are replaced.
    """
    with tempfile.TemporaryDirectory(prefix="sparsegen-push-") as scratch:
        asked = _joined(trust, signer)
        try:
            (Path(scratch) / "there").mkdir()
            there = _checked(remote, artifact.key, asked, Path(scratch) / "there")
        except NotThereError as error:
            log.debug("to be written: %s", error)
        except (ArchiveError, UntrustedError) as error:
            log.warning("replaced in the store: %s", error)
        else:
            if _rank(there) >= _rank(artifact):
                return False
        packed = Path(scratch) / "entry.tar.gz"
        export_archive(packed, [artifact], signer)
        put(remote, object_name(artifact.key), packed)
    return True


def _rank(artifact: Artifact) -> tuple[int, str]:
    """What is better sorts later: the level of tuning, then the time (UTC, ISO 8601)."""
    return LEVELS.index(artifact.manifest.decision.tune), artifact.manifest.created


def _joined(trust: Trust | None, signer: Signer | None) -> Trust | None:
    mine = () if signer is None else (signer.public,)
    keys = (*(trust.keys if trust else ()), *mine)
    return Trust(keys) if keys else None
