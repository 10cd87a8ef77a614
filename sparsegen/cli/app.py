"""The ``sparsegen`` command: which words there are, and how an error reaches a person."""

from __future__ import annotations

import sys

import typer

from sparsegen.cli import bench, build, look, notices, report, store, streams, tuning
from sparsegen.errors import SparsegenError

app = typer.Typer(
    name="sparsegen",
    help="Attention patterns in YAML become specialised, tuned Triton kernels.",
    rich_markup_mode=None,  # rich would double the time of --help
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
)
app.callback()(look.options)
app.command("show")(look.show)
app.command("patterns")(look.patterns)
app.command("schema")(look.schema)
app.command("doctor")(look.doctor)
app.command("compile")(build.compile)
app.command("tune")(tuning.tune)
app.command("bench")(bench.bench)
app.command("warm")(build.warm)
app.command("check")(build.check)
app.command("report")(report.report)

_cache = typer.Typer(help="Look at and move what was built.", no_args_is_help=True)
_cache.command("ls")(store.ls)
_cache.command("prune")(store.prune)
_cache.command("export")(store.export)
_cache.command("import")(store.import_)
_cache.command("push")(store.push)
_cache.command("pull")(store.pull)
_cache.command("keygen")(store.keygen)
app.add_typer(_cache, name="cache")


def main() -> None:
    """Run the command line: exit code 0 done, 1 a ``SparsegenError`` (its message on stderr), 2 usage."""
    with streams.steady():
        try:
            with notices.shown():
                app()
        except SparsegenError as error:
            print(streams.shortened(f"{type(error).__name__}: {error}"), file=sys.stderr)
            sys.exit(1)
