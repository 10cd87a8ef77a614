"""A schedule and a problem turned into what the backward template is given.

The text of ranges, rows and masks is that of the forward kernel (``rows``, ``segments``, ``entries``); for ``keys`` it
is made of the transposed schedule and turned (``backward_turn``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from sparsegen.codegen.backward_plan import BackwardPlan, GradientLaunch, HeadsPlan
from sparsegen.codegen.backward_turn import turned
from sparsegen.codegen.grids import Grid, Launch, launches_of
from sparsegen.codegen.plan import Table
from sparsegen.codegen.planner import (
    chunks,
    heads_lines,
    mask_lines_of,
    split_plan,
)
from sparsegen.codegen.rows import rows_plan, varying
from sparsegen.codegen.segments import NARROW, Around, segment_plan, symbols
from sparsegen.codegen.terms import Terms, tables_of
from sparsegen.codegen.text import lines_of
from sparsegen.schedule.chunks import MOST_CHUNKS
from sparsegen.schedule.tree import HeadClass, Schedule, Sweep
from sparsegen.spec.expr import Term
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem

QUERIES, KEYS = "queries", "keys"
FUSED = "fused"  # all three gradients over the schedule of keys, see ``backward_fused``
STORED = "stored"  # dS is stored by the kernel of keys and read by that of queries, see ``backward_stored``
OUTPUTS = {QUERIES: ("DQ",), KEYS: ("DK", "DV")}


class BoundedTerms(Terms):
    """Membership tests that read no row of a table behind that of the call's last query."""

    def __call__(self, term: Term) -> str:
        return super().__call__(term)[:-1] + ", last_query)"


def make_backward_plan(
    pattern: Pattern,
    schedule: Schedule,
    problem: Problem,
    part: str,
    outputs: tuple[str, ...],
    shift: int,
    template: str,
    entry: str,
    knobs: Iterable[str],
    narrow: int = NARROW,
) -> BackwardPlan:
    """The plan of one of the two kernels; ``schedule`` is the transposed one for keys, moved by ``shift``.

    ``narrow``: most rows of a segment that has tiles of its own size.
    """
    launches = gradient_launches(schedule, part)
    tables = tables_of(schedule)
    turn = turned if part == KEYS else lambda x: x
    plans = tuple(
        _launch(i, x, schedule, tables, part, pattern.alibi, narrow) for i, x in enumerate(launches)
    )
    if part == QUERIES:
        plans = (_prepare(), *plans)
    qk, v = chunks(problem.head_dim), chunks(problem.value_dim)
    walks = any(s.table for x in plans for c in x.classes for s in c.segments)
    parameters, types = zip(*_parameters(pattern, launches, tables, outputs, walks))
    constexprs = (*(k for k in knobs if k != "PERSISTENT"), "WIDE")
    which = ("SWEEP",) if len(plans) > 1 else ()
    named = {"DQ": "queries", "DK": "keys", "DV": "values"}
    what = " and ".join(named[name] for name in outputs)
    return BackwardPlan(
        part=part,
        outputs=outputs,
        title=f"Gradients of {what} with one mask: {problem.dtype}, head_dim {problem.head_dim}, "
        f"value_dim {problem.value_dim}.",
        template=template,
        entry=entry,
        mask_lines=turn(tuple(mask_lines_of(schedule))),
        head_dim=problem.head_dim,
        value_dim=problem.value_dim,
        qk_chunks=qk,
        v_chunks=v,
        softcap=pattern.softcap,
        alibi=pattern.alibi,
        sink_logits=pattern.sink_logits,
        null_key=pattern.null_key,
        tables=tuple(_turned_table(t) for t in tables) if part == KEYS else tables,
        walks=walks,
        shift=shift,
        launches=plans,
        gathers=any(
            (x.rows is not None and x.rows.gathered)
            or any(s.box_lines for c in x.classes for s in c.segments)
            for x in plans
        ),
        most_chunks=MOST_CHUNKS,
        parameters=parameters,
        types=types,
        constexprs=(*constexprs, *which, "PERSISTENT"),
        parameter_lines=(
            *lines_of(parameters),
            *lines_of(f"{c}: tl.constexpr" for c in constexprs),
        ),
        argument_lines=(*lines_of(parameters), *lines_of(constexprs)),
    )


