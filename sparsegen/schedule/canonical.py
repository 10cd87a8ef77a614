"""The canonical form of a mask: one text and digest for all spellings that the normal form finds equal.

Also the lengths of a problem are read here: a window at least as long as every call is no window, so the schedule is
the plain one, and the largest position for which that is true is kept with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from sparsegen.schedule.branches import expand, plainer, proof_budget
from sparsegen.schedule.facts import ANY_LENGTH, BUDGET, Domain, Exhausted, moduli
from sparsegen.schedule.forms import BIG
from sparsegen.schedule.formula import Cube, Dnf, cube_text, dnf_text
from sparsegen.schedule.normalise import to_dnf
from sparsegen.spec import expr as ex

MOST_TRIED = 12  # lengths at which a shorter form is proven again


@dataclass(frozen=True)
class Reduced:
    """The same mask in fewer and plainer cubes, sorted.

    ``max_position`` (exclusive) and ``min_position`` (inclusive; None: -max_position) are the positions for which that
    holds, where a length made a conjunct or a cube idle; else both are None.  ``exhausted``: the budget of proofs ran
    out; the cubes are right, and may be less plain than they could be.
    """

    cubes: tuple[Cube, ...]
    max_position: int | None = None
    min_position: int | None = None
    exhausted: bool = False


@lru_cache(maxsize=512)
def reduced(cubes: tuple[Cube, ...], dom: Domain = ANY_LENGTH) -> Reduced:
    """The mask for calls of any length, at the positions of a domain."""
    with proof_budget():
        out = _reduced(cubes, dom)
        return Reduced(out, exhausted=_spent())


def _spent() -> bool:
    return BUDGET.left is not None and BUDGET.left < 0


def _reduced(cubes: tuple[Cube, ...], dom: Domain) -> tuple[Cube, ...]:
    """Within the caller's budget of proofs; what is reached when it runs out is right, only less plain."""
    out: Dnf = list(cubes)
    try:
        out = plainer(out, dom)
        out = expand(out, dom)
    except Exhausted:
        assert _spent()
    return tuple(sorted(out, key=cube_text))


def canonical_text(e: ex.Bool) -> str:
    """The canonical formula of a mask, for calls of any length."""
    return dnf_text(reduced(tuple(to_dnf(e))).cubes)


def text_digest(text: str) -> str:
    """sha256 hex of a canonical text."""
    return hashlib.sha256(text.encode()).hexdigest()


def at_lengths(cubes: tuple[Cube, ...], align: str, lengths: Iterable[tuple[int, int]]) -> Reduced:
    """The mask where no call exceeds ``lengths``."""
    pairs = list(lengths)
    if not pairs:
        return Reduced(cubes)
    with proof_budget():
        most = max(max(p) for p in pairs)
        return Reduced(*_at_most(cubes, most, _no_negative_rows(align, pairs)), exhausted=_spent())


def _no_negative_rows(align: str, pairs: list[tuple[int, int]]) -> bool:
    return align == "top_left" or all(q_len <= kv_len for q_len, kv_len in pairs)


def _at_most(
    cubes: tuple[Cube, ...], most: int, from_zero: bool
) -> tuple[tuple[Cube, ...], int | None, int | None]:
    short = _reduced(cubes, _within(most, signed=True))
    limit = _furthest(cubes, short, most, signed=True) if short != cubes else None
    if from_zero:
        # No row before position 0: worth claiming only where a length, and not the sign alone, makes more idle,
        # or where the same form then holds for longer calls.
        plain = _reduced(cubes, _within(most, signed=False))
        if limit is not None and plain == short:
            further = _furthest(cubes, plain, most, signed=False)
            if further > limit:
                return plain, further, 0
        elif plain not in (_reduced(short, _NOT_NEGATIVE), _reduced(cubes, _NOT_NEGATIVE)):
            if _spent():
                return (cubes if limit is None else short), limit, None  # no proof which it was
            return plain, _furthest(cubes, plain, most, signed=False), 0
    return (cubes if limit is None else short), limit, None


_NOT_NEGATIVE = Domain(0, ANY_LENGTH.q_hi, ANY_LENGTH.k_hi, ANY_LENGTH.len_hi)


def _within(most: int, *, signed: bool) -> Domain:
    return Domain(-most if signed else 0, most - 1, most - 1, 2 * most)


def _furthest(cubes: tuple[Cube, ...], short: tuple[Cube, ...], most: int, *, signed: bool) -> int:
    """Largest number of positions at which the cubes still reduce to ``short``, among those that the formula names."""
    named = set(moduli(cubes))
    for c in cubes:
        for r in c:
            named |= {abs(b) for b in (r.lo, r.hi) if abs(b) < BIG}
    near = {n + d for n in named for d in (-1, 0, 1)} | {(n + 1) // 2 for n in named}
    longer = sorted((n for n in near if most < n <= ANY_LENGTH.k_hi), reverse=True)
    for n in longer[:MOST_TRIED]:
        if _reduced(cubes, _within(n, signed=signed)) == short:
            return n
    return most
