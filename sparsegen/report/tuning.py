"""``sparsegen tune`` and the tuned rows that ``sparsegen check`` looks at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsegen.errors import InputError, SparsegenError, ToolchainError, TuneError
from sparsegen.paths import data_dir
from sparsegen.report import files

if TYPE_CHECKING:
    from sparsegen.artifact.problems import Changes
    from sparsegen.spec.gpu import Gpu
    from sparsegen.spec.pattern import Pattern
    from sparsegen.spec.problem import Problem
    from sparsegen.tune.job import Done, Job
    from sparsegen.tune.recording import Recording
    from sparsegen.tune.store import Measured, Row


def tune_one(
    pattern: str,
    *,
    storage: str | None = None,
    budget_s: float | None = None,
    keep: bool = False,
    jobs: int | None = None,
    problem: Problem | None = None,
    replay: Recording | None = None,
    part: str | None = None,
) -> dict[str, Any]:
    """Tune one pattern (a file or a shipped name) on the GPU here, and report the winner as plain values.

    ``part``: a gradient kernel, "queries" or "keys"; None: the forward one.

    ``storage``: default the study that ``compile --tune`` reads, so that nothing is measured twice.  ``budget_s``:
    seconds; ``None`` for the quick budget.  ``keep`` writes the winner to ``tuned/``.  ``problem``: default the pattern's.
    ``replay``: take times from a record instead of a GPU.
    """
    from sparsegen.spec.gpu import current_gpu, find_gpu
    from sparsegen.spec.pattern import Pattern
    from sparsegen.tune.job import run
    from sparsegen.tune.progress import shown

    spec = Pattern.from_yaml(pattern)
    gpu = current_gpu() if replay is None else find_gpu(replay.origin.gpu)
    if gpu is None:
        raise ToolchainError("tuning measures on a GPU and there is none here")
    if keep:
        files.check_kept(data_dir("tuned"))
    job = job_of(spec, problem, gpu, storage, budget_s, jobs, replay, part)
    with shown(f"tune {spec.name}{f' gradients of {part}' if part else ''}") as progress:
        done = run(_with_study(job), progress=progress)
    return _reported(done, keep)


def parts_of(passes: Sequence[str], deterministic: bool = True) -> tuple[str | None, ...]:
    """What is tuned for these passes, in order: None is the forward kernel, the backward pass has two of its own.

    Without ``deterministic`` the fused kernel is a third one.  InputError for a name that is no pass with kernels.
    """
    from sparsegen.artifact.gradients import BACKWARD, COMPILED, FORWARD
    from sparsegen.codegen.backward_planner import FUSED
    from sparsegen.codegen.gradient_template import PARTS

    odd = [name for name in passes if name not in COMPILED]
    if odd:
        raise InputError(f"passes must be some of {', '.join(COMPILED)}, got {odd[0]!r}")
    forward: tuple[str | None, ...] = (None,) if FORWARD in passes else ()
    gradients: tuple[str | None, ...] = PARTS if deterministic else (*PARTS, FUSED)
    return forward + (gradients if BACKWARD in passes else ())


def tune_many(
    patterns: Sequence[str],
    address: str,
    *,
    gpus: Sequence[str] | None = None,
    problems: Sequence[Changes] | None = None,
    storage: str | None = None,
    budget_s: float | None = None,
    keep: bool = False,
    jobs: int | None = None,
    replay: Recording | None = None,
    parts: Sequence[str | None] = (None,),
    progress: Callable[[int, int, str], None] = lambda done, total, message: None,
) -> list[dict[str, Any]]:
    """Tune patterns x problems x GPU types over the Ray cluster at ``address``; rows as of ``tune_one``.

    ``storage``: default a file in the cache of each node; with a database URL a job that is tried again goes on where it
    was.  ``gpus``: default all types of the cluster.  A job without a result has ``failed``: why.

    Raises:
        ToolchainError: no Ray, no cluster, or a type of GPU that it lacks.
    """
    from sparsegen.artifact.problems import changed
    from sparsegen.spec.gpu import all_gpus, find_gpu
    from sparsegen.spec.pattern import Pattern
    from sparsegen.tune.cluster import Failed, spread, types_of

    if keep:
        files.check_kept(data_dir("tuned"))
    specs = [Pattern.from_yaml(pattern) for pattern in patterns]
    types = types_of(address, all_gpus()) if gpus is None else [find_gpu(gpu) for gpu in gpus]
    wanted = [
        job_of(spec, changed(spec, changes), gpu, storage, budget_s, jobs, replay, part)
        for gpu in types
        for spec in specs
        for changes in problems or ({},)
        for part in parts
    ]
    outcomes = spread(wanted, run_there, address, progress)
    return [
        {**_named(o.job), "failed": o.reason} if isinstance(o, Failed) else _reported(o, keep)
        for o in outcomes
    ]


def job_of(
    spec: Pattern,
    problem: Problem | None,
    gpu: Gpu,
    storage: str | None,
    budget_s: float | None,
    jobs: int | None,
    replay: Recording | None,
    part: str | None = None,
) -> Job:
    """The job of a pattern at the first lengths of its problem."""
    from sparsegen import __version__
    from sparsegen.spec.problem import Problem
    from sparsegen.tune.job import Job
    from sparsegen.tune.replay import find
    from sparsegen.tune.store import Measured
    from sparsegen.tune.tuner import QUICK, full

    problem = problem or spec.problem or Problem()
    lengths = problem.lengths[0]
    budget = QUICK if budget_s is None else full(budget_s)
    source = None if replay is None else find(replay, spec.name, Measured.of(problem, *lengths))
    return Job(spec, problem, gpu, lengths, budget, storage, jobs, source, __version__, part)


def run_there(job: Job) -> Done:
    """What a node runs."""
    from sparsegen.tune.job import run

    return run(_with_study(job))


def _with_study(job: Job) -> Job:
    """Where no storage is named: the study in the cache of the machine that measures; of a replay nothing is kept."""
    if job.storage is not None or job.replay is not None:
        return job
    return replace(job, storage=str(_study(job.gpu.name)))


def _reported(done: Done, keep: bool) -> dict[str, Any]:
    """A finished job as plain values; its row and line of history written first, if they are to be kept."""
    from sparsegen.artifact.rendering import considered
    from sparsegen.codegen.backward_planner import QUERIES
    from sparsegen.report.built import among
    from sparsegen.tune import winners
    from sparsegen.tune.gradient_target import part_candidates
    from sparsegen.tune.schedules import labels_of, split, times_us

    job, result = done.job, done.result
    kept = None
    if keep:
        if done.row is None or done.line is None:
            raise TuneError(f"nothing to keep for {job.name}: {result.how}")
        kept = winners.keep_row(job.gpu, done.row, done.line)
    candidates = part_candidates(job.pattern, job.problem, job.part or QUERIES)
    labels = labels_of(candidates)
    label, config = split(result.config, labels)
    listed, _ = considered(candidates, times_us(result.trials, labels))
    return {
        **_named(job),
        "best_us": result.time_us,
        "default_us": result.baseline_us,
        "measured": result.complete,
        "schedule": among(label, listed),
        "config": str(config),
        "how": ("replay: " if job.replay else "") + result.how,
        "storage": result.storage,
        "kept": None if kept is None else str(kept),
    }


def _named(job: Job) -> dict[str, Any]:
    return {
        "pattern": job.pattern.name,
        "kernel": f"gradients of {job.part}" if job.part else "forward",
        "gpu": job.gpu.name,
        "problem": job.problem.to_data(),
    }


def stale_rows(
    gpus: Sequence[str], patterns: Sequence[Pattern | str | Path] | None = None
) -> list[str]:
    """Rows of ``tuned/`` that were measured for another version of a pattern or template, in words.

    ``patterns``: as ``check`` was asked for them, and only rows that these would take; default: all rows.  Rules of a GPU
    are for every pattern.
    """
    from sparsegen.codegen.gradient_template import tuned_templates
    from sparsegen.spec.gpu import find_gpu
    from sparsegen.spec.pattern import Pattern
    from sparsegen.spec.shipped import shipped_patterns
    from sparsegen.tune.store import errors

    asked = [] if patterns is None else _readable(patterns)
    shipped = {name: Pattern.from_yaml(p) for name, p in shipped_patterns().items()}
    known = {p.name: p for p in asked} | shipped
    digests = {name: pattern.digest() for name, pattern in known.items()}
    names, looks = {p.name for p in asked}, {p.digest() for p in asked}
    templates = {name: which.digest for name, which in tuned_templates().items()}
    root = data_dir("tuned")

    def labels(row: Row) -> tuple[str, ...]:
        return labels_of_row(known[row.pattern], row.problem, row.template)

    def taken(row: Row) -> bool:
        # as ``tune.store.lookup`` finds rows: by name, or by what the mask is
        return patterns is None or row.pattern in names or row.pattern_digest in looks

    types = dict.fromkeys(find_gpu(gpu).name for gpu in gpus)
    return [e for name in types for e in errors(root, name, digests, templates, labels, taken)]


def _readable(patterns: Sequence[Pattern | str | Path]) -> list[Pattern]:
    """Those without mistakes; ``check`` itself says what is wrong with the others."""
    from sparsegen.spec.pattern import Pattern

    found = []
    for one in patterns:
        try:
            found.append(one if isinstance(one, Pattern) else Pattern.from_yaml(one))
        except SparsegenError:
            continue
    return found


def labels_of_row(
    pattern: Pattern, measured: Measured, template: str = "forward"
) -> tuple[str, ...]:
    """The candidates that a tuning chose among, best prediction first: of the pattern's problem if it has these lengths.

    ``template``: the row's; gradients of keys have candidates of their own.
    """
    from sparsegen.codegen.backward_planner import QUERIES
    from sparsegen.codegen.gradient_template import part_of
    from sparsegen.spec.problem import Problem
    from sparsegen.tune.gradient_target import part_candidates
    from sparsegen.tune.schedules import labels_of

    problem = pattern.problem or Problem()
    at = (measured.q_len, measured.kv_len)
    if at not in problem.lengths:
        problem = replace(problem, lengths=(at,))
    return labels_of(part_candidates(pattern, problem, part_of(template) or QUERIES))


def _study(gpu: str) -> Path:
    from sparsegen.artifact.store import default_root

    folder = default_root() / "studies"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder / f"{gpu}.sqlite"
