"""A segment as text: its key range, the borders of its full part, and what the other tiles test."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from sparsegen.codegen import text
from sparsegen.codegen.entries import Box, box_of, descriptor_of, product, sizes
from sparsegen.codegen.key_boxes import KeyBoxes
from sparsegen.codegen.plan import Limit, Loop, SegmentPlan, Table, WalkPlan
from sparsegen.schedule.forms import Lin, variables
from sparsegen.schedule.formula import Range
from sparsegen.schedule.tree import AnyOf, NoneOf, Segment, Span, Test

NARROW = 64  # a segment that never shows more keys than this has a key tile of its own size


@dataclass(frozen=True)
class Around:
    """What a segment's text depends on besides the segment."""

    tables: tuple[Table, ...]
    terms: text.TermPrinter
    varying: tuple[str, ...]  # symbols that differ between the rows of a tile
    split: bool
    alibi: bool  # scores depend on positions
    narrow: int = NARROW


def segment_plan(seg: Segment, around: Around) -> SegmentPlan:
    """All text of one segment."""
    walk = _walk(seg, around.tables)
    block, narrow = _key_block(seg, walk, around.narrow)
    lower = any(s.lower for s in seg.spans) or walk is not None
    upper = any(s.upper for s in seg.spans)
    full_lo = seg.full_lo if any(s.kind == "full" for s in seg.spans) else None
    inner = [hi - lo for lo, hi in seg.inner]
    live = ["live_rows > 0", *(f"{text.form(f)} >= 0" for f in seg.live)]
    live += [f"{text.form(f)} >= 0" for f in inner if f.terms or f.const < 0]
    holds = " & ".join(f"({t})" for t in live)
    guards = [" | ".join(f"({text.form(f)} >= 0)" for f in any_of) for any_of in seg.guards]
    lo, end, body_lo, body_end = _borders(seg, holds, block, full_lo)
    described = descriptor_of(seg)
    box = box_of(seg, block) if seg.tiling.k_cuts else None
    return SegmentPlan(
        name=seg.name,
        comment=str(seg.branch),
        row_lo=text.form(seg.row_lo, text.ROW) if lower else "",
        row_hi=_row_hi(seg) if upper else "",
        lo=lo,
        end=end,
        some=f"{holds} & ({text.form(seg.tile_hi)} >= {text.form(seg.tile_lo)})",
        body_lo=body_lo,
        body_end=body_end,
        body_holds=" & ".join(
            f"({g})" for g in [f"end > {'0' if seg.tiling.k_cuts else 'lo'}", *guards]
        ),
        block=block,
        # the descriptors' boxes have BLOCK_N rows
        tma=f"TMA and BLOCK_N == {block}" if narrow else "TMA",
        descriptor=descriptor_name("", described) if described else "",
        corner=box.corner if described and box is not None else (),
        box_shape=_box_shape(described),
        loop=_loop(seg, full_lo is not None, walk, around),
        loop_of_lines=_loop(seg, False, walk, around, lines=True) if seg.tiling.k_extent else None,
        box_lines=box.before() if box is not None else (),
        box_vectors=box.vectors() if box is not None else (),
        table=walk,
    )


def _row_hi(seg: Segment) -> str:
    if seg.tiling.k_extent:
        return KeyBoxes(seg, "BLOCK_N").row_hi
    return text.form(seg.row_hi, text.ROW)


def descriptor_name(tensor: str, described: tuple[int, int]) -> str:
    """Name of the descriptors of a tensor, before the number of their column chunk."""
    period, group = described
    kind = "DESC" if period == 1 else f"EVERY{period}_" if group == 1 else f"{group}OF{period}_"
    return f"{tensor}_{kind}"


def _box_shape(described: tuple[int, int] | None) -> str:
    if described is None:
        return ""
    period, group = described
    return "BLOCK_N" if period == 1 else f"BLOCK_N // {group}, {group}"


def symbols(seg: Segment) -> frozenset[str]:
    """The symbols that the segment's forms for a tile mention."""
    forms = [seg.tile_lo, seg.tile_hi, *seg.live, *(f for pair in seg.inner for f in pair)]
    forms += [f for f in (seg.full_lo, seg.full_hi) if f is not None]
    forms += [f for any_of in seg.guards for f in any_of]
    walked = {"q_first", "q_last"} if seg.table is not None else set()
    return frozenset(walked).union(*map(variables, forms))


# ---- key ranges ----


def _key_block(seg: Segment, walk: WalkPlan | None, most: int) -> tuple[str, bool]:
    """Keys of a tile as text, and whether that is the segment's own size, ``most`` or less."""
    if walk is not None:
        return str(_power_of_two(min(walk.block, most))), True
    if seg.width is not None and seg.width <= most:
        return str(_power_of_two(seg.width or 16)), True
    return "BLOCK_N", False


