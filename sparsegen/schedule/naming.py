"""Names and order of the segments of a sweep."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from sparsegen.schedule.forms import BIG, K_FIRST, K_LAST, Floor, Lin, Q, Var, variables
from sparsegen.schedule.formula import Range, as_mod
from sparsegen.schedule.intervals import pick_args
from sparsegen.schedule.tree import AnyOf, Segment, Test


def ordered(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Named segments: those of constant width first, narrowest in front, table walks last."""
    named = [replace(s, name=shape(s)) for s in segments]
    named.sort(key=lambda s: (s.table is not None, s.width is None, s.width or 0, str(s.branch)))
    total, seen = Counter(s.name for s in named), Counter[str]()
    out = []
    for s in named:
        seen[s.name] += 1
        out.append(replace(s, name=f"{s.name}{seen[s.name]}") if total[s.name] > 1 else s)
    return tuple(out)


def shape(s: Segment) -> str:
    """What a segment looks like in the mask.

    blocks: a table walk · masked: several alternatives · strided, stripes: a remainder of q - k, of k is tested, or
    holds for all keys of the box · box: other boxes of key digits · columns: a few keys · rows: a few queries ·
    chunks, band, causal, left, right: ranges by the row · keys, full
    """
    if s.table is not None:
        return "blocks"
    tests = [t for span in s.spans for t in span.tests]
    if any(isinstance(t, AnyOf) for t in tests):
        return "masked"
    if s.width is not None:
        return "columns"
    if any(_few_rows(r) for c in s.branch.alts for r in c):
        return "rows"
    if kind := _remainder(tests) or _box(s):
        return kind
    name = _range(s)
    return (
        "masked"
        if name == "full" and any("k" in variables(t.lin) for t in tests if isinstance(t, Range))
        else name
    )


def _few_rows(r: Range) -> bool:
    plain = variables(r.lin) == {"q"} and as_mod(r.lin) is None
    return plain and r.lo > -BIG and r.hi < BIG


def _remainder(tests: list[Test]) -> str:
    for t in tests:
        if isinstance(t, Range) and (mod := as_mod(t.lin)) and "k" in variables(mod[0]):
            return "strided" if "q" in variables(mod[0]) else "stripes"
    return ""


def _box(s: Segment) -> str:
    """One key digit for every row and query digit: strided; the same digits for all rows: stripes."""
    if not s.inner:
        return ""
    if all(lo == hi for lo, hi in s.inner) and any(lo.terms for lo, _ in s.inner):
        return "strided"
    return "box" if any(lo.terms or hi.terms for lo, hi in s.inner) else "stripes"


def _range(s: Segment) -> str:
    lows, highs = pick_args(s.row_lo, "max"), pick_args(s.row_hi, "min")
    low, high = [f for f in lows if "q" in variables(f)], [f for f in highs if "q" in variables(f)]
    if low and high:
        return (
            "chunks" if all(map(_by_floor, (*low, *high))) or _starts_chunk(low, high) else "band"
        )
    if high:
        return "causal" if set(highs) == {Q, K_LAST} and s.row_lo == K_FIRST else "left"
    return "right" if low else "full" if s.row_lo == K_FIRST else "keys"


def _by_floor(form: Lin) -> bool:
    return any(isinstance(g, Floor) for g, _ in form.terms) and Var("q") not in dict(form.terms)


def _starts_chunk(low: list[Lin], high: list[Lin]) -> bool:
    return all(map(_by_floor, low)) and high == [Q]  # a chunk with causality
