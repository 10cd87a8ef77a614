"""``sparsegen bench``: our kernels beside their peers, and how far from the roofline."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from sparsegen.cli.build import Patterns
from sparsegen.cli.look import Json
from sparsegen.cli.output import emit, progress

_LENGTH = re.compile(r"0*[1-9][0-9]{0,18}(x0*[1-9][0-9]{0,18})?")


def bench(
    patterns: Patterns = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N]",
            help="Lengths, each N or QxK; default: those of each pattern's problem.",
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="PEER[,PEER]",
            help="Some of flex, flex-max, sdpa, fa4, flashinfer, or none; default: all that are here.",
        ),
    ] = None,
    tune: Annotated[
        Literal["off", "quick"],
        typer.Option(help="Our configuration: the best on record, or measured for two minutes."),
    ] = "off",
    rounds: Annotated[
        int, typer.Option("--rounds", "--repeat", min=1, help="Turns of every contender.")
    ] = 5,
    idle: Annotated[float, typer.Option(min=0, help="Seconds of rest before each turn.")] = 0.7,
    csv: Annotated[Path | None, typer.Option(help="A line a pattern, length and peer.")] = None,
    png: Annotated[
        Path | None, typer.Option(help="Draw roofline and times into this file.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="All results as JSON, written anew after every case.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure our kernels beside their peers.

    Needs a GPU. Times, memory, host time, and how much of the measured roofline each reaches.
    """
    from sparsegen.bench.output import Files, failed, turns_of
    from sparsegen.bench.run import bench as measure
    from sparsegen.bench.table import text

    asked = None if against is None else against.split(",")
    pairs = None if lengths is None else pairs_of(lengths)
    turns, files = turns_of(rounds, idle), Files(csv, png, out)
    with progress("bench") as report:
        done = measure(
            patterns, pairs, against=asked, tune=tune, turns=turns, progress=report, keep=files.keep
        )
    emit(done.as_dict(), as_json, text(done))
    if failed(done):
        raise typer.Exit(1)


def pairs_of(text: str) -> list[tuple[int, int]]:
    """(q_len, kv_len) of each entry of ``--lengths``; a usage error for anything but N and QxK."""
    from sparsegen.spec.fields import LIMIT

    entries = text.lower().split(",")
    wanted = f"--lengths must be N or QxK, several with commas, numbers from 1 to {LIMIT}"
    if not all(_LENGTH.fullmatch(entry) for entry in entries):
        raise typer.BadParameter(f"{wanted}; got {text!r}")
    pairs = [(int(e.split("x")[0]), int(e.split("x")[-1])) for e in entries]
    if any(max(pair) > LIMIT for pair in pairs):
        raise typer.BadParameter(f"{wanted}; got {text!r}")
    return pairs
