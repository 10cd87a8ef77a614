"""Copies and pickles of callables, and of models that hold them: kernels are shared in a process and never pickled."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from sparsegen.artifact.store import Store
from sparsegen.nn import SparseAttention
from sparsegen.runtime.attend import Attend, ReferenceAttend
from tests.runtime.calls import PROBLEM, StandIn, attend_of, pattern_of


class Model(nn.Module):
    """A model of a user's own around a callable, with a weight beside it."""

    def __init__(self, attend: Any):
        super().__init__()
        self.attend, self.weight = attend, nn.Parameter(torch.ones(2))


def loaded() -> Attend:
    """As ``sparsegen.load`` makes it: with a function that only this process has."""
    return Attend(pattern_of(), PROBLEM, StandIn(), gradients=lambda problem: None)  # type: ignore[arg-type]


@pytest.mark.parametrize("write", [pickle.dumps, lambda x: torch.save(x, io.BytesIO())])
@pytest.mark.parametrize("held", [lambda x: x, Model], ids=["alone", "in a model"])
def test_a_pickle_of_a_callable_is_refused(write: Any, held: Any) -> None:
    with pytest.raises(TypeError) as error:
        write(held(loaded()))
    assert str(error.value) == (
        "<sparsegen.Attend 'p' float16 head_dim 16> belongs to this process and cannot be pickled: make it in each "
        "process with sparsegen.load or sparsegen.compile; a sparsegen.nn.SparseAttention can be, and does that at its "
        "first call"
    )


def test_copies_of_a_model_share_the_callable() -> None:
    attend, _ = attend_of()
    assert copy.copy(attend) is copy.deepcopy(attend) is attend
    model = Model(attend)
    for other in (copy.deepcopy(model), AveragedModel(model).module):
        assert other.attend is attend and other.weight is not model.weight


def test_the_reference_is_copied_and_pickled() -> None:
    q = torch.randn(1, 2, 8, 16)
    attend = ReferenceAttend(pattern_of())
    for other in (copy.deepcopy(attend), pickle.loads(pickle.dumps(attend))):
        assert torch.equal(other(q, q, q), attend(q, q, q))


def test_copies_of_a_layer_ask_for_the_same_kernels(tmp_path: Any) -> None:
    """``nn.open_callable`` goes by the store itself: a second one would be built and loaded once more."""
    layer = SparseAttention(32, 2, pattern_of(), store=Store(tmp_path))
    for other in (copy.deepcopy(layer), AveragedModel(layer).module):
        assert other.store is layer.store and other.problem == layer.problem
        assert hash(other.pattern) == hash(layer.pattern) and other.pattern == layer.pattern
    found = pickle.loads(pickle.dumps(layer))
    assert found.store.root == tmp_path and not list(tmp_path.iterdir())
