"""Callables with gradients over interpreted kernels."""

from __future__ import annotations

from typing import Any

import torch

from sparsegen.runtime.attend import Attend
from sparsegen.spec.problem import Problem
from tests.kernels.cases import Case, pattern_of, tensors
from tests.kernels.cases import kernel_of as forward_of
from tests.kernels.gradients import extras_of
from tests.kernels.gradients import kernel_of as backward_of

SINKS = {"all_of": ["causal", {"any_of": [{"window": {"size": 8}}, {"sink": {"tokens": 2}}]}]}
SETTINGS = {"sink_logits": True, "null_key": True, "softcap": 4.0, "alibi": True}
DRAWN = {"any_of": ["causal", {"random_blocks": {"block": 8, "per_row": 1, "seed": 3}}]}
GROUPS = {"heads": 4, "kv_heads": 2}
PLAIN = Case("plain", pattern_of(SINKS), 20, 24, **GROUPS)
LEARNED = Case("learned", pattern_of(SINKS, **SETTINGS), 20, 24, **GROUPS)
TOP_LEFT = Case("top-left", pattern_of(SINKS, align="top_left"), 20, 24, **GROUPS)
RANDOM = Case("random", pattern_of(DRAWN), 20, 24, **GROUPS)
WIDE = Case("wide", pattern_of("causal", scale=0.5), 20, 24, **GROUPS, value_dim=32)


class Counting:
    """The gradient kernels of a case, and which gradients were asked of them."""

    def __init__(self, case: Case):
        self.kernel = backward_of(case)
        self.sources, self.configs, self.asked = self.kernel.sources, self.kernel.configs, []

    def __call__(self, saved: Any, call: Any, wanted: Any) -> Any:
        self.asked.append(list(wanted))
        return self.kernel(saved, call, wanted)


def problem_of(case: Case, **more: Any) -> Problem:
    dims = {n: getattr(case, n) for n in ("head_dim", "value_dim", "heads", "kv_heads", "dtype")}
    return Problem(**dims, **more)


def attend_of(case: Case, **more: Any) -> tuple[Attend, Counting]:
    """A callable over interpreted kernels; ``more``: other arguments of ``Attend``."""
    backward = Counting(case)
    given = {"backward": backward} | more
    return Attend(case.pattern, problem_of(case), forward_of(case), **given), backward


def learned(case: Case) -> tuple[list[Any], dict[str, Any]]:
    """What gets a gradient: q, k, v, and what the extras hold of it."""
    leaves, extras = list(tensors(case)), extras_of(case)
    if "sink_logits" in extras:
        leaves += [extras["sink_logits"], *extras["null_key"]]
    return [t.requires_grad_() for t in leaves], extras


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "starts": {"q_start": 9, "k_start": 3},
    "keys from 5 on": {"k_start": 5},
    "before zero": {"q_start": -4},
    "partial": {"partial": True},
    "lengths": {
        "q_lengths": torch.tensor([11], dtype=torch.int32),
        "kv_starts": torch.tensor([2], dtype=torch.int32),
        "kv_lengths": torch.tensor([17], dtype=torch.int32),
    },
}