def _power_of_two(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def _borders(seg: Segment, holds: str, n: str, full_lo: Lin | None) -> tuple[str, str, str, str]:
    """First and end of the range and of its full part: of keys, or of entries where the keys are a box of digits."""
    if seg.tiling.k_extent:
        return "", f"tl.where({holds}, {KeyBoxes(seg, n).end}, 0)", "", ""
    boxed = bool(seg.tiling.k_cuts)
    lo = "0" if boxed else "lo"
    entry = partial(_entry, seg)
    end = entry(text.form(seg.tile_hi + 1) if boxed else f"{text.atom(seg.tile_hi)} + 1")
    end = f"tl.where({holds}, {end}, {lo})"
    first = "" if boxed else text.form(seg.tile_lo)
    if full_lo is None or seg.full_hi is None:
        return first, end, "", ""
    full = entry(text.form(seg.full_hi + 1))
    body_end = f"body_lo + tl.maximum({full} - body_lo, 0) // {n} * {n}"
    if full_lo == seg.tile_lo:
        return first, end, lo, body_end
    skipped = entry(text.atom(full_lo)) + ("" if boxed else " - lo")
    body_lo = f"tl.cdiv(tl.maximum({skipped}, 0), {n}) * {n}"
    return first, end, body_lo if boxed else f"lo + {body_lo}", body_end


def _entry(seg: Segment, value: str) -> str:
    """Where a value of the top axis comes in the range."""
    if not seg.tiling.k_cuts:
        return value
    width, distance = product(sizes(seg)), f"{value} - y{len(seg.inner)}_first"
    return distance if width == "1" else f"({distance}) * {width}"


def _walk(seg: Segment, tables: tuple[Table, ...]) -> WalkPlan | None:
    if seg.table is None:
        return None
    table = next(t for t in tables if t.term == seg.table.term)
    return WalkPlan(
        pointer=f"TABLE{table.index}",
        first_row=f"table{table.index}_row",
        block=table.block,
        per_row=table.per_row,
        first_row_of_tile=text.floor_by("q_first", table.block),
        last_row_of_tile=text.floor_by("q_last", table.block),
    )


# ---- loops ----


def _loop(
    seg: Segment, has_full: bool, walk: WalkPlan | None, around: Around, lines: bool = False
) -> Loop:
    """The loop of a segment; of a split sweep only the part of it that lies in the program's chunk.

    ``lines``: where the keys of the call are whole lines of a grid.

    One loop over head, body and tail: tiles of the body skip the tests.  Three loops would each fill and drain their
    pipeline, which cost 5 to 10 % on windows and gained nothing on causal masks (docs/performance.md).
    """
    start, stop = "0" if seg.tiling.k_cuts else "lo", "end"
    block = _key_block(seg, walk, around.narrow)[0]
    edge = _edge(seg.spans)
    boxes = KeyBoxes(seg, block) if seg.tiling.k_extent else None
    on_lines: tuple[str, ...] = ()
    if boxes is not None and lines:
        tests, on_lines = boxes.of_lines(edge.tests)
        edge = replace(edge, tests=tests)
    parts, said = _tests(seg, edge, walk, around)
    if boxes is not None:
        parts = boxes.by_axis([*parts, *on_lines, *boxes.beyond(edge.upper)])
    elif not edge.upper and walk is None:
        at = f"(j + tl.arange(0, {block}))" if seg.tiling.k_cuts else "k_pos"
        parts.append(f"{at}[None, :] < end")
    parts = _side_by_side(parts) if boxes is None else parts
    mask = " & ".join(p if p.startswith("(") and len(parts) == 1 else f"({p})" for p in parts)
    if around.split:
        start, stop = f"tl.maximum({start}, chunk_lo)", f"tl.minimum({stop}, chunk_end)"
    there = _there(edge) if seg.tiling.k_cuts and not lines else ""
    needed = f"{mask} {there}" + (" k_pos" if around.alibi else "")
    where = ""
    if has_full:
        where = "j >= body_end"
        if seg.full_lo != seg.tile_lo:
            where = f"(j < body_lo) | ({where})"
    return Loop(
        start=start,
        stop=stop,
        comment=("edges test " if has_full else "tests ") + "; ".join(said or ["the last key"]),
        mask=mask,
        edge=where,
        there=there,
        keys=box_of(seg, block).inside(needed) if seg.tiling.k_cuts else (),
        limits=_limits(seg, edge, has_full, block, around) if walk is None and not lines else (),
    )


def _limits(
    seg: Segment, edge: Span, has_full: bool, block: str, around: Around
) -> tuple[Limit, ...]:
    """The tests of a loop border by border, if they are borders that differ between rows and nothing else."""
    box = box_of(seg, block) if seg.tiling.k_cuts else None
    neighbours = box is None or (isinstance(box, Box) and set(box.sizes) == {"1"})
    by_row = all(
        variables(lin) & {*around.varying}
        for asked, lin in ((edge.lower, seg.row_lo), (edge.upper, seg.row_hi))
        if asked
    )
    if not (neighbours and by_row and edge.upper) or edge.tests or seg.guards:
        return ()
    first = f"y{len(seg.inner)}_first + j" if seg.tiling.k_cuts else "j"
    lower, upper = Limit("row_lo", first, "", ""), Limit("row_hi", first, "", "")
    asked = [lower, upper] if edge.lower else [upper]
    if not has_full:
        return tuple(asked)
    assert seg.full_lo is not None and seg.full_hi is not None
    begins = f"inside_lo = {_entry(seg, text.form(seg.full_lo))}"
    ends = f"inside_end = {_entry(seg, text.form(seg.full_hi + 1))}"
    lower = replace(lower, where="j < inside_lo", inside=begins)
    upper = replace(upper, where=f"j + {block} > inside_end", inside=ends)
    return (lower, upper) if edge.lower and seg.full_lo != seg.tile_lo else (upper,)


def _edge(spans: tuple[Span, ...]) -> Span:
    """All that head, tail or tiles without a full part test, in one."""
    tested = [s for s in spans if s.kind != "full"]
    whole = next((s for s in tested if s.kind == "whole"), None)
    tests = whole.tests if whole else tuple(dict.fromkeys(t for s in tested for t in s.tests))
    return Span("whole", any(s.lower for s in tested), any(s.upper for s in tested), tests)


def _there(edge: Span) -> str:
    """Which keys of a box are keys of the call: what neither the box says nor its last tile needs is left out."""
    tested = frozenset().union(*map(_symbols_of, edge.tests))
    first = "(k_pos >= k_first) & " if "k_first" in tested else ""
    return f"{first}(k_pos <= k_last)"


def _symbols_of(test: Test) -> frozenset[str]:
    if isinstance(test, Range):
        return variables(test.lin)
    return frozenset().union(*(variables(r.lin) for cube in test.cubes for r in cube))


def _side_by_side(parts: list[str]) -> list[str]:
    """Tests of rows alone, and of keys alone, joined: they cost a vector's work each, not a tile's."""
    groups: dict[tuple[bool, bool] | int, list[str]] = {}
    for i, part in enumerate(parts):
        kind = (
            "[:, None]" in part or "in_table" in part,
            "[None, :]" in part or "in_table" in part,
        )
        groups.setdefault(i if all(kind) else kind, []).append(part)
    return [" & ".join(f"({p})" for p in g) if len(g) > 1 else g[0] for g in groups.values()]


def _tests(
    seg: Segment, span: Span, walk: WalkPlan | None, around: Around
) -> tuple[list[str], list[str]]:
    """Booleans over the cells of a tile, and the same for people."""
    top = f"y{len(seg.inner)}" if seg.tiling.k_cuts else "k_pos"
    varying = box_of(seg, "BLOCK_N").varying if seg.tiling.k_cuts else ("k_pos",)
    keys = f"{top}[None, :]" if top in varying else top
    rows = [x for x in around.varying if x != "q"]
    names = text.cell_names(rows, varying if seg.tiling.k_cuts else ())
    parts, said = [], []
    if walk is not None:
        parts.append(f"({text.floor_by('q_pos', walk.block)} == block_row)[:, None]")
        parts.append("k_pos[None, :] < block_end")
        said.append("rows of this block row")
    for asked, name, lin, sign in (
        (span.lower, "row_lo", seg.row_lo, ">="),
        (span.upper, "row_hi", seg.row_hi, "<="),
    ):
        if asked:
            # a column beside the keys, or a scalar where it does not depend on the row
            limit = f"{name}[:, None]" if variables(lin) & {*around.varying} else name
            parts.append(f"{keys} {sign} {limit}")
            said.append(f"{'k' if top == 'k_pos' else top} {sign} {name}")
    for test in span.tests:
        parts.append(text.test_text(test, around.terms, names))
        said.append(_said(test))
    return parts, said


def _said(test: Range | AnyOf | NoneOf) -> str:
    if isinstance(test, Range):
        return str(test)
    word = "any of" if isinstance(test, AnyOf) else "none of"
    return f"{word} {len(test.cubes)} terms"
