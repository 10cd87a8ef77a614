"""One rank of a distributed run of ``SparseAttention``: gradients and a step equal to those of one process, or it fails.

    python ranks.py ddp|fsdp2 RANK WORLD FILE BACKEND

BACKEND ``reference`` runs on the CPU with gloo, ``triton`` on the GPU with nccl.
"""

from __future__ import annotations

import os
import sys
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import sparsegen

SINKS = {"all_of": ["causal", {"any_of": [{"window": {"size": 8}}, {"sink": {"tokens": 2}}]}]}
WIDTH, BATCH, LENGTH = 64, 4, 48


def layer(backend: str, mask: Any, **settings: Any) -> nn.Module:
    pattern = sparsegen.Pattern.from_dict({"name": "case", "mask": mask, **settings})
    return sparsegen.nn.SparseAttention(WIDTH, 4, pattern, num_kv_heads=2, backend=backend)


class Model(nn.Module):
    """A hybrid stack: the first layer sees all that is before, the second a window and learned sinks."""

    def __init__(self, backend: str):
        super().__init__()
        learned = layer(backend, SINKS, sink_logits=True, null_key=True)
        self.layers = nn.ModuleList([layer(backend, "causal"), learned])

    def forward(self, x: Any) -> Any:
        for one in self.layers:
            x = x + one(nn.functional.layer_norm(x, x.shape[-1:]))
        return x


def wrapped(model: nn.Module, mode: str, device: str, world: int) -> nn.Module:
    if mode == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh(device, (world,))
    for one in model.layers:
        fully_shard(one, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(t: Any) -> Any:
    return t.full_tensor() if isinstance(t, DTensor) else t


def step(model: nn.Module, x: Any) -> None:
    """Two steps of SGD on the mean of squares; the gradients of the second stay."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimiser.zero_grad()
        model(x).square().mean().backward()
        optimiser.step()


def main(mode: str, rank: int, world: int, file: str, backend: str) -> None:
    device = "cuda" if backend == "triton" else "cpu"
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", f"file://{file}", rank=rank, world_size=world
    )
    torch.manual_seed(0)
    alone = Model(backend).to(device)
    model = wrapped(deepcopy(alone), mode, device, world)
    x = torch.randn(BATCH, LENGTH, WIDTH).to(device)
    step(alone, x)
    step(model, x.chunk(world)[rank])
    wanted = dict(alone.named_parameters())
    found = {n.removeprefix("module."): p for n, p in model.named_parameters()}
    assert list(found) == list(wanted), (list(found), list(wanted))
    if mode == "fsdp2":
        sharded = [n for n, p in found.items() if isinstance(p, DTensor)]
        assert sharded == list(found), sharded
    for name, right in wanted.items():
        got = found[name]
        assert right.grad.abs().max() > 0, name
        close = {"rtol": 1e-4, "atol": 1e-6}
        torch.testing.assert_close(whole(got.grad), right.grad, **close, msg=name)
        torch.testing.assert_close(whole(got.data), right.data, **close, msg=name)
    dist.destroy_process_group()
    print(f"rank {rank} of {world}: {len(wanted)} gradients equal", flush=True)
    # Not the interpreter's own end: there DDP's reducer frees gloo's group, which waits for a thread that waits for the
    # interpreter's lock (torch 2.13, a stuck rank in one of two runs on a busy machine, 2026-11-30).
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
