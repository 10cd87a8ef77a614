"""One call of a pattern, seen densely: positions, run-time data, and what each ``Term`` means on them.

Tensors are [B, H, rows, keys] with 1 wherever nothing differs along an axis.
"""

from __future__ import annotations

from typing import Any

from sparsegen.errors import InputError
from sparsegen.spec.node import NODES
from sparsegen.spec.positions import Positions
from sparsegen.spec.random_blocks import random_block_table
from sparsegen.spec.run_data import Documents, integers, per_batch

_DOCUMENT_NAMES = ("cu_seqlens", "document_ids", "document_lengths")


class Call:
    """Data of a call that hold for every query row; ``rows_env`` looks at some rows of it."""

    def __init__(
        self,
        pattern: Any,
        positions: Positions,
        heads: int | None,
        data: dict[str, Any],
        tensors: Any = None,
    ):
        """``data``: run-time keywords.  ``tensors``: (q, k) of the call, for masks that are computed from them."""
        self.pattern, self.at, self.heads, self.data, self.tensors = (
            pattern,
            positions,
            heads,
            data,
            tensors,
        )
        self.device = positions.q_start.device
        self.sizes: dict[str, int] = {"lengths": positions.batch} if positions.batched else {}
        k, k_valid = positions.keys()
        self.k, self.k_valid = k[:, None, None, :], k_valid[:, None, None, :]
        self.documents = self._documents()
        self.prefix = self._prefix()
        self._blocks: dict[Any, Any] = {}

    # ------------------------------------------------------------------ batches
    @property
    def batch(self) -> int | None:
        """Batch entries that the run-time data distinguish; None when there is no batch."""
        if len(set(self.sizes.values()) - {1}) > 1:
            found = ", ".join(f"{name} has {size}" for name, size in self.sizes.items())
            raise InputError(f"different batch sizes: {found}")
        return max(self.sizes.values()) if self.sizes else None

    def _documents(self) -> Documents | None:
        name = next((n for n in _DOCUMENT_NAMES if self.data.get(n) is not None), None)
        if name is None:
            return None
        found = Documents(
            name, self.data[name], None if self.at.explicit else self.at.kv_len, self.device
        )
        if found.batched:
            self.sizes[name] = found.batch
        return found

    def _prefix(self) -> Any:
        if self.data.get("prefix_lengths") is None:
            return None
        lengths = per_batch("prefix_lengths", self.data["prefix_lengths"], 0, 2**31, self.device)
        if lengths.dim():
            self.sizes["prefix_lengths"] = lengths.shape[0]
        return lengths.reshape(-1, 1, 1, 1)

    # ------------------------------------------------------------------ rows
    def at_rows(self, rows: Any) -> Rows:
        """The call at query rows [n] (int64 indexes)."""
        return Rows(self, rows)

    # ------------------------------------------------------------------ blocks given or chosen at run time
    def shaped(self, name: str, tensor: Any, dims: int) -> Any:
        """[B or 1, H or kv_heads or 1, …] with the heads spread to 1 or H; missing leading axes are 1."""
        if not dims - 2 <= tensor.dim() <= dims:
            raise InputError(f"{name} must have {dims} dimensions, got shape {list(tensor.shape)}")
        tensor = tensor.reshape((1,) * (dims - tensor.dim()) + tuple(tensor.shape))
        if tensor.shape[0] != 1:
            self.sizes[name] = tensor.shape[0]
        heads = tensor.shape[1]
        if self.heads is None or heads in (1, self.heads):
            return tensor
        if heads == 0 or self.heads % heads:
            raise InputError(
                f"{name} has {heads} heads, which does not fit {self.heads} query heads"
            )
        return tensor.repeat_interleave(self.heads // heads, 1)

    def block_count(self, name: str, block: tuple[int, int]) -> tuple[int, int]:
        """(rows, columns) of blocks that cover the call."""
        if self.at.k_start < 0:
            raise InputError(f"{name} needs k_start to be 0 or more, got {self.at.k_start}")
        return -(-self.at.q_len // block[0]), -(-self.at.k_end // block[1])

    def same_blocks(
        self, name: str, rows: int, columns: int | None, block: tuple[int, int]
    ) -> None:
        """Data for other lengths would be read at wrong places: the number of blocks must be the call's own."""
        need_rows, need_columns = self.block_count(name, block)
        if rows != need_rows or columns not in (None, need_columns):
            got = f"{rows} rows" if columns is None else f"{rows} x {columns}"
            need = f"{need_rows} rows" if columns is None else f"{need_rows} x {need_columns}"
            lengths = f"q_len {self.at.q_len} and kv_len {self.at.kv_len}"
            raise InputError(f"{name} has {got} of blocks {list(block)}; {lengths} need {need}")

    def block_mask(self, block: tuple[int, int]) -> Any:
        """bool [B or 1, H or 1, rows, columns]."""
        import torch

        mask = torch.as_tensor(self.data["block_mask"], device=self.device)
        if mask.dtype != torch.bool:
            raise InputError(
                f"block_mask must be bool, got {str(mask.dtype).removeprefix('torch.')}"
            )
        mask = self.shaped("block_mask", mask, 4)
        self.same_blocks("block_mask", mask.shape[2], mask.shape[3], block)
        return mask

    def block_list(self, block: tuple[int, int]) -> Any:
        """The lists as a bool [B or 1, H or 1, rows, columns]."""
        import torch

        indices = self.shaped(
            "block_indices", integers("block_indices", self.data["block_indices"], self.device), 4
        )
        counts = self.shaped(
            "block_counts", integers("block_counts", self.data["block_counts"], self.device), 3
        )
        self.same_blocks("block_indices", indices.shape[2], None, block)
        self.same_blocks("block_counts", counts.shape[2], None, block)
        most, columns = indices.shape[3], self.block_count("block_indices", block)[1]
        if counts.numel() and not 0 <= int(counts.min()) <= int(counts.max()) <= most:
            raise InputError(f"block_counts must be from 0 to {most}, the length of the lists")
        counted = torch.arange(most, device=self.device) < counts[..., None]
        indices, counted = torch.broadcast_tensors(indices, counted)
        if bool((counted & ((indices < 0) | (indices >= columns))).any()):
            bad = indices[counted & ((indices < 0) | (indices >= columns))][0].item()
            raise InputError(
                f"block_indices must be from 0 to {columns - 1}, the last block of kv_len {self.at.kv_len}; got {bad}"
            )
        mask = torch.zeros((*indices.shape[:3], columns + 1), dtype=torch.bool, device=self.device)
        return mask.scatter(3, torch.where(counted, indices, columns), True)[..., :columns]

    def top_blocks(self, node: Any) -> Any:
        """The chosen blocks of a ``top_blocks`` node as a bool [B or 1, H or 1, rows, columns]."""
        import torch

        size, at = node.block, self.at
        rows, columns = self.block_count("top_blocks", (size, size))
        scores = self.block_scores(size)
        column = torch.arange(columns, device=self.device)
        first_key = (column * size)[None, None, None]
        ends = torch.minimum(
            (torch.arange(rows, device=self.device) + 1) * size, at.q_lengths[:, None]
        )
        last_query = (at.q_start[:, None] + ends - 1)[:, None, :, None]
        has_keys = first_key < (at.k_start + at.kv_lengths)[:, None, None, None]
        has_keys = has_keys & (first_key + size > at.k_start)
        candidate = has_keys & (node.future | (first_key <= last_query))
        if node.threshold is not None:
            candidate = candidate & (scores >= node.threshold)
        scores, candidate = torch.broadcast_tensors(scores, candidate)
        # Candidates first, then by falling score; both sorts are stable, so the earlier block wins a tie.
        order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
        out = (~candidate.gather(-1, order)).int()
        order = order.gather(-1, torch.sort(out, dim=-1, stable=True).indices)
        chosen = torch.zeros_like(candidate).scatter(-1, order[..., : node.count], True)
        return chosen & candidate

    def block_scores(self, size: int) -> Any:
        """Scores [B or 1, H or 1, rows, columns]: given, or from the mean query and mean key of each block."""
        import torch

        if self.data.get("block_scores") is not None:
            scores = torch.as_tensor(self.data["block_scores"], device=self.device)
            scores = self.shaped("block_scores", scores, 4)
            self.same_blocks("block_scores", scores.shape[2], scores.shape[3], (size, size))
            return scores
        if self.tensors is None:
            raise TypeError(
                f"{self.pattern.name}: missing keyword block_scores (sparsegen.reference makes them from q and k)"
            )
        rows, columns = self.block_count("top_blocks", (size, size))
        q, k = (t.detach().double() for t in self.tensors)
        if q.shape[0] > 1:
            self.sizes["q"] = q.shape[0]
        row = torch.arange(self.at.q_len, device=self.device)
        _, q_valid = self.at.queries(row)
        q_mean = _block_mean(q, (row // size).expand(q_valid.shape), q_valid, rows)
        k_mean = _block_mean(k, self.k[:, 0, 0] // size, self.k_valid[:, 0, 0], columns)
        k_mean = k_mean.repeat_interleave(q.shape[1] // k.shape[1], 1)
        return q_mean @ k_mean.transpose(-1, -2)


def _block_mean(x: Any, block: Any, valid: Any, blocks: int) -> Any:
    """Mean of the valid rows of x [B, H, S, D] in each block; ``block`` and ``valid`` are [B or 1, S].  0 if none."""
    import torch

    batch, heads, _, dim = x.shape
    where = torch.where(valid, block, blocks).expand(batch, -1)
    total = torch.zeros(batch, heads, blocks + 1, dim, dtype=x.dtype, device=x.device)
    x = torch.where(valid[:, None, :, None], x, 0)
    total = total.scatter_add(2, where[:, None, :, None].expand(x.shape), x)[:, :, :blocks]
    count = torch.zeros(batch, blocks + 1, dtype=x.dtype, device=x.device)
    count = count.scatter_add(1, where, torch.ones_like(where, dtype=x.dtype))[:, :blocks]
    return total / count.clamp(min=1)[:, None, :, None]


def _tables(block: int, per_row: int, seed: int, rows: list[int], blocks: int) -> Any:
    """``random_block_table`` of any rows (sorted), one call for each run of neighbours."""
    import numpy as np

    per_row, parts, start = min(per_row, max(blocks, 1)), [], 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or rows[end] != rows[end - 1] + 1:
            parts.append(random_block_table(block, per_row, seed, rows[start], end - start, blocks))
            start = end
    return np.concatenate(parts) if parts else np.zeros((0, per_row), np.int32)


class Rows:
    """A call at some of its query rows: what an Expr needs to be evaluated there."""

    def __init__(self, call: Call, rows: Any):
        self.call, self.rows = call, rows
        at = call.at
        q, q_valid = at.queries(rows)
        self.q, self.q_valid = q[:, None, :, None], q_valid[:, None, :, None]
        self.k, self.k_valid = call.k, call.k_valid
        wide = lambda t: t[:, None, None, None]
        # Lengths are at least 1 for the arithmetic: with no key or no query there is no cell to look at, and
        # predicates may divide by a length.
        self.env = {
            "q": self.q,
            "k": self.k,
            "q_len": wide(at.q_lengths).clamp(min=1),
            "kv_len": wide(at.kv_lengths).clamp(min=1),
        }
        if call.prefix is not None:
            self.env["prefix_length"] = call.prefix
        if call.documents is not None:
            self.q_document, start = (t[:, None, :, None] for t in call.documents.find(q))
            self.env["document_start"] = start

    def term(self, term: Any) -> Any:
        """Visibility of a ``Term``: bool, broadcastable to [B, H, rows, keys]."""
        return NODES[term.kind](**dict(term.params)).visible(self)

    # ------------------------------------------------------------------ asked by the nodes
    def same_document(self) -> Any:
        document, _ = self.call.documents.find(self.k[:, 0, 0])  # type: ignore[union-attr]
        return (self.q_document == document[:, None, None, :]) & (self.q_document >= 0)

    def random_blocks(self, block: int, per_row: int, seed: int) -> Any:
        import torch

        parts = []
        lengths = self.call.at.kv_lengths.tolist()
        for entry in range(self.call.at.batch):
            blocks = -(-lengths[entry] // block)
            row = (self.q[entry, 0, :, 0] // block).clamp(min=-1)
            drawn, at = torch.unique(row, return_inverse=True)
            table = (
                torch.from_numpy(_tables(block, per_row, seed, drawn.tolist(), blocks))
                .to(row.device)
                .long()
            )
            chosen = torch.zeros(len(drawn), blocks + 1, dtype=torch.bool, device=row.device)
            chosen.scatter_(1, torch.where(table >= 0, table, blocks), True)
            chosen[:, blocks] = False
            column = self.k[entry, 0, 0] // block
            column = torch.where(
                (column >= 0) & (column < blocks), column, blocks
            )  # the last column: never drawn
            parts.append(chosen[at][:, column])
        return torch.stack(parts)[:, None]

    def block_mask(self, block: tuple[int, int]) -> Any:
        return self._once(("block_mask", block), lambda: self.call.block_mask(block))

    def block_list(self, block: tuple[int, int]) -> Any:
        return self._once(("block_list", block), lambda: self.call.block_list(block))

    def top_blocks(self, node: Any) -> Any:
        return self._once(node, lambda: self.call.top_blocks(node))

    def _once(self, key: Any, make: Any) -> Any:
        if key not in self.call._blocks:
            self.call._blocks[key] = make()
        return self.call._blocks[key]

    def spread_blocks(self, blocks: Any, block: tuple[int, int]) -> Any:
        """Blocks [b, h, rows, columns] → cells [b, h, len(rows), keys]."""
        picked = blocks[:, :, self.rows // block[0]]
        if not picked.shape[-1]:
            return picked.expand(*picked.shape[:3], self.k.shape[-1])
        column = (self.k // block[1]).clamp(
            0, picked.shape[-1] - 1
        )  # keys that are none are masked later
        batch = max(picked.shape[0], column.shape[0])
        shape = (batch, *picked.shape[1:3], column.shape[-1])
        return picked.expand(batch, -1, -1, -1).gather(3, column.expand(shape))
