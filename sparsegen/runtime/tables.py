"""Tables of ``random_blocks`` on the device, made at the first call of their lengths and kept for the next ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparsegen.errors import InputError
from sparsegen.launch.tables import random_table

if TYPE_CHECKING:
    from sparsegen.codegen.plan import Table

TABLES_KEPT = 32  # one per draw and pair of lengths


class Tables:
    """The tables made last; the oldest one goes first."""

    def __init__(self) -> None:
        self._made: dict[Any, tuple[Any, int]] = {}

    def of(
        self, table: Table, q_first: int, q_len: int, kv_len: int, device: Any
    ) -> tuple[Any, int]:
        """``launch.tables.random_table`` of a call whose first query is at ``q_first``.

        InputError where it would have to be made inside a CUDA graph capture.
        """
        import torch

        key = table.term, q_first, q_len, kv_len, device
        made = self._made.get(key)
        if made is None:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise InputError(
                    "random_blocks meets these lengths for the first time inside a CUDA graph capture; call once before"
                )
            made = self._made[key] = random_table(table, q_first, q_len, kv_len, device)
            if len(self._made) > TABLES_KEPT:
                self._made.pop(next(iter(self._made)))
        return made
