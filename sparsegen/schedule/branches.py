"""Disjoint branches of a formula: cube and not any earlier cube, simplified by what is proven.

``simplify`` drops what is implied, finds empty conjunctions, and turns an exclusion with one side left into a plain
conjunct: ``k < 4`` without ``q - k < 1024`` becomes ``k < 4 and q - k >= 1024``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

from sparsegen.schedule.facts import (
    ANALYSIS,
    BUDGET,
    Domain,
    bound,
    facts_of,
    maximal_chains,
    moduli,
    residue_bound,
)
from sparsegen.schedule.forms import BIG, Opaque
from sparsegen.schedule.formula import (
    Cube,
    Dnf,
    Range,
    as_mod,
    conj,
    cube_text,
    kept_whole,
    merge,
    negate,
    ranged,
    without,
)
from sparsegen.spec import expr as ex

PROOF_STEPS = 12_000  # about a second (2 cores of a shared machine, 2026-11)


@dataclass(frozen=True)
class Branch:
    """Visible where any alternative holds and no excluded cube does.  One alternative: its Ranges are plain conjuncts."""

    alts: tuple[Cube, ...]
    minus: tuple[Cube, ...]

    def __str__(self) -> str:
        parts = [cube_text(c) for c in self.alts]
        out = parts[0] if len(parts) == 1 else " or ".join(f"({p})" for p in parts)
        return out + "".join(f" and not ({cube_text(c)})" for c in self.minus)


@lru_cache(maxsize=1 << 13)
def simplify(
    cube: Cube, minus: tuple[Cube, ...], dom: Domain
) -> tuple[Cube, tuple[Cube, ...]] | None:
    """cube and not any(minus) → (cube, clauses), or None where it is empty.  A clause is what is left of a minus cube."""
    chain_list = maximal_chains(moduli([cube, *minus]))
    left = list(minus)
    while True:
        if _empty(cube, chain_list, dom):
            return None
        got = _exclude(cube, left, chain_list, dom)
        if got is None:
            return None
        clauses, unit = got
        joined: Cube | None
        if unit is None:
            joined = _one_multiple(cube, chain_list, dom)
            if joined == cube:
                return _drop_implied(cube, chain_list, dom), tuple(merge(clauses))
        else:
            joined = conj([*cube, unit])
        if joined is None:
            return None
        cube = joined


def _empty(cube: Cube, chain_list: list[tuple[int, ...]], dom: Domain) -> bool:
    for r in cube:
        lo, hi = bound(cube, r, chain_list, dom)
        if lo > hi or lo > r.hi or hi < r.lo:
            return True
    return False


def _exclude(
    cube: Cube, minus: list[Cube], chain_list: list[tuple[int, ...]], dom: Domain
) -> tuple[list[Cube], Range | None] | None:
    """Clauses left of ``minus``, or one new conjunct (its cube leaves ``minus``); None: an exclusion covers the cube."""
    clauses: list[Cube] = []
    for m in list(minus):
        left: list[tuple[Range, bool, bool]] | None = []
        for r in m:
            lo, hi = bound(cube, r, chain_list, dom)
            if lo > r.hi or hi < r.lo:
                left = None  # one of its literals is false: it excludes nothing here
                break
            if not (lo >= r.lo and hi <= r.hi):
                left.append((r, lo < r.lo, hi > r.hi))  # type: ignore[union-attr]
        if left is None:
            continue
        if not left:
            return None
        if len(left) == 1 and left[0][1] != left[0][2]:
            r, below, _ = left[0]
            unit = ranged(r.lin, -BIG, r.lo - 1) if below else ranged(r.lin, r.hi + 1, BIG)
            if isinstance(unit, Range):
                minus.remove(m)
                return clauses, unit
        clauses.append(tuple(r for r, _, _ in left))
    return clauses, None


def _one_multiple(cube: Cube, chain_list: list[tuple[int, ...]], dom: Domain) -> Cube | None:
    """L % m == c as L == v where the cube leaves one such value to L; None: it leaves none."""
    for r in cube:
        mod = as_mod(r.lin)
        if mod is None or r.lo != r.hi:
            continue
        inner, m, off = mod
        found = [facts_of(cube, c, dom).bound(inner) for c in chain_list]
        lo, hi = max(lo for lo, _ in found), min(hi for _, hi in found)
        first = lo + (r.lo - off - lo) % m
        if lo <= -BIG or hi >= BIG or first + m <= hi:
            continue
        only = ranged(inner, first, first) if first <= hi else False
        rest = without(cube, r)
        return conj([*rest, only]) if isinstance(only, Range) else rest if only else None
    return cube


def _drop_implied(cube: Cube, chain_list: list[tuple[int, ...]], dom: Domain) -> Cube:
    """Drop Ranges implied by the rest, longest first, and the proven side of a Range (a remainder keeps both)."""
    for r in sorted(cube, key=lambda r: (-len(r.lin.terms), str(r))):
        rest = without(cube, r)
        lo, hi = bound(rest, r, chain_list, dom)
        if as_mod(r.lin):
            a, b = residue_bound(cube, r.lin)
            r = Range(r.lin, max(r.lo, a), min(r.hi, b))
        if lo >= r.lo and hi <= r.hi:
            cube = rest
        elif kept_whole(r.lin):
            cube = _with(rest, r)
        else:
            cube = _with(
                rest, Range(r.lin, -BIG if lo >= r.lo else r.lo, BIG if hi <= r.hi else r.hi)
            )
    return cube


def _with(cube: Cube, r: Range) -> Cube:
    return tuple(sorted([*cube, r], key=str))


@contextmanager
def proof_budget(steps: int = PROOF_STEPS) -> Iterator[None]:
    """Proofs inside raise ``Exhausted`` after so many steps; inside another budget they share that one.

    Starts without remembered proofs: what was analysed before in this process must not decide how far it gets.
    """
    with ANALYSIS:
        if BUDGET.left is not None:  # this thread's own, since it holds the lock
            yield
            return
        simplify.cache_clear()
        facts_of.cache_clear()
        BUDGET.left = steps
        try:
            yield
        finally:
            BUDGET.left = None


def inside(a: Cube, b: Cube, dom: Domain) -> bool:
    """Is every cell of a one of b?"""
    return simplify(a, (b,), dom) is None


def plainer(cubes: Dnf, dom: Domain) -> Dnf:
    """The same union with each cube simplified alone, the empty ones gone."""
    return merge(s[0] for c in cubes if (s := simplify(c, (), dom)) is not None)


def expand(cubes: Dnf, dom: Domain) -> Dnf:
    """The same union with fewer and plainer cubes: covered ones leave, and a literal leaves where what the cube gains
    lies inside one other cube (joins guarded cases of abs, min, max)."""
    out = list(cubes)
    if len(out) > 16:
        return out
    for i, a in enumerate(out):
        for r in a:
            rest = [b for j, b in enumerate(out) if j != i]
            gains = [conj([*without(out[i], r), *n]) for n in negate(r)]
            if r in out[i] and all(
                g is None or any(inside(g, b, dom) for b in rest) for g in gains
            ):
                out[i] = without(out[i], r)
    kept = list(dict.fromkeys(out))
    for c in kept[::-1]:
        if any(o != c and inside(c, o, dom) for o in kept):
            kept.remove(c)
    return merge(kept)


def walked_term(cube: Cube) -> ex.Term | None:
    """The random_blocks term whose table this cube can walk: the first positive one."""
    for r in cube:
        for g, _ in r.lin.terms:
            if isinstance(g, Opaque) and isinstance(g.expr, ex.Term) and r.lo == 1:
                return g.expr
    return None
