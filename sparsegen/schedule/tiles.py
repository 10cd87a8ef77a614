"""Query tiles of a call and the key tiles they visit, in numbers: the rules of ``tree`` that kernels, counts and
``verify`` share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsegen.schedule.digits import radices
from sparsegen.schedule.forms import value
from sparsegen.schedule.tree import IDENTITY, Segment, Tiling


@dataclass(frozen=True)
class Visit:
    """The box of a segment and its spans, one entry per query tile (int64 arrays).

    ``first``, ``last``: of the top key axis (without key cuts: keys); ``last < first`` where the box is empty.
    """

    first: np.ndarray
    last: np.ndarray
    inner: tuple[tuple[np.ndarray, np.ndarray], ...]  # first digit, number of them: lower key axes
    width: np.ndarray  # entries per value of the top axis
    entries: np.ndarray
    head: np.ndarray  # key tiles before the full span; 0 where there is none
    body: np.ndarray  # key tiles of the full span; 0: no full part on this tile
    block_n: int

    @property
    def body_first(self) -> np.ndarray:
        """First value of the top axis in the full span, without key cuts: its first key."""
        return self.first + self.head * self.block_n // np.maximum(self.width, 1)

    def tiles(self, block_n: int) -> dict[str, np.ndarray]:
        """Key tiles per query tile of "head", "full", "tail" and "whole" (whole: where there is no full part)."""
        assert block_n == self.block_n
        full = self.body > 0
        every = -(-self.entries // block_n)
        return {
            "head": np.where(full, self.head, 0),
            "full": self.body,
            "tail": np.where(full, every - self.head - self.body, 0),
            "whole": np.where(full, 0, every),
        }


def visit(segment: Segment, env: Mapping[str, Any], block_n: int) -> Visit:
    """What every query tile visits.  ``env``: the symbols of the tiles as ints or arrays (``query_tiles``)."""
    shape = np.broadcast_shapes(*(np.shape(v) for v in env.values()))

    def wide(x: Any) -> np.ndarray:
        return np.broadcast_to(np.asarray(x, dtype=np.int64), shape)

    def of(form: Any) -> np.ndarray:
        return wide(value(form, env))

    first, last = of(segment.tile_lo), of(segment.tile_hi)
    for form in segment.live:
        last = np.where(of(form) < 0, first - 1, last)
    inner = tuple((of(lo), np.maximum(of(hi) - of(lo) + 1, 0)) for lo, hi in segment.inner)
    width = math.prod((n for _, n in inner), start=wide(1))
    entries = np.maximum(last - first + 1, 0) * width
    if segment.tiling.k_extent:
        counts = (*(n for _, n in inner), np.maximum(last - first + 1, 0))
        entries = math.prod(_boxes(counts, segment.tiling, block_n), start=wide(block_n))
    none = np.zeros(shape, np.int64)
    if segment.full_lo is None or segment.full_hi is None:
        return Visit(first, last, inner, width, entries, none, none, block_n)
    head = -((first - of(segment.full_lo)) * width // block_n)
    body = np.maximum((of(segment.full_hi) + 1 - first) * width // block_n - head, 0)
    body = np.where(entries > 0, body, 0)
    for group in segment.guards:
        held = np.logical_or.reduce([of(form) >= 0 for form in group])
        body = np.where(held, body, 0)
    return Visit(first, last, inner, width, entries, np.where(body > 0, head, 0), body, block_n)


def query_tiles(
    q_start: int,
    q_len: int,
    block_m: int,
    k_start: int,
    kv_len: int,
    tiling: Tiling = IDENTITY,
    rows: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """The symbols of all query tiles of a call: an array over tiles for each digit, ints for the lengths.

    Lower axis 0 runs fastest, the top axis slowest; tiles without a row of the call are left out.  ``rows``: only these query positions, the first of them that the
    call has in front.
    """
    first, last = q_start, q_start + q_len - 1
    if rows is not None:
        first, last = max(first, rows[0]), min(last, rows[1])
    env: dict[str, Any] = {
        "k_first": k_start,
        "k_last": k_start + kv_len - 1,
        "q_len": q_len,
        "kv_len": kv_len,
    }
    if not tiling.q_cuts:
        start = np.arange(first, last + 1, block_m, dtype=np.int64)
        return {"q_first": start, "q_last": np.minimum(start + block_m - 1, last), **env}
    step = tiling.q_cuts[-1]
    axes = list(zip(radices(tiling.q_cuts), tiling.extent, strict=True))
    top_first, top_last = first // step, last // step
    size = top_size(tiling, block_m)
    counts = [-(-radix // n) for radix, n in axes]
    counts.append(-(-(top_last - top_first + 1) // size) if last >= first else 0)
    at = np.arange(math.prod(counts), dtype=np.int64)
    for t, (radix, n) in enumerate(axes):
        digit, at = at % counts[t] * n, at // counts[t]
        if n == 1:
            env[f"x{t}"] = digit
        else:
            env |= {f"x{t}_first": digit, f"x{t}_last": np.minimum(digit + n, radix) - 1}
    digit = top_first + at * size
    t = len(axes)
    env |= {f"x{t}_first": digit, f"x{t}_last": np.minimum(digit + size - 1, top_last)}
    live = _holds_rows(env, tiling.q_cuts, first, last)
    return {n: v[live] if isinstance(v, np.ndarray) else v for n, v in env.items()}


def _holds_rows(env: Mapping[str, Any], cuts: tuple[int, ...], first: Any, last: Any) -> Any:
    """Which tiles hold any of the positions first..last: on its top axis one digit, or its two ends, decide."""
    t = len(cuts)
    low, high = (env.get(f"x{t}_{end}", env.get(f"x{t}")) for end in ("first", "last"))
    if not t:
        return np.maximum(low, first) <= np.minimum(high, last)
    step = cuts[-1]
    a, b = np.maximum(low, -(-first // step)), np.minimum(high, (last + 1) // step - 1)
    out = a <= b  # a digit with all positions below it
    for end in (first // step, last // step):
        part = np.maximum(first - end * step, 0), np.minimum(last - end * step, step - 1)
        out = out | ((low <= end) & (end <= high) & _holds_rows(env, cuts[:-1], *part))
    return out


def top_size(tiling: Tiling, block_m: int) -> int:
    """The query tile's size on the top axis."""
    lower = math.prod(tiling.extent)
    if block_m % lower:
        raise ValueError(f"tiles of {block_m} rows do not hold {lower} lower digits")
    return block_m // lower


