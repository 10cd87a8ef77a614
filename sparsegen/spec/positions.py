"""Where the rows of the tensors of a call lie on the positions, for plain and for ragged batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparsegen.errors import InputError
from sparsegen.spec.fields import LIMIT, show
from sparsegen.spec.run_data import per_batch


@dataclass(frozen=True)
class Positions:
    """Positions of a call, as int64 tensors with B = 1 where all batch entries are alike.

    ``q_start`` [B], ``q_lengths`` [B], ``kv_starts`` [B], ``kv_lengths`` [B]; ``k_start`` and the lengths of the
    tensors ``q_len``, ``kv_len`` are ints.  ``explicit``: the call gave q_start or k_start itself.
    """

    q_len: int
    kv_len: int
    k_start: int
    q_start: Any
    q_lengths: Any
    kv_starts: Any
    kv_lengths: Any
    batched: bool
    explicit: bool

    @property
    def batch(self) -> int:
        """Batch entries that the lengths distinguish."""
        return int(self.q_start.shape[0])

    @property
    def k_end(self) -> int:
        """One past the largest position that a key of the buffer can have."""
        return self.k_start + self.kv_len

    def queries(self, rows: Any) -> tuple[Any, Any]:
        """(position, is a query) of query rows [n]: [B, n] each."""
        return self.q_start[:, None] + rows[None], rows[None] < self.q_lengths[:, None]

    def keys(self) -> tuple[Any, Any]:
        """(position, is a key) of the memory rows 0 .. kv_len - 1: [B, kv_len] each."""
        import torch

        row = torch.arange(self.kv_len, device=self.q_start.device)[None] - self.kv_starts[:, None]
        return self.k_start + row, (row >= 0) & (row < self.kv_lengths[:, None])


def find_positions(
    q_len: int,
    kv_len: int,
    align: str,
    device: Any,
    *,
    q_start: Any = None,
    k_start: Any = None,
    q_lengths: Any = None,
    kv_starts: Any = None,
    kv_lengths: Any = None,
) -> Positions:
    """Positions of a call.

    Valid keys of batch entry b are memory rows kv_starts[b] .. kv_starts[b] + kv_lengths[b] - 1, at positions k_start,
    k_start + 1, …  Valid queries are rows 0 .. q_lengths[b] - 1, at positions q_start, q_start + 1, …; other rows are
    empty.  Defaults: k_start 0; q_start = k_start + kv_lengths[b] - q_lengths[b] for bottom_right, k_start for
    top_left; q_lengths the tensor's length; kv_starts 0; kv_lengths what is left of the tensor after kv_starts[b].
    """
    import torch

    for name, length in (("q_len", q_len), ("kv_len", kv_len)):
        if type(length) is not int or not 0 <= length <= LIMIT:
            raise InputError(f"{name} must be an integer from 0 to {LIMIT}, got {show(length)}")
    start = _position("k_start", k_start) if k_start is not None else 0
    queries = per_batch("q_lengths", q_len if q_lengths is None else q_lengths, 0, q_len, device)
    first = per_batch("kv_starts", 0 if kv_starts is None else kv_starts, 0, kv_len, device)
    keys = (
        kv_len - first
        if kv_lengths is None
        else per_batch("kv_lengths", kv_lengths, 0, kv_len, device)
    )
    named = {"q_lengths": queries, "kv_starts": first, "kv_lengths": keys}
    sizes = {name: t.shape[0] for name, t in named.items() if t.dim()}
    if len(set(sizes.values()) - {1}) > 1:
        raise InputError(
            "different batch sizes: " + ", ".join(f"{n} has {s}" for n, s in sizes.items())
        )
    batch = max(sizes.values(), default=1)
    queries, first, keys = (t.reshape(-1).expand(batch) for t in (queries, first, keys))
    if kv_len and bool((first + keys > kv_len).any()):
        at = int((first + keys).argmax())
        both = f"{int(first[at])} + {int(keys[at])}"
        raise InputError(f"kv_starts + kv_lengths must be at most kv_len = {kv_len}, got {both}")
    if q_start is not None:
        begin = torch.full_like(queries, _position("q_start", q_start))
    else:
        begin = start + (keys - queries if align == "bottom_right" else torch.zeros_like(queries))
    explicit = q_start is not None or k_start is not None
    found = Positions(q_len, kv_len, start, begin, queries, first, keys, bool(sizes), explicit)
    if batch and max(int(begin.abs().max()) + q_len, abs(start) + kv_len) > LIMIT:
        raise InputError(f"positions must lie within ±{LIMIT}")
    return found


def _position(name: str, value: Any) -> int:
    if (
        type(value) is not int or not -LIMIT <= value <= LIMIT
    ):  # 3.0 and True are mistakes elsewhere
        raise InputError(f"{name} must be an integer from -{LIMIT} to {LIMIT}, got {show(value)}")
    return value
