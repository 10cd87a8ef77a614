"""Optuna studies as the history page shows them: how the best time fell from trial to trial.

SQLite files are read as they are and never written: the tuner may be at work on them, the folder may be read-only.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sparsegen.errors import InputError, TuneError
from sparsegen.tune.storage import Storage, address_of, open_storage
from sparsegen.tune.study import Trial, trial_of
from sparsegen.tune.tuner import quiet_optuna


@dataclass(frozen=True)
class Convergence:
    """One study.

    ``measured``: (trial number, µs) of every complete trial, in order.  ``outcomes``: how often each state or kind of
    failure occurred, most frequent first.  ``source``: file name or address, without a password.
    """

    name: str
    source: str
    measured: tuple[tuple[int, float], ...]
    outcomes: tuple[tuple[str, int], ...]
    best_config: str

    @property
    def trials(self) -> int:
        """All trials, whatever became of them."""
        return sum(count for _, count in self.outcomes)

    @property
    def best_so_far(self) -> list[tuple[int, float]]:
        """(trial number, best µs up to there) at every complete trial."""
        out: list[tuple[int, float]] = []
        for number, us in self.measured:
            out.append((number, min(us, out[-1][1]) if out else us))
        return out

    @property
    def near(self) -> int | None:
        """How many trials were complete when one within 3 % of the best was among them."""
        if not self.measured:
            return None
        limit = 1.03 * min(us for _, us in self.measured)
        return next(i for i, (_, us) in enumerate(self.measured, 1) if us <= limit)


def read_studies(where: str | Path | None) -> list[Convergence]:
    """The studies of a folder of SQLite files, of one file, or of a database URL, by source and name.

    ``None``: those of the cache, if there are any.

    Raises:
        InputError: there is no such folder or file.
        TuneError: a storage cannot be read.
    """
    if where is None:
        from sparsegen.artifact.store import default_root

        return _of_files(sorted((default_root() / "studies").glob("*.sqlite")))
    path = address_of(where)
    if not isinstance(path, Path):
        with quiet_optuna():
            return _of_storage(open_storage(str(where)), None)
    if path.is_dir():
        return _of_files(sorted(path.glob("*.sqlite")))
    if path.is_file():
        if not path.stat().st_size:  # SQLite takes it for a database without tables
            raise TuneError(f"cannot read the study {path}: it is empty")
        return _of_files([path])
    raise InputError(f"--studies {str(where)!r} is no folder, no SQLite file and no database URL")


def _of_files(paths: Sequence[Path]) -> list[Convergence]:
    found = []
    for path in paths:
        with tempfile.TemporaryDirectory(prefix="sparsegen-report-") as folder, quiet_optuna():
            copy = Path(folder) / "copy.sqlite"
            _copy(path, copy)
            found += _of_storage(open_storage(copy), path.name)
    return found


def _copy(path: Path, copy: Path) -> None:
    """One consistent state of a database that others may be writing."""
    # Without a write-ahead log and without a place to put one, SQLite opens a file only as never changing.
    alone = not os.access(path.parent, os.W_OK) and not Path(f"{path}-wal").exists()
    address = f"{path.absolute().as_uri()}?mode=ro" + "&immutable=1" * alone
    try:
        with (
            contextlib.closing(sqlite3.connect(address, uri=True, timeout=15)) as source,
            contextlib.closing(sqlite3.connect(copy)) as target,
        ):
            source.backup(target)
    except sqlite3.Error as error:
        raise TuneError(f"cannot read the study {path}: {error}") from error


def _of_storage(storage: Storage, source: str | None) -> list[Convergence]:
    found = []
    try:
        for study in storage.patiently(storage.backend.get_all_studies):
            if len(study.directions) > 1:
                raise TuneError(
                    f"the study {study.study_name!r} in {source or storage.where} has several objectives: "
                    "it is not the tuner's; name a storage that holds the tuner's studies alone"
                )
            frozen = storage.backend.get_all_trials(study._study_id, deepcopy=False)
            trials = [trial_of(one) for one in frozen]
            found.append(convergence(study.study_name, source or storage.where, trials))
    finally:
        storage.backend.remove_session()
        storage.close()
    return sorted(found, key=lambda c: (c.source, c.name))


def convergence(name: str, source: str, trials: Sequence[Trial]) -> Convergence:
    """What the page says of one study."""
    complete = [t for t in trials if t.state == "complete" and t.time_us is not None]
    outcomes = Counter(t.kind or t.state for t in trials)
    best = min(complete, key=lambda t: (t.time_us or 0.0, t.number), default=None)
    return Convergence(
        name,
        source,
        tuple((t.number, float(t.time_us or 0.0)) for t in complete),
        tuple(sorted(outcomes.items(), key=lambda kind: (-kind[1], kind[0]))),
        str(best.config) if best else "",
    )
