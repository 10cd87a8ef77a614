"""How far positions may go before 32-bit arithmetic overflows in some form or test of a schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from sparsegen.schedule.digits import axes_of, radices
from sparsegen.schedule.forms import Floor, Lin, Opaque, Pick, Prod, Table, Var
from sparsegen.schedule.formula import Range
from sparsegen.schedule.intervals import gen_bounds
from sparsegen.schedule.tree import AnyOf, NoneOf, Segment, Tiling
from sparsegen.spec import expr as ex

INT32 = (1 << 31) - 1
OVERHANG = 1 << 12  # rows and entries of a tile beyond the last position; no block is larger


class Sizes:
    """Largest |value| of every name while |positions| and lengths are at most ``far``.

    Digits of lower axes stay below their radix, but for key tiles that are boxes.  On the top axes a tile goes on beyond the last position: by OVERHANG
    steps, and so do the positions that are put together from digits.
    """

    def __init__(self, tiling: Tiling, far: int):
        self.positions = far + OVERHANG * max(*tiling.q_cuts, *tiling.k_cuts, 1, 1)
        self._digits: dict[str, int] = {}
        for axis, cuts in (("x", tiling.q_cuts), ("y", tiling.k_cuts)):
            for t, radix in enumerate(radices(cuts)):
                beyond = OVERHANG if axis == "y" and tiling.k_extent else 0
                self._digits[f"{axis}{t}"] = radix - 1 + beyond
            if cuts:
                self._digits[f"{axis}{len(cuts)}"] = far // cuts[-1] + 1 + OVERHANG

    def of(self, name: str) -> int:
        """The bound of a variable: a digit, its first and last value on a tile, a position or a length."""
        return self._digits.get(name.split("_")[0], self.positions)

    @property
    def both_ways(self) -> Mapping[str, tuple[int, int]]:
        """The interval of every name, for ``intervals``."""
        return _BothWays(self)


class _BothWays(dict[str, tuple[int, int]]):
    def __init__(self, sizes: Sizes):
        self._sizes = sizes

    def __missing__(self, name: str) -> tuple[int, int]:
        most = self._sizes.of(name)
        return -most, most


def position_limit(segments: Iterable[Segment]) -> int:
    """Largest P: every intermediate fits 32 bits while |positions| and lengths are at most P.  0: even at 0 it does not."""
    every: dict[Tiling, list[Segment]] = {}
    for s in segments:
        every.setdefault(s.tiling, []).append(s)
    left = [(t, x) for t, some in every.items() for forms in _read(some) for x in forms]
    low = 0
    p = high = INT32 - OVERHANG
    while low < high:
        sizes = {tiling: Sizes(tiling, p) for tiling in every}
        over = [(t, x) for t, x in left if _peak(x, sizes[t]) > INT32]
        low, high = (low, p - 1) if over else (p, high)
        left = over or left  # what fits here fits at all lesser positions
        p = (low + high + 1) // 2
    return low


def _peak(x: Lin | ex.Bool, sizes: Sizes) -> int:
    return (worst(x, sizes) if isinstance(x, Lin) else expr_worst(x, sizes.positions))[1]


def worst(lin: Lin, sizes: Sizes) -> tuple[int, int]:
    """(|value|, |largest intermediate|) of a form; sums in any order."""
    total = peak = abs(lin.const)
    for g, c in lin.terms:
        match g:
            case Var(n):
                v = top = sizes.of(n)
            case Floor(a, m):
                v, top = worst(a, sizes)
                v = v // m + 1
            case Table(_, a):
                v, top = sizes.positions, worst(a, sizes)[1]
            case Opaque(_):
                v = top = 1
            case Prod(a, b):
                (x, xt), (y, yt) = worst(a, sizes), worst(b, sizes)
                v, top = x * y, max(xt, yt, x * y)
            case Pick(_, args):
                ends = [worst(a, sizes) for a in args]
                v, top = max(e[0] for e in ends), max(e[1] for e in ends)
                least, most = gen_bounds(g, sizes.both_ways)  # min(1, max(0, q - 9)) is small
                v = min(v, max(-least, most))
        peak = max(peak, top, abs(c) * v)
        total += abs(c) * v
    return total, max(peak, total)


def expr_worst(e: ex.Int | ex.Bool, far: int) -> tuple[int, int]:
    """The same for an expression that stays opaque."""
    match e:
        case ex.Const(v):
            return abs(v), abs(v)
        case ex.Name():
            return far, far
        case ex.Truth() | ex.Term():
            return 1, far
        case ex.Neg(a) | ex.Abs(a) | ex.Not(a):
            return expr_worst(a, far)
        case ex.Min(args) | ex.Max(args) | ex.And(args) | ex.Or(args):
            ends = [expr_worst(a, far) for a in args] or [(1, 1)]
            return max(x for x, _ in ends), max(t for _, t in ends)
    (x, xt), (y, yt) = expr_worst(e.a, far), expr_worst(e.b, far)
    v = x * y if isinstance(e, ex.Mul) else x + y if isinstance(e, (ex.Add, ex.Sub)) else max(x, y)
    return v, max(xt, yt, v)


def _read(segments: Iterable[Segment]) -> tuple[list[Lin], list[ex.Bool]]:
    forms: set[Lin] = set()
    exprs: set[ex.Bool] = set()
    for s in segments:
        parts = [s.row_lo, s.row_hi, s.tile_lo, s.tile_hi, s.full_lo, s.full_hi, *s.live]
        parts += [f for ends in s.inner for f in ends]
        forms |= {f for f in (*parts, *(f for g in s.guards for f in g)) if f is not None}
        forms |= set(
            axes_of(s.tiling).positions.values()
        )  # rows and keys are put together from their digits
        for span in s.spans:
            for r in _ranges(span.tests):
                forms.add(r.lin)
                forms |= {Lin((), b) for b in (r.lo, r.hi) if abs(b) < 1 << 62}
    for f in forms:
        exprs |= set(_opaque(f))
    return list(forms), list(exprs)


def _ranges(tests: Iterable[object]) -> Iterator[Range]:
    for t in tests:
        if isinstance(t, (AnyOf, NoneOf)):
            for cube in t.cubes:
                yield from cube
        elif isinstance(t, Range):
            yield t


def _opaque(lin: Lin) -> Iterator[ex.Bool]:
    for g, _ in lin.terms:
        match g:
            case Opaque(e):
                yield e
            case Floor(a, _) | Table(_, a):
                yield from _opaque(a)
            case Prod(a, b):
                yield from (*_opaque(a), *_opaque(b))
            case Pick(_, args):
                for a in args:
                    yield from _opaque(a)
