"""What each primitive shows, by hand-counted keys; boundary rows; sizes beyond the length."""

from __future__ import annotations

from typing import Any

import pytest

from sparsegen.errors import InputError
from sparsegen.spec import Pattern
from sparsegen.spec.expr import And, Bool, Term
from sparsegen.spec.language import NODES


def keys(mask: Any, row: int, q_len: int, kv_len: int, **more: Any) -> list[int]:
    """Keys that a query row sees."""
    pattern = Pattern.from_dict({"mask": mask, **more})
    return pattern.dense_mask(q_len, kv_len)[0, row].nonzero().flatten().tolist()


def test_every_primitive_has_a_meaning_in_words() -> None:
    for keyword, cls in NODES.items():
        assert cls.__doc__ and cls.keyword == keyword
        assert all(f.description for f in cls.model_fields.values()), keyword


def test_a_new_primitive_is_one_class() -> None:
    from sparsegen.spec.expr import Compare, Const, K
    from sparsegen.spec.fields import integer
    from sparsegen.spec.node import Node
    from sparsegen.spec.schema import json_schema

    class Only(Node):
        """Only key n."""

        keyword = "only"
        key: integer(0)  # type: ignore[valid-type]

        def expr(self) -> Bool:
            return Compare("==", K, Const(self.key))

    Only.model_rebuild(_types_namespace={"integer": integer})
    try:
        assert keys({"any_of": [{"only": {"key": 3}}]}, 0, 2, 5) == [3]
        assert "only" in str(json_schema())
    finally:
        del NODES["only"]


# ---------------------------------------------------------------------- alignment
def test_alignment_of_different_lengths() -> None:
    assert [keys("causal", r, 2, 5) for r in (0, 1)] == [[0, 1, 2, 3], [0, 1, 2, 3, 4]]
    top_left = {"align": "top_left"}
    assert [keys("causal", r, 2, 5, **top_left) for r in (0, 1)] == [[0], [0, 1]]
    assert [keys("causal", r, 5, 2) for r in range(5)] == [[], [], [], [0], [0, 1]]
    assert [keys("causal", r, 5, 2, **top_left) for r in (0, 1, 4)] == [[0], [0, 1], [0, 1]]


# ---------------------------------------------------------------------- windows
def test_window_size_counts_the_querys_own_key() -> None:
    window = {"window": {"size": 3}}
    assert [keys(window, r, 8, 8) for r in (0, 2, 3, 5)] == [[0], [0, 1, 2], [1, 2, 3], [3, 4, 5]]
    assert keys({"window": {"left": 3}}, 5, 8, 8) == [2, 3, 4, 5]
    assert keys({"window": {"size": 1}}, 5, 8, 8) == [5]


def test_window_of_one_decoded_query() -> None:
    assert keys({"window": {"size": 64}}, 0, 1, 257) == list(range(193, 257))
    assert keys({"window": {"left": 64}}, 0, 1, 257) == list(range(192, 257))


def test_window_sides() -> None:
    assert keys({"window": {"radius": 2}}, 4, 9, 9) == [2, 3, 4, 5, 6]
    assert keys({"window": {"left": 1, "right": 3}}, 4, 9, 9) == [3, 4, 5, 6, 7]
    assert keys({"window": {"right": 2}}, 4, 9, 9) == [4, 5, 6]
    assert keys({"window": {"left": "inf"}}, 4, 9, 9) == [0, 1, 2, 3, 4]
    assert keys({"window": {"left": float("inf"), "right": 1}}, 4, 9, 9) == [0, 1, 2, 3, 4, 5]
    assert keys({"window": {"radius": "inf"}}, 4, 9, 9) == list(range(9))
    assert keys({"window": {"size": 2**31}}, 4, 9, 9) == [0, 1, 2, 3, 4]


def test_decoding_one_by_one_equals_prefill() -> None:
    pattern = Pattern.from_dict(
        {
            "mask": {
                "all_of": ["causal", {"any_of": [{"window": {"size": 5}}, {"sink": {"tokens": 2}}]}]
            }
        }
    )
    prefill = pattern.dense_mask(40, 40)
    for length in range(1, 41):
        assert pattern.dense_mask(1, length)[0, 0].equal(prefill[0, length - 1, :length])


