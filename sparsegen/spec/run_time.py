"""The nodes that data decide: drawn blocks, documents, paddings, block masks, block lists and block routing.

Each gives a ``Term``, and ``visible(call)``: its dense meaning on a call's data (``sparsegen.spec.call``).
"""

from __future__ import annotations

from typing import Any

from sparsegen.spec.expr import Bool, Term
from sparsegen.spec.fields import SEED_LIMIT, integer, integers, number, truth, word
from sparsegen.spec.node import Node


class RandomBlocks(Node):
    """Each block of ``block`` queries sees ``per_row`` random blocks of ``block`` keys: k // b is among the first r
    distinct splitmix64((s << 40) ^ ((q // b) << 20) ^ t) mod ceil(kv_len / b), t = 0, 1, …; per_row at or above the
    number of blocks is all of them; a negative q sees nothing.  The same seed always draws the same blocks.
    """

    keyword = "random_blocks"
    block: integer(1)  # type: ignore[valid-type]
    per_row: integer(1, 65536)  # type: ignore[valid-type]
    seed: integer(0, SEED_LIMIT)  # type: ignore[valid-type]

    def expr(self) -> Bool:
        return Term(
            "random_blocks", (("block", self.block), ("per_row", self.per_row), ("seed", self.seed))
        )

    def visible(self, call: Any) -> Any:
        return call.random_blocks(self.block, self.per_row, self.seed)


class Documents(Node):
    """Query and key lie in the same document; the call gives ``cu_seqlens``, ``document_ids`` or
    ``document_lengths``.  Positions stay absolute.  With ``positions: relative`` the nodes that stand beside it in the
    same ``all_of`` (and all inside them) count q and k from the start of the document, so that sinks, chunks and
    prefixes are each document's own; q_len and kv_len stay the call's.  Positions beyond the last offset belong to
    no document: they see nothing and nothing sees them.  Equal ids are one document.
    """

    keyword = "documents"
    bare = True
    runtime = (("cu_seqlens", "document_ids", "document_lengths"),)
    positions: word("absolute", "relative") = "absolute"  # type: ignore[valid-type]

    @property
    def restarts_positions(self) -> bool:
        return self.positions == "relative"

    def expr(self) -> Bool:
        return Term("documents")

    def visible(self, call: Any) -> Any:
        return call.same_document()


class KeyPadding(Node):
    """Keys that are not padding: k < kv_lengths[batch]."""

    keyword = "key_padding"
    bare = True
    runtime = (("kv_lengths",),)

    def expr(self) -> Bool:
        return Term("key_padding")

    def visible(self, call: Any) -> Any:
        return call.k_valid


class BlockMask(Node):
    """A boolean ``block_mask`` [B or 1, H or kv_heads or 1, rows, columns], given at run time for blocks of
    [bq, bk] = ``block``, by query index // bq and k // bk.  It must have exactly the blocks that q_len and kv_len need.
    """

    keyword = "block_mask"
    runtime = (("block_mask",),)
    block: integers(1, least=2, most=2)  # type: ignore[valid-type]

    def expr(self) -> Bool:
        return Term("block_mask", (("block", self.block),))

    def visible(self, call: Any) -> Any:
        return call.spread_blocks(call.block_mask(self.block), self.block)


class BlockList(Node):
    """Lists of key blocks, given at run time for blocks of [bq, bk] = ``block``: ``block_indices``, integers
    [B or 1, H or kv_heads or 1, rows, most], of which the first ``block_counts`` [B or 1, H or kv_heads or 1, rows]
    of each row count.  A block listed twice is seen once.
    """

    keyword = "block_list"
    runtime = (("block_indices",), ("block_counts",))
    block: integers(1, least=2, most=2)  # type: ignore[valid-type]

    def expr(self) -> Bool:
        return Term("block_list", (("block", self.block),))

    def visible(self, call: Any) -> Any:
        return call.spread_blocks(call.block_list(self.block), self.block)


class TopBlocks(Node):
    """Block routing: each block of b queries (by query index) sees the ``count`` key blocks of b keys that score
    best.  ``score: mean`` is the product of the mean query and the mean key of the blocks, for each query head;
    ``score: runtime`` takes ``block_scores`` [B or 1, H or kv_heads or 1, rows, columns] from a learned router.  Only
    key blocks that begin at or before the block's last query are chosen, unless ``future`` is true; blocks scoring
    below ``threshold`` never are.  Of equal scores the earlier block is chosen.  Fewer blocks than ``count``: all.
    """

    keyword = "top_blocks"
    block: integer(1)  # type: ignore[valid-type]
    count: integer(0)  # type: ignore[valid-type]
    score: word("mean", "runtime") = "mean"  # type: ignore[valid-type]
    threshold: number() = None  # type: ignore[valid-type]
    future: truth() = False  # type: ignore[valid-type]

    @property
    def decided_by_data(self) -> bool:
        return True

    def needs(self) -> tuple[tuple[str, ...], ...]:
        return (("block_scores",),) if self.score == "runtime" else ()

    def expr(self) -> Bool:
        given = ((name, value) for name, value in self if value is not None)
        return Term("top_blocks", tuple(sorted(given)))

    def visible(self, call: Any) -> Any:
        return call.spread_blocks(call.top_blocks(self), (self.block, self.block))
