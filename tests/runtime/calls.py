"""Callables over a kernel that records its calls, and tensors that only claim to be on a GPU (in a ``FakeTensorMode``)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from sparsegen.launch.kernel import Call
from sparsegen.runtime.attend import Attend
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem

PROBLEM = Problem(head_dim=16, heads=4, kv_heads=2, dtype="float16", lengths=((64, 64),))
EVERYTHING = {"alibi": True, "sink_logits": True, "null_key": True}


class StandIn:
    """Records what a kernel would have been launched with."""

    def __init__(self, most: int | None = None, least: int | None = None, tables: tuple = ()):
        self.source = SimpleNamespace(
            max_position=most, min_position=least, tables=tables, digest=""
        )
        self.config = ""
        self.calls: list[tuple[Call, str | None]] = []

    def prepare(self, q, k, v, out, call: Call) -> Any:
        def launch(q, k, v, out, lse, variant: str | None = None) -> None:
            assert out.shape == (*q.shape[:3], v.shape[3]) and lse.shape == q.shape[:3]
            assert out.dtype == q.dtype and lse.dtype == torch.float32
            self.calls.append((call, variant))

        return launch


def pattern_of(mask: Any = "causal", **settings: Any) -> Pattern:
    return Pattern.from_dict({"name": "p", "mask": mask, **settings})


def attend_of(mask: Any = "causal", kernel: Any = None, rebuild: Any = None, **settings: Any):
    kernel = kernel or StandIn()
    return Attend(pattern_of(mask, **settings), PROBLEM, kernel, rebuild), kernel


def tensor(*shape: int, dtype: Any = torch.float16, device: str = "cuda", **more: Any) -> Any:
    return torch.empty(*shape, dtype=dtype, device=device, **more)


def strided(*shape: int, stride: tuple[int, ...]) -> Any:
    return torch.empty_strided(shape, stride, dtype=torch.float16, device="cuda")


def qkv(q_len: int = 8, kv_len: int = 8, **changes: Any) -> dict[str, Any]:
    made = {
        "q": tensor(1, 4, q_len, 16),
        "k": tensor(1, 2, kv_len, 16),
        "v": tensor(1, 2, kv_len, 16),
    }
    return made | {n: c() if callable(c) else c for n, c in changes.items()}


def extras(**changes: Any) -> dict[str, Any]:
    made = {
        "alibi_slopes": tensor(4, dtype=torch.float32),
        "sink_logits": tensor(4, dtype=torch.float32),
        "null_key": (tensor(2, 16), tensor(2, 16)),
    }
    return made | {n: c() for n, c in changes.items()}