def test_dilated_window() -> None:
    node = {"dilated": {"size": 4, "dilation": 3}}
    assert keys(node, 10, 16, 16) == [1, 4, 7, 10]
    assert keys(node, 5, 16, 16) == [2, 5]
    assert keys({"dilated": {"size": 4, "dilation": 100}}, 10, 16, 16) == [
        10
    ]  # dilation * size > length
    assert keys({"dilated": {"left": 1, "right": 2, "dilation": 2}}, 6, 16, 16) == [4, 6, 8, 10]
    assert keys({"dilated": {"radius": "inf", "dilation": 5}}, 7, 16, 16) == [2, 7, 12]
    assert keys({"dilated": {"size": 2**31, "dilation": 2**31}}, 3, 5, 5) == [3]


# ---------------------------------------------------------------------- sinks, prefixes, global tokens
def test_sinks_and_window_count_overlap_once() -> None:
    mask = {"all_of": ["causal", {"any_of": [{"window": {"size": 4}}, {"sink": {"tokens": 4}}]}]}
    assert keys(mask, 5, 12, 12) == [0, 1, 2, 3, 4, 5]
    assert keys(mask, 9, 12, 12) == [0, 1, 2, 3, 6, 7, 8, 9]
    many = {"all_of": ["causal", {"any_of": [{"window": {"size": 4}}, {"sink": {"tokens": 50}}]}]}
    assert keys(many, 9, 12, 12) == list(range(10))  # sinks >= kv_len: plain causal
    assert keys({"sink": {"tokens": 0}}, 3, 4, 4) == []


def test_prefix_longer_than_the_keys() -> None:
    assert keys({"prefix": {"tokens": 9}}, 0, 4, 4) == [0, 1, 2, 3]
    assert keys({"any_of": ["causal", {"prefix": {"tokens": 3}}]}, 0, 6, 6) == [0, 1, 2]


def test_global_rows_and_columns() -> None:
    node = {"global": {"positions": [4, 1, 2, 4, 500]}}
    assert keys(node, 1, 8, 8) == list(range(8))
    assert keys(node, 0, 8, 8) == [1, 2, 4]
    assert keys({"global": {"tokens": 2, "rows": False}}, 0, 6, 6) == [0, 1]
    assert keys({"global": {"tokens": 2, "columns": False}}, 2, 6, 6) == []
    # Queries before the first key are no global tokens.
    assert [keys({"global": {"tokens": 2}}, r, 6, 3) for r in (2, 3, 5)] == [
        [0, 1],
        [0, 1, 2],
        [0, 1],
    ]


# ---------------------------------------------------------------------- periodic patterns
def test_periodic_patterns() -> None:
    assert keys({"strided": {"stride": 4}}, 5, 16, 16) == [1, 5, 9, 13]
    assert keys({"columns": {"stride": 4, "width": 2}}, 5, 9, 9) == [2, 3, 6, 7]
    assert keys({"chunks": {"size": 4}}, 5, 9, 9) == [4, 5, 6, 7]
    assert keys({"chunks": {"size": 4}}, 0, 6, 3) == []  # position -3 lies in a chunk of its own
    assert keys({"strided": {"stride": 4}}, 0, 6, 3) == [1]


def test_grids() -> None:
    assert keys({"axial": {"shape": [2, 3]}}, 4, 6, 6) == [1, 3, 4, 5]
    assert keys({"axial": {"shape": [6]}}, 4, 6, 6) == list(range(6))
    assert keys({"axial": {"shape": [2, 2, 2]}}, 0, 8, 8) == [0, 1, 2, 4]
    assert keys({"neighborhood": {"shape": [3, 4], "radius": [1, 0]}}, 5, 12, 12) == [1, 5, 9]
    assert keys({"neighborhood": {"shape": [3, 4], "radius": [0, 9]}}, 5, 12, 12) == [4, 5, 6, 7]


