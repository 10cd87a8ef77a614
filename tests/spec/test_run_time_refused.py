"""Run-time data that does not fit, or is not there, is refused in one sentence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sparsegen.errors import InputError
from tests.spec.run_time import dense

# ---------------------------------------------------------------------- refusals
DOCS, LIST = "documents", {"block_list": {"block": [4, 4]}}
BAD = [
    (DOCS, {"cu_seqlens": [1, 8]}, "cu_seqlens must start at 0, got 1"),
    (DOCS, {"cu_seqlens": [0, 5, 4, 8]}, "cu_seqlens must never decrease, got 4 after 5"),
    (DOCS, {"cu_seqlens": [0, 9]}, "cu_seqlens ends at 9, beyond the buffer of kv_len = 8"),
    (DOCS, {"cu_seqlens": [0]}, "cu_seqlens must have at least 2 offsets, got 1"),
    (DOCS, {"cu_seqlens": 3}, "cu_seqlens must be [n + 1] or [B, n + 1], got shape []"),
    (DOCS, {"cu_seqlens": [0.0, 8.0]}, "cu_seqlens must be integers, got float32"),
    (DOCS, {"cu_seqlens": "all"}, "cu_seqlens must be integers, got 'all'"),
    (DOCS, {"document_lengths": [4, -1]}, "document_lengths must be 0 or more, got -1"),
    (
        DOCS,
        {"document_lengths": [4, 5]},
        "document_lengths ends at 9, beyond the buffer of kv_len = 8",
    ),
    (DOCS, {"document_ids": [0, 1]}, "document_ids must have kv_len = 8 entries, got 2"),
    ("key_padding", {"kv_lengths": [9]}, "kv_lengths must be from 0 to 8, got 9"),
    (
        "key_padding",
        {"kv_lengths": [[8]]},
        "kv_lengths must be one integer or a list [B], got shape [1, 1]",
    ),
    (
        "full",
        {"q_lengths": [8, 8], "kv_lengths": [8, 8, 8]},
        "different batch sizes: q_lengths has 2, kv_lengths has 3",
    ),
    (
        "full",
        {"kv_starts": [4], "kv_lengths": [5]},
        "kv_starts + kv_lengths must be at most kv_len = 8, got 4 + 5",
    ),
    (
        "full",
        {"q_start": 1.5},
        "q_start must be an integer from -2147483648 to 2147483648, got 1.5",
    ),
    ("full", {"q_start": 2**31 - 4}, "positions must lie within ±2147483648"),
    (
        {"prefix": {"tokens": "runtime"}},
        {"prefix_lengths": [-1]},
        "prefix_lengths must be from 0 to 2147483648, got -1",
    ),
    (
        {"block_mask": {"block": [4, 4]}},
        {"block_mask": np.ones((1, 1, 3, 2), bool)},
        "block_mask has 3 x 2 of blocks [4, 4]; q_len 8 and kv_len 8 need 2 x 2",
    ),
    (
        {"block_mask": {"block": [4, 4]}},
        {"block_mask": np.ones((1, 1, 1, 2), bool)},
        "block_mask has 1 x 2 of blocks [4, 4]; q_len 8 and kv_len 8 need 2 x 2",
    ),
    (
        {"block_mask": {"block": [4, 4]}},
        {"block_mask": np.ones((1, 1, 2, 2))},
        "block_mask must be bool, got float64",
    ),
    (
        {"block_mask": {"block": [4, 4]}},
        {"block_mask": np.ones((1, 1, 1, 2, 2), bool)},
        "block_mask must have 4 dimensions, got shape [1, 1, 1, 2, 2]",
    ),
    (
        LIST,
        {"block_indices": [[0], [2]], "block_counts": [1, 1]},
        "block_indices must be from 0 to 1, the last block of kv_len 8; got 2",
    ),
    (
        LIST,
        {"block_indices": [[0], [0]], "block_counts": [1, 2]},
        "block_counts must be from 0 to 1, the length of the lists",
    ),
    (
        LIST,
        {"block_indices": [[0]], "block_counts": [1]},
        "block_indices has 1 rows of blocks [4, 4]; q_len 8 and kv_len 8 need 2 rows",
    ),
]


@pytest.mark.parametrize(("mask", "data", "message"), BAD, ids=[b[2][:40] for b in BAD])
def test_data_that_does_not_fit(mask: Any, data: dict, message: str) -> None:
    with pytest.raises(InputError) as error:
        dense(mask, 8, 8, **data)
    assert str(error.value) == message
    assert isinstance(error.value, ValueError)


def test_block_data_for_other_lengths_are_refused() -> None:
    """Made for 8192: a call with 1024, with 1000, or with one query must not read the first rows by stealth."""
    data = torch.ones(1, 1, 64, 64, dtype=torch.bool)
    for lengths, needed in (
        ((1024, 1024), "8 x 8"),
        ((1000, 1000), "8 x 8"),
        ((1, 8192), "1 x 64"),
        ((8320, 8320), "65 x 65"),
    ):
        with pytest.raises(
            InputError, match=f"q_len {lengths[0]} and kv_len {lengths[1]} need {needed}$"
        ):
            dense({"block_mask": {"block": [128, 128]}}, *lengths, block_mask=data, rows=[0])


KEYWORDS = [
    (DOCS, {}, "pattern: missing keyword cu_seqlens or document_ids or document_lengths"),
    (
        DOCS,
        {"cu_seqlens": [0, 8], "document_ids": [0] * 8},
        "pattern: give only one of cu_seqlens and document_ids",
    ),
    (LIST, {"block_indices": [[0], [0]]}, "pattern: missing keyword block_counts"),
    ("key_padding", {}, "pattern: missing keyword kv_lengths"),
    (
        "causal",
        {"kv_length": [3]},
        "pattern: unknown keyword 'kv_length' (did you mean 'kv_lengths'?); it takes q_start, k_start, q_lengths, kv_starts, kv_lengths",
    ),
    (
        "causal",
        {"cu_seqlens": [0, 8]},
        "pattern: unknown keyword 'cu_seqlens'; it takes q_start, k_start, q_lengths, kv_starts, kv_lengths",
    ),
]


@pytest.mark.parametrize(("mask", "data", "message"), KEYWORDS, ids=[k[2][9:50] for k in KEYWORDS])
def test_keywords(mask: Any, data: dict, message: str) -> None:
    with pytest.raises(TypeError) as error:
        dense(mask, 8, 8, **data)
    assert str(error.value) == message


# ---------------------------------------------------------------------- nothing given, too much given
DOCUMENTS = {"all_of": ["causal", "documents"]}


def test_no_document_at_all_sees_nothing() -> None:
    assert not dense(DOCUMENTS, 4, 4, document_lengths=[]).any()
    assert dense(DOCUMENTS, 4, 0, document_ids=[]).shape[-2:] == (4, 0)


@pytest.mark.parametrize("name", ["cu_seqlens", "document_lengths", "document_ids"])
def test_documents_of_no_batch_entry(name: str) -> None:
    with pytest.raises(InputError, match=f"{name} must have at least one batch entry"):
        dense(DOCUMENTS, 4, 4, **{name: torch.zeros(0, 4, dtype=torch.int32)})


def test_lengths_whose_sum_would_wrap() -> None:
    with pytest.raises(InputError, match="document_lengths must be at most"):
        dense(DOCUMENTS, 4, 4, document_lengths=[2**62, 2**62, 2**62])


def test_a_batch_of_none_has_no_mask() -> None:
    assert dense({"all_of": ["causal", "key_padding"]}, 4, 4, kv_lengths=[]).shape == (0, 1, 4, 4)
    prefix = {"any_of": ["causal", {"prefix": {"tokens": "runtime"}}]}
    assert dense(prefix, 4, 4, prefix_lengths=[]).shape == (0, 1, 4, 4)


def test_a_mask_that_no_memory_holds_is_refused_before_it_is_made() -> None:
    with pytest.raises(InputError, match="is too large, .* rows="):
        dense("causal", 2**30, 2**30)
    assert dense("causal", 2**30, 64, rows=[5, 2**30 - 1]).shape == (1, 2, 64)
