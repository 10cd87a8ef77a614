"""Random valid pattern files as plain values, over every node of the language; and run-time data for them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

Data = dict[str, Any]


def random_pattern(rng: random.Random, depth: int = 3) -> Data:
    """A valid pattern whose numbers suit lengths of a few dozen."""
    data: Data = {"name": f"p{rng.randrange(1000)}"}
    if rng.random() < 0.3:
        masks = [random_mask(rng, depth - 1) for _ in range(3)]
        data["heads"] = [
            {"heads": [0, "2-3"], "mask": masks[0]},
            {"heads": 1, "mask": masks[1]},
            {"heads": "rest", "mask": masks[2]},
        ]
        data["problem"] = {"heads": 6, "kv_heads": rng.choice([1, 2, 3, 6]), "lengths": [5, [1, 9]]}
    else:
        data["mask"] = random_mask(rng, depth)
    if rng.random() < 0.3:
        data["align"] = rng.choice(["top_left", "bottom_right"])
    for name, value in (
        ("softcap", 30.0),
        ("scale", 0.125),
        ("alibi", True),
        ("sink_logits", True),
        ("null_key", False),
        ("summary", "what it is: über"),
    ):
        if rng.random() < 0.15:
            data[name] = value
    return data


def random_mask(rng: random.Random, depth: int) -> Any:
    if depth > 0 and rng.random() < 0.6:
        kind = rng.choice(["all_of", "any_of", "not", "relative"])
        if kind == "not":
            return {"not": random_mask(rng, depth - 1)}
        parts = [random_mask(rng, depth - 1) for _ in range(rng.randint(1, 3))]
        if kind != "relative":
            return {kind: parts}
        if not any(word in str(parts) for word in ("relative", "random_blocks")):
            return {"all_of": [{"documents": {"positions": "relative"}}, *parts]}
    name = rng.choice(sorted(LEAVES))
    body = LEAVES[name](rng)
    return name if body is None else {name: body}


def _sides(rng: random.Random) -> Data:
    side = lambda: rng.choice([0, 1, 3, 10, "inf"])
    return rng.choice(
        [
            {"size": rng.choice([1, 2, 5, 100])},
            {"radius": side()},
            {"left": side(), "right": side()},
            {"left": side()},
        ]
    )


def _grid(rng: random.Random) -> list[int]:
    return rng.choice([[5, 6], [4, 2, 4], [30], [2, 3, 2, 3]])


def _radius(rng: random.Random) -> Data:
    shape = _grid(rng)
    return {"shape": shape, "radius": [rng.randrange(3) for _ in shape]}


LEAVES: dict[str, Any] = {
    "full": lambda rng: None,
    "causal": lambda rng: None,
    "window": _sides,
    "dilated": lambda rng: {**_sides(rng), "dilation": rng.choice([1, 2, 3, 50])},
    "sink": lambda rng: {"tokens": rng.choice([0, 1, 4, 100])},
    "prefix": lambda rng: {"tokens": rng.choice([0, 3, 100, "runtime"])},
    "global": lambda rng: {
        **rng.choice([{"tokens": 2}, {"positions": [0, 5, 6, 300]}]),
        "rows": rng.random() < 0.6,
    },
    "strided": lambda rng: {"stride": rng.choice([1, 2, 5, 64])},
    "columns": lambda rng: rng.choice(
        [{"stride": 4, "width": 1}, {"stride": 5, "width": 3}, {"stride": 2, "width": 2}]
    ),
    "chunks": lambda rng: {"size": rng.choice([1, 3, 8, 100])},
    "axial": lambda rng: {"shape": _grid(rng)},
    "neighborhood": _radius,
    "random_blocks": lambda rng: {
        "block": rng.choice([1, 4, 12]),
        "per_row": rng.choice([1, 2, 9]),
        "seed": rng.randrange(100),
    },
    "documents": lambda rng: None,
    "key_padding": lambda rng: None,
    "block_mask": lambda rng: {"block": [4, 4]},
    "block_list": lambda rng: {"block": [4, 8]},
    "top_blocks": lambda rng: {
        "block": 4,
        "count": rng.randrange(4),
        "score": "runtime",
        "future": rng.random() < 0.5,
    },
    "predicate": lambda rng: rng.choice(
        [
            "k <= q",
            "abs(q - k) % 3 == 1 or k < 2",
            "0 <= q - k < kv_len // 2",
            "q // 4 == k // 4 and not k == 3",
        ]
    ),
}


def runtime_for(
    needs: tuple[tuple[str, ...], ...],
    blocks: dict[str, list[tuple[int, int]]],
    q_len: int,
    kv_len: int,
    heads: int,
    rng: random.Random,
) -> Data | None:
    """Data for the keywords that a call needs; None where one keyword would serve nodes of different block sizes.

    ``blocks``: keyword → the block sizes that its nodes have.
    """
    draw, data = np.random.default_rng(rng.randrange(2**32)), {}
    for group in needs:
        name = rng.choice(group)
        cuts = sorted(rng.randrange(kv_len + 1) for _ in range(3))
        if name in blocks:
            if len(set(blocks[name])) > 1:
                return None
            bq, bk = blocks[name][0]
            rows, columns = -(-q_len // bq), -(-kv_len // bk)
            if rows * columns > 10_000:
                return None
        if name == "cu_seqlens":
            data[name] = [0, *cuts]
        elif name == "document_lengths":
            data[name] = [cuts[0], cuts[1] - cuts[0], cuts[2] - cuts[1]]
        elif name == "document_ids":
            data[name] = draw.integers(0, 3, kv_len).tolist()
        elif name == "kv_lengths":
            data[name] = [kv_len, rng.randrange(kv_len + 1)]
        elif name == "prefix_lengths":
            data[name] = [rng.randrange(kv_len + 2) for _ in range(2)]
        elif name == "block_mask":
            data[name] = draw.random((1, heads, rows, columns)) < 0.5
        elif name == "block_indices":
            data[name] = draw.integers(0, columns, (1, heads, rows, 3))
        elif name == "block_counts":
            data[name] = draw.integers(0, 4, (1, heads, rows))
        elif name == "block_scores":
            data[name] = draw.integers(0, 3, (1, heads, rows, columns)).astype(float)
        else:
            raise KeyError(name)
    return data
