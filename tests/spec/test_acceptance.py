"""All masks of the independent oracle, by sha256; and the tests' own evaluator against the same oracle."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import yaml

from sparsegen.spec import Pattern
from tests.evaluator import evaluate
from tests.spec.acceptance import FOLDER, case_id, cases, runtime_of

CASES = cases()


def sha256(mask: np.ndarray) -> str:
    return hashlib.sha256(np.packbits(mask).tobytes()).hexdigest()


def runs_of(row: np.ndarray) -> list[list[int]]:
    """[first, end) of the visible runs of a row."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], row.astype(int), [0]])))
    return edges.reshape(-1, 2).tolist()


def test_the_oracle_is_all_there() -> None:
    assert sum(len(case["heads"]) for case in CASES) == 144
    assert {case["pattern"] for case in CASES} == {p.name for p in FOLDER.glob("patterns/*.yaml")}


@pytest.mark.parametrize("case", CASES, ids=map(case_id, CASES))
def test_dense_mask_equals_the_oracle(case: dict) -> None:
    pattern = Pattern.from_yaml(FOLDER / "patterns" / case["pattern"])
    mask = pattern.dense_mask(case["q_len"], case["kv_len"], **runtime_of(case)).numpy()
    assert mask.shape == (len(case["heads"]), case["q_len"], case["kv_len"])
    for head, expected in zip(mask, case["heads"], strict=True):
        assert head.sum() == expected["cells"]
        assert (~head.any(1)).sum() == expected["empty_rows"]
        for row, runs in expected["rows"].items():
            assert runs_of(head[int(row)])[:12] == runs, (
                f"row {row}"
            )  # the oracle lists the first 12
        assert sha256(head) == expected["sha256"]


@pytest.mark.parametrize("case", CASES, ids=map(case_id, CASES))
def test_rows_are_rows_of_the_whole_mask(case: dict) -> None:
    pattern = Pattern.from_yaml(FOLDER / "patterns" / case["pattern"])
    rows = sorted({0, case["q_len"] // 3, case["q_len"] - 1}, reverse=True)
    whole = pattern.dense_mask(case["q_len"], case["kv_len"], **runtime_of(case))
    some = pattern.dense_mask(case["q_len"], case["kv_len"], rows=rows, **runtime_of(case))
    assert some.equal(whole[:, rows])


@pytest.mark.parametrize(
    "case", [c for c in CASES if c["q_len"] * c["kv_len"] < 20_000], ids=case_id
)
def test_the_evaluator_of_the_fuzz_tests_equals_the_oracle(case: dict) -> None:
    data = yaml.safe_load((FOLDER / "patterns" / case["pattern"]).read_text(encoding="utf-8"))
    masks = evaluate(data, case["q_len"], case["kv_len"], len(case["heads"]), runtime_of(case))[0]
    assert [sha256(m) for m in masks] == [h["sha256"] for h in case["heads"]]
