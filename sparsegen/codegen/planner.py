"""A schedule and a problem turned into what a template is given.

All arithmetic and string building of code generation is here and in ``grids`` (which sweeps are one launch), ``rows``
(the query tile), ``segments`` (key ranges and loops) and ``text``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from sparsegen.codegen.grids import Grid, Launch, launches_of
from sparsegen.codegen.plan import (
    Chunk,
    ClassPlan,
    ForwardPlan,
    LaunchPlan,
    SegmentPlan,
    SplitPlan,
    Table,
)
from sparsegen.codegen.rows import rows_plan, varying
from sparsegen.codegen.segments import Around, descriptor_name, segment_plan, symbols
from sparsegen.codegen.terms import Terms, tables_of
from sparsegen.codegen.text import lines_of
from sparsegen.errors import UnsupportedError
from sparsegen.schedule.chunks import MOST_CHUNKS
from sparsegen.schedule.tree import HeadClass, Schedule, Sweep
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem


def chunks(columns: int) -> tuple[Chunk, ...]:
    """One or two powers of two that cover the columns with the fewest padded ones; a dot needs 16 at least."""
    powers = (16, 32, 64, 128, 256)
    if columns > 256:
        raise UnsupportedError(
            f"head_dim or value_dim {columns}: kernels take up to 256 columns of a head"
        )
    options = [(w,) for w in powers] + [(a, b) for a in powers for b in powers if a > b]
    widths = min((o for o in options if sum(o) >= columns), key=lambda o: (sum(o), len(o)))
    out, first = [], 0
    for i, width in enumerate(widths):
        out.append(Chunk(i, first, min(width, columns - first), width))
        first += width
    return tuple(out)


def make_plan(
    pattern: Pattern,
    schedule: Schedule,
    problem: Problem,
    template: str,
    entry: str,
    knobs: Iterable[str],
) -> ForwardPlan:
    """The plan of the forward kernel for one pattern and one set of dims."""
    tables = tables_of(schedule)
    launches = launches_of(schedule)
    plans = tuple(
        _launch(i, len(launches), x, tables, pattern.alibi) for i, x in enumerate(launches)
    )
    splits = any(x.grid.split for x in launches)
    # the softmax takes its maximum before scaling, which needs a positive scale
    prescaled = pattern.alibi or (pattern.scale is not None and pattern.scale <= 0)
    qk, v = chunks(problem.head_dim), chunks(problem.value_dim)
    described = sorted({x for launch in launches for x in launch.grid.described})
    parameters, types = zip(*_parameters(pattern, qk, v, tables, splits, described))
    constexprs = (*(k for k in knobs if k != "PERSISTENT"), "WIDE")
    which = ("SWEEP",) if len(launches) > 1 else ()
    return ForwardPlan(
        # no name here: patterns with one mask share one kernel and one cache entry
        title=f"Forward attention with one mask: {problem.dtype}, head_dim {problem.head_dim}, "
        f"value_dim {problem.value_dim}.",
        template=template,
        entry=entry,
        mask_lines=tuple(mask_lines_of(schedule)),
        head_dim=problem.head_dim,
        value_dim=problem.value_dim,
        qk_chunks=qk,
        v_chunks=v,
        softcap=pattern.softcap,
        alibi=pattern.alibi,
        sink_logits=pattern.sink_logits,
        null_key=pattern.null_key,
        prescaled=prescaled,
        softmax_scale="1.0" if pattern.softcap or prescaled else "scale * LOG2E",
        tables=tables,
        launches=plans,
        gathers=any(
            x.rows.gathered or any(s.box_lines for c in x.classes for s in c.segments)
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


def of_whole_lines(plan: ForwardPlan) -> ForwardPlan:
    """The plan for calls whose keys are whole periods of every descriptor's view, as ``launch`` sees to."""

    def segment(seg: SegmentPlan) -> SegmentPlan:
        return replace(seg, loop=seg.loop_of_lines or seg.loop)

    def launch(x: LaunchPlan) -> LaunchPlan:
        classes = (replace(c, segments=tuple(map(segment, c.segments))) for c in x.classes)
        return replace(x, classes=tuple(classes))

    return replace(plan, launches=tuple(map(launch, plan.launches)))


