"""A store of artifacts in a local folder: load by exact key, explain a miss, build once, replace atomically."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from sparsegen.artifact import folder
from sparsegen.artifact.archive import entry_of
from sparsegen.artifact.entry import Artifact, GoneError, look_up, read_manifest
from sparsegen.artifact.key import ArtifactKey, describe_difference
from sparsegen.artifact.manifest import Decision, Manifest
from sparsegen.artifact.publish import (
    CacheWarning,
    NoPlaceError,
    Write,
    adopt_in,
    build_in,
    discard_locked,
    private_root,
    roots,
    take_in,
)
from sparsegen.artifact.remote import NotThereError
from sparsegen.artifact.remote_ask import look_up_shared, pull, push_or_say, say
from sparsegen.artifact.remote_places import Places, Remote, read_places
from sparsegen.errors import ArtifactError, CacheMiss, InputError

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

    What the root lacks is looked for in the shared folders and stores of its ``stores.yaml``; ``remote`` is the URL of
    one more, asked first, and ``push`` sends there what is built.  ``places`` replaces all of that.

    ``archive``: a file that ``cache export`` wrote, with entries for any number of GPU types; what is missing elsewhere on
    this machine is taken from it, before any store is asked.
    """

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        remote: str | None = None,
        push: bool = False,
        places: Places | None = None,
        archive: str | Path | None = None,
    ):
        self.root = default_root() if root is None else _path("root", root)
        if push and remote is None:
            raise InputError("push needs the URL of a store to send to")
        self._remote = None if remote is None else Remote(remote).url  # checked now, asked later
        self._push, self._places = push, places
        self._archive = None if archive is None else _path("archive", archive)

    def __deepcopy__(self, memo: dict[int, object]) -> Store:
        """Itself: a place on a disk.  Copies of a layer then share its kernels (``nn.open_callable``)."""
        return self

    @property
    def places(self) -> Places:
        """Shared folders, stores and keys; ``stores.yaml`` is read at the first use.

        InputError says what is wrong in it, ArtifactError that it cannot be read.
        """
        if self._places is None:
            try:
                found = read_places(self.root)
            except OSError as error:
                raise ArtifactError(f"{error.filename} cannot be read: {error.strerror}") from error
            self._places = found.with_remote(self._remote, push=self._push)
        return self._places

    @property
    def artifacts(self) -> Path:
        """The folder that holds the entries."""
        return self.root / "artifacts"

    def try_load(self, key: ArtifactKey) -> Artifact | None:
        """The artifact of ``key`` from this machine, or ``None``.

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
        found, faults = look_up_shared(self._places_here(), key)
        for fault in faults:
            log.warning("shared entry not used: %s", fault)
        return found

    def load(self, key: ArtifactKey, pattern: str | None = None) -> Artifact:
        """The artifact of ``key``; CacheMiss explains an absent one, ArtifactError a damaged one.

        ``pattern``: its name, for a better explanation.
        """
        found, faults = self.find(key)
        if found is not None:
            return found
        found, refusals = self._pull(key)
        if found is not None:
            return found
        misses = [error for error in refusals if isinstance(error, NotThereError)]
        for fault in (*faults, *refusals):
            if fault not in misses:
                raise fault
        raise CacheMiss("; ".join([self.explain_miss(key, pattern), *map(str, misses)]))

    def find(self, key: ArtifactKey) -> tuple[Artifact | None, list[ArtifactError]]:
        """The valid artifact of ``key`` on this machine, if any, and what is wrong with its other entries.

        Changes nothing and asks no store behind a URL.
        """
        faults: list[ArtifactError] = []
        for root in roots(self.root):
            found, there = look_up(root, key)
            faults += there
            if found is not None:
                return found, faults
        found, there = look_up_shared(self._places_here(), key)
        return found, faults + there

    def explain_miss(self, key: ArtifactKey, pattern: str | None = None) -> str:
        """Why ``key`` is not here: the fields in which it differs from the nearest stored entry."""
        name = f"{pattern}: " if pattern else ""
        head = f"{name}no artifact under key {key.short()} in {self.artifacts}"
        shared = itertools.chain.from_iterable(map(_entries_below, self._places_here().shared))
        everything = itertools.chain(self.entries(), shared)
        stored = [(m, p) for p, m in everything if isinstance(m, Manifest)]
        if not stored:
            readable = _why_unreadable(self.artifacts)
            return f"{head}: {readable or 'the store is empty'}"

        def distance(item: tuple[Manifest, Path]) -> tuple[int, bool, str]:
            return (len(key.difference(item[0].key)), item[0].pattern != pattern, str(item[1]))

        manifest, path = min(stored, key=distance)
        different = key.difference(manifest.key)
        types = sorted({m.key.gpu for m, _ in stored if key.like(m.key)} - {key.gpu})
        if different and types:
            return (
                f"{head}: it is built for {', '.join(types)} and not for {key.gpu}; "
                f"`sparsegen warm --gpu {key.gpu} PATTERN`, with its name or file, builds it on any machine"
            )
        if not different:
            return f"{head}: {path.name} has this key but is not valid"
        return (
            f"{head}: the nearest entry, {path.name}, differs in {describe_difference(different)}"
        )

    def entries(self) -> Iterator[tuple[Path, Manifest | ArtifactError]]:
        """Every entry of this store with its manifest, or with the error that reading it gave; files are not hashed."""
        for root in roots(self.root):
            yield from _entries_below(root)

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
        found, refusals = self._pull(key)
        say(refusals)
        if found is not None and accept(found):
            return found
        made: list[Path] = []

        def write_here(directory: Path) -> Decision:
            made.append(directory)
            return write(directory)

        artifact = self._build(
            partial(
                build_in,
                key=key,
                pattern=pattern,
                write=write_here,
                versions=versions,
                accept=accept,
            )
        )
        if made:
            push_or_say(self._places_here(), artifact)
        return artifact

    def _build(self, job: Callable[[Path], Artifact]) -> Artifact:
        """Run ``job`` on the root, or on this process's own folder where the root cannot be written."""
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

    # --- what comes from elsewhere ---

    def _places_here(self) -> Places:
        """``places``, or nothing where nobody may look into the root: another user's folder says nothing to us."""
        try:
            return self.places
        except ArtifactError as error:
            if self._remote is not None or not isinstance(error.__cause__, PermissionError):
                raise
            log.info("no stores: %s", error)
            self._places = Places()
            return self._places

    def _pull(self, key: ArtifactKey) -> tuple[Artifact | None, list[ArtifactError]]:
        """The artifact of ``key`` from the archive, or the first store that has a good one, published here; what others said."""

        def publish(artifact: Artifact) -> Artifact:
            return self._build(partial(take_in, artifact=artifact))

        refusals: list[ArtifactError] = []
        if self._archive is not None:
            try:
                with entry_of(self._archive, key, self._places_here().trust) as artifact:
                    return publish(artifact), refusals
            except ArtifactError as error:
                refusals.append(error)
        found, said = pull(self._places_here(), key, publish)
        return found, refusals + said


def _path(name: str, value: str | Path) -> Path:
    """Absolute.  InputError for an empty name, which would be the folder that one happens to be in, and for no name."""
    if not isinstance(value, (str, os.PathLike)) or not str(value) or "\0" in str(value):
        raise InputError(f"{name} of a Store must be a path, got {value!r}")
    return Path(os.path.abspath(value))


def _entries_below(root: Path) -> Iterator[tuple[Path, Manifest | ArtifactError]]:
    for name in folder.entry_names(root / "artifacts"):
        path = root / "artifacts" / str(name)
        try:
            yield path, read_manifest(path)
        except GoneError:
            continue
        except ArtifactError as error:
            yield path, error


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
