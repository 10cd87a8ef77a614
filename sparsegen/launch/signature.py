"""How a kernel's arguments are typed: the part of a compilation that a variant decides.

    fast      strides in 32 bits and multiples of 16 bytes, pointers on 16 bytes, positions within
              ``position_limit`` (32-bit arithmetic is then exact).  Loads are vectorised, or go by TMA.
    pointers  the same without TMA, where the fast one uses it: zero strides, per-batch key lengths.  Also single
              launches of a fast call that load every p-th key, where its keys are not whole periods of p.
    general   strides and positions in 64 bits, no assumption on alignment.  Any view, any length.

The first whose guard holds is launched (``sparsegen.launch.kernel``).  Every launch of a source is a binary of its own.
"""

from __future__ import annotations

from typing import Any

from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.codegen.source import KernelSource
from sparsegen.codegen.template import LAUNCH_OPTIONS

FAST, POINTERS, GENERAL = "fast", "pointers", "general"
TRITON_DTYPE = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
STRIDE_MULTIPLE = 8  # elements: 16 bytes of a 2-byte type
ALIGNMENT = 16  # bytes: the widest load of a thread, and what a tensor descriptor asks for


# The same whatever was tuned: one binary serves all configurations.
GENERAL_CONFIG: dict[str, Any] = {
    "BLOCK_M": 32,
    "BLOCK_N": 32,
    "STAGES": 2,
    "num_warps": 4,
    "TMA": False,
    "HEAVY_FIRST": True,
    "GROUP_HEADS": 8,
    "PERSISTENT": False,
}


def variants(source: KernelSource, config: LaunchConfig) -> tuple[str, ...]:
    """The variants that make an artifact complete, in the order in which their guards are tried."""
    return (FAST, POINTERS, GENERAL) if config["TMA"] else (FAST, GENERAL)


def variant_config(source: KernelSource, config: LaunchConfig, variant: str) -> LaunchConfig:
    """The configuration that a variant is compiled with: the tuned one, or small tiles that fit any layout.

    The general one keeps below 64 query rows, so below Hopper's asynchronous matrix instructions.  Its loads are too
    narrow to be pipelined, and ptxas 12.8 (Triton 3.6) then reads a register that was never set for the descriptor
    of value tiles 32 columns wide: wrong values or an illegal address (seen 2026-11-29 on an H200, head_dim 96).
    """
    if variant == FAST:
        return config
    if variant == POINTERS:
        return LaunchConfig.of(config.as_dict() | {"TMA": False})
    small = dict(GENERAL_CONFIG)
    if source.dtype == "float32":
        small["BLOCK_N"] = 16  # twice the bytes a tile: 99 KiB cards hold head_dim 256 with this
    return LaunchConfig.of({name: small.get(name, value) for name, value in config.values})


def takes_descriptors(
    source: KernelSource, config: LaunchConfig, variant: str, launch: int
) -> bool:
    """Whether a launch loads keys through tensor descriptors."""
    chosen = variant_config(source, config, variant)
    return bool(chosen["TMA"]) and bool(source.grids[launch].described)


def described(kind: str) -> tuple[int, int, int] | None:
    """(period, group, columns) of a descriptor parameter's type, None for any other."""
    if not kind.startswith("desc:"):
        return None
    period, group, columns = map(int, kind.split(":")[1:])
    return period, group, columns


def block_of(kind: str, block_n: int) -> list[int]:
    """What a descriptor of this type loads at once: [1, 1, keys, columns], or [1, 1, periods, group, columns]."""
    found = described(kind)
    assert found is not None, kind
    period, group, columns = found
    return [1, 1, block_n, columns] if period == 1 else [1, 1, block_n // group, group, columns]


def constants(
    source: KernelSource, config: LaunchConfig, variant: str, launch: int = 0
) -> dict[str, Any]:
    """Values of the ``tl.constexpr`` parameters, and ``None`` for arguments that the variant does not use."""
    chosen = variant_config(source, config, variant).values
    values: dict[str, Any] = {n: v for n, v in chosen if n not in LAUNCH_OPTIONS}
    values["WIDE"] = variant == GENERAL
    values["TMA"] = takes_descriptors(source, config, variant, launch)
    if len(source.grids) > 1:
        values["SWEEP"] = launch
    used = source.grids[launch].described if values["TMA"] else ()
    for name, kind in source.parameters:
        found = described(kind)
        if found is not None and found[:2] not in used:
            values[name] = None
    return values


def signature(
    source: KernelSource, config: LaunchConfig, variant: str, launch: int = 0
) -> dict[str, str]:
    """Triton's type of every parameter, by name, in the kernel's order."""
    fixed = constants(source, config, variant, launch)
    dtype = TRITON_DTYPE[source.dtype]
    out = {}
    for name, kind in source.parameters:
        if name in fixed:
            out[name] = "constexpr"
        elif kind.startswith("desc:"):
            block = block_of(kind, int(config["BLOCK_N"]))
            out[name] = f"tensordesc<{dtype}[{', '.join(map(str, block))}]>"
        elif kind == "stride":
            out[name] = "i64" if variant == GENERAL else "i32"
        else:
            out[name] = f"*{dtype}" if kind == "*data" else kind
    for name in source.constexprs:
        out[name] = "constexpr"
    return out


def attributes(
    source: KernelSource, config: LaunchConfig, variant: str
) -> dict[tuple[int], list[list[Any]]]:
    """Divisibility that Triton may assume: of the tensors' addresses in bytes, of strides in elements."""
    if variant == GENERAL:
        return {}
    out = {}
    for i, (name, kind) in enumerate(source.parameters):
        if kind == "stride":
            out[(i,)] = [["tt.divisibility", STRIDE_MULTIPLE]]
        elif name in ("Q", "K", "V", "OUT", "LSE", "PARTIAL_OUT"):
            out[(i,)] = [["tt.divisibility", ALIGNMENT]]
    return out


def options(source: KernelSource, config: LaunchConfig, variant: str) -> dict[str, Any]:
    """Launch options of Triton.  Fused multiply-add is asked for by name: its default changes between versions."""
    chosen = variant_config(source, config, variant)
    return {name: chosen[name] for name in LAUNCH_OPTIONS} | {"enable_fp_fusion": True}
