"""Arguments that are none of their kind: one sentence that names the argument, and no attribute that something lacks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sparsegen
from sparsegen.artifact.store import Store
from sparsegen.errors import InputError
from sparsegen.spec.reference import merge, reference
from tests.runtime.calls import EVERYTHING, pattern_of

Q = torch.ones(1, 2, 8, 16)
LSE = Q[..., 0]
LEARNED: dict[str, Any] = {
    "alibi_slopes": torch.ones(2),
    "sink_logits": torch.ones(2),
    "null_key": (Q[0, :, 0], Q[0, :, 0]),
}


def compiled(**given: Any) -> Any:
    return sparsegen.compile("causal", gpu="h200", **{"tune": "off"} | given)


def learned(**changes: Any) -> Any:
    return reference(pattern_of(**EVERYTHING), Q, Q, Q, **LEARNED | changes)


CALLS: list[tuple[Callable[[], Any], str]] = [
    (lambda: compiled(store="kernels"), "store must be a sparsegen.Store, got str"),
    (lambda: sparsegen.load("causal", gpu="h200", store="x"), "store must be a sparsegen.Store, got str"),  # type: ignore[arg-type]
    (lambda: compiled(jobs=0), "jobs must be a number of processes, 1 or more, got 0"),
    (lambda: compiled(jobs="2"), "jobs must be a number of processes, 1 or more, got '2'"),
    (lambda: compiled(budget_s="9"), "budget_s must be seconds, 1 or more, got '9'"),
    (lambda: compiled(budget_s=float("nan")), "budget_s must be seconds, 1 or more, got nan"),
    (lambda: compiled(passes=5), "passes must be some of forward, backward, got 5"),
    (lambda: Store(5), "root of a Store must be a path, got 5"),  # type: ignore[arg-type]
    (lambda: Store(""), "root of a Store must be a path, got ''"),
    (lambda: Store("a\0b"), r"root of a Store must be a path, got 'a\x00b'"),
    (lambda: Store(archive=5), "archive of a Store must be a path, got 5"),  # type: ignore[arg-type]
    (
        lambda: Store(remote=5),  # type: ignore[arg-type]
        "a store must be an absolute path or a URL such as s3://bucket/folder, got 5",
    ),
    (lambda: merge(None), "each part must be a pair of tensors (out, lse), as partial=True returns it with return_lse=True"),
    (lambda: merge([(1, 2)]), "each part must be a pair of tensors (out, lse), as partial=True returns it with return_lse=True"),
    (lambda: merge([(Q, LSE)], sink_logits="x"), "sink_logits must be numbers, got 'x'"),
    (lambda: learned(alibi_slopes="x"), "alibi_slopes must be numbers, got 'x'"),
    (lambda: learned(null_key=("a", "b")), "null_key must be numbers, got 'a'"),
    (lambda: learned(scale="x"), "scale must be a finite number, got 'x'"),
    (lambda: learned(scale=float("nan")), "scale must be a finite number, got nan"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), CALLS, ids=[f"{i} {c[1]}" for i, c in enumerate(CALLS)])  # fmt: skip
def test_one_sentence_names_the_argument(
    call: Callable[[], Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparsegen.artifact.build.ensure", None)  # nothing is built for these
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        call()


def test_what_is_meant_by_them_still_goes(tmp_path: Path) -> None:
    assert Store(str(tmp_path)).root == Store(tmp_path).root == tmp_path
    for scale in (2, 2.0, np.float32(2)):
        assert torch.equal(learned(scale=scale)[0], learned(scale=2.0)[0])
    lists = {"alibi_slopes": [1, 1], "sink_logits": np.ones(2)}
    assert torch.equal(learned(**lists)[0], learned()[0])
    out, lse = merge(iter([(Q, LSE)]))
    assert torch.equal(out, Q) and torch.equal(lse, LSE)
