"""Random unions of the terms that query tilings are for: periodic, window, grid and global ones."""

from __future__ import annotations

import random

PERIODS = (2, 3, 4, 6, 8, 12, 16)


def union(rng: random.Random) -> str:
    """A predicate: one to four terms, causal or not, now and then without one of them."""
    terms = [term(rng) for _ in range(rng.randint(1, 4))]
    out = " or ".join(f"({t})" for t in terms)
    if rng.random() < 0.2:
        out = f"({out}) and not ({term(rng)})"
    return f"k <= q and ({out})" if rng.random() < 0.5 else out


def term(rng: random.Random) -> str:
    kind = rng.choice((periodic, periodic, window, grid, grid, few))
    return kind(rng)


def periodic(rng: random.Random) -> str:
    m = rng.choice(PERIODS)
    a = rng.randrange(m)
    b = rng.randrange(a, m)
    return rng.choice(
        (
            f"(q - k) % {m} == {a}",
            f"{a} <= (q - k) % {m} and (q - k) % {m} <= {b}",
            f"k % {m} >= {b}",
            f"k % {m} == {a}",
            f"q % {m} == k % {m} and abs(q - k) < {m * rng.randint(1, 5)}",
            f"(q + k) % {m} == {a}",
            f"q % {m} == {a} and k % {m} <= {b}",
            f"(k // {rng.choice((2, 4))}) % {m} == {a}",
        )
    )


def window(rng: random.Random) -> str:
    n = rng.randint(1, 20)
    return rng.choice((f"0 <= q - k and q - k < {n}", f"abs(q - k) <= {n}", f"{n} < abs(q - k)"))


def grid(rng: random.Random) -> str:
    w, r, s = rng.choice((4, 5, 8, 12)), rng.randint(0, 2), rng.randint(0, 3)
    h = rng.choice((2, 3, 4))
    return rng.choice(
        (
            f"q // {w} == k // {w}",
            f"q // {w} == k // {w} or q % {w} == k % {w}",
            f"abs(q // {w} - k // {w}) <= {r} and abs(q % {w} - k % {w}) <= {s}",
            f"max(abs(q // {w} - k // {w}), abs(q % {w} - k % {w})) <= {r}",
            f"abs(q // {w * h} - k // {w * h}) <= 1 and abs(q // {w} % {h} - k // {w} % {h}) <= {r}"
            f" and abs(q % {w} - k % {w}) <= {s}",
        )
    )


def few(rng: random.Random) -> str:
    a = rng.randint(0, 12)
    b = a + rng.randint(0, 6)
    return rng.choice((f"k < {b + 1}", f"{a} <= k and k <= {b}", f"{a} <= q and q <= {b}",
                       f"q < {b + 1}", f"min(q, k) < {b + 1}"))  # fmt: skip
