"""``sparsegen cache``: list, prune, export and import what was built."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from sparsegen.cli.look import Json
from sparsegen.cli.output import age, emit, size, table


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
        float | None, typer.Option(min=0, help="Remove what was made more than DAYS ago.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="Only artifacts for this GPU type.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all artifacts.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: Json = False,
) -> None:
    """Remove artifacts; damaged and replaced ones always go."""
    from sparsegen.artifact.cache import prune as prune_store
    from sparsegen.spec.gpu import find_gpu

    gone = prune_store(
        older_than=None if days is None else timedelta(days=days),
        gpu=None if gpu is None else find_gpu(gpu).name,
        everything=everything,
        dry_run=dry_run,
    )
    said = "would remove" if dry_run else "removed"
    text = "\n".join([f"{said} {e.path.name}" for e in gone.entries])
    total = f"{said} {len(gone.entries)} artifacts, {size(gone.size_bytes)}"
    emit([entry_dict(e) for e in gone.entries], as_json, f"{text}\n{total}".strip())


def export(
    file: Annotated[Path, typer.Argument(help="The archive to write (.tar.gz).")],
    gpu: Annotated[str | None, typer.Option(help="Only artifacts for this GPU type.")] = None,
) -> None:
    """Write artifacts into one archive, for a machine without a compiler."""
    from sparsegen.artifact.archive import export_archive
    from sparsegen.artifact.cache import list_entries
    from sparsegen.artifact.entry import read_entry
    from sparsegen.spec.gpu import find_gpu

    wanted = None if gpu is None else find_gpu(gpu).name
    good = [e for e in list_entries() if not e.fault and not e.superseded]
    chosen = [read_entry(e.path) for e in good if wanted in (None, e.gpu)]
    names = export_archive(file, chosen)
    print("\n".join([*names, f"{len(names)} artifacts in {file}"]))


def import_(file: Annotated[Path, typer.Argument(help="An archive made by export.")]) -> None:
    """Take the artifacts of an archive into the cache, after checking every file."""
    from sparsegen.artifact.archive import import_archive

    done = import_archive(file)
    for name in done.added:
        print(f"added {name}")
    print(f"{len(done.added)} added, {len(done.present)} already here")


def entry_dict(entry: object) -> dict[str, object]:
    """Plain values of an ``EntryInfo``."""
    from dataclasses import asdict

    return {n: str(v) if isinstance(v, Path) else v for n, v in asdict(entry).items()}  # type: ignore[call-overload]
