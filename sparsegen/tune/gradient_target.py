"""The candidate source of one gradient kernel: of queries, of keys and values, or of all.  Each is a problem of its own."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsegen.codegen.backward_planner import FUSED, KEYS, OUTPUTS, QUERIES
from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.errors import UnsupportedError
from sparsegen.tune.candidates import Limits
from sparsegen.tune.check import sampled_rows, small_lengths
from sparsegen.tune.gradient_check import GradientCase, check_gradients, long_case, short_case
from sparsegen.tune.measure import CudaClock
from sparsegen.tune.schedules import candidates_of, joined
from sparsegen.tune.space import Space
from sparsegen.tune.target import KernelTarget, open_device, up_to

if TYPE_CHECKING:
    from sparsegen.codegen import KernelSource
    from sparsegen.codegen.backward import BackwardSource
    from sparsegen.codegen.gradient_template import GradientTemplate
    from sparsegen.launch.backward import Gradients
    from sparsegen.launch.backward_kernel import BackwardKernel
    from sparsegen.schedule.search import Candidate
    from sparsegen.schedule.transpose import Transposed
    from sparsegen.schedule.tree import Schedule
    from sparsegen.spec.gpu import Gpu
    from sparsegen.spec.pattern import Pattern
    from sparsegen.spec.problem import Problem

# gradients of a part
GIVES = {QUERIES: ("q",), KEYS: ("k", "v"), FUSED: ("q", "k", "v")}
SPILLED = 1024  # bytes a thread; sums of 128 columns leave the portable default some hundreds, and it is no slow one


@lru_cache(maxsize=64)
def transposed_of(pattern: Pattern, problem: Problem) -> Transposed:
    """``schedule.transpose``, kept: key, look-up, tuning and build all ask for it."""
    from sparsegen.schedule.transpose import transpose

    return transpose(pattern, problem)


def part_candidates(pattern: Pattern, problem: Problem, part: str) -> tuple[Candidate, ...]:
    """Candidate schedules of a part, best prediction first: the forward's, or those of the transposed mask.

    Of the latter the fused kernel has those that it can run over at the problem's first lengths, which may be none.
    """
    if part == QUERIES:
        return candidates_of(pattern, problem)
    found = tuple(transposed_of(pattern, problem).candidates)
    return found if part == KEYS else fused_candidates(pattern, problem)


@lru_cache(maxsize=64)
def fused_candidates(pattern: Pattern, problem: Problem) -> tuple[Candidate, ...]:
    """Those of the transposed mask whose rows descriptors load, in whole periods at the problem's first lengths."""
    from sparsegen.codegen.backward_fused import render_fused, uncovered

    found = transposed_of(pattern, problem)
    lengths = next(iter(problem.lengths), ())

    def whole(candidate: Candidate) -> bool:
        source = render_fused(pattern, candidate.schedule, problem, found.shift)
        return not any(n % whole_rows([source]) for n in lengths)

    covered = (c for c in found.candidates if uncovered(c.schedule, problem) is None)
    return tuple(c for c in covered if whole(c))


def whole_rows(sources: Iterable[BackwardSource]) -> int:
    """Rows of queries and keys come in multiples of this where descriptors view them in periods."""
    grids = [grid for source in sources for grid in source.grids]
    periods = {period for grid in grids for period, _ in grid.described}
    periods |= {grid.queries[0] for grid in grids if grid.queries is not None}
    return math.lcm(*periods)


