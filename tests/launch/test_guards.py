"""Which variant a launch takes: decided by layout, positions and addresses, never by chance."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparsegen.codegen import LaunchConfig, load_template, render
from sparsegen.errors import UnsupportedError
from sparsegen.launch import Call, Kernel
from sparsegen.schedule.build import build
from sparsegen.spec.gpu import find_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem


class NoGpu(Kernel):
    """A kernel whose binaries record the grid and the arguments."""

    def __init__(self, tma: bool, limit: int | None = None):
        pattern, problem = (
            Pattern.from_dict({"name": "p", "mask": "causal"}),
            Problem(head_dim=64, heads=2),
        )
        source = render(pattern, build(pattern, problem), problem)
        config = load_template().default(problem, find_gpu("nvidia-h200")).as_dict() | {"TMA": tma}
        super().__init__(source, LaunchConfig.of(config), {})
        self.ran: list[tuple[int, tuple[Any, ...]]] = []

    def loaded(self, variant: str, device: int, launch: int) -> Any:
        def prepare(programs: int, args: tuple[Any, ...], moving: int) -> Any:
            assert args[:moving] == (0,) * moving  # places of the addresses, which a call brings

            def step(addresses: tuple[int, ...]) -> None:
                assert len(addresses) == moving
                self.ran.append((programs, (*addresses, *args[moving:])))

            return step

        return SimpleNamespace(block_m=64, persistent=False, prepare=prepare)


def tensors(kv_len: int = 70) -> list[torch.Tensor]:
    q, k, v = (torch.zeros(1, 2, n, 64, dtype=torch.bfloat16) for n in (100, kv_len, kv_len))
    return [q, k, v, torch.zeros_like(q), torch.zeros(1, 2, 100)]


def lengths() -> torch.Tensor:
    return torch.tensor([70], dtype=torch.int32)


def test_plain_tensors_are_fast() -> None:
    for tma in (True, False):
        kernel = NoGpu(tma)
        assert kernel(*tensors(), Call()) == "fast"
        ((programs, args),) = kernel.ran
        assert programs == 2 * 2  # two tiles of 64 rows, two heads
        assert len(args) == len(kernel.source.parameters)
        descriptors = args[5:7]
        assert all(d is None for d in descriptors) == (not tma)


@pytest.mark.parametrize(
    ("change", "with_tma", "without"),
    [
        ("lengths", "pointers", "fast"),
        ("expanded", "pointers", "fast"),
        ("no keys", "pointers", "fast"),
        ("odd row stride", "general", "general"),
        ("odd address", "general", "general"),
        ("far", "general", "general"),
    ],
)
def test_guards(change: str, with_tma: str, without: str) -> None:
    q, k, v, out, lse = tensors()
    call = Call()
    if change == "lengths":
        call = Call(kv_lengths=lengths())
    elif change == "expanded":
        v = v[:, :1].expand(-1, 2, -1, -1)
    elif change == "no keys":
        k, v = k[:, :, :0], v[:, :, :0]
    elif change == "odd row stride":
        k = torch.zeros(1, 2, 70, 67, dtype=torch.bfloat16)[..., :64]
    elif change == "odd address":
        k = torch.zeros(1 + k.numel(), dtype=torch.bfloat16)[1:].view(k.shape)
    elif change == "far":
        call = Call(q_start=1 << 40, relative=0)
    assert NoGpu(True)(q, k, v, out, lse, call) == with_tma
    assert NoGpu(False)(q, k, v, out, lse, call) == without


def test_a_variant_can_be_asked_for() -> None:
    kernel = NoGpu(True)
    for variant in ("fast", "pointers", "general"):
        assert kernel(*tensors(), Call(), variant) == variant
    ragged = Call(kv_lengths=lengths())
    with pytest.raises(UnsupportedError) as error:
        kernel(*tensors(), ragged, "fast")
    assert str(error.value) == (
        "variant 'fast' cannot take these tensors; it needs: pointers on 16 bytes, strides multiples of 8 elements, "
        "those of rows below 2^23, positions within 32-bit arithmetic; with descriptors also no zero strides of what they "
        "describe, at least one key and no per-batch kv_lengths"
    )


def test_one_layout_many_addresses() -> None:
    """A prepared launch has its descriptors around the tensors of each call: they say which address they move with."""
    kernel = NoGpu(True)
    first, second = tensors(), tensors()
    launch = kernel.prepare(*first[:4], Call())
    launch(*first)
    launch(*second)
    (_, a), (_, b) = kernel.ran
    for args, given in ((a, first), (b, second)):
        assert args[:5] == tuple(t.data_ptr() for t in given)
        for view, tensor in zip(args[5:7], given[1:3], strict=True):
            assert view.base is None and args[view.moves] == tensor.data_ptr()
            assert view.shape == tuple(tensor.shape)
            assert view.strides[1:] == tensor.stride()[1:]  # that of the only batch entry is free
    assert a[5] is b[5] and a[6] is b[6]  # prepared once
    odd = torch.zeros(1 + second[1].numel(), dtype=torch.bfloat16)[1:].view(second[1].shape)
    assert launch(second[0], odd, *second[2:]) == "general"
