"""``sparsegen report``: everything that was measured, on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparsegen.cli.look import Json
from sparsegen.cli.output import emit, progress


def report(
    out: Annotated[Path, typer.Option(metavar="FILE.html", help="The page to write.")] = Path(
        "sparsegen-report.html"
    ),
    studies: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER|URL",
            help="Where the studies are: a folder of SQLite files, or a database URL; default: the cache.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write one HTML page of all measurements.

    Winners, speed over time, convergence of the studies, pictures of the patterns; needs no GPU, and no network to read.
    """
    from sparsegen.report.history_page import report as write

    with progress("report") as said:
        page = write(out, studies=studies, progress=said)
    emit(page.as_dict(), as_json, page.text())
