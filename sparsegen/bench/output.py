"""Where the results of a benchmark go: files, written anew after every case, and what is printed at the end."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from sparsegen.bench import table
from sparsegen.bench.results import Results
from sparsegen.report.files import check_writable, write
from sparsegen.tune.measure import PUBLISHED, Turns


@dataclass(frozen=True)
class Files:
    """Files asked for, each or None.  Made before anything is measured: a folder that is not there is an error then."""

    csv: Path | None = None
    png: Path | None = None
    out: Path | None = None

    def __post_init__(self) -> None:
        for path in (self.csv, self.png, self.out):
            if path is not None:
                check_writable(path)

    def keep(self, results: Results) -> None:
        """Write the results so far: a run that is cut short keeps what it has measured."""
        if self.csv is not None:
            write(self.csv, table.csv_text(results).encode())
        if self.out is not None:
            write(self.out, (json.dumps(results.as_dict(), indent=1) + "\n").encode())
        if self.png is not None and results.cases:
            from sparsegen.bench.plot import save_png

            save_png(results, self.png)


def failed(results: Results) -> bool:
    """Whether a run should end with exit code 1: a result of ours was wrong, or nothing was measured."""
    return not results.cases or any(x.wrong for x in results.left_out)


def turns_of(rounds: int, idle_s: float) -> Turns:
    """The published protocol with other rounds and rest."""
    return Turns(
        rounds, idle_s, PUBLISHED.warm_up_ms, PUBLISHED.measured_ms, give_up=PUBLISHED.give_up
    )
