"""Device tables that a kernel reads: made from numbers alone, cached by whoever calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from sparsegen.codegen.plan import Table

LARGEST_TILE = 128  # query rows


def random_table(
    table: Table, q_first: int, q_len: int, kv_len: int, device: Any
) -> tuple[torch.Tensor, int]:
    """The random_blocks table of a call: int32 [block rows, per_row] on ``device``, and its first block row.

    ``q_first`` is the absolute position of query row 0.  Negative positions have no row: they see nothing.  Rows behind
    the last query are empty; a kernel reads them for the dead rows of its last tile.
    """
    import torch

    from sparsegen.spec.random_blocks import random_block_table

    first_row = max(0, q_first) // table.block
    last_row = max(0, q_first + q_len - 1) // table.block
    blocks = max(1, -(-kv_len // table.block))
    seed = table.term["seed"]
    made = random_block_table(
        table.block, table.per_row, seed, first_row, last_row - first_row + 1, blocks
    )
    behind = -(-LARGEST_TILE // table.block)
    padded = torch.nn.functional.pad(torch.from_numpy(made), (0, 0, 0, behind), value=-1)
    return padded.to(device), first_row
