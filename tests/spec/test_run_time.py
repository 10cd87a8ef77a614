"""Nodes that data decide: their masks against the independent evaluator, and every refusal by its full text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sparsegen.spec import Pattern, random_block_table
from sparsegen.spec.reference import reference
from tests.evaluator import evaluate
from tests.spec.acceptance import splitmix64
from tests.spec.run_time import dense
from tests.work import at_most


def same(mask: Any, q_len: int, kv_len: int, heads: int = 1, **runtime: Any) -> None:
    """Our mask equals the evaluator's, batch and heads included."""
    ours = dense(mask, q_len, kv_len, **runtime)
    ours = ours if ours.dim() == 4 else ours[None]
    wanted = evaluate({"mask": mask}, q_len, kv_len, heads, runtime)
    assert (np.broadcast_to(ours.numpy(), wanted.shape) == wanted).all()


# ---------------------------------------------------------------------- documents
def test_packed_documents_do_not_leak() -> None:
    """Two documents of 3 and 4 tokens, causal, Q = 0, V[j] = j: means of the visible values by hand."""
    pattern = Pattern.from_dict({"mask": {"all_of": ["causal", "documents"]}})
    q, k = torch.zeros(1, 1, 7, 4), torch.randn(1, 1, 7, 4, requires_grad=True)
    v = torch.arange(7.0)[None, None, :, None]
    for data in (
        {"cu_seqlens": [0, 3, 7]},
        {"document_lengths": [3, 4]},
        {"document_ids": [5, 5, 5, 2, 2, 2, 2]},
    ):
        out, _ = reference(pattern, q, k, v, **data)
        assert out[0, 0, [3, 6], 0].tolist() == [3.0, 4.5]
    moved = reference(
        pattern,
        q,
        k + torch.tensor([9.0] * 3 + [0.0] * 4)[None, None, :, None],
        v,
        cu_seqlens=[0, 3, 7],
    )[0]
    assert moved[:, :, 3:].equal(out[:, :, 3:])
    q = torch.randn(1, 1, 7, 4)
    reference(pattern, q, k, v, cu_seqlens=[0, 3, 7])[0][:, :, 3:].square().sum().backward()
    assert k.grad[:, :, :3].abs().max() == 0 < k.grad[:, :, 3:].abs().max()


@pytest.mark.parametrize("lengths", [(20, 20), (5, 20), (20, 5), (1, 20)])
@pytest.mark.parametrize("positions", ["absolute", "relative"])
@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
def test_documents_of_any_lengths(lengths: tuple[int, int], positions: str, align: str) -> None:
    mask = {
        "all_of": [
            {"documents": {"positions": positions}},
            {"any_of": [{"window": {"size": 2}}, {"sink": {"tokens": 2}}, {"chunks": {"size": 3}}]},
        ]
    }
    kv_len = lengths[1]
    ids = ([3, 3, 3, 8, 8, 0, 3, 3] * 3)[:kv_len]
    for data in (
        {"document_lengths": [2, 0, 1, 2] if kv_len == 5 else [4, 0, 1, 9, 4]},
        {"document_ids": ids},
    ):
        ours = Pattern.from_dict({"mask": mask, "align": align}).dense_mask(*lengths, **data)
        assert (
            ours.numpy() == evaluate({"mask": mask, "align": align}, *lengths, 1, data)[0]
        ).all()


def test_relative_positions_restart_sinks_in_each_document() -> None:
    mask = {
        "all_of": [
            "causal",
            {"documents": {"positions": "relative"}},
            {"any_of": [{"sink": {"tokens": 1}}, {"window": {"size": 1}}]},
        ]
    }
    rows = dense(mask, 7, 7, cu_seqlens=[0, 3, 7])[0]
    assert rows[5].nonzero().flatten().tolist() == [3, 5]
    prefix = {
        "all_of": [
            {"documents": {"positions": "relative"}},
            {"any_of": ["causal", {"prefix": {"tokens": "runtime"}}]},
        ]
    }
    rows = dense(prefix, 7, 7, cu_seqlens=[0, 3, 7], prefix_lengths=2)[0]
    assert rows[3].nonzero().flatten().tolist() == [3, 4]


def test_tokens_beyond_the_last_offset_see_and_are_seen_by_nothing() -> None:
    mask = dense("documents", 6, 6, cu_seqlens=torch.tensor([0, 2, 4]))[0]
    assert not mask[4:].any() and not mask[:, 4:].any() and mask[:4, :4].sum() == 8


def test_documents_of_a_batch() -> None:
    mask = dense(
        {"all_of": ["causal", "documents"]}, 4, 4, document_ids=[[1, 1, 2, 2], [1, 2, 2, 2]]
    )
    assert mask.shape == (2, 1, 4, 4)
    assert mask[:, 0, 2].tolist() == [[False, False, True, False], [False, True, True, False]]
    assert mask.equal(
        dense({"all_of": ["causal", "documents"]}, 4, 4, document_lengths=[[2, 2], [1, 3]])
    )
    assert mask.equal(
        dense({"all_of": ["causal", "documents"]}, 4, 4, cu_seqlens=[[0, 2, 4], [0, 1, 4]])
    )


