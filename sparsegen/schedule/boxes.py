"""The box of key digits that a cube needs on any query tile, which part of it all rows see, and what is left to test.

Conjuncts by kind, T being the top key axis:

    a lower digit fixed by the row (y0 == x0)   the digit's range; the digit is replaced in all other conjuncts
    T alone                                     an exact limit of the row
    T and lower digits                          bounds of T, loose for the box and strict for the full part; a test
    lower digits only                           their ranges; a condition where the box does not prove it
    no key                                      a condition on rows
    anything else                               a test, and no full part
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparsegen.schedule.digits import Axes, Conjunct
from sparsegen.schedule.forms import (
    BIG,
    K_FIRST,
    K_LAST,
    Env,
    K,
    Lin,
    Var,
    as_form,
    variables,
)
from sparsegen.schedule.formula import Cube, Range
from sparsegen.schedule.intervals import bounds, pick
from sparsegen.schedule.limits import (
    direction,
    edges,
    enclose,
    invert,
    over,
    too_long,
    unbounded,
)

Ends = tuple[Lin, Lin]
KEYS = (Range(K - K_FIRST, 0, BIG), Range(K_LAST - K, 0, BIG))  # keys of the call
ROUNDS = 2  # of narrowing lower digits by each other


@dataclass(frozen=True)
class Edge:
    """One side of a conjunct of T and lower digits: what to test, and T's bounds as forms of the tile.

    Outside ``loose`` no key passes; inside ``strict`` every key does.  None: no form, or too long a one.
    """

    test: Range
    loose: Lin | None
    strict: Lin | None


@dataclass(frozen=True)
class Box:
    """What one cube says of the keys of any query tile.

    ``first``, ``last``: T of the call's first and last key, where a form of the row says it exactly.
    ``lower``, ``upper``: exact limits of T.  ``below``, ``above``: edges that bound T from below, from above.
    """

    inner: tuple[Ends, ...]
    first: Lin | None
    last: Lin | None
    lower: tuple[Lin, ...]
    upper: tuple[Lin, ...]
    below: tuple[Edge, ...]
    above: tuple[Edge, ...]
    rows: tuple[Conjunct, ...]
    inside: tuple[Conjunct, ...]
    tests: tuple[Conjunct, ...]


def solve(cube: Cube, axes: Axes, inner: tuple[Ends, ...] | None = None) -> Box:
    """The box of a cube.  ``inner``: ranges of the lower digits that are decided already."""
    return _Solver(cube, axes, inner).box()


class _Solver:
    def __init__(self, cube: Cube, axes: Axes, inner: tuple[Ends, ...] | None):
        self.axes = axes
        self.keys = [axes.conjunct(r) for r in KEYS]
        self.conjuncts = [axes.conjunct(r) for r in cube]
        # what fixed a digit that differs between the rows of a tile
        self.inside: list[Conjunct] = []
        self.inner: dict[str, Ends] = {}
        if inner is None:
            self._fix_digits()
            self._narrow()
        else:
            self.inner = dict(zip(axes.keys, inner))
            self._replace(
                {
                    y: lo
                    for y, (lo, hi) in self.inner.items()
                    if lo == hi and variables(lo) <= axes.row_names
                }
            )
        self.env = {**axes.on_tile, **self.inner}
        # Ends of the call's keys are where they are for all digits, nearly: not worth forms of the tile.
        whole = {y: (Lin(), Lin((), axes.radix(y) - 1)) for y in axes.keys[:-1]}
        self.key_env = self.env | {y: r for y, r in whole.items() if not self._constant(y)}

    def _replace(self, digits: dict[str, Lin]) -> None:
        self.keys = [self.axes.replaced(c, digits) for c in self.keys]
        self.conjuncts = [self.axes.replaced(c, digits) for c in self.conjuncts]

    def _constant(self, y: str) -> bool:
        lo, hi = self.inner[y]
        return not lo.terms and not hi.terms

    def _fix_digits(self) -> None:
        axes = self.axes
        while True:
            found = ((c, axes.determined(c)) for c in self.conjuncts)
            c, fixed = next(((c, f) for c, f in found if f is not None), (None, None))
            if c is None or fixed is None:
                return
            name, form = fixed
            self.conjuncts.remove(c)
            self._replace({name: form})
            lo, hi = axes.ends(form)
            last = Lin((), axes.radix(name) - 1)
            in_range = axes.unproven(Conjunct(form, 0, last.const))
            if in_range.ever:  # rows for which the digit would lie outside its axis see nothing
                self.conjuncts.append(in_range)
            if lo != hi:
                lo, hi = pick("max", [lo, Lin()]), pick("min", [hi, last])
            lo, hi = self._short(lo, Lin()), self._short(hi, last)
            if lo != hi:
                self.inside.append(c)
            self.inner[name] = lo, hi

    def _short(self, form: Lin, else_: Lin) -> Lin:
        form = self.axes.tidy(form)
        return else_ if unbounded(form) or over(form) else form

    def _narrow(self) -> None:
        """Ranges of the other lower digits, from the conjuncts that have no T."""
        axes = self.axes
        free = [y for y in axes.keys[:-1] if y not in self.inner]
        self.inner |= {y: (Lin(), Lin((), axes.radix(y) - 1)) for y in free}
        for _ in range(ROUNDS if len(free) > 1 else 1):
            for y in free:
                for c in self.conjuncts:
                    names = variables(c.lin) & axes.key_names
                    if y in names and axes.top not in names and "k" not in names:
                        self._narrow_by(y, c)

    def _narrow_by(self, y: str, c: Conjunct) -> None:
        env = {**self.axes.on_tile, **self.inner}
        solved = enclose(c.lin, *edges(c.lo, c.hi), y, env, strict=False)
        if solved is None:
            return
        lo, hi = self.inner[y]
        if solved[0] is not None:
            lo = self._short(pick("max", [lo, as_form(solved[0])]), lo)
        if solved[1] is not None:
            hi = self._short(pick("min", [hi, as_form(solved[1])]), hi)
        self.inner[y] = lo, hi

    def box(self) -> Box:
        """Every conjunct by its kind."""
        axes = self.axes
        lower: list[Lin] = []
        upper: list[Lin] = []
        below: list[Edge] = []
        above: list[Edge] = []
        rows: list[Conjunct] = []
        inside: list[Conjunct] = []
        tests: list[Conjunct] = []
        for c in (*self.conjuncts, *self.inside):
            c = axes.unproven(c)
            names = variables(c.lin) & axes.key_names
            if not c.ever:
                continue
            if not names:
                (tests if too_long(c.lin, axes.on_tile) else rows).append(c)
            elif not names & {axes.top, "k"}:
                inside.append(axes.unproven(c, self.env))
            elif (exact := self._exact(c, names)) is not None:
                lower += [exact[0]] if exact[0] is not None else []
                upper += [exact[1]] if exact[1] is not None else []
            elif (sides := self._sides(c, names, self.env)) is not None:
                below += [sides[0]] if sides[0] is not None else []
                above += [sides[1]] if sides[1] is not None else []
            else:
                tests.append(c)
        ends: list[Lin | None] = []
        for c, low in zip(self.keys, (True, False)):
            names = variables(c.lin) & axes.key_names
            exact = self._exact(c, names)
            ends.append(None if exact is None else exact[0 if low else 1])
            if exact is None:
                sides = self._sides(c, names, self.key_env)
                assert sides is not None  # k is the sum of its digits: T is a plain term of it
                edge = sides[0 if low else 1]
                (below if low else above).extend([edge] if edge is not None else [])
        inner = tuple(self.inner[y] for y in axes.keys[:-1])
        kept = [c for c in inside if c.ever]
        lists = (lower, upper, below, above, rows, kept, tests)
        return Box(inner, ends[0], ends[1], *map(tuple, lists))  # type: ignore[arg-type]

    def _exact(self, c: Conjunct, names: frozenset[str]) -> tuple[Lin | None, Lin | None] | None:
        axes = self.axes
        if names != {axes.top}:
            return None
        solved = invert(c.lin, *edges(c.lo, c.hi), axes.top)
        if solved is None or any(x is not None and too_long(x, axes.on_tile) for x in solved):
            return None
        return solved

    def _sides(
        self, c: Conjunct, names: frozenset[str], env: Env
    ) -> tuple[Edge | None, Edge | None] | None:
        """The conjunct as edges from below and from above; None where T is not alone in it."""
        way = direction(c.lin, self.axes.top)
        if not way or (names == {self.axes.top}):
            return None
        loose, strict = self._bounds(c, env, strict=False), self._bounds(c, env, strict=True)
        out: list[Edge | None] = []
        for low in (True, False):
            of_lo = low == (way > 0)
            there = c.lo > -BIG if of_lo else c.hi < BIG
            i = 0 if low else 1
            test = c.test(lower=of_lo, upper=not of_lo)
            out.append(Edge(test, loose[i], strict[i]) if there else None)
        return out[0], out[1]

    def _bounds(self, c: Conjunct, env: Env, *, strict: bool) -> tuple[Any, Any]:
        """T's bounds over the lower digits and the rows, as forms of the tile."""
        axes = self.axes
        small = self._apart(c)
        if small is not None:
            big, lo, hi = small
            if strict:
                lo, hi = hi, lo
            g = abs(dict(c.lin.terms)[Var(axes.top)])
            least = -BIG if c.lo <= -BIG else -((hi - c.lo) // g)
            most = BIG if c.hi >= BIG else (c.hi - lo) // g
            solved: Any = invert(big, *edges(least, most), axes.top)
            first, last = solved
            at = 1 if strict else 0
            got = [
                None if first is None else axes.ends(first)[at],
                None if last is None else axes.ends(last)[1 - at],
            ]
        else:
            found = enclose(c.lin, *edges(c.lo, c.hi), axes.top, env, strict=strict)
            assert found is not None
            got = [None if x is None else axes.tidy(as_form(x)) for x in found]
        return tuple(  # type: ignore[return-value]
            None if x is None or unbounded(x) or over(x) else x for x in got
        )

    def _apart(self, c: Conjunct) -> tuple[Lin, int, int] | None:
        """g * A + R with T alone in A and R within about one g on any call: (A, least R, most R)."""
        g = abs(dict(c.lin.terms).get(Var(self.axes.top), 0))
        if g < 2:
            return None
        big = Lin([(x, n // g) for x, n in c.lin.terms if n % g == 0])
        rest = Lin([(x, n) for x, n in c.lin.terms if n % g])
        fixed = {y: (lo.const, hi.const) for y, (lo, hi) in self.inner.items() if self._constant(y)}
        lo, hi = bounds(rest, {**self.axes.static, **fixed})
        key_names = variables(big) & self.axes.key_names
        if hi - lo > 2 * g or key_names != {self.axes.top} or direction(big, self.axes.top) == 0:
            return None
        return big, int(lo), int(hi)
