"""Commands that build and measure: ``compile``, ``tune``, ``warm``, ``check``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from sparsegen.cli.look import Json, PatternName
from sparsegen.cli.output import emit, progress

Level = Literal["off", "quick", "full"]
Jobs = Annotated[
    int | None, typer.Option(min=1, help="Parallel compile processes; default: the cores.")
]
Gpus = Annotated[
    str, typer.Option("--gpu", metavar="NAME[,NAME]", help="GPU types, e.g. h200,a100.")
]
Patterns = Annotated[
    list[str] | None,
    typer.Argument(metavar="PATTERN", help="Files or shipped names; default: all shipped."),
]
Problems = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="YAML list of what to change in each pattern's problem; default: build it as stated.",
    ),
]
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic/--no-deterministic",
        help="Gradients the same to the bit from run to run; without it a fused kernel may be faster (sm_90).",
    ),
]
StoreUrl = Annotated[
    str | None,
    typer.Option("--store", metavar="URL", help="Ask this store before building."),
]
Push = Annotated[bool, typer.Option("--push", help="Send what is built to the store of --store.")]


def compile(
    pattern: PatternName,
    gpu: Annotated[
        str | None, typer.Option(help="GPU type, e.g. h200; default: the one here.")
    ] = None,
    tune: Annotated[
        Level | None,
        typer.Option(
            help="Measure: not, two minutes, --budget. Default: quick here, off for a GPU elsewhere."
        ),
    ] = None,
    budget: Annotated[
        float | None, typer.Option(min=1, help="Seconds for --tune full; default: 900.")
    ] = None,
    passes: Annotated[
        str | None,
        typer.Option(
            metavar="PASS[,PASS]",
            help="Some of forward, backward; default: those that the pattern's problem names.",
        ),
    ] = None,
    deterministic: Deterministic = True,
    workspace: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="BYTES",
            help="Gradients for calls that may take so many bytes for dS.",
        ),
    ] = None,
    jobs: Jobs = None,
    store: StoreUrl = None,
    push: Push = False,
    as_json: Json = False,
) -> None:
    """Build the artifacts of a pattern: of its forward pass, and of its gradients where they are asked for.

    For a GPU type that is not here it cross-compiles. What is in the cache already is not built again.
    """
    from sparsegen.artifact.store import Store
    from sparsegen.report.built import build

    asked = None if passes is None else passes.split(",")
    if workspace is not None and not deterministic:
        raise typer.BadParameter("--workspace and --no-deterministic do not go together")
    if budget is not None and tune != "full":
        raise typer.BadParameter("--budget goes with --tune full")
    place = Store(remote=store, push=push)
    options = {"tune": tune, "budget_s": budget or 900.0, "passes": asked, "store": place}
    options |= {"jobs": jobs, "deterministic": deterministic, "stored": workspace is not None}
    with progress(f"compile {pattern}") as report:
        built = build(pattern, gpu=gpu, progress=report, **options)  # type: ignore[arg-type]
    emit(built.as_dict(), as_json, built.text())


def warm(
    gpu: Gpus,
    patterns: Patterns = None,
    problems: Problems = None,
    jobs: Jobs = None,
    store: StoreUrl = None,
    push: Push = False,
    as_json: Json = False,
) -> None:
    """Fill the cache for GPU types that need not be here."""
    from sparsegen.artifact.fleet import warm as warm_fleet
    from sparsegen.artifact.problems import read_problems
    from sparsegen.artifact.store import Store

    place, names = Store(remote=store, push=push), patterns or None
    asked = None if problems is None else read_problems(problems)
    with progress("warm") as report:
        done = warm_fleet(
            gpu.split(","), names, problems=asked, jobs=jobs, store=place, progress=report
        )
    emit([result_dict(r) for r in done.results], as_json, str(done))
    if not done.ok:
        raise typer.Exit(1)


def check(
    gpu: Gpus, patterns: Patterns = None, problems: Problems = None, as_json: Json = False
) -> None:
    """Prove that the cache is complete; compiles nothing.

    Rows of tuned/ that these patterns take and that were measured for another version of a pattern or template are
    faults too.
    """
    from sparsegen.artifact.fleet import check as check_fleet
    from sparsegen.artifact.problems import read_problems
    from sparsegen.report.tuning import stale_rows

    gpus, names = gpu.split(","), patterns or None
    asked = None if problems is None else read_problems(problems)
    with progress("check") as report:
        done = check_fleet(gpus, names, problems=asked, progress=report)
    stale = stale_rows(gpus, names)
    found = {"results": [result_dict(r) for r in done.results], "stale_rows": stale}
    emit(found, as_json, "\n".join([str(done), *stale]))
    if stale or not done.ok:
        raise typer.Exit(1)


def result_dict(result: object) -> dict[str, object]:
    """Plain values of a ``fleet.Result``."""
    from dataclasses import asdict

    plain = asdict(result)  # type: ignore[call-overload]
    return {n: str(v) if isinstance(v, Path) else v for n, v in plain.items()}
