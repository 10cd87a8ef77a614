"""A schedule and a problem turned into what a template is given.

All arithmetic and string building of code generation is here and in ``text``.  ``ClassPlan``, ``SegmentPlan``, ``Loop``
and ``SpanPlan`` are the schedule's classes of heads, segments and spans as text.
"""

from __future__ import annotations

from collections.abc import Iterable

from sparsegen.codegen import text
from sparsegen.codegen.plan import (
    Chunk,
    ClassPlan,
    ForwardPlan,
    Loop,
    SegmentPlan,
    SpanPlan,
    Table,
    WalkPlan,
)
from sparsegen.errors import UnsupportedError
from sparsegen.schedule.forms import Lin, Opaque, variables
from sparsegen.schedule.formula import Range
from sparsegen.schedule.tree import AnyOf, HeadClass, NoneOf, Schedule, Segment, Span
from sparsegen.spec.expr import Term
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem

NARROW = 64  # a segment that never shows more keys than this has a key tile of its own size


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
    tables = _tables(schedule)
    printer = _Terms(tables)
    classes = tuple(
        ClassPlan(
            keyword=_keyword(i, len(schedule.classes), cls.heads),
            comment=cls.mask_text,
            segments=tuple(
                _segment(seg, tables, printer) for sweep in cls.sweeps for seg in sweep.segments
            ),
        )
        for i, cls in enumerate(_rest_last(schedule))
    )
    # the softmax takes its maximum before scaling, which needs a positive scale
    prescaled = pattern.alibi or (pattern.scale is not None and pattern.scale <= 0)
    qk, v = chunks(problem.head_dim), chunks(problem.value_dim)
    parameters, types = zip(*_parameters(pattern, qk, v, tables))
    constexprs = (*(k for k in knobs if k != "PERSISTENT"), "WIDE")
    return ForwardPlan(
        # no name here: patterns with one mask share one kernel and one cache entry
        title=f"Forward attention with one mask: {problem.dtype}, head_dim {problem.head_dim}, "
        f"value_dim {problem.value_dim}.",
        template=template,
        entry=entry,
        mask_lines=tuple(_mask_lines(schedule)),
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
        classes=classes,
        parameters=parameters,
        types=types,
        constexprs=(*constexprs, "PERSISTENT"),
        parameter_lines=(*_lines(parameters), *_lines(f"{c}: tl.constexpr" for c in constexprs)),
        argument_lines=(*_lines(parameters), *_lines(constexprs)),
    )


def _lines(names: Iterable[str], width: int = 96) -> list[str]:
    """Names as the lines of a list, each closed by a comma."""
    lines = [""]
    for name in names:
        if lines[-1] and len(lines[-1]) + len(name) + 2 > width:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + name + ","
    return lines


def _parameters(
    pattern: Pattern, qk: tuple[Chunk, ...], v: tuple[Chunk, ...], tables: tuple[Table, ...]
) -> list[tuple[str, str]]:
    """(name, type) of every run-time argument, in order; ``launch`` packs by name."""
    out = [("Q", "*data"), ("K", "*data"), ("V", "*data"), ("OUT", "*data"), ("LSE", "*fp32")]
    out += [(f"K_DESC{c.index}", f"desc:{c.width}") for c in qk]
    out += [(f"V_DESC{c.index}", f"desc:{c.width}") for c in v]
    out += [(f"stride_{t}{axis}", "stride") for t in "qkvo" for axis in "bhs"]
    out += [(name, "*i32") for name in ("Q_LENGTHS", "KV_STARTS", "KV_LENGTHS")]
    out += [(name, "i32") for name in ("has_q_lengths", "has_kv_starts", "has_kv_lengths")]
    out += [(name, "i32") for name in ("heads", "heads_per_kv", "batch_heads", "q_rows", "kv_rows")]
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


# ---- segments ----


