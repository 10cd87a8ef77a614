"""``sparsegen cache``: list, prune, export and import what was built, push and pull it, make keys."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from sparsegen.cli.build import Gpus, Patterns, Problems, result_dict
from sparsegen.cli.look import Json
from sparsegen.cli.output import age, artifacts, emit, progress, size, table
from sparsegen.errors import InputError

Url = Annotated[
    str, typer.Argument(metavar="URL", help="A store, e.g. s3://bucket/kernels, or a folder.")
]
Sign = Annotated[
    Path | None,
    typer.Option(metavar="KEY", help="Sign with this private key; default: that of stores.yaml."),
]
TrustKey = Annotated[
    Path | None,
    typer.Option(
        metavar="KEY.pub",
        help="Take only what this public key signed; default: those of stores.yaml.",
    ),
]


def ls(as_json: Json = False) -> None:
    """List the stored artifacts."""
    from sparsegen.artifact.cache import list_entries

    entries = list_entries()
    rows = [
        (
            *(e.pattern, e.gpu, e.dtype, e.key, size(e.size_bytes), age(e.age_s), e.schedule),
            e.fault or e.config,
        )
        for e in entries
    ]
    header = ("pattern", "gpu", "dtype", "key", "size", "age", "schedule", "configuration")
    text = table(header, rows)
    emit([entry_dict(e) for e in entries], as_json, text)


def prune(
    days: Annotated[
        float | None,
        typer.Option(
            metavar="DAYS", min=0, max=1e6, help="Remove what was made more than DAYS ago."
        ),
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="Only artifacts for this GPU type.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all artifacts.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: Json = False,
) -> None:
    """Remove artifacts; damaged and replaced ones always go."""
    from sparsegen.artifact.cache import prune as prune_store
    from sparsegen.spec.gpu import find_gpu

    if everything and days is not None:
        raise typer.BadParameter("--all and --days do not go together")
    gone = prune_store(
        older_than=None if days is None else timedelta(days=days),
        gpu=None if gpu is None else find_gpu(gpu).name,
        everything=everything,
        dry_run=dry_run,
    )
    said = "would remove" if dry_run else "removed"
    text = "\n".join([f"{said} {e.path.name}" for e in gone.entries])
    total = f"{said} {artifacts(len(gone.entries))}, {size(gone.size_bytes)}"
    emit([entry_dict(e) for e in gone.entries], as_json, f"{text}\n{total}".strip())


def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The archive to write (.tar.gz).")],
    gpu: Annotated[str | None, typer.Option(help="Only artifacts for this GPU type.")] = None,
    sign: Sign = None,
) -> None:
    """Write artifacts into one archive, for a machine without a compiler."""
    from sparsegen.artifact.archive import export_archive
    from sparsegen.artifact.cache import list_entries
    from sparsegen.artifact.entry import read_entry
    from sparsegen.artifact.remote_fleet import signer_of
    from sparsegen.spec.gpu import find_gpu

    wanted = None if gpu is None else find_gpu(gpu).name
    good = [e for e in list_entries() if not e.fault and not e.superseded]
    chosen = [read_entry(e.path) for e in good if wanted in (None, e.gpu)]
    if not chosen:
        raise InputError(
            f"nothing to export: the cache has no artifact{f' for {wanted}' * bool(wanted)}"
        )
    names = export_archive(file, chosen, signer_of(sign))
    print("\n".join([*names, f"{artifacts(len(names))} in {file}"]))


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An archive made by export.")],
    trust: TrustKey = None,
) -> None:
    """Take the artifacts of an archive into the cache, after checking every file."""
    from sparsegen.artifact.archive import import_archive
    from sparsegen.artifact.remote_fleet import trust_of

    done = import_archive(file, trust=trust_of(trust))
    for name in done.added:
        print(f"added {name}")
    print(f"{len(done.added)} added, {len(done.present)} already here")


def push(
    url: Url,
    patterns: Annotated[
        list[str] | None,
        typer.Argument(metavar="PATTERN", help="Names or files; default: all in the cache."),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME[,NAME]", help="Only these GPU types.")
    ] = None,
    sign: Sign = None,
    as_json: Json = False,
) -> None:
    """Send artifacts to a store; what is better tuned there is kept."""
    from sparsegen.artifact.remote_fleet import push as push_all

    types = None if gpu is None else gpu.split(",")
    with progress("push") as report:
        done = push_all(url, patterns or None, gpus=types, sign=sign, progress=report)
    emit([result_dict(r) for r in done.results], as_json, str(done))
    if not done.ok:
        raise typer.Exit(1)


def pull(
    url: Url,
    gpu: Gpus,
    patterns: Patterns = None,
    problems: Problems = None,
    trust: TrustKey = None,
    as_json: Json = False,
) -> None:
    """Take what patterns need from a store, after checking every file; builds nothing."""
    from sparsegen.artifact.problems import read_problems
    from sparsegen.artifact.remote_fleet import pull as pull_all

    types, names = gpu.split(","), patterns or None
    asked = None if problems is None else read_problems(problems)
    with progress("pull") as report:
        done = pull_all(url, types, names, problems=asked, trust=trust, progress=report)
    emit([result_dict(r) for r in done.results], as_json, str(done))
    if not done.ok:
        raise typer.Exit(1)


def keygen(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="The private key to write; FILE.pub is the other."),
    ],
) -> None:
    """Make a pair of keys (ed25519) that sign artifacts and check them."""
    from sparsegen.artifact.signing import make_keys

    public, name = make_keys(file)
    print(f"private key: {file}, for those who push and export; keep it secret")
    print(f"public key: {public}, for those who pull and import ({name})")


def entry_dict(entry: object) -> dict[str, object]:
    """Plain values of an ``EntryInfo``."""
    from dataclasses import asdict

    return {n: str(v) if isinstance(v, Path) else v for n, v in asdict(entry).items()}  # type: ignore[call-overload]
