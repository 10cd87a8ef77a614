"""Our own kernel for a case: built as ``sparsegen.compile`` builds it, counted, and checked against the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sparsegen.bench.case import Case, Inputs

if TYPE_CHECKING:
    from sparsegen.schedule.tree import Schedule
    from sparsegen.spec.gpu import Gpu

CHECKED_ROWS = 32  # of each head, compared with float64
Say = Callable[[str], None]


@dataclass(frozen=True)
class Built:
    """A callable for a case and how it was chosen.  ``tile``: rows and keys, None where the template has no such knobs."""

    attend: Callable[..., Any]
    schedule: Schedule
    config: str
    chosen_by: str
    tile: tuple[int, int] | None


@dataclass(frozen=True)
class Cells:
    """Over all heads and batch entries; ``computed`` is None where no tile is known, ``exact`` False for estimates."""

    visible: int
    computed: int | None
    exact: bool


def build(case: Case, gpu: Gpu, tune: str, say: Say) -> Built:
    """The artifact of a case, from the cache or built now; ``say`` is told how a tuning gets on.

    Raises ``UnsupportedError`` for a pattern that no template can do, and what ``artifact.build.ensure`` raises.
    """
    from sparsegen.artifact.build import ask, ensure
    from sparsegen.artifact.compiler import Compiler
    from sparsegen.artifact.rendering import schedule_of
    from sparsegen.runtime.api import open_kernel
    from sparsegen.runtime.attend import Attend

    progress = lambda done, total, message: say(f"{done} of {total}, {message}")
    problem = ask(case.pattern, case.problem, gpu, tune).problem
    artifact = ensure(case.pattern, problem, gpu, tune=tune, builder=Compiler(), progress=progress)
    decision = artifact.manifest.decision
    knobs = decision.config.as_dict()
    tile = (knobs.get("BLOCK_M"), knobs.get("BLOCK_N"))
    return Built(
        Attend(case.pattern, problem, open_kernel(case.pattern, problem, artifact)),
        schedule_of(case.pattern, problem, decision.label),
        str(decision.config),
        decision.chosen_by,
        (int(tile[0]), int(tile[1])) if tile[0] and tile[1] else None,
    )


def count(case: Case, schedule: Schedule, tile: tuple[int, int] | None) -> Cells:
    """Visible cells of all heads, and those that whole tiles compute."""
    from sparsegen.schedule import count as counting
    from sparsegen.schedule.cost import head_shares

    visible, computed, exact = 0, 0, True
    shares = head_shares(schedule.classes, case.problem.heads)
    for one, heads in zip(schedule.classes, shares, strict=True):
        alone = replace(schedule, classes=(one,))
        found = counting.count(alone, case.q_len, case.kv_len)
        visible += heads * found.cells
        exact &= found.exact
        if tile is not None:
            computed += heads * counting.computed_cells(alone, case.q_len, case.kv_len, *tile)
    batch = case.problem.batch
    return Cells(batch * visible, batch * computed if tile is not None else None, exact)


def wrong(case: Case, inputs: Inputs, out: Any) -> str:
    """Why ``out`` is not the result, "" when it is: some rows of every head against the float64 reference."""
    import torch

    from sparsegen.spec.reference import reference
    from sparsegen.tune.accept import within_tolerance
    from sparsegen.tune.eager import eager_attention

    many = min(CHECKED_ROWS, case.q_len)
    rows = torch.linspace(0, case.q_len - 1, many, device=out.device).round().long()
    tensors = (inputs.q, inputs.k, inputs.v)
    want, _ = reference(case.pattern, *tensors, rows=rows, **inputs.extras)
    low, _ = eager_attention(case.pattern, *tensors, rows=rows, **inputs.extras)
    return within_tolerance(out[:, :, rows], want, low).reason