def _segment(seg: Segment, tables: tuple[Table, ...], printer: _Terms) -> SegmentPlan:
    walk = _walk(seg, tables)
    narrow = (seg.width is not None and seg.width <= NARROW) or walk is not None
    block = "BLOCK_N"
    if walk is not None:
        block = str(_power_of_two(min(walk.block, NARROW)))
    elif narrow:
        block = str(_power_of_two(seg.width or 16))
    live = ["live_rows > 0", *(f"{text.form(f)} >= 0" for f in seg.live)]
    guards = [" | ".join(f"({text.form(f)} >= 0)" for f in any_of) for any_of in seg.guards]
    spans = {span.kind: span for span in seg.spans}
    has_full = seg.full_lo is not None and "full" in spans
    lower = any(s.lower for s in seg.spans) or walk is not None
    upper = any(s.upper for s in seg.spans)
    return SegmentPlan(
        name=seg.name,
        comment=str(seg.branch),
        row_lo=text.form(seg.row_lo, text.ROW) if lower else "",
        row_hi=text.form(seg.row_hi, text.ROW) if upper else "",
        tile_lo=text.form(seg.tile_lo),
        tile_hi=text.atom(seg.tile_hi),
        live=" & ".join(f"({t})" for t in live),
        full_lo=text.atom(seg.full_lo) if has_full and seg.full_lo is not None else "",
        full_end=text.form(seg.full_hi + 1) if has_full and seg.full_hi is not None else "",
        body_holds=" & ".join(f"({g})" for g in ["end > lo", *guards]),
        block=block,
        # the descriptors' boxes have BLOCK_N rows
        tma=f"TMA and BLOCK_N == {block}" if narrow else "TMA",
        loops=tuple(_loops(seg, spans, has_full, walk, printer)),
        table=walk,
    )


def _loops(
    seg: Segment, spans: dict[str, Span], has_full: bool, walk: WalkPlan | None, printer: _Terms
) -> list[Loop]:
    """The loops of a segment; their borders follow the docstring of ``schedule.tree``."""
    if not has_full:
        return [_loop(seg, spans["whole"], "lo", "end", walk, printer)]
    out = []
    if "head" in spans:
        out.append(
            _loop(seg, spans["head"], "lo", "tl.where(has_body, body_lo, lo)", walk, printer)
        )
    out.append(_loop(seg, spans["full"], "body_lo", "body_end", walk, printer))
    if "tail" in spans:
        start = "end" if "whole" in spans else "lo"
        out.append(
            _loop(
                seg, spans["tail"], f"tl.where(has_body, body_end, {start})", "end", walk, printer
            )
        )
    if "whole" in spans:
        out.append(_loop(seg, spans["whole"], "tl.where(has_body, end, lo)", "end", walk, printer))
    return out


def _loop(
    seg: Segment, span: Span, start: str, stop: str, walk: WalkPlan | None, printer: _Terms
) -> Loop:
    parts, said = [], []
    if walk is not None:
        parts.append(f"(({_row_block('q_pos', walk.block)}) == block_row)[:, None]")
        parts.append("k_pos[None, :] < block_end")
        said.append("rows of this block row")
    if span.lower:
        parts.append(f"k_pos[None, :] >= {_limit('row_lo', seg.row_lo)}")
        said.append("k >= row_lo")
    if span.upper:
        parts.append(f"k_pos[None, :] <= {_limit('row_hi', seg.row_hi)}")
        said.append("k <= row_hi")
    for test in span.tests:
        parts.append(text.test_text(test, printer))
        said.append(_said(test))
    mask = " & ".join(p if p.startswith("(") and len(parts) == 1 else f"({p})" for p in parts)
    meaning = {
        "head": "left edge",
        "full": "every cell is visible",
        "tail": "right edge",
        "whole": "no full part",
    }
    comment = meaning[span.kind] + (f": tests {'; '.join(said)}" if said else "")
    return Loop(
        start=start,
        stop=stop,
        stages="STAGES" if span.kind == "full" or not seg.full_lo else "EDGE_STAGES",
        comment=comment,
        span=SpanPlan(mask=mask, needs_k_pos=bool(mask), overhangs=span.kind in ("tail", "whole")),
    )