def tile_count(env: Mapping[str, Any]) -> int:
    """Number of query tiles of an environment."""
    return max(np.size(v) for n, v in env.items() if n[0] in "qx" and n != "q_len")


def one_tile(env: Mapping[str, Any], i: int) -> dict[str, Any]:
    """The environment of query tile ``i`` alone, as ints."""
    return {n: int(v[i]) if isinstance(v, np.ndarray) else v for n, v in env.items()}


@dataclass(frozen=True)
class Rows:
    """The rows of one query tile, lower axis 0 fastest: int64 [BLOCK_M], and which of them the call has."""

    q: np.ndarray
    digits: dict[str, np.ndarray]  # "x0", "x1", ...; no query cuts: "q"
    live: np.ndarray


def tile_rows(
    tile: Mapping[str, Any],
    q_start: int,
    q_len: int,
    block_m: int,
    tiling: Tiling = IDENTITY,
) -> Rows:
    """The rows of a tile (``one_tile``).  Dead: beyond its last digit on some axis, or not of the call."""
    at = np.arange(block_m, dtype=np.int64)
    if not tiling.q_cuts:
        q = tile["q_first"] + at
        return Rows(q, {"q": q}, q <= tile["q_last"])
    digits: dict[str, np.ndarray] = {}
    q, live = np.zeros(block_m, np.int64), np.ones(block_m, bool)
    sizes = (*tiling.extent, top_size(tiling, block_m))
    for t, (step, n) in enumerate(zip((1, *tiling.q_cuts), sizes, strict=True)):
        name = f"x{t}"
        digits[name] = tile.get(f"{name}_first", tile.get(name)) + at % n
        live &= digits[name] <= tile.get(f"{name}_last", tile.get(name))
        q, at = q + step * digits[name], at // n
    return Rows(q, digits, live & (q >= q_start) & (q < q_start + q_len))


def entry_keys(
    first: int,
    inner: tuple[tuple[int, int], ...],
    entries: np.ndarray,
    tiling: Tiling,
    block_n: int = 0,
) -> dict[str, np.ndarray]:
    """Keys of numbered entries of a box (``first``: of the top axis; inner: first digit and size): "k" and the digits.

    ``block_n``: entries of a key tile, which matter where the tiling has a ``k_extent``.
    """
    if not tiling.k_cuts:
        return {"k": first + entries}
    out: dict[str, np.ndarray] = {}
    k = np.zeros_like(entries)
    digits = _entry_digits(first, inner, entries, tiling, block_n)
    for t, (step, digit) in enumerate(zip((1, *tiling.k_cuts), digits, strict=True)):
        out[f"y{t}"] = digit
        k = k + step * digit
    return {**out, "k": k}


def _entry_digits(
    first: int,
    inner: tuple[tuple[int, int], ...],
    entries: np.ndarray,
    tiling: Tiling,
    block_n: int,
) -> Iterator[np.ndarray]:
    if not tiling.k_extent:
        for lo, n in inner:
            yield lo + entries % n
            entries = entries // n
        yield first + entries
        return
    at, within = np.divmod(entries, block_n)
    sizes = key_tile(tiling, block_n)
    counts = _boxes([n for _, n in inner], tiling, block_n)
    for (lo, _), size, count in zip(inner, sizes, counts):
        yield lo + at % count * size + within % size
        at, within = at // count, within // size
    yield first + at * sizes[len(inner)] + within % sizes[len(inner)]


def key_tile(tiling: Tiling, block_n: int) -> tuple[int, ...]:
    """A key tile's size on every key axis, where the tiling has a ``k_extent``."""
    if block_n % tiling.k_extent:
        raise ValueError(f"tiles of {block_n} keys are no boxes {tiling.k_extent} digits wide")
    return (tiling.k_extent, block_n // tiling.k_extent, *(1 for _ in tiling.k_cuts[1:]))


def _boxes(counts: Sequence[Any], tiling: Tiling, block_n: int) -> list[Any]:
    """Key tiles along each axis that has ``counts`` digits."""
    return [-(-n // size) for n, size in zip(counts, key_tile(tiling, block_n))]


def within(visited: Visit, keys: Mapping[str, np.ndarray]) -> np.ndarray:
    """Which keys are of the box of the one query tile that was visited: key tiles that are boxes have more."""
    ends = [int(first) + int(n) - 1 for first, n in visited.inner] + [int(visited.last)]
    return np.logical_and.reduce([keys[f"y{t}"] <= end for t, end in enumerate(ends)])
