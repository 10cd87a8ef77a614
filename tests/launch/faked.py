"""Kernels whose driver is a stand-in, tensors and calls for them, and what such a kernel would read."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import torch

from sparsegen.launch import Call, Job, Kernel
from sparsegen.launch.description import read_description
from sparsegen.launch.loading import DriverLoaded
from tests.launch.described import launches
from tests.launch.fake_driver import FakeHip, FakeLibrary

FORMATS = {"pointer": "<Q", "int32": "<i", "int64": "<q", "float32": "<f"}
HEADS, KV_HEADS, ROWS, KEYS = 4, 2, 128, 640


class Faked(Kernel):
    """A kernel whose driver is the stand-in."""

    def __init__(self, job: Job, **settings: Any):
        folders = {job.variant: job.directory}
        super().__init__(job.source, job.config, folders)
        stand_in = FakeHip if job.gpu.backend == "hip" else FakeLibrary
        self.library = stand_in.of_folder(job.directory, **settings)
        self.driver = stand_in.kind(self.library)

    def loaded(self, variant: str, device: int, launch: int) -> DriverLoaded:
        given = self.source, self.config, variant, self._directories[variant], 0, launch
        return DriverLoaded(*given, driver=self.driver)


def on_16_bytes(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor that is aligned as CUDA's are."""
    size = 1
    for n in shape:
        size *= n
    room = torch.empty(size + 32, dtype=dtype)
    first = -room.data_ptr() % 64 // room.element_size()
    return room[first : first + size].view(shape)


def tensors(job: Job) -> tuple[torch.Tensor, ...]:
    """q, k, v, out, lse; rows of k and v are those of a wider tensor."""
    source, dtype = job.source, getattr(torch, job.source.dtype)
    q = on_16_bytes(2, HEADS, ROWS, source.head_dim, dtype=dtype)
    k = on_16_bytes(2, KV_HEADS, KEYS, source.head_dim + 16, dtype=dtype)[..., : source.head_dim]
    v = on_16_bytes(2, KV_HEADS, KEYS, source.value_dim + 32, dtype=dtype)[..., : source.value_dim]
    out = on_16_bytes(2, HEADS, ROWS, source.value_dim, dtype=dtype)
    return q, k, v, out, on_16_bytes(2, HEADS, ROWS, dtype=torch.float32)


def call_of(job: Job) -> Call:
    source = job.source
    if not source.tables:
        return Call(scale=0.25)
    extras = {"alibi_slopes": torch.ones(HEADS), "sink_logits": torch.ones(HEADS)}
    dtype = getattr(torch, source.dtype)
    null = tuple(torch.ones(KV_HEADS, d, dtype=dtype) for d in (source.head_dim, source.value_dim))
    table = torch.zeros(50, source.tables[0].per_row, dtype=torch.int32)
    return Call(scale=0.25, null_key=null, tables=((table, 3),), **extras)


def read(job: Job, folder: Path, parameters: tuple[bytes, ...]) -> dict[str, Any]:
    """What the kernel would see, by name; of a descriptor its number, shape and strides."""
    left, out = list(parameters), {}
    for p in read_description(folder).parameters:
        if p.box is None:
            (out[p.name],) = struct.unpack(FORMATS[p.kind], left.pop(0))
            continue
        rank = len(p.box.shape)
        number = struct.unpack_from("<Q", left.pop(0))[0]
        shape = [struct.unpack("<i", left.pop(0))[0] for _ in range(rank)]
        out[p.name] = number, shape, [struct.unpack("<q", left.pop(0))[0] for _ in range(rank)]
    assert left == [bytes(8), bytes(8)]  # no scratch memory
    return out


def launched(
    job: Job, kernel: Faked, given: tuple[torch.Tensor, ...], call: Call, stream: int
) -> list[tuple[Path, dict[str, Any]]]:
    """(folder, what it would read by name) of each launch, after a call's were compared with its tensors."""
    q, k, v, out, lse = given
    found = []
    for done, (_, folder, entry) in zip(kernel.library.launched, launches(job), strict=True):
        description = read_description(folder)
        assert (done.kernel, done.stream, done.grid[1:]) == (entry, stream, (1, 1))
        assert done.block == (description.threads, 1, 1)
        assert done.shared == description.shared_bytes
        seen = read(job, folder, done.parameters)
        wanted = {"Q": q, "K": k, "V": v, "OUT": out, "LSE": lse}
        assert {n: seen[n] for n in wanted} == {n: t.data_ptr() for n, t in wanted.items()}
        assert [seen[f"stride_k{a}"] for a in "bhs"] == list(k.stride()[:3])
        assert [seen[f"stride_v{a}"] for a in "bhs"] == list(v.stride()[:3])
        assert (seen["heads"], seen["heads_per_kv"]) == (HEADS, HEADS // KV_HEADS)
        assert (seen["q_rows"], seen["kv_rows"], seen["scale"]) == (ROWS, KEYS, 0.25)
        assert done.grid[0] == seen["tiles"] * seen["batch_heads"]
        if (
            call.null_key is not None
            and call.alibi_slopes is not None
            and call.sink_logits is not None
        ):
            pointers = *call.null_key, call.alibi_slopes, call.sink_logits, call.tables[0][0]
            names = ("NULL_K", "NULL_V", "ALIBI_SLOPES", "SINK_LOGITS", "TABLE0")
            assert [seen[n] for n in names] == [t.data_ptr() for t in pointers]
            assert seen["table0_row"] == call.tables[0][1] == 3 and seen["joins"] == 1
        found.append((folder, seen))
    return found
