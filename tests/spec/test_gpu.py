"""GPU types by name, alias and architecture."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sparsegen.errors import InputError
from sparsegen.spec import all_gpus, find_gpu
from sparsegen.spec.gpu import described


@pytest.mark.parametrize("name", ["h200", "nvidia-h200", "NVIDIA H200", "sm_90", "sm90"])
def test_h200(name: str) -> None:
    gpu = find_gpu(name)
    assert (gpu.name, gpu.backend, gpu.arch, gpu.warp_size, gpu.multiprocessors) == (
        "nvidia-h200",
        "cuda",
        90,
        32,
        132,
    )
    assert gpu.shared_bytes == 232448 and gpu.target == "sm_90"


def test_every_name_finds_its_own_type() -> None:
    for gpu in all_gpus():
        assert all(find_gpu(name) is gpu for name in (gpu.name, *gpu.aliases))
    assert len({gpu.name for gpu in all_gpus()}) == len(all_gpus())
    assert find_gpu("gfx942").warp_size == 64


def test_unknown_gpu() -> None:
    with pytest.raises(InputError) as error:
        find_gpu("h20")
    assert str(error.value).startswith(
        "unknown GPU 'h20' (did you mean 'h200'?); known: nvidia-h200, nvidia-h100,"
    )
    assert str(error.value).endswith("or an architecture such as sm_90")


def test_a_gpu_is_recognised_by_its_properties() -> None:
    found = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3",
        major=9,
        minor=0,
        multi_processor_count=132,
        warp_size=32,
        L2_cache_size=1,
        shared_memory_per_block_optin=2,
    )
    assert described(found, hip=False) is find_gpu("h100")
    found.name, found.multi_processor_count = "NVIDIA H100 PCIe", 114
    gpu = described(found, hip=False)
    assert (gpu.name, gpu.arch, gpu.multiprocessors, gpu.shared_bytes, gpu.l2_bytes) == (
        "nvidia-h100-pcie",
        90,
        114,
        2,
        1,
    )