def test_queries_off_the_grid_see_nothing() -> None:
    full_grid = {"neighborhood": {"shape": [2, 2], "radius": [2, 2]}}
    assert [keys(full_grid, r, 6, 3) for r in (2, 3)] == [[], [0, 1, 2]]
    assert [keys(full_grid, r, 6, 3, align="top_left") for r in (3, 4)] == [[0, 1, 2], []]


def test_more_keys_than_the_grid_has_cells() -> None:
    with pytest.raises(InputError) as error:
        keys({"any_of": ["causal", {"axial": {"shape": [2, 3]}}]}, 0, 7, 7)
    assert (
        str(error.value) == "pattern: mask.any_of[1].axial.shape has 6 cells, too few for kv_len 7"
    )


# ---------------------------------------------------------------------- joining
def test_joining() -> None:
    assert keys({"not": "causal"}, 2, 5, 5) == [3, 4]
    assert keys({"all_of": ["causal", {"not": {"window": {"size": 2}}}]}, 4, 5, 5) == [0, 1, 2]
    assert keys({"any_of": [{"sink": {"tokens": 1}}, {"not": "full"}]}, 4, 5, 5) == [0]


def test_terms_stand_only_for_data() -> None:
    pattern = Pattern.from_dict(
        {"mask": {"all_of": ["causal", {"random_blocks": {"block": 4, "per_row": 2, "seed": 9}}]}}
    )
    ((heads, expr),) = pattern.exprs
    assert heads is None and isinstance(expr, And)
    assert expr.args[1] == Term("random_blocks", (("block", 4), ("per_row", 2), ("seed", 9)))
    assert pattern.position_only and pattern.runtime_names == ()


# ---------------------------------------------------------------------- heads
def test_rules_per_head() -> None:
    window, sinks = {"window": {"size": 2}}, {"sink": {"tokens": 1}}
    data = {
        "heads": [
            {"heads": [0, "2-3"], "mask": window},
            {"heads": 1, "mask": sinks},
            {"heads": "rest", "mask": "full"},
        ]
    }
    pattern = Pattern.from_dict(data)
    assert pattern.head_rule_of(6) == [0, 1, 0, 0, 2, 2]
    mask = pattern.dense_mask(4, 4, heads=6)
    assert mask.shape == (6, 4, 4)
    assert [m[3].nonzero().flatten().tolist() for m in mask] == [
        [2, 3],
        [0],
        [2, 3],
        [2, 3],
        [0, 1, 2, 3],
        [0, 1, 2, 3],
    ]


def test_heads_that_do_not_fit_the_call() -> None:
    pattern = Pattern.from_dict({"name": "p", "heads": [{"heads": "0-3", "mask": "full"}]})
    with pytest.raises(InputError, match=r"^p: heads\[0\] names head 3, but there are 2 heads$"):
        pattern.head_rule_of(2)
    with pytest.raises(InputError, match="names head 3, but there are 3 heads"):
        pattern.head_rule_of(3)
    assert pattern.head_rule_of(4) == [0, 0, 0, 0]
    with pytest.raises(InputError, match=r"^p: head 4 of 8 has no rule; add one for heads: rest$"):
        pattern.head_rule_of(8)
    rest = Pattern.from_dict(
        {"name": "p", "heads": [{"heads": "rest", "mask": "full"}, {"heads": 0, "mask": "causal"}]}
    )
    with pytest.raises(
        InputError,
        match=r"^p: heads: rest needs the number of heads; give heads= or problem.heads$",
    ):
        rest.dense_mask(4, 4)


def test_rows_of_a_long_mask_stay_small() -> None:
    """A row of a million keys; the whole mask would be a terabyte."""
    pattern = Pattern.from_dict({"mask": {"window": {"size": 4}}})
    mask = pattern.dense_mask(2**20, 2**20, rows=[2**19])
    assert mask.shape == (1, 1, 2**20) and mask.sum() == 4
    with pytest.raises(InputError, match=r"^rows must be from 0 to 4, got 5 to 5$"):
        pattern.dense_mask(5, 5, rows=[5])