def test_documents_of_shards_use_positions_of_the_whole() -> None:
    """Queries 4..7 and keys 2..5 of 8 tokens: offsets beyond both are those of the whole sequence."""
    whole = dense({"all_of": ["causal", "documents"]}, 8, 8, cu_seqlens=[0, 3, 8])
    shard = dense(
        {"all_of": ["causal", "documents"]}, 4, 4, cu_seqlens=[0, 3, 8], q_start=4, k_start=2
    )
    assert shard.equal(whole[:, 4:, 2:6])


# ---------------------------------------------------------------------- random blocks
@pytest.mark.parametrize(
    ("block", "per_row", "blocks"),
    [(1, 3, 50), (8, 1, 7), (12, 5, 6), (48, 40, 41), (512, 3, 3), (7, 9, 4)],
)
def test_random_block_table_draws_the_defined_blocks(block: int, per_row: int, blocks: int) -> None:
    table = random_block_table(block, per_row, 77, 5, 6, blocks)
    assert table.shape == (6, per_row) and table.dtype == np.int32
    for i, row in enumerate(range(5, 11)):
        drawn: list[int] = []
        t = 0
        while len(drawn) < min(per_row, blocks):
            c = splitmix64((77 << 40) ^ (row << 20) ^ t) % blocks
            drawn, t = drawn + [c] * (c not in drawn), t + 1
        got = table[i].tolist()
        assert got == (list(range(blocks)) if per_row >= blocks else drawn) + [-1] * max(
            per_row - blocks, 0
        )


def test_random_block_table_of_many_rows_is_made_in_one_go() -> None:
    """16,384 rows (a million tokens of blocks of 64), and not one call for each of them."""
    with at_most(1_000):
        table = random_block_table(64, 3, 1, 0, 16384, 16384)
    assert (np.sort(table, 1)[:, 1:] > np.sort(table, 1)[:, :-1]).all()
    assert (table[100:103] == random_block_table(64, 3, 1, 100, 3, 16384)).all()
    assert (random_block_table(8, 2, 1, -2, 4, 9)[:2] == -1).all() and (
        random_block_table(8, 2, 1, 0, 3, 0) == -1
    ).all()


@pytest.mark.parametrize("block", [1, 8, 12, 48, 512])
@pytest.mark.parametrize("lengths", [(40, 40), (1, 33), (33, 6)])
def test_random_blocks_of_any_size(block: int, lengths: tuple[int, int]) -> None:
    same({"random_blocks": {"block": block, "per_row": 2, "seed": 3}}, *lengths)


# ---------------------------------------------------------------------- paddings and prefixes
def test_key_padding() -> None:
    same({"all_of": ["causal", "key_padding"]}, 6, 9, kv_lengths=[9, 0, 4])
    same({"not": "key_padding"}, 6, 9, kv_lengths=[9, 5])
    same({"all_of": ["key_padding", {"predicate": "k < kv_len // 2"}]}, 6, 9, kv_lengths=[9, 5])


def test_run_time_prefix() -> None:
    same({"any_of": ["causal", {"prefix": {"tokens": "runtime"}}]}, 5, 8, prefix_lengths=[0, 6, 9])
    assert dense({"prefix": {"tokens": "runtime"}}, 2, 4, prefix_lengths=3).shape == (1, 2, 4)


# ---------------------------------------------------------------------- block masks and lists
@pytest.mark.parametrize(
    ("block", "lengths"), [([4, 4], (16, 16)), ([4, 3], (13, 11)), ([16, 2], (1, 9))]
)
def test_block_masks_and_equal_lists(block: list[int], lengths: tuple[int, int]) -> None:
    rng = np.random.default_rng(3)
    rows, columns = -(-lengths[0] // block[0]), -(-lengths[1] // block[1])
    mask = rng.random((2, 2, rows, columns)) < 0.4
    data = {"all_of": ["causal", {"block_mask": {"block": block}}]}
    wanted = np.stack(
        [
            evaluate({"mask": data}, *lengths, 2, {"block_mask": mask[b : b + 1]})[0]
            for b in range(2)
        ]
    )
    assert (dense(data, *lengths, block_mask=mask).numpy() == wanted).all()
    order = np.argsort(~mask, -1, kind="stable")  # the set blocks first
    lists = {"block_indices": order, "block_counts": mask.sum(-1)}
    assert dense({"all_of": ["causal", {"block_list": {"block": block}}]}, *lengths, **lists).equal(
        dense(data, *lengths, block_mask=mask)
    )


def test_block_list_of_the_first_block_is_not_dense() -> None:
    """128 x 64 blocks, one index 0 a row: softmax over keys 0..63 only."""
    pattern = Pattern.from_dict({"mask": {"block_list": {"block": [128, 64]}}})
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 512, 16) for _ in range(3))
    out, _ = reference(
        pattern,
        q,
        k,
        v,
        block_indices=torch.zeros(1, 1, 4, 3, dtype=torch.int32),
        block_counts=torch.ones(1, 1, 4, dtype=torch.int64),
    )
    first = torch.softmax(q.double() @ k[:, :, :64].double().mT / 4, -1) @ v[:, :, :64].double()
    full = torch.softmax(q.double() @ k.double().mT / 4, -1) @ v.double()
    assert (out - first).abs().max() < 1e-12 < 0.1 < (out - full).abs().max()