@dataclass(frozen=True)
class GradientTarget(KernelTarget):
    """A ``KernelTarget`` whose kernels give the gradients of ``part``: "queries", "keys", or "fused", which are all.

    A launch is what a backward pass runs for this part alone: the one that prepares for both, then the kernel's own.
    """

    part: str = QUERIES

    @classmethod
    def for_part(
        cls,
        pattern: Pattern,
        problem: Problem,
        gpu: Gpu,
        part: str,
        *,
        lengths: tuple[int, int] | None = None,
        device: int = 0,
    ) -> GradientTarget:
        """Analyse ``pattern`` and render the part's candidates; ``lengths`` default to the problem's first.

        Raises:
            UnsupportedError: the template cannot do the pattern or the problem, or the pattern needs run-time data.
        """
        from sparsegen.codegen.backward import render_backward
        from sparsegen.codegen.backward_fused import render_fused
        from sparsegen.tune.gradient_designs import why_not_fused

        if pattern.runtime_names:
            raise UnsupportedError(
                f"pattern {pattern.name} needs {', '.join(pattern.runtime_names)} at run time; "
                "tuning makes its own inputs and cannot make these yet"
            )
        q_len, kv_len = lengths or problem.lengths[0]
        shift = 0 if part == QUERIES else transposed_of(pattern, problem).shift

        def rendered(schedule: Schedule) -> BackwardSource:
            if part == FUSED:
                return render_fused(pattern, schedule, problem, shift)
            return render_backward(pattern, schedule, problem, part, shift, OUTPUTS[part])

        if part == FUSED and (why := why_not_fused(pattern, problem, gpu)) is not None:
            raise UnsupportedError(f"pattern {pattern.name}, fused gradient kernel: {why}")
        found = part_candidates(pattern, problem, part)
        measured = [c for c in found if c.to_measure] or found[:1]
        sources = tuple((c.schedule.label, rendered(c.schedule)) for c in measured)
        return cls(pattern, problem, gpu, sources, q_len, kv_len, device, part)

    @property
    def template(self) -> GradientTemplate:
        """The backward template, as this part sees it."""
        from sparsegen.codegen.gradient_template import gradient_template

        return gradient_template(self.part)

    @property
    def limits(self) -> Limits:
        """See ``CandidateSource``."""
        return Limits(shared_bytes=self.gpu.shared_bytes, spill_bytes=SPILLED)

    def _starts_of(self, label: str) -> list[LaunchConfig]:
        """The template's choice for a schedule, and starts of its warp-specialised kernel."""
        from sparsegen.codegen import backward, backward_fused

        special = dict(self.sources)[label].hopper is not None
        space = Space(self.template.knobs)
        if self.part == FUSED:
            given = backward_fused.starts(self.problem, self.gpu)
        else:
            given = backward.starts(self.problem, self.gpu, OUTPUTS[self.part])
        found = [space.canonical(c.as_dict()) for c in given]
        return [joined(c, label, self.labels) for c in found if special or c["KERNEL"] != "hopper"]

    def timed(self, source: KernelSource, config: LaunchConfig) -> tuple[str, ...]:
        """Variants that the timed problem's launches take: the first, and its stand-in for odd numbers of rows."""
        from sparsegen.launch import variants

        odd = any(n % self.whole for n in (self.q_len, self.kv_len))
        return variants(source, config)[: 1 + odd]

    @property
    def whole(self) -> int:
        """See ``whole_rows``."""
        return whole_rows([source for _, source in self.sources])  # type: ignore[misc]

    def bench(self) -> GradientBench:
        """See ``CandidateSource``.

        Raises:
            ToolchainError: there is no GPU here, or another one than the target's.
        """
        return GradientBench(self)


