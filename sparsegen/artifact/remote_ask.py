"""What a store does about places elsewhere: look into shared folders, pull on a miss, push what was built."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from sparsegen.artifact.entry import Artifact, look_up
from sparsegen.artifact.key import ArtifactKey
from sparsegen.artifact.remote import NotThereError
from sparsegen.artifact.remote_entries import fetched, send
from sparsegen.artifact.remote_places import Places
from sparsegen.artifact.signing import read_signature
from sparsegen.errors import ArtifactError

log = logging.getLogger(__name__)


def look_up_shared(places: Places, key: ArtifactKey) -> tuple[Artifact | None, list[ArtifactError]]:
    """Like ``look_up`` in the shared folders, which are only read; signatures are checked."""
    faults: list[ArtifactError] = []
    for root in places.shared:
        found, there = look_up(root, key)
        faults += there
        if found is None:
            continue
        try:
            if places.trust is not None:
                places.trust.check(found.manifest, read_signature(found.path), str(found.path))
        except ArtifactError as error:
            faults.append(error)
        else:
            return found, faults
    return None, faults


def pull(
    places: Places, key: ArtifactKey, publish: Callable[[Artifact], Artifact]
) -> tuple[Artifact | None, list[ArtifactError]]:
    """What ``publish`` made of the first good artifact of ``key`` in a store, and what the stores before it said."""
    refusals: list[ArtifactError] = []
    for remote in places.remotes:
        try:
            with fetched(remote, key, places.trust) as artifact:
                return publish(artifact), refusals
        except ArtifactError as error:
            refusals.append(error)
    return None, refusals


def say(refusals: Iterable[ArtifactError]) -> None:
    """Log what stores said where a build follows: that something is not there is no news."""
    for error in refusals:
        level = logging.INFO if isinstance(error, NotThereError) else logging.WARNING
        log.log(level, "store not used: %s", error)


def push_or_say(places: Places, artifact: Artifact) -> None:
    """Send what was built to the stores that take it; a failure is a warning, since the artifact is here."""
    remotes = [remote for remote in places.remotes if remote.push]
    signer = places.signer if remotes else None
    for remote in remotes:
        try:
            send(remote, artifact, signer, places.trust)
        except ArtifactError as error:
            log.warning("built, but not pushed: %s", error)
