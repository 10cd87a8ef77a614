"""Expressions and closed forms printed as Triton text: the third reading of what ``spec`` and ``schedule`` hold.

Division by a power of two is a shift, which floors for negative positions too; by anything else it is the helper
``floor_div`` of the template, since ``//`` truncates on a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from sparsegen.schedule.forms import BIG, Floor, Lin, Opaque, Pick, Prod, Var
from sparsegen.schedule.formula import Cube, Range
from sparsegen.schedule.tree import AnyOf, NoneOf, Test
from sparsegen.spec import expr as ex

Names = Mapping[str, str]  # variable of a form → Triton text
PLAIN: Names = {}  # every variable by its own name
ROW: Names = {"q": "q_pos"}
CELL: Names = {"q": "q_pos[:, None]", "k": "k_pos[None, :]"}


def cell_names(rows: Iterable[str], keys: Iterable[str]) -> Names:
    """Names on the cells of a tile, where besides the positions these digits differ between rows, between keys."""
    by_row, by_key = {x: f"{x}[:, None]" for x in rows}, {y: f"{y}[None, :]" for y in keys}
    return {**CELL, **by_row, **by_key}


def floor_by(name: str, m: int) -> str:
    """floor(name / m) as an operand, for a name or a number in brackets."""
    if m == 1:
        return name
    return f"({name} >> {m.bit_length() - 1})" if m & (m - 1) == 0 else f"floor_div({name}, {m})"


def lines_of(names: Iterable[str], width: int = 96) -> tuple[str, ...]:
    """Names as the lines of a list, each closed by a comma."""
    lines = [""]
    for name in names:
        if lines[-1] and len(lines[-1]) + len(name) + 2 > width:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + name + ","
    return tuple(lines)


COMPARISONS = {"<", "<=", ">", ">=", "==", "!="}


def from_digits(axis: str, cuts: tuple[int, ...]) -> str:
    """A position from its digits: x0 + 128 * x1."""
    return " + ".join(f"{c} * {axis}{t}" if t else f"{axis}0" for t, c in enumerate((1, *cuts)))


class TermPrinter:
    """Text of a ``Term`` on the cells of a tile; what a template offers for data-driven visibility."""

    def __call__(self, term: ex.Term) -> str:
        raise NotImplementedError


def form(lin: Lin, names: Names = PLAIN) -> str:
    """A linear form as text, terms in their canonical order."""
    out = ""
    for generator, c in lin.terms:
        text = generator_text(generator, names)
        out += (" - " if c < 0 else " + ") + (text if abs(c) == 1 else f"{abs(c)} * {text}")
    if lin.const or not out:
        out += (" - " if lin.const < 0 else " + ") + str(abs(lin.const))
    return out[3:] if out.startswith(" + ") else "-" + out[3:]


def atom(lin: Lin, names: Names = PLAIN) -> str:
    """A form as an operand: in brackets unless it is one name, one number, one call or in brackets already."""
    text = form(lin, names)
    return text if text.replace("_", "").isalnum() or _closed(text) else f"({text})"


def _closed(text: str) -> bool:
    """Whether the text is one bracket, with a function's name before it or none."""
    if not re.match(r"[a-z_.]*\(", text):
        return False
    depth = 0
    for i, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == ")" and not depth:
            return i == len(text) - 1
    return False


def generator_text(generator: object, names: Names) -> str:
    """One generator of a form as text; TypeError for one that only ``boolean`` can print."""
    match generator:
        case Var(name):
            return names.get(name, name)
        case Floor(arg, m):
            if m & (m - 1) == 0:
                return f"({atom(arg, names)} >> {m.bit_length() - 1})"
            return f"floor_div({form(arg, names)}, {m})"
        case Prod(a, b):
            return f"({atom(a, names)} * {atom(b, names)})"
        case Pick(op, args):
            call = {"max": "tl.maximum", "min": "tl.minimum"}[op]
            texts = [form(a, names) for a in args]
            out = texts[0]
            for text in texts[1:]:
                out = f"{call}({out}, {text})"
            return out
    raise TypeError(f"no Triton text for {generator!r}")