def gradient_launches(schedule: Schedule, part: str) -> tuple[Launch, ...]:
    """The launches of a schedule.

    Programs of ``keys`` are of key heads, so all of these take part in each launch, whichever query heads do: the first
    launch writes, all others add.
    """
    found = launches_of(schedule)
    if part == QUERIES:
        return found
    return tuple(
        replace(x, grid=replace(x.grid, heads=None, all_but=False), chained=i > 0)
        for i, x in enumerate(found)
    )


def _turned_table(t: Table) -> Table:
    return replace(t, row_of_q=turned(t.row_of_q), block_of_k=turned(t.block_of_k))


def adds_up(launches: Iterable[Launch]) -> bool:
    """Whether gradients are summed in float32 over launches, and cast by the caller; else they are written in their own dtype.

    One launch that adds to all rows is no reason: rows are then rounded twice, and a float32 copy of them, written, read,
    written and cast, took a third of the time of strided and axial masks (H200, 2026-11-30).  What a split launch adds does
    not count either: it has a few rows, whose partial sums are float32.
    """
    return sum(x.chained and not (x.grid.split or x.grid.combine) for x in launches) > 1


def _parameters(
    pattern: Pattern,
    launches: tuple[Launch, ...],
    tables: tuple[Table, ...],
    outputs: tuple[str, ...],
    walks: bool,
) -> list[tuple[str, str]]:
    """(name, type) of every run-time argument, in order; ``launch.backward`` packs by name."""
    queries = outputs == OUTPUTS[QUERIES]
    splits = any(x.grid.split for x in launches)
    sums = "*fp32" if adds_up(launches) else "*data"
    out = [(name, "*data") for name in ("Q", "K", "V", *(["OUT"] if queries else []), "DO")]
    out += [(name, "*fp32") for name in (*(["LSE", "DLSE"] if queries else []), "STATS")]
    out += [(name, sums) for name in outputs]
    if splits:
        out += [(f"PARTIAL_{name}", "*fp32") for name in outputs]
    if queries and pattern.sink_logits:
        out.append(("SINK_PARTS", "*fp32"))
    if queries and pattern.null_key:
        out += [("NULL_K_PARTS", "*fp32"), ("NULL_V_PARTS", "*fp32")]
    tensors = "qkvog" if queries else "qkvg"
    out += [(f"stride_{t}{axis}", "stride") for t in tensors for axis in "bhs"]
    out += [(name, "*i32") for name in ("Q_LENGTHS", "KV_STARTS", "KV_LENGTHS")]
    out += [(name, "i32") for name in ("has_q_lengths", "has_kv_starts", "has_kv_lengths")]
    sizes = ["heads", "heads_per_kv", "batch_heads", "q_rows", "kv_rows", "tiles"]
    out += [(name, "i32") for name in (*sizes, *(["chunks", "chunk"] if splits else []))]
    out += [("q_start", "i64"), ("k_start", "i64"), ("relative", "i32"), ("scale", "fp32")]
    if queries:
        out.append(("has_dlse", "i32"))
    if pattern.alibi:
        out.append(("ALIBI_SLOPES", "*fp32"))
    if queries and pattern.sink_logits:
        out.append(("SINK_LOGITS", "*fp32"))
    if queries and pattern.null_key:
        out += [("NULL_K", "*data"), ("NULL_V", "*data")]
    if queries and (pattern.sink_logits or pattern.null_key):
        out.append(("joins", "i32"))
    for t in tables:
        out += [(f"TABLE{t.index}", "*i32"), (f"table{t.index}_row", "i32")]
        if not queries and walks:
            i = t.index
            out += [(f"LIST{i}", "*i32"), (f"LIST{i}_ENDS", "*i32"), (f"list{i}_row", "i32")]
    return out