def _parameters(
    pattern: Pattern,
    qk: tuple[Chunk, ...],
    v: tuple[Chunk, ...],
    tables: tuple[Table, ...],
    splits: bool,
    described: Iterable[tuple[int, int]],
) -> list[tuple[str, str]]:
    """(name, type) of every run-time argument, in order; ``launch`` packs by name."""
    out = [("Q", "*data"), ("K", "*data"), ("V", "*data"), ("OUT", "*data"), ("LSE", "*fp32")]
    if splits:
        out += [("PARTIAL_OUT", "*fp32"), ("PARTIAL_LSE", "*fp32")]
    for period, group in described:
        for tensor, columns in (("K", qk), ("V", v)):
            name = descriptor_name(tensor, (period, group))
            out += [(f"{name}{c.index}", f"desc:{period}:{group}:{c.width}") for c in columns]
    out += [(f"stride_{t}{axis}", "stride") for t in "qkvo" for axis in "bhs"]
    out += [(name, "*i32") for name in ("Q_LENGTHS", "KV_STARTS", "KV_LENGTHS")]
    out += [(name, "i32") for name in ("has_q_lengths", "has_kv_starts", "has_kv_lengths")]
    sizes = ["heads", "heads_per_kv", "batch_heads", "q_rows", "kv_rows", "tiles"]
    out += [(name, "i32") for name in (*sizes, *(["chunks", "chunk"] if splits else []))]
    out += [("q_start", "i64"), ("k_start", "i64"), ("relative", "i32"), ("scale", "fp32")]
    if pattern.alibi:
        out.append(("ALIBI_SLOPES", "*fp32"))
    if pattern.sink_logits:
        out.append(("SINK_LOGITS", "*fp32"))
    if pattern.null_key:
        out += [("NULL_K", "*data"), ("NULL_V", "*data")]
    if pattern.sink_logits or pattern.null_key:
        out.append(("joins", "i32"))
    for t in tables:
        out += [(f"TABLE{t.index}", "*i32"), (f"table{t.index}_row", "i32")]
    return out


# ---- launches ----


def _launch(
    number: int, count: int, launch: Launch, tables: tuple[Table, ...], alibi: bool
) -> LaunchPlan:
    grid = launch.grid
    around = Around(tables, Terms(tables), varying(grid), grid.split, alibi)
    segments = [seg for _, sweep in launch.parts for seg in sweep.segments]
    used = frozenset().union(*map(symbols, segments))
    return LaunchPlan(
        function="attend_tile" if count == 1 else f"{_kind(grid)}{number}",
        summary=_summary(launch),
        chained=launch.chained,
        heads=heads_lines(grid),
        rows=rows_plan(launch, used),
        classes=tuple(
            _class(i, len(launch.parts), cls, sweep, launch, around)
            for i, (cls, sweep) in enumerate(launch.parts)
        ),
        runs=any(not seg.tiling.k_cuts for seg in segments),
        split=split_plan(grid) if grid.split or grid.combine else None,
        combine=grid.combine,
    )


def _kind(grid: Grid) -> str:
    return "combine" if grid.combine else "sweep"


def _summary(launch: Launch) -> str:
    grid = launch.grid
    if grid.combine:
        return "One row of one head: the partial results of its chunks of keys join OUT and LSE."
    if grid.split:
        return "One chunk of the keys for one query tile of one head: a partial result."
    what = "One query tile of one head"
    return f"{what}: takes OUT and LSE up from the launch before." if launch.chained else f"{what}."


def _class(
    i: int, count: int, cls: HeadClass, sweep: Sweep, launch: Launch, around: Around
) -> ClassPlan:
    segments = tuple(segment_plan(seg, around) for seg in sweep.segments)
    asked = launch.chained and not launch.grid.split
    return ClassPlan(
        keyword=_keyword(i, cls.heads) if i < count - 1 else "else" if i else "",
        comment=cls.mask_text,
        segments=segments,
        adds=" | ".join(f"({seg.some})" for seg in segments) if asked else "",
    )


def _keyword(i: int, heads: tuple[tuple[int, int], ...] | None) -> str:
    tests = [f"(h == {a})" if a == b else f"((h >= {a}) & (h <= {b}))" for a, b in heads or ()]
    return ("if " if i == 0 else "elif ") + " | ".join(tests)


def heads_lines(grid: Grid) -> tuple[str, ...]:
    """The heads of a launch are numbered without gaps; each gap moves the heads above it up."""
    if grid.heads is None:
        return ()
    named = sum(last - first + 1 for first, last in grid.heads)
    gaps = grid.heads if grid.all_but else _gaps(grid.heads)
    return (
        f"heads_here = {f'heads - {named}' if grid.all_but else named}",
        "h = batch_head % heads_here",
        *(f"h = tl.where(h >= {a}, h + {b - a + 1}, h)" for a, b in gaps),
    )


def _gaps(heads: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    starts = [0, *(last + 1 for _, last in heads)]
    return tuple((a, first - 1) for a, (first, _) in zip(starts, heads) if a < first)


def split_plan(grid: Grid) -> SplitPlan:
    """Which rows the partial results of a split launch have."""
    if grid.rows is None:
        return SplitPlan("first_query", "q_rows", "")
    first, last = grid.rows
    rows = f"tl.minimum({last - first + 1}, q_rows)"
    return SplitPlan(f"tl.maximum(first_query, {first})", rows, str(last))


def mask_lines_of(schedule: Schedule) -> Iterable[str]:
    """What is visible, for people: a line for each class of heads."""
    for cls in sorted(schedule.classes, key=lambda c: c.heads is None):
        who = "all heads" if len(schedule.classes) == 1 else "other heads"
        if cls.heads is not None:
            who = "heads " + ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in cls.heads)
        yield f"Visible for {who}: {cls.mask_text}"