def test_block_mask_of_key_heads_is_shared_by_their_group() -> None:
    pattern = Pattern.from_dict({"mask": {"block_mask": {"block": [2, 2]}}})
    mask = torch.tensor([[[[1, 0]], [[0, 1]]]]).bool()  # 2 key heads
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 2, 8), torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8)
    out, _ = reference(pattern, q, k, v, block_mask=mask)
    parts = [
        reference(
            Pattern.from_dict({"mask": "full"}),
            q[:, 2 * h : 2 * h + 2],
            k[:, h : h + 1, 2 * h : 2 * h + 2],
            v[:, h : h + 1, 2 * h : 2 * h + 2],
        )[0]
        for h in range(2)
    ]
    assert (out - torch.cat(parts, 1)).abs().max() < 1e-12


# ---------------------------------------------------------------------- block routing
@pytest.mark.parametrize("more", [{}, {"future": True}, {"threshold": 0.5}])
@pytest.mark.parametrize("count", [0, 1, 2, 16])
def test_top_blocks_from_scores(count: int, more: dict) -> None:
    rng = np.random.default_rng(5)
    mask = {
        "any_of": [
            {"top_blocks": {"block": 4, "count": count, "score": "runtime", **more}},
            {"window": {"size": 1}},
        ]
    }
    scores = rng.integers(0, 3, (1, 2, 4, 5)).astype(float)  # many ties: the earlier block is taken
    same(mask, 14, 18, 2, block_scores=scores)


def test_top_blocks_of_short_and_long_inputs() -> None:
    torch.manual_seed(0)
    top = lambda count: {"all_of": ["causal", {"top_blocks": {"block": 64, "count": count}}]}
    q, k, v = (torch.randn(1, 1, 100, 16) for _ in range(3))
    causal = reference(Pattern.from_dict({"mask": "causal"}), q, k, v)[0]
    assert reference(Pattern.from_dict({"mask": top(16)}), q, k, v)[0].equal(
        causal
    )  # more than there are blocks
    q, k, v = (torch.randn(1, 1, 256, 16) for _ in range(3))
    first = reference(Pattern.from_dict({"mask": top(1)}), q, k, v)[0][:, :, :64]
    assert first.equal(
        reference(Pattern.from_dict({"mask": "causal"}), q, k, v)[0][:, :, :64]
    )  # only block 0
    kept = {
        "all_of": [
            "causal",
            {
                "any_of": [
                    {"top_blocks": {"block": 64, "count": 0}},
                    {"sink": {"tokens": 2}},
                    {"window": {"size": 8}},
                ]
            },
        ]
    }
    alone = {"all_of": ["causal", {"any_of": [{"sink": {"tokens": 2}}, {"window": {"size": 8}}]}]}
    assert reference(Pattern.from_dict({"mask": kept}), q, k, v)[0].equal(
        reference(Pattern.from_dict({"mask": alone}), q, k, v)[0]
    )


def test_top_blocks_by_the_mean() -> None:
    """Scores by hand: mean query of a block times mean key of a block, for each query head of a group."""
    torch.manual_seed(1)
    q, k, v = torch.randn(2, 4, 10, 8), torch.randn(2, 2, 10, 8), torch.randn(2, 2, 10, 8)
    pattern = Pattern.from_dict({"mask": {"top_blocks": {"block": 4, "count": 1, "future": True}}})
    mean = lambda x: torch.stack([part.double().mean(2) for part in x.split(4, 2)], 2)
    scores = mean(q) @ mean(k).repeat_interleave(2, 1).mT
    routed = Pattern.from_dict(
        {"mask": {"top_blocks": {"block": 4, "count": 1, "future": True, "score": "runtime"}}}
    )
    ours, wanted = reference(pattern, q, k, v), reference(routed, q, k, v, block_scores=scores)
    assert ours[0].equal(wanted[0]) and ours[1].equal(wanted[1])
    assert not pattern.position_only and pattern.runtime_names == ()
    with pytest.raises(
        TypeError,
        match=r"^pattern: missing keyword block_scores \(sparsegen.reference makes them from q and k\)$",
    ):
        pattern.dense_mask(10, 10)
