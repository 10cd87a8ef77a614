"""Stand-ins for what a benchmark needs and is not here: a GPU, and packages of peers."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from sparsegen.bench.case import Case
from sparsegen.bench.ours import Built
from sparsegen.bench.results import Results
from sparsegen.bench.roofline import Roof
from sparsegen.runtime.attend import ReferenceAttend
from sparsegen.schedule import build as schedules

ROOF = Roof(800e12, 4e12)


class StandInClock:
    """Launches once and says 100, 200, … µs, in the order in which it is asked for new launches."""

    def __init__(self) -> None:
        self.known: list[Any] = []

    def times_us(self, launch: Any, warm_up_ms: float, measured_ms: float) -> list[float]:
        launch()
        if launch not in self.known:
            self.known.append(launch)
        return [100.0 * (1 + self.known.index(launch))]


class StandInDevice:
    """A device on the CPU that answers with numbers of its own."""

    name = "cpu"

    def __init__(self) -> None:
        self.clock, self.bare = StandInClock(), StandInClock()
        self.released = 0

    def exposed(self, launch: Any) -> bool:
        return False

    def sustained_us(self, launch: Any) -> float:
        return 90.0

    def host_us(self, launch: Any, us: float) -> float:
        return us / 10

    def peak_bytes(self, launch: Any) -> int:
        return 4096

    def wait(self) -> None:
        pass

    def release(self) -> None:
        self.released += 1


def build(case: Case, say: Any = None) -> Built:
    """The float64 reference in place of a kernel, with the schedule that the compiler would choose."""
    schedule = schedules.build(case.pattern, case.problem)
    attend = ReferenceAttend(case.pattern)
    return Built(attend, schedule, "BLOCK_M=64", "the reference", (64, 64))


def empty(missing: tuple[tuple[str, str], ...] = ()) -> Results:
    """A run that has not begun."""
    versions = {"driver": "580", "sparsegen": "0.1", "torch": "2.11", "triton": "3.6"}
    return Results("nvidia-h200", versions, "2026-11-30T02:00:00", "5 rounds", ROOF, missing)


# ---- packages ----


class Vector(torch.Tensor):
    """An integer vector whose division rounds towards zero, as a machine's does."""

    def __floordiv__(self, other: Any) -> Any:
        return torch.div(self, other, rounding_mode="trunc").as_subclass(Vector)

    def __mod__(self, other: Any) -> Any:
        return torch.fmod(self, other).as_subclass(Vector)


def vector(values: Any) -> Any:
    return torch.as_tensor(values).as_subclass(Vector)


class BlockSparseTensorsTorch(NamedTuple):
    """The fields of flash_attn.cute's, as far as they are given."""

    mask_block_cnt: Any
    mask_block_idx: Any
    full_block_cnt: Any = None
    full_block_idx: Any = None
    block_size: Any = None


def dense(q: Any, k: Any, v: Any, mask: Any, scale: Any, softcap: Any, sink: Any) -> Any:
    """Attention of [B, S, H, D] tensors in float64 under a bool mask [Sq, Sk]."""
    q, k, v = (t.transpose(1, 2).double() for t in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    score = (q @ k.transpose(-1, -2)) * (scale or q.shape[-1] ** -0.5)
    score = softcap * torch.tanh(score / softcap) if softcap else score
    score = score.masked_fill(~mask, -torch.inf)
    if sink is not None:
        column = sink.double()[None, :, None, None].expand(*score.shape[:3], 1)
        weights = torch.softmax(torch.cat([score, column], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(score, -1).nan_to_num(0.0)
    return (weights @ v).transpose(1, 2)


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: Any = (None, None),
    learnable_sink: Any = None,
    softcap: float = 0.0,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
) -> Any:
    """What flash_attn.cute's documents say: bottom-right alignment, inclusive windows, block lists by tiles."""
    q_len, kv_len = q.shape[1], k.shape[1]
    i, j = torch.arange(q_len)[:, None], torch.arange(kv_len)[None]
    if mask_mod is None:
        left, right = (None, 0) if causal else window_size
        apart = i + kv_len - q_len - j
        mask = torch.ones(q_len, kv_len, dtype=torch.bool)
        mask &= True if left is None else apart <= left
        mask &= True if right is None else -apart <= right
    else:
        mask = mask_mod(vector(0), vector(0), vector(i), vector(j), None, None)
        mask = mask.as_subclass(torch.Tensor) & blocks_of(block_sparse_tensors, q_len, kv_len, 0)
        mask |= blocks_of(block_sparse_tensors, q_len, kv_len, 2)
    return dense(q, k, v, mask, softmax_scale, softcap, learnable_sink).to(q.dtype), None


def blocks_of(lists: Any, q_len: int, kv_len: int, first: int) -> Any:
    """Bool [q_len, kv_len] of the blocks that a count and its indices name."""
    counts, indices = lists[first][0, 0], lists[first + 1][0, 0]
    seen = torch.zeros(q_len, kv_len, dtype=torch.bool)
    m, n = lists.block_size
    for row, count in enumerate(counts.tolist()):
        for block in indices[row, :count].tolist():
            seen[row * m : (row + 1) * m, block * n : (block + 1) * n] = True
    return seen


def install_flash4(monkeypatch: pytest.MonkeyPatch, function: Any = flash_attn_func) -> None:
    """A flash_attn.cute that computes densely."""
    parts = {
        "flash_attn": {},
        "flash_attn.cute": {},
        "flash_attn.cute.interface": {"flash_attn_func": function},
        "flash_attn.cute.block_sparsity": {"BlockSparseTensorsTorch": BlockSparseTensorsTorch},
        "flash_attn.cute.utils": {"scalar_to_ssa": lambda value, kind: vector(value)},
        "cutlass": {"Int32": int, "cute": SimpleNamespace(where=torch.where)},
        "cutlass.cute": {"where": torch.where},
    }
    for name, values in parts.items():
        module = ModuleType(name)
        for key, value in values.items():
            setattr(module, key, value)
        monkeypatch.setitem(sys.modules, name, module)


def install_flash_infer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flashinfer that computes densely."""

    def prefill(
        q: Any,
        k: Any,
        v: Any,
        causal: bool = False,
        window_left: int = -1,
        sm_scale: Any = None,
        logits_soft_cap: Any = None,
    ) -> Any:
        apart = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))[None]
        mask = (apart >= 0) if causal else torch.ones_like(apart, dtype=torch.bool)
        mask &= True if window_left < 0 else apart <= window_left
        tensors = (t[None] for t in (q, k, v))
        return dense(*tensors, mask, sm_scale, logits_soft_cap, None)[0].to(q.dtype)

    module = ModuleType("flashinfer")
    module.single_prefill_with_kv_cache = prefill  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
