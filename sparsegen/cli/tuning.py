"""``sparsegen tune``: measure here or over a cluster, or find few configurations in what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from sparsegen.cli.build import Deterministic, Jobs, Problems
from sparsegen.cli.look import Json
from sparsegen.cli.output import emit, progress, table


def tune(
    patterns: Annotated[
        list[str] | None,
        typer.Argument(metavar="PATTERN", help="Files or shipped names."),
    ] = None,
    storage: Annotated[
        str | None, typer.Option(help="SQLite file or database URL of the study.")
    ] = None,
    budget: Annotated[
        float | None, typer.Option(min=1, help="Seconds a pattern; default: about two minutes.")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Write the winners, or the rule of --cover, to tuned/.")
    ] = False,
    jobs: Jobs = None,
    problems: Problems = None,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Spread over the Ray cluster there, by type of GPU."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME]", help="GPU types, with --ray or --cover; default: all there are."
        ),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Take times from a recording instead of a GPU: a trial run."
        ),
    ] = None,
    cover: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|URL",
            help="Measure nothing: find few configurations in a recording or in studies.",
        ),
    ] = None,
    limit: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="With --cover: what may be lost; default 0.03."),
    ] = None,
    passes: Annotated[
        str,
        typer.Option(
            metavar="PASS[,PASS]",
            help="forward, backward or both; the gradient kernels are tuned apart.",
        ),
    ] = "forward",
    deterministic: Deterministic = True,
    as_json: Json = False,
) -> None:
    """Measure configurations on the GPU here, or on those of a cluster.

    The same command again goes on where it was: nothing is measured twice.
    """
    _refuse(patterns, cover, ray, gpu, keep, replay, limit, problems)
    measured = {"--storage": storage, "--budget": budget, "--jobs": jobs}
    _refuse_unread(cover, passes, deterministic, measured)
    if cover is not None:
        from sparsegen.report.cover import cover_of

        page = cover_of(cover, limit=limit, gpu=gpu, keep=keep)
        emit(page.as_dict(), as_json, page.text())
        return
    from sparsegen.report.tuning import parts_of

    parts = parts_of(passes.split(","), deterministic)
    if replay is not None and parts != (None,):
        raise typer.BadParameter("--replay records the forward kernel: no --passes with it")
    common = {
        "storage": storage,
        "budget_s": budget,
        "keep": keep,
        "jobs": jobs,
        "replay": _recording(replay),
    }
    names = patterns or []
    if ray is None:
        rows = _here(names, problems, parts, common)
    else:
        rows = _there(names, ray, problems, gpu, common | {"parts": parts})
    emit(rows, as_json, _text(rows))
    if any("failed" in row for row in rows):
        raise typer.Exit(1)


def _here(
    names: list[str], problems: Path | None, parts: tuple[str | None, ...], common: dict[str, Any]
) -> list[dict[str, Any]]:
    from sparsegen.artifact.problems import changed, read_problems
    from sparsegen.report.tuning import tune_one
    from sparsegen.spec.pattern import Pattern

    asked = None if problems is None else read_problems(problems)
    # all of them before the first is measured: a mistake in the last one is not said after minutes
    posed = [
        (name, None if asked is None else changed(spec, changes))
        for name, spec in [(name, Pattern.from_yaml(name)) for name in names]
        for changes in asked or ({},)
    ]
    return [
        tune_one(name, problem=problem, part=part, **common)
        for name, problem in posed
        for part in parts
    ]


def _there(
    names: list[str], address: str, problems: Path | None, gpu: str | None, common: dict[str, Any]
) -> list[dict[str, Any]]:
    from sparsegen.artifact.problems import read_problems
    from sparsegen.report.tuning import tune_many

    asked = None if problems is None else read_problems(problems)
    gpus = None if gpu is None else gpu.split(",")
    with progress("tune") as report:
        return tune_many(names, address, gpus=gpus, problems=asked, progress=report, **common)


def _recording(file: Path | None) -> Any:
    from sparsegen.tune import recording

    return None if file is None else recording.read(file)


def _text(rows: list[dict[str, Any]]) -> str:
    header = ("pattern", "kernel", "gpu", "best_us", "default_us", "measured", "config", "how")
    good = [row for row in rows if "failed" not in row]
    lines = [table(header, [[row[name] for name in header] for row in good])]
    lines += [f"{row['pattern']}: schedule: {row['schedule']}" for row in good]
    lines += [
        f"{row['pattern']} on {row['gpu']}: failed: {row['failed']}"
        for row in rows
        if "failed" in row
    ]
    return "\n".join(lines)


def _refuse_unread(
    cover: str | None, passes: str, deterministic: bool, measured: Mapping[str, object]
) -> None:
    """Options that the rest of the command line leaves nothing to do are a usage error, never dropped."""
    given = [name for name, value in measured.items() if value is not None]
    given += ["--passes"] if passes != "forward" else []
    given += [] if deterministic else ["--no-deterministic"]
    if cover is not None and given:
        raise typer.BadParameter(f"--cover measures nothing: no {', '.join(given)}")
    if not deterministic and "backward" not in passes.split(","):
        raise typer.BadParameter("--no-deterministic is about gradients: --passes backward")


def _refuse(
    patterns: list[str] | None,
    cover: str | None,
    ray: str | None,
    gpu: str | None,
    keep: bool,
    replay: Path | None,
    limit: float | None,
    problems: Path | None,
) -> None:
    """Options that do not go together are a usage error, never dropped."""
    if cover is not None and (patterns or ray or replay or problems):
        raise typer.BadParameter(
            "--cover measures nothing: no PATTERN, --ray, --replay, --problems"
        )
    if cover is None and not patterns:
        raise typer.BadParameter("name a PATTERN, or a recording with --cover")
    if cover is None and limit is not None:
        raise typer.BadParameter("--limit goes with --cover")
    if gpu is not None and ray is None and cover is None:
        raise typer.BadParameter("--gpu goes with --ray or --cover: else the GPU here is measured")
    if replay is not None and keep:
        raise typer.BadParameter("a --replay measures nothing that could be kept")
