"""Text of a transposed schedule, turned back: what its rows and keys are called becomes keys and queries.

``rows``, ``segments`` and ``entries`` write a query tile and the keys it visits.  A transposed schedule has keys for
rows and queries for keys, so the same text says the right thing once its names are exchanged: ``q_pos`` is then the
position of a query in both kernels, and a tile of scores is [keys, queries].
"""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from sparsegen.codegen.rows import FIRST

_PAIRS = (
    ("q", "k"),
    ("q_pos", "k_pos"),
    ("q_first", "k_first"),
    ("q_last", "k_last"),
    ("q_len", "kv_len"),
    ("q_rows", "kv_rows"),
)
NAMES = (
    dict(_PAIRS)
    | {b: a for a, b in _PAIRS}
    | {
        "first_query": "first_key",  # position of the first row of the call
        "first_key": "tile_query",  # position that a tile of entries starts at
        "k_rows": "q_offsets",  # rows in memory of a tile's entries, from there on
    }
)
_FIRST_KEY = "k_start.to(POSITION)"  # position of the first key: no alignment moves it
_AXIS = {"x": "y", "y": "x"}

T = TypeVar("T")


def turned(value: T) -> T:
    """Text, or a record or tuple that holds text, with queries and keys exchanged."""
    out: Any = value
    if isinstance(value, str):
        out = re.sub(r"[A-Za-z_]\w*", _turn, value.replace(FIRST, _FIRST_KEY))
    elif isinstance(value, tuple):
        out = tuple(map(turned, value))
    elif is_dataclass(value) and not isinstance(value, type):
        texts = {f.name: getattr(value, f.name) for f in fields(value)}
        out = replace(value, **{name: turned(x) for name, x in texts.items()})  # type: ignore[type-var]
    return out  # type: ignore[no-any-return]


def _turn(found: re.Match[str]) -> str:
    name = found[0]
    if re.fullmatch(r"[xy]\d+(_\w+)?", name):
        return _AXIS[name[0]] + name[1:]
    return NAMES.get(name, name)
