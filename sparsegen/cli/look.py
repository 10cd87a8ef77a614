"""Commands that only look: ``show``, ``patterns``, ``schema``, ``doctor``, ``--version``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from sparsegen.cli.output import as_tile, emit, lengths, table

PatternName = Annotated[
    str, typer.Argument(metavar="PATTERN", help="A pattern file, or the name of a shipped one.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON value, for machines.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from sparsegen import __version__

        print(f"sparsegen {__version__}")
        raise typer.Exit


def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    """Attention patterns in YAML become specialised, tuned Triton kernels."""


def show(
    pattern: PatternName,
    length: Annotated[
        str, typer.Option(metavar="N[,M]", help="Queries and keys, or both by one number.")
    ],
    kv_length: Annotated[
        int | None, typer.Option(min=1, help="Keys; the same as N,M in --length.")
    ] = None,
    tile: Annotated[
        str, typer.Option(metavar="MxN", help="Tile to choose the schedule for, and to count at.")
    ] = "128x64",
    runtime: Annotated[
        Path | None, typer.Option(help="YAML or JSON with the data of run-time nodes.")
    ] = None,
    head: Annotated[int, typer.Option(min=0, help="Head to draw and count.")] = 0,
    explain: Annotated[
        bool, typer.Option("--explain", help="Forms, candidate schedules and notes too.")
    ] = False,
    png: Annotated[Path | None, typer.Option(help="Draw the pattern into this file.")] = None,
    as_json: Json = False,
) -> None:
    """Draw a pattern and count its cells.

    Picture, density, branches and tile efficiency; needs no GPU and no compiler.
    """
    from sparsegen.report.show import look

    seen = look(pattern, lengths(length, kv_length), as_tile(tile), runtime=runtime, head=head)
    if png is not None:
        seen.save_png(png)
    emit(seen.as_dict(), as_json, seen.text(explain=explain))


def patterns(as_json: Json = False) -> None:
    """List the shipped patterns."""
    from sparsegen.report.shipped import shipped

    rows = shipped()
    listing = table(("name", "summary"), [(r["name"], r["summary"]) for r in rows])
    emit(rows, as_json, listing)


def schema() -> None:
    """Print the JSON Schema of pattern files."""
    from sparsegen.spec.schema import json_schema

    print(json.dumps(json_schema(), indent=2))


def doctor(as_json: Json = False) -> None:
    """Say what is here and what is missing.

    GPU, versions, cache, compilers, and what to do about each lack.
    """
    from dataclasses import asdict

    from sparsegen.artifact.doctor import diagnose

    findings = diagnose()
    rows = [(f.name, f.state, f.found, f.advice) for f in findings]
    emit([asdict(f) for f in findings], as_json, table(("what", "state", "found", "advice"), rows))
