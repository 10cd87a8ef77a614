"""The candidate source of one gradient kernel: of queries, of keys and values, or of all.  Each is a problem of its own."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from sparsegen.codegen.backward_planner import FUSED, KEYS, OUTPUTS, QUERIES
from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.errors import UnsupportedError
from sparsegen.tune.candidates import Limits
from sparsegen.tune.schedules import candidates_of, joined
from sparsegen.tune.space import Space
from sparsegen.tune.target import KernelTarget

if TYPE_CHECKING:
    from sparsegen.codegen import KernelSource
    from sparsegen.codegen.backward import BackwardSource
    from sparsegen.codegen.gradient_template import GradientTemplate
    from sparsegen.schedule.search import Candidate
    from sparsegen.schedule.transpose import Transposed
    from sparsegen.schedule.tree import Schedule
    from sparsegen.spec.gpu import Gpu
    from sparsegen.spec.pattern import Pattern
    from sparsegen.spec.problem import Problem
    from sparsegen.tune.gradient_bench import GradientBench

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
        from sparsegen.tune.gradient_bench import GradientBench

        return GradientBench(self)
