"""Many patterns for many GPU types: ``warm`` builds them, ``check`` proves that all are there without compiling.

Both go over the passes that the problem of a pattern names.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sparsegen.artifact.build import Builder, Progress, Request, ask, ensure
from sparsegen.artifact.gradients import BACKWARD, FORWARD, passes_of
from sparsegen.artifact.manifest import Decision
from sparsegen.artifact.problems import Changes, changed, words
from sparsegen.artifact.store import Store
from sparsegen.errors import ArtifactError, InputError, SparsegenError, UnsupportedError

if TYPE_CHECKING:
    from sparsegen.spec.gpu import Gpu
    from sparsegen.spec.pattern import Pattern
    from sparsegen.spec.problem import Problem

log = logging.getLogger(__name__)

# States of one pattern on one GPU type; the second line are the ones that make a report fail.
GOOD = ("hit", "built", "ok", "pushed", "pulled", "kept", "unsupported")
BAD = ("failed", "missing", "damaged", "refused", "outdated")


@dataclass(frozen=True)
class Result:
    """One pass of one pattern on one GPU type.

    state, of warm   ``hit`` (was stored), ``built``, ``unsupported`` (this version cannot compile it), ``failed``
    state, of check  ``ok``, ``missing``, ``damaged``, ``outdated`` (today's ``tuned/`` says otherwise), ``unsupported``,
                     ``failed`` (the pattern file has mistakes)
    state, of push   ``pushed``, ``kept`` (what lies there is as good), ``damaged``
    state, of pull   ``pulled``, ``hit`` (what is here is as good), ``missing``, ``refused``, ``unsupported``, ``failed``
    problem          which one, in words, where several were asked for
    detail           why; for a missing one the fields in which the nearest entry differs
    """

    pattern: str
    gpu: str
    state: str
    detail: str = ""
    path: Path | None = None
    problem: str = ""
    part: str = FORWARD  # or "backward": the kernels of gradients

    @property
    def name(self) -> str:
        """GPU type and pattern, the problem where several were asked for, the pass where it is not the forward one."""
        problem = f" [{self.problem}]" * bool(self.problem)
        return f"{self.gpu} {self.pattern}{problem}" + " gradients" * (self.part != FORWARD)


@dataclass(frozen=True)
class Report:
    """Results in the order of GPU types and patterns."""

    results: tuple[Result, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing failed, is missing, damaged or outdated."""
        return all(result.state in GOOD for result in self.results)

    def counts(self) -> dict[str, int]:
        """How many results there are of each state that occurs."""
        found = Counter(result.state for result in self.results)
        return {state: found[state] for state in (*GOOD, *BAD) if found[state]}

    def __str__(self) -> str:
        lines = [f"{r.name}: {r.state}" + f" ({r.detail})" * bool(r.detail) for r in self.results]
        total = ", ".join(f"{count} {state}" for state, count in self.counts().items())
        return "\n".join([*lines, total or "nothing to do"])


def warm(
    gpus: Sequence[str],
    patterns: Iterable[Pattern | str | Path] | None = None,
    *,
    tune: str = "off",
    problems: Sequence[Changes] | None = None,
    jobs: int | None = None,
    store: Store | None = None,
    builder: Builder | None = None,
    gradients: Builder | None = None,
    progress: Progress | None = None,
) -> Report:
    """Build every pattern for every GPU type; what is stored already is a hit, so an interrupted run goes on.

    Args:
        gpus: names or aliases of GPU types.
        patterns: patterns, files or shipped names; default: all shipped ones.
        problems: what to change in each pattern's problem, see ``problems.read_problems``; default: nothing.
        jobs: how many to build at a time, each by a compile process of its own (default: the machine's cores).
        builder, gradients: what builds the passes; default: Triton.
    """
    from sparsegen.launch.pool import WAKE_S, stop_compiling

    store = Store() if store is None else store
    _ = store.places  # a mistake in stores.yaml is said once, and not of every pattern
    made_by = builders(builder, gradients, 1)
    items = list(work(gpus, patterns, problems))
    workers = max(1, min(len(items), jobs or os.cpu_count() or 1))
    results: dict[int, Result] = {}
    with ThreadPoolExecutor(workers) as threads:
        waiting: dict[Future[Result], int] = {
            threads.submit(_build_one, item, tune, store, made_by[item.part]): number
            for number, item in enumerate(items)
        }
        try:
            while waiting:
                done, _ = wait(waiting, WAKE_S, FIRST_COMPLETED)
                for future in done:
                    result = results[waiting.pop(future)] = future.result()
                    if progress is not None:
                        progress(len(results), len(items), f"{result.name}: {result.state}")
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            while any(future.running() for future in waiting):
                stop_compiling()
                time.sleep(0.1)
            raise
    return Report(tuple(results[number] for number in range(len(items))))


def check(
    gpus: Sequence[str],
    patterns: Iterable[Pattern | str | Path] | None = None,
    *,
    problems: Sequence[Changes] | None = None,
    store: Store | None = None,
    builder: Builder | None = None,
    gradients: Builder | None = None,
    progress: Progress | None = None,
) -> Report:
    """Prove that the store holds every pattern for every GPU type: keys, versions and digests.  Compiles nothing.

    Arguments as for ``warm``.
    """
    store = Store() if store is None else store
    _ = store.places  # a mistake in stores.yaml is said once, and not of every pattern
    made_by = builders(builder, gradients, None)
    items = list(work(gpus, patterns, problems))
    results = []
    for item in items:
        results.append(_check_one(item, store, made_by[item.part]))
        if progress is not None:
            progress(len(results), len(items), f"{results[-1].name}: {results[-1].state}")
    return Report(tuple(results))


def builders(
    forward: Builder | None, backward: Builder | None, jobs: int | None
) -> dict[str, Builder]:
    """What builds each pass."""
    from sparsegen.artifact.compiler import Compiler
    from sparsegen.artifact.gradients import GradientCompiler

    return {FORWARD: forward or Compiler(jobs=jobs), BACKWARD: backward or GradientCompiler(jobs)}


@dataclass(frozen=True)
class Item:
    """One pass of one pattern for one problem and GPU type; ``fault`` where pattern or problem are wrong.

    ``problem`` is None for the pattern's own; ``words`` say which it is where several were asked for.
    """

    name: str
    pattern: Pattern | None
    gpu: Gpu
    part: str = FORWARD
    fault: str = ""
    problem: Problem | None = None
    words: str = ""

    def result(self, state: str, detail: str = "", path: Path | None = None) -> Result:
        """What became of it."""
        return Result(self.name, self.gpu.name, state, detail, path, self.words, self.part)


def work(
    gpus: Sequence[str],
    patterns: Iterable[Pattern | str | Path] | None,
    problems: Sequence[Changes] | None = None,
) -> Iterator[Item]:
    """Every pattern (default: all shipped ones) with every problem (default: its own) for every GPU type."""
    from sparsegen.spec.gpu import find_gpu
    from sparsegen.spec.shipped import shipped_patterns

    named = list(shipped_patterns().values() if patterns is None else patterns)
    asked = [one for i, one in enumerate(named) if one not in named[:i]]  # named twice is once
    targets = list(dict.fromkeys(map(find_gpu, gpus)))  # an alias and its name are one
    for gpu in targets:
        for one in asked:
            item = _item(one, gpu)
            posed = [item] if problems is None else [_posed(item, c) for c in problems]
            for each in posed:
                yield from _passes(each)


def _posed(item: Item, changes: Changes) -> Item:
    """The item with its pattern's problem changed."""
    if item.pattern is None:
        return item
    try:
        return replace(item, problem=changed(item.pattern, changes), words=words(changes))
    except InputError as error:
        return replace(item, pattern=None, fault=str(error), words=words(changes))


def _passes(item: Item) -> Iterator[Item]:
    """The item for every pass that its problem names."""
    if item.pattern is None:
        yield item
        return
    problem = ask(item.pattern, item.problem, item.gpu).problem
    yield from (replace(item, part=part) for part in passes_of(None, problem))


def _item(one: Pattern | str | Path, gpu: Gpu) -> Item:
    from sparsegen.spec.pattern import Pattern

    try:
        pattern = one if isinstance(one, Pattern) else Pattern.from_yaml(one)
    except SparsegenError as error:
        return Item(Path(str(one)).stem, None, gpu, fault=str(error))
    return Item(pattern.name, pattern, gpu)


def _build_one(item: Item, tune: str, store: Store, builder: Builder) -> Result:
    if item.pattern is None:
        return item.result("failed", item.fault)
    counted = _Counted(builder, store.root)
    try:
        artifact = ensure(
            item.pattern, item.problem, item.gpu, tune=tune, store=store, builder=counted
        )
    except UnsupportedError as error:
        return item.result("unsupported", str(error))
    except SparsegenError as error:
        return item.result("failed", str(error))
    if not artifact.path.is_relative_to(store.root):
        return item.result("failed", f"{store.root} cannot be written")
    state = "built" if counted.built else "hit"
    chosen = artifact.manifest.decision.chosen_by
    return item.result(state, chosen, artifact.path)


class _Counted:
    """A builder that knows whether it was asked to build, and builds below ``root`` alone: what goes elsewhere is lost."""

    def __init__(self, builder: Builder, root: Path):
        self.inner, self.root, self.built = builder, root, False
        self.key, self.versions, self.is_current = builder.key, builder.versions, builder.is_current

    def build(self, request: Request, directory: Path, progress: Progress | None) -> Decision:
        if not directory.is_relative_to(self.root):
            raise ArtifactError(f"{self.root} cannot be written")
        self.built = True
        return self.inner.build(request, directory, progress)


def _check_one(item: Item, store: Store, builder: Builder) -> Result:
    said = item.result
    if item.pattern is None:
        return said("failed", item.fault)
    request = ask(item.pattern, item.problem, item.gpu)
    try:
        key = builder.key(request)
        found, faults = store.find(key)
        if faults:
            return said("damaged", "; ".join(map(str, faults)))
        if found is None:
            return said("missing", store.explain_miss(key, item.name))
        if not builder.is_current(request, found):
            who = "tuned/ gives" if item.part == FORWARD else "this version chooses"
            return said("outdated", f"{who} another schedule or configuration today", found.path)
    except UnsupportedError as error:
        return said("unsupported", str(error))
    except SparsegenError as error:
        return said("failed", str(error))
    return said("ok", found.manifest.decision.chosen_by, found.path)
