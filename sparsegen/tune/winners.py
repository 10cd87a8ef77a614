"""From a pattern to a stored winner: seeds from ``tuned/``, one tuning, a row and a line of history."""

from __future__ import annotations

import dataclasses
import datetime
import re
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsegen.errors import TuneError
from sparsegen.paths import data_dir
from sparsegen.tune import history, recording, store
from sparsegen.tune.target import KernelTarget
from sparsegen.tune.tuner import QUICK, Budget, TuneResult, tune

if TYPE_CHECKING:
    from sparsegen.spec.gpu import Gpu
    from sparsegen.spec.pattern import Pattern
    from sparsegen.spec.problem import Problem


def tune_pattern(
    pattern: Pattern,
    problem: Problem,
    gpu: Gpu,
    *,
    template: str = "forward",
    lengths: tuple[int, int] | None = None,
    budget: Budget = QUICK,
    storage: str | Path | None = None,
    tuned: Path | None = None,
    **options: Any,
) -> tuple[KernelTarget, TuneResult]:
    """Tune ``template`` for one pattern and problem on the GPU here, starting from the shipped winner.

    Args:
        lengths: (q_len, kv_len) to time at; default the problem's first.
        budget: ``QUICK``, or ``full(seconds)``.
        storage: path of a SQLite file or a database URL; the same one again goes on where it was.
        tuned: the folder to take the seed from; default the one that comes with the package.
        options: further keywords of ``tune`` (jobs, seed, progress, folder, ...).

    Raises:
        TuneError, ToolchainError, UnsupportedError: see ``tune`` and ``KernelTarget.of``.
    """
    target = KernelTarget.of(pattern, problem, gpu, template=template, lengths=lengths)
    at = (target.q_len, target.kv_len)
    known, _ = store.lookup(
        pattern, problem, gpu, target.template, target.labels, lengths=at, root=tuned
    )
    seeds = [known, *target.starts]
    about = None if storage is None else about_of(target)
    result = tune(target, budget=budget, storage=storage, seeds=seeds, about=about, **options)
    return target, result


def about_of(target: KernelTarget) -> dict[str, Any]:
    """What a study says of itself: the file's line and the problem's line of a recording (``recording``)."""
    from sparsegen.tune.features import features_of

    template, versions = target.template, current_versions()
    origin = recording.Origin(
        target.gpu.name, template.name, template.digest, versions, _now(), synthetic=False
    )
    features = features_of(
        target.pattern, target.problem, target.q_len, target.kv_len, template.name
    )
    described = recording.described(target, features, {})
    return {"origin": dataclasses.asdict(origin), "problem": described.as_dict()}


def keep(target: KernelTarget, result: TuneResult, root: Path | None = None) -> Path:
    """Write the winner to ``tuned/`` and add a line to ``history.csv``; returns the file of the row.

    Raises:
        TuneError: nothing was measured, so there is nothing to keep.
    """
    return keep_row(target.gpu, *row_of(target, result), root)


def keep_row(gpu: Gpu, row: store.Row, line: history.Entry, root: Path | None = None) -> Path:
    """Write a row to ``tuned/`` and its line to ``history.csv``; returns the file of the row."""
    root = root or data_dir("tuned")
    path = store.write(root, gpu, row)
    history.append(root / "history.csv", [line])
    return path


def row_of(target: KernelTarget, result: TuneResult) -> tuple[store.Row, history.Entry]:
    """The winner as a row of ``tuned/`` and as a line of history, with the versions that are here.

    Raises:
        TuneError: nothing was measured, so there is nothing to keep.
    """
    if result.time_us is None or result.baseline_us is None or result.noise is None:
        raise TuneError(f"nothing to keep for {target.pattern.name}: {result.how}")
    versions = current_versions()
    row = store.Row(
        pattern=target.pattern.name,
        pattern_digest=target.pattern.digest(),
        template=target.template.name,
        template_digest=target.template.digest,
        problem=store.Measured.of(target.problem, target.q_len, target.kv_len),
        config=result.config.as_dict(),
        time_us=round(result.time_us, 3),
        baseline_us=round(result.baseline_us, 3),
        noise=round(result.noise, 5),
        trials=result.complete,
        versions=versions,
        date=_now(),
    )
    return row, _line(row, target, result.noise, versions)


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def current_versions() -> dict[str, str]:
    """Versions that a time depends on: driver, sparsegen, torch, triton; "absent" for what is not here."""
    found = {name: _version(name) for name in ("sparsegen", "torch", "triton")}
    return {"driver": driver_version() or "absent", **found}


def driver_version() -> str | None:
    """The NVIDIA driver's release, or None."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        text = ""
    found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", text)
    if found:
        return found[1]
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        run = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.split()[0] if run.stdout.split() else None


def _version(name: str) -> str:
    if name == "sparsegen":  # runs from a checkout too, where no package is installed
        from sparsegen import __version__

        return __version__
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def _line(
    row: store.Row, target: KernelTarget, noise: float, versions: Mapping[str, str]
) -> history.Entry:
    p = row.problem
    problem = (
        f"B{p.batch} H{p.heads}:{p.kv_heads} D{p.head_dim}:{p.value_dim} {p.dtype} "
        f"{p.q_len}x{p.kv_len}"
    )
    return history.Entry(
        date=row.date,
        commit=versions["sparsegen"],
        gpu=target.gpu.name,
        driver=versions["driver"],
        torch=versions["torch"],
        triton=versions["triton"],
        pattern=row.pattern,
        problem=problem,
        config=str(target.template.name)
        + ": "
        + " ".join(f"{n}={v}" for n, v in row.config.items()),
        median_us=row.time_us,
        spread_us=round(noise * row.baseline_us, 3),
        baseline="template default",
        baseline_us=row.baseline_us,
    )
