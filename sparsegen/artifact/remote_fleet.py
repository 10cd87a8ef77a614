"""Many artifacts at a time: ``push`` what is in a cache, ``pull`` what a fleet needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from sparsegen.artifact.archive import ArchiveError
from sparsegen.artifact.build import Builder, Progress, ask
from sparsegen.artifact.cache import EntryInfo, list_entries
from sparsegen.artifact.entry import read_entry
from sparsegen.artifact.fleet import Item, Report, Result, builders, work
from sparsegen.artifact.problems import Changes
from sparsegen.artifact.remote import NotThereError, RefusedError
from sparsegen.artifact.remote_entries import fetched, send
from sparsegen.artifact.remote_places import Remote
from sparsegen.artifact.signing import Signer, Trust, UntrustedError
from sparsegen.artifact.store import Store
from sparsegen.errors import ArtifactError, InputError, SparsegenError, UnsupportedError
from sparsegen.spec.gpu import find_gpu
from sparsegen.spec.pattern import Pattern


def push(
    url: str,
    patterns: Iterable[str | Path] | None = None,
    *,
    gpus: Sequence[str] | None = None,
    sign: str | Path | None = None,
    store: Store | None = None,
    progress: Progress | None = None,
) -> Report:
    """Send what is in the cache to the store of ``url``; states are ``pushed``, ``kept`` and ``damaged``.

    Args:
        url: its options are taken from ``stores.yaml`` where it stands there.
        patterns: names or files; default: everything.
        gpus: names or aliases of GPU types; default: all.
        sign: a private key; default: that of ``stores.yaml``, if it names one.

    StoreError ends it at once where the store cannot be reached; InputError names a pattern that is not in the cache.
    """
    store = Store() if store is None else store
    remote = store.places.remote(url)
    signer = signer_of(sign, store)
    wanted = _stored(store, patterns, gpus)
    results: list[Result] = []
    for info in wanted:
        results.append(_push_one(info, remote, signer, store.places.trust))
        _tell(progress, results, len(wanted))
    return Report(tuple(results))


def pull(
    url: str,
    gpus: Sequence[str],
    patterns: Iterable[Pattern | str | Path] | None = None,
    *,
    problems: Sequence[Changes] | None = None,
    trust: str | Path | None = None,
    store: Store | None = None,
    builder: Builder | None = None,
    progress: Progress | None = None,
) -> Report:
    """Take what patterns need on GPU types from the store of ``url``, by exact keys; nothing is built.

    States are ``pulled``, ``hit`` (what is here is as good), ``missing``, ``refused`` (damaged, not signed by a trusted
    key, or not to be read), ``unsupported`` and ``failed``.

    Args:
        gpus, patterns, problems: as for ``warm``.
        trust: a public key; default: those of ``stores.yaml``, if it names some.

    StoreError ends it at once where the store cannot be reached.
    """
    store = Store() if store is None else store
    remote = store.places.remote(url)
    trusted = trust_of(trust, store)
    made_by = builders(builder, None, None)
    items = list(work(gpus, patterns, problems))
    results: list[Result] = []
    for item in items:
        results.append(_pull_one(item, remote, trusted, store, made_by[item.part]))
        _tell(progress, results, len(items))
    return Report(tuple(results))


def signer_of(file: str | Path | None, store: Store | None = None) -> Signer | None:
    """The private key in ``file``, else that of ``stores.yaml``, else ``None``."""
    if file is not None:
        return Signer.of_file(file)
    return (Store() if store is None else store).places.signer


def trust_of(file: str | Path | None, store: Store | None = None) -> Trust | None:
    """Trust in the public key in ``file``, else in those of ``stores.yaml``, else ``None``: no signatures are asked for."""
    if file is not None:
        return Trust.of_files([file])
    return (Store() if store is None else store).places.trust


def _push_one(
    info: EntryInfo, remote: Remote, signer: Signer | None, trust: Trust | None
) -> Result:
    try:
        artifact = read_entry(info.path)
    except ArtifactError as error:
        return Result(info.pattern, info.gpu, "damaged", str(error), info.path)
    sent = send(remote, artifact, signer, trust)
    return Result(info.pattern, info.gpu, "pushed" if sent else "kept", path=info.path)


def _pull_one(
    item: Item, remote: Remote, trust: Trust | None, store: Store, builder: Builder
) -> Result:
    def said(state: str, detail: object = "") -> Result:
        return item.result(state, str(detail))

    if item.pattern is None:
        return said("failed", item.fault)
    try:
        key = builder.key(ask(item.pattern, item.problem, item.gpu))
        with fetched(remote, key, trust) as artifact:
            return said("pulled" if store.adopt(artifact) else "hit")
    except NotThereError as error:
        return said("missing", error)
    except UnsupportedError as error:
        return said("unsupported", error)
    except (ArchiveError, RefusedError, UntrustedError) as error:
        return said("refused", error)
    except ArtifactError:  # the store cannot be reached, the cache cannot be written: so for all
        raise
    except SparsegenError as error:
        return said("failed", error)


def _stored(
    store: Store, patterns: Iterable[str | Path] | None, gpus: Sequence[str] | None
) -> list[EntryInfo]:
    """The newest entries of the cache that are asked for; damaged ones too, to be named."""
    there = [entry for entry in list_entries(store) if not entry.superseded]
    names = None if patterns is None else set(map(_name, patterns))
    if names and (absent := names - {entry.pattern for entry in there}):
        raise InputError(f"no artifact of {', '.join(sorted(absent))} in {store.artifacts}")
    types = None if gpus is None else {find_gpu(gpu).name for gpu in gpus}
    return [
        entry
        for entry in there
        if (names is None or entry.pattern in names or (entry.fault and entry.gpu == ""))
        and (types is None or entry.gpu in types or entry.fault)
    ]


def _name(pattern: str | Path) -> str:
    """The name that the entries of a pattern carry: that in the file, or the word itself."""
    is_file = Path(pattern).suffix in (".yaml", ".yml")
    return Pattern.from_yaml(pattern).name if is_file else str(pattern)


def _tell(progress: Progress | None, results: list[Result], total: int) -> None:
    if progress is not None:
        last = results[-1]
        progress(len(results), total, f"{last.pattern} for {last.gpu}: {last.state}")