def range_test(r: Range, terms: TermPrinter, names: Names = CELL) -> str:
    """A Range as a boolean over the cells of a tile."""
    if len(r.lin.terms) == 1 and isinstance(r.lin.terms[0][0], Opaque):
        text = boolean(r.lin.terms[0][0].expr, terms)
        return text if r.lo == 1 else f"({text} == 0)"
    text = form(r.lin, names)
    if r.lo == r.hi:
        return f"({text} == {r.lo})"
    sides = []
    if r.lo > -BIG:
        sides.append(f"({text} >= {r.lo})")
    if r.hi < BIG:
        sides.append(f"({text} <= {r.hi})")
    return " & ".join(sides)


def cube_test(cube: Cube, terms: TermPrinter, names: Names = CELL) -> str:
    """All Ranges of a cube as one boolean over the cells of a tile, in an order that never changes."""
    ranges = sorted(cube, key=str)
    return "(" + " & ".join(range_test(r, terms, names) for r in ranges) + ")"


def test_text(test: Test, terms: TermPrinter, names: Names = CELL) -> str:
    """A test of a span as a boolean over the cells of a tile."""
    match test:
        case Range():
            return range_test(test, terms, names)
        case AnyOf(cubes):
            return "(" + " | ".join(cube_test(c, terms, names) for c in cubes) + ")"
        case NoneOf(cubes):
            return "((" + " | ".join(cube_test(c, terms, names) for c in cubes) + ") == 0)"
    raise TypeError(f"no Triton text for {test!r}")


def boolean(e: ex.Bool, terms: TermPrinter) -> str:
    """A boolean expression that has no normal form, cell by cell."""
    match e:
        case ex.Truth(value):
            return f"(k_pos[None, :] {'==' if value else '!='} k_pos[None, :])"
        case ex.Compare(op, a, b) if op in COMPARISONS:
            return f"({integer(a)} {op} {integer(b)})"
        case ex.And(args) | ex.Or(args):
            mark = " & " if isinstance(e, ex.And) else " | "
            return "(" + mark.join(boolean(a, terms) for a in args) + ")"
        case ex.Not(a):
            return f"({boolean(a, terms)} == 0)"
        case ex.Term():
            return terms(e)
    raise TypeError(f"no Triton text for {e!r}")


def integer(e: ex.Int) -> str:
    """An integer expression that has no normal form, cell by cell."""
    match e:
        case ex.Const(value):
            return str(value) if value >= 0 else f"({value})"
        case ex.Name(name):
            return CELL.get(name, name)
        case ex.Neg(a):
            return f"(-{integer(a)})"
        case ex.Abs(a):
            return f"tl.abs({_variable(a)})"
        case ex.Add(a, b):
            return f"({integer(a)} + {integer(b)})"
        case ex.Sub(a, b):
            return f"({integer(a)} - {integer(b)})"
        case ex.Mul(a, b):
            return f"({integer(a)} * {integer(b)})"
        case ex.FloorDiv(a, b):
            return f"floor_div({_variable(a)}, {integer(b)})"
        case ex.Mod(a, b):
            return f"({_variable(a)} - floor_div({_variable(a)}, {integer(b)}) * {integer(b)})"
        case ex.Min(args) | ex.Max(args):
            call = "tl.minimum" if isinstance(e, ex.Min) else "tl.maximum"
            out = _variable(args[0])
            for a in args[1:]:
                out = f"{call}({out}, {integer(a)})"
            return out
    raise TypeError(f"no Triton text for {e!r}")


def _variable(e: ex.Int) -> str:
    """An operand that must be a tensor and not a Python number, since the helper's rules are those of the GPU."""
    text = integer(e)
    return f"(k_first * 0 + {text})" if isinstance(e, ex.Const) else text