class GradientBench:
    """Inputs of the timed problem on the GPU, in the worker process.

    The first launch of a pass is one of the kernel of queries: for a candidate of keys that one is compiled here, in its
    default configuration.
    """

    def __init__(self, target: GradientTarget) -> None:
        import torch

        self.target = target
        open_device(target)
        self.clock = CudaClock(target.gpu.l2_bytes)
        self.generator = torch.Generator("cuda").manual_seed(0)
        self.case = long_case(
            target.pattern, target.problem, target.q_len, target.kv_len, "cuda", self.generator
        )
        self.before: dict[str, Any] = {} if target.part == QUERIES else self._prepares()

    def _prepares(self) -> dict[str, Any]:
        from sparsegen.launch import compile_kernel
        from sparsegen.launch.module import write_modules

        t = self.target
        other = GradientTarget.for_part(t.pattern, t.problem, t.gpu, QUERIES)
        source, config = other.parts(other.default)
        folder = Path(tempfile.mkdtemp(prefix="sparsegen-prepare-"))
        compile_kernel(source, config, "fast", t.gpu, folder / "fast")
        return {
            "source": source,
            "config": config,
            "module": write_modules(folder, source),
            "directories": {"fast": folder / "fast"},
        }

    def load(self, config: LaunchConfig, folder: Path) -> GradientCandidate:
        """See ``Bench``."""
        return GradientCandidate(self, config, folder)

    def short(self) -> list[GradientCase]:
        """New short inputs of ragged lengths, every gradient of which is compared."""
        target, whole = self.target, self.target.whole
        return [
            short_case(
                target.pattern,
                target.problem,
                up_to(q_len, whole),
                up_to(kv_len, whole),
                "cuda",
                self.generator,
                size,
                batch=2,
            )
            for q_len, kv_len, size in small_lengths(target.q_len, target.kv_len)
        ]

    def refresh(self) -> GradientCase:
        """The timed problem's tensors with new random values, and rows of it to compare."""
        import torch

        saved, target = self.case.saved, self.target
        for tensor in (saved.q, saved.k, saved.v, saved.dout):
            tensor.normal_(generator=self.generator)
        length = {QUERIES: target.q_len, KEYS: target.kv_len}.get(
            target.part, min(target.q_len, target.kv_len)
        )
        rows = sampled_rows(length, self.generator)
        rows = torch.arange(length, device="cuda") if rows is None else rows
        return GradientCase(saved, self.case.keywords, rows)


class GradientCandidate:
    """One loaded configuration of one part."""

    def __init__(self, bench: GradientBench, config: LaunchConfig, folder: Path) -> None:
        from sparsegen.launch.module import write_modules

        self._bench, target = bench, bench.target
        source, plain = target.parts(config)
        names = target.timed(source, plain)
        found = {
            "source": source,
            "config": plain,
            "module": write_modules(folder, source),
            "directories": {name: folder / name for name in names},
        }
        self._kernel = kernel_of(*([bench.before] if bench.before else []), found)
        self._tables: Any = source.tables
        self._calls: dict[tuple[int, int], Any] = {}

    def check(self) -> str:
        """Short ragged inputs, then rows of what is timed."""
        target = self._bench.target
        for case in (*self._bench.short(), self._bench.refresh()):
            if wrong := check_gradients(self._run, case, target.pattern, GIVES[target.part]):
                return wrong
        return ""

    def launch(self) -> None:
        """One pass for this part on the bench's tensors; the kernel prepares it once."""
        case = self._bench.case
        self._run(case.saved, case.keywords, None)

    def _run(self, saved: Any, keywords: Mapping[str, Any], make: Any) -> Gradients:
        call = self._call(saved.q.shape[2], saved.k.shape[2], keywords)
        return self._kernel(saved, call, GIVES[self._bench.target.part], None, make)

    def _call(self, q_len: int, kv_len: int, keywords: Mapping[str, Any]) -> Any:
        """The run-time arguments for these lengths, kept."""
        from sparsegen.launch import Call
        from sparsegen.launch.tables import random_table

        target = self._bench.target
        same = self._calls.get((q_len, kv_len))
        if same is not None and same[0] is keywords:
            return same[1]
        relative = int(target.pattern.align == "bottom_right")
        first = kv_len - q_len if relative else 0
        scale = target.pattern.scale
        call = Call(
            relative=relative,
            scale=1.0 / math.sqrt(target.problem.head_dim) if scale is None else scale,
            tables=[random_table(t, first, q_len, kv_len, "cuda") for t in self._tables],
            **keywords,
        )
        self._calls[q_len, kv_len] = (keywords, call)
        return call


def kernel_of(*given: Mapping[str, Any]) -> BackwardKernel:
    """Parts of a backward pass as one callable; each: its source, config, module and directories."""
    from sparsegen.launch.backward_kernel import BackwardKernel

    named: dict[str, Mapping[str, Any]] = {_source(g).name: g for g in given}
    pick = lambda what: {name: g[what] for name, g in named.items()}
    return BackwardKernel(pick("source"), pick("config"), pick("module"), pick("directories"))


def _source(given: Mapping[str, Any]) -> BackwardSource:
    found: BackwardSource = given["source"]
    return found
