"""A store of artifacts in a local folder: load by exact key, explain a miss, build once, replace atomically."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from sparsegen.artifact import folder
from sparsegen.artifact.entry import Artifact, GoneError, look_up, read_manifest
from sparsegen.artifact.key import ArtifactKey, describe_difference
from sparsegen.artifact.manifest import Manifest
from sparsegen.artifact.publish import (
    CacheWarning,
    NoPlaceError,
    Write,
    adopt_in,
    build_in,
    discard_locked,
    private_root,
    roots,
)
from sparsegen.errors import ArtifactError, CacheMiss

__all__ = ["Artifact", "CacheWarning", "Store", "default_root"]

log = logging.getLogger(__name__)


def default_root() -> Path:
    """SPARSEGEN_CACHE, else XDG_CACHE_HOME/sparsegen, else the platform's user cache folder.

    A user without any home (a random id in a container) is treated as though the home were ``/``.
    """
    if chosen := os.environ.get("SPARSEGEN_CACHE"):
        return Path(os.path.abspath(os.path.expanduser(chosen)))
    # The XDG rules say to ignore a relative path.
    if os.path.isabs(base := os.environ.get("XDG_CACHE_HOME", "")):
        return Path(base) / "sparsegen"
    if not os.path.isabs(os.path.expanduser("~")):
        return Path("/.cache/sparsegen")
    import platformdirs

    return Path(os.path.abspath(platformdirs.user_cache_dir("sparsegen", appauthor=False)))


class Store:
    """Artifacts below one root folder.

    Making a Store touches nothing.  Reading works on a read-only root.  Where the root cannot be written, builds go
    to a folder that is private to this process and removed at its end, after one CacheWarning.
    """

    def __init__(self, root: str | Path | None = None):
        self.root = default_root() if root is None else Path(os.path.abspath(root))

    @property
    def artifacts(self) -> Path:
        """The folder that holds the entries."""
        return self.root / "artifacts"

    def try_load(self, key: ArtifactKey) -> Artifact | None:
        """The artifact of ``key``, or ``None``.

        A damaged entry counts as absent: it is logged, and moved aside unless a builder is at it.
        """
        for root in roots(self.root):
            found, faults = look_up(root, key)
            if faults:
                _discard(root, key)
            for fault in faults:
                log.warning("cache entry not used: %s", fault)
            if found is not None:
                return found
        return None

    def load(self, key: ArtifactKey, pattern: str | None = None) -> Artifact:
        """The artifact of ``key``; CacheMiss explains an absent one, ArtifactError a damaged one.

        ``pattern``: its name, for a better explanation.
        """
        found, faults = self.find(key)
        if found is not None:
            return found
        if faults:
            raise faults[0]
        raise CacheMiss(self.explain_miss(key, pattern))

    def find(self, key: ArtifactKey) -> tuple[Artifact | None, list[ArtifactError]]:
        """The valid artifact of ``key``, if any, and what is wrong with its other entries; changes nothing."""
        faults: list[ArtifactError] = []
        for root in roots(self.root):
            found, there = look_up(root, key)
            faults += there
            if found is not None:
                return found, faults
        return None, faults

    def explain_miss(self, key: ArtifactKey, pattern: str | None = None) -> str:
        """Why ``key`` is not here: the fields in which it differs from the nearest stored entry."""
        name = f"{pattern}: " if pattern else ""
        head = f"{name}no artifact under key {key.short()} in {self.artifacts}"
        stored = [(m, p) for p, m in self.entries() if isinstance(m, Manifest)]
        if not stored:
            readable = _why_unreadable(self.artifacts)
            return f"{head}: {readable or 'the store is empty'}"

        def distance(item: tuple[Manifest, Path]) -> tuple[int, bool, str]:
            return (len(key.difference(item[0].key)), item[0].pattern != pattern, str(item[1]))

        manifest, path = min(stored, key=distance)
        different = key.difference(manifest.key)
        if not different:
            return f"{head}: {path.name} has this key but is not valid"
        return (
            f"{head}: the nearest entry, {path.name}, differs in {describe_difference(different)}"
        )

    def entries(self) -> Iterator[tuple[Path, Manifest | ArtifactError]]:
        """Every entry with its manifest, or with the error that reading it gave; files are not hashed."""
        for root in roots(self.root):
            for name in folder.entry_names(root / "artifacts"):
                path = root / "artifacts" / str(name)
                try:
                    yield path, read_manifest(path)
                except GoneError:
                    continue
                except ArtifactError as error:
                    yield path, error

    def build_once(
        self,
        key: ArtifactKey,
        pattern: str,
        write: Write,
        versions: Mapping[str, str],
        accept: Callable[[Artifact], bool] = lambda artifact: True,
    ) -> Artifact:
        """The artifact of ``key``, built by ``write`` unless a stored one is good enough for ``accept``.

        Among processes one builds and the others wait for it.  A stored one that ``accept`` refuses is replaced by a
        new generation; the old one stays for those who read it, until the next but one.
        """
        found = self.try_load(key)
        if found is not None and accept(found):
            return found
        job = partial(
            build_in, key=key, pattern=pattern, write=write, versions=versions, accept=accept
        )
        try:
            return job(self.root)
        except NoPlaceError as error:
            scratch = private_root(self.root, str(error.__cause__))
        try:
            return job(scratch)
        except NoPlaceError as error:
            raise ArtifactError(
                f"an artifact can be written neither to {self.root} nor to {scratch}: {error.__cause__}; "
                "free some space, or set SPARSEGEN_CACHE to a folder that can be written"
            ) from error

    def adopt(self, artifact: Artifact) -> bool:
        """Copy a verified entry from elsewhere into this store.

        False where a valid one that is tuned at least as well is here already; ArtifactError where nothing can be
        written.
        """
        try:
            return adopt_in(self.root, artifact)
        except NoPlaceError as error:
            raise ArtifactError(f"{self.root} cannot be written: {error.__cause__}") from error


def _discard(root: Path, key: ArtifactKey) -> None:
    """Move invalid entries of ``key`` aside; left to the builder that holds the lock, if there is one."""
    try:
        with folder.builder_lock(root, key.short(), timeout_s=0):
            discard_locked(root, key)
    except OSError as error:  # TimeoutError, or a store that cannot be written
        log.debug("invalid entry stays in place: %s", error)


def _why_unreadable(artifacts: Path) -> str:
    try:
        os.listdir(artifacts)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"the store cannot be read ({error.strerror})"
    return ""