# ---- launches ----


def _prepare() -> GradientLaunch:
    return GradientLaunch(
        kind="prepare",
        function="prepare",
        summary="One query tile of one head: delta of its rows, and its part of what sinks and null key get.",
        chained=False,
        heads=(),
        rows=None,
        classes=(),
        some="",
        split=None,
        cut=False,
    )


def _launch(
    number: int,
    launch: Launch,
    schedule: Schedule,
    tables: tuple[Table, ...],
    part: str,
    alibi: bool,
    narrow: int,
) -> GradientLaunch:
    grid = launch.grid
    around = Around(tables, BoundedTerms(tables), varying(grid), grid.split, alibi, narrow)
    segments = [seg for _, sweep in launch.parts for seg in sweep.segments]
    used = frozenset().union(*map(symbols, segments))
    classes = tuple(
        _heads(cls, sweep, around, who) for cls, sweep, who in _parts(launch, schedule, part)
    )
    plan = GradientLaunch(
        kind="combine" if grid.combine else "sweep",
        function=f"{'combine' if grid.combine else 'sweep'}{number}",
        summary=_summary(launch, part),
        chained=launch.chained,
        heads=heads_lines(grid),
        rows=None if grid.combine else rows_plan(launch, used),
        classes=() if grid.combine else classes,
        some=" | ".join(f"({seg.some})" for c in classes for seg in c.segments) or "False",
        split=split_plan(grid) if grid.split or grid.combine else None,
        cut=grid.split,
    )
    if part == QUERIES:
        return plan
    # conditions name heads and no positions; summaries are for people
    own = tuple(replace(turned(c), condition=c.condition) for c in plan.classes)
    rows, split = turned(plan.rows), turned(plan.split)
    return replace(plan, rows=rows, classes=own, some=turned(plan.some), split=split)


def _parts(launch: Launch, schedule: Schedule, part: str) -> Iterable[tuple[HeadClass, Sweep, str]]:
    """Classes with their sweep in this launch, and the condition that picks their heads.

    A launch over queries has programs for the heads that take part; one over keys runs over all heads of a group.
    """
    took = dict(launch.parts)
    here = list(took) if part == QUERIES else list(schedule.classes)
    for cls, sweep in took.items():
        others = [c for c in here if c is not cls]
        yield cls, sweep, _condition(cls, others) if others else ""


def _condition(cls: HeadClass, others: Iterable[HeadClass]) -> str:
    """Text that holds for the heads of a class and for no others."""
    if cls.heads is not None:
        return _among(cls.heads)
    named = [r for c in others for r in c.heads or ()]
    return f"({_among(sorted(named))}) == 0"


def _among(heads: Iterable[tuple[int, int]]) -> str:
    tests = [f"(h == {a})" if a == b else f"((h >= {a}) & (h <= {b}))" for a, b in heads]
    return " | ".join(tests)


def _heads(cls: HeadClass, sweep: Sweep, around: Around, condition: str) -> HeadsPlan:
    return HeadsPlan(
        condition, cls.mask_text, tuple(segment_plan(s, around) for s in sweep.segments)
    )


def _summary(launch: Launch, part: str) -> str:
    grid: Grid = launch.grid
    row, other = ("query", "keys") if part == QUERIES else ("key", "queries")
    if grid.combine:
        return f"One {row} row of one head: adds the partial sums of its chunks of {other}."
    if grid.split:
        return f"One chunk of the {other} for one {row} tile of one head: partial sums."
    what = f"One {row} tile of one head"
    return f"{what}: adds to the launch before." if launch.chained else f"{what}."
