"""GPU types: what the compiler and the tuner must know of them, with or without one in this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparsegen.errors import InputError
from sparsegen.spec.fields import did_you_mean

KIB, MIB = 1024, 1024 * 1024


@dataclass(frozen=True)
class Gpu:
    """One type of GPU.  ``arch``: 90 for sm_90, or "gfx942".  ``shared_bytes``: the most that one block may ask for."""

    name: str
    backend: str  # "cuda" | "hip"
    arch: int | str
    warp_size: int
    multiprocessors: int
    shared_bytes: int
    l2_bytes: int
    aliases: tuple[str, ...] = ()

    @property
    def target(self) -> str:
        """``sm_90`` or ``gfx942``."""
        return f"sm_{self.arch}" if self.backend == "cuda" else str(self.arch)


def _cuda(
    name: str, arch: int, multiprocessors: int, shared_kib: int, l2_mib: int, *aliases: str
) -> Gpu:
    names = (name.removeprefix("nvidia-"), *aliases)
    return Gpu(name, "cuda", arch, 32, multiprocessors, shared_kib * KIB, l2_mib * MIB, names)


# The first of an architecture is what sm_NN alone means.  Shared memory a block: 227 KiB on sm_90 and sm_100, 163 on
# sm_80, 99 on sm_86, sm_89 and sm_120 (CUDA programming guide, table of compute capabilities).
_GPUS = (
    _cuda("nvidia-h200", 90, 132, 227, 60),
    _cuda("nvidia-h100", 90, 132, 227, 50, "h100-sxm"),
    _cuda("nvidia-b200", 100, 148, 227, 126),
    _cuda("nvidia-a100", 80, 108, 163, 40),
    _cuda("nvidia-l40s", 89, 142, 99, 96),
    _cuda("nvidia-l4", 89, 58, 99, 48),
    _cuda("nvidia-rtx-4090", 89, 128, 99, 72, "rtx4090", "4090"),
    _cuda("nvidia-a10g", 86, 80, 99, 6),
    _cuda("nvidia-rtx-5090", 120, 170, 99, 96, "rtx5090", "5090"),
    Gpu("amd-mi300x", "hip", "gfx942", 64, 304, 64 * KIB, 4 * MIB, ("mi300x",)),
)


def all_gpus() -> tuple[Gpu, ...]:
    """Every GPU type that is known by name."""
    return _GPUS


def find_gpu(name: str) -> Gpu:
    """The GPU type of a name ("nvidia-h200"), an alias ("h200") or an architecture ("sm_90", "gfx942")."""
    wanted = str(name).strip().lower().replace(" ", "-")
    for gpu in _GPUS:
        if wanted in (gpu.name, *gpu.aliases):
            return gpu
    for gpu in _GPUS:
        if wanted in (gpu.target, f"sm{gpu.arch}"):
            return gpu
    names = [n for gpu in _GPUS for n in (gpu.name, *gpu.aliases, gpu.target)]
    near = did_you_mean(wanted, names)
    known = ", ".join(gpu.name for gpu in _GPUS)
    raise InputError(
        f"unknown GPU {str(name)[:60]!r}{near}; known: {known}, or an architecture such as sm_90"
    )


def as_gpu(gpu: Any) -> Gpu:
    """A GPU type that was given as such or by name; InputError for anything else."""
    if isinstance(gpu, Gpu):
        return gpu
    if isinstance(gpu, str):
        return find_gpu(gpu)
    raise InputError(
        f"gpu must be a name such as 'h200' or a sparsegen.Gpu, got {type(gpu).__name__}"
    )


def current_gpu() -> Gpu | None:
    """The GPU that torch would use now, or None.  A type without a name here is described by its properties."""
    import torch

    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return described(found, hip=torch.version.hip is not None)


def described(found: Any, *, hip: bool) -> Gpu:
    """The Gpu of torch's device properties: the named type where name and architecture agree, else a new one."""
    slug = "-".join(found.name.lower().split())
    arch: int | str = found.gcnArchName.split(":")[0] if hip else 10 * found.major + found.minor
    for gpu in _GPUS:
        # "NVIDIA H100 80GB HBM3" is an h100; "NVIDIA H100 PCIe" has fewer multiprocessors and is its own type.
        alike = slug == gpu.name or slug.startswith(gpu.name + "-")
        if alike and gpu.arch == arch and gpu.multiprocessors == found.multi_processor_count:
            return gpu
    shared = 64 * KIB if hip else getattr(found, "shared_memory_per_block_optin", 48 * KIB)
    return Gpu(
        slug,
        "hip" if hip else "cuda",
        arch,
        found.warp_size,
        found.multi_processor_count,
        shared,
        getattr(found, "L2_cache_size", 0),
    )