def _limit(name: str, lin: Lin) -> str:
    """A row limit beside the keys [1, N]: a column [M, 1], or a scalar where it does not depend on the row."""
    return f"{name}[:, None]" if "q" in variables(lin) else name


def _said(test: Range | AnyOf | NoneOf) -> str:
    if isinstance(test, Range):
        return str(test)
    word = "any of" if isinstance(test, AnyOf) else "none of"
    return f"{word} {len(test.cubes)} terms"


# ---- tables of random_blocks ----


class _Terms(text.TermPrinter):
    """Membership tests of the kernel's tables."""

    def __init__(self, tables: tuple[Table, ...]):
        self.tables = {t.term: t for t in tables}

    def __call__(self, term: Term) -> str:
        table = self.tables.get(term)
        if table is None:
            raise UnsupportedError(f"the forward template has no run-time data for {term.kind!r}")
        i = table.index
        return f"in_table{i}(TABLE{i}, table{i}_row, q_pos, k_pos)"


def _tables(schedule: Schedule) -> tuple[Table, ...]:
    """Every random_blocks term that a segment walks over or tests, each once."""
    terms: dict[Term, None] = {}
    for cls in schedule.classes:
        for sweep in cls.sweeps:
            for seg in sweep.segments:
                if seg.table is not None:
                    terms[seg.table.term] = None  # type: ignore[index]
                for span in seg.spans:
                    for test in span.tests:
                        terms.update(dict.fromkeys(_terms_of(test)))
    out = []
    for i, term in enumerate(sorted(terms, key=str)):
        block = term["block"]
        out.append(
            Table(
                i,
                term,
                block,
                term["per_row"],
                _row_block("q_pos", block),
                _row_block("k_pos", block),
            )
        )
    return tuple(out)


def _terms_of(test: object) -> Iterable[Term]:
    if isinstance(test, Range):
        for generator, _ in test.lin.terms:
            if isinstance(generator, Opaque):
                yield from _terms_in(generator.expr)
    elif isinstance(test, (AnyOf, NoneOf)):
        for cube in test.cubes:
            for r in cube:
                yield from _terms_of(r)


def _terms_in(e: object) -> Iterable[Term]:
    if isinstance(e, Term):
        yield e
    else:
        for field in getattr(e, "__dataclass_fields__", ()):
            value = getattr(e, field)
            for child in value if isinstance(value, tuple) else (value,):
                yield from _terms_in(child)


def _walk(seg: Segment, tables: tuple[Table, ...]) -> WalkPlan | None:
    if seg.table is None:
        return None
    table = next(t for t in tables if t.term == seg.table.term)
    return WalkPlan(
        pointer=f"TABLE{table.index}",
        first_row=f"table{table.index}_row",
        block=table.block,
        per_row=table.per_row,
        first_row_of_tile=_row_block("q_first", table.block),
        last_row_of_tile=_row_block("q_last", table.block),
    )


def _row_block(name: str, block: int) -> str:
    shift = block.bit_length() - 1
    return f"({name} >> {shift})" if block & (block - 1) == 0 else f"floor_div({name}, {block})"


def _power_of_two(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


# ---- classes of heads ----


def _rest_last(schedule: Schedule) -> list[HeadClass]:
    """Classes with the one for all remaining heads at the end, where it becomes the ``else``."""
    return sorted(schedule.classes, key=lambda c: c.heads is None)


def _keyword(i: int, count: int, heads: tuple[tuple[int, int], ...] | None) -> str:
    if heads is None or i == count - 1:
        return "else"
    tests = [f"(h == {a})" if a == b else f"((h >= {a}) & (h <= {b}))" for a, b in heads]
    return ("if " if i == 0 else "elif ") + " | ".join(tests)


def _mask_lines(schedule: Schedule) -> Iterable[str]:
    for cls in _rest_last(schedule):
        who = "all heads" if len(schedule.classes) == 1 else "other heads"
        if cls.heads is not None:
            who = "heads " + ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in cls.heads)
        yield f"Visible for {who}: {cls.mask_text}"
