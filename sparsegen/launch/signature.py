"""How a kernel's arguments are typed: the part of a compilation that a variant decides.

    fast      strides in 32 bits and multiples of 16 bytes, pointers on 16 bytes, positions within
              ``position_limit`` (32-bit arithmetic is then exact).  Loads are vectorised, or go by TMA.
    pointers  the same without TMA, where the fast one uses it: zero strides, per-batch key lengths.  Also single
              launches of a fast call that load every p-th key, where its keys are not whole periods of p.
    general   strides and positions in 64 bits, no assumption on alignment.  Any view, any length.

The first whose guard holds is launched (``sparsegen.launch.kernel``).  Every launch of a source is a binary of its own.

Where the configuration says ``KERNEL=hopper``, the launches of the fast variant that the warp-specialised text does are
compiled from it; all others, and the other variants, are the portable text with the template's default tiles.
"""

from __future__ import annotations

from typing import Any

from sparsegen.codegen.hopper import ROWS as CONSUMER_ROWS
from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.codegen.source import KernelSource
from sparsegen.codegen.template import LAUNCH_OPTIONS

FAST, POINTERS, GENERAL = "fast", "pointers", "general"
TRITON_DTYPE = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
STRIDE_MULTIPLE = 8  # elements: 16 bytes of a 2-byte type
ALIGNMENT = 16  # bytes: the widest load of a thread, and what a tensor descriptor asks for
ALIGNED = {"Q", "K", "V", "OUT", "LSE", "PARTIAL_OUT"} | {
    "DO", "DLSE", "STATS", "SUMS", "DS", "DQ", "DK", "DV", "PARTIAL_DQ", "PARTIAL_DK", "PARTIAL_DV"
}  # fmt: skip


PORTABLE, HOPPER = "portable", "hopper"  # values of the knob KERNEL
# templates of the gradient kernels; of all but the first every call is a fast one, others go to the split kernels
BACKWARD = ("backward", "backward_fused", "backward_stored")
# what descriptors take the elements of float32 tensors for; of all others they have the dtype of the inputs
ELEMENTS = {"STATS": "bf16", "SUMS": "fp32"}
# Registers a thread of the warp-specialised kernel at its start, by consumers: 65,536 a multiprocessor are enough for
# one program of three warpgroups, or for two programs of two.
MAX_REGISTERS = {2: 168, 1: 128}
TWO_PROGRAMS = 128  # most value columns that one consumer of two such programs can accumulate

# The same whatever was tuned: one binary serves all configurations.
GENERAL_CONFIG: dict[str, Any] = {
    "KERNEL": PORTABLE,
    "BLOCK_M": 32,
    "BLOCK_N": 32,
    "STAGES": 2,
    "num_warps": 4,
    "TMA": False,
    "HEAVY_FIRST": True,
    "GROUP_HEADS": 8,
    "PERSISTENT": False,
    "LATE_VALUES": False,
}


def variants(source: KernelSource, config: LaunchConfig) -> tuple[str, ...]:
    """The variants that make an artifact complete, in the order in which their guards are tried."""
    if source.template in BACKWARD[1:]:
        return (FAST,)
    return (FAST, POINTERS, GENERAL) if by_boxes(config) else (FAST, GENERAL)


def by_boxes(config: LaunchConfig) -> bool:
    """Whether the fast variant loads through tensor descriptors."""
    return bool(config["TMA"]) or config["KERNEL"] == HOPPER


def unit(
    source: KernelSource, config: LaunchConfig, variant: str, launch: int
) -> tuple[KernelSource, LaunchConfig]:
    """The text that a launch of a variant is compiled from, and the configuration it is compiled with."""
    if config["KERNEL"] != HOPPER:
        return source, variant_config(source, config, variant)
    if variant == FAST and source.hopper is not None and launch in source.hopper.launches:
        return source.hopper, config
    return source, variant_config(source, _beside(source, config), variant)


def _beside(source: KernelSource, config: LaunchConfig) -> LaunchConfig:
    """What a portable kernel beside the warp-specialised one is compiled with: that one's tiles are too large for it."""
    if source.template in BACKWARD:
        from sparsegen.codegen.backward import beside

        return beside(source)
    wide = max(source.head_dim, source.value_dim) > 192
    tiles = {"BLOCK_M": 64, "BLOCK_N": 32 if wide else 64, "STAGES": 2 if wide else 3}
    return LaunchConfig.of(config.as_dict() | tiles | {"KERNEL": PORTABLE, "TMA": True})


def variant_config(source: KernelSource, config: LaunchConfig, variant: str) -> LaunchConfig:
    """The configuration that a portable variant is compiled with: the tuned one, or small tiles that fit any layout.

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
    _, chosen = unit(source, config, variant, launch)
    return by_boxes(chosen) and bool(source.grids[launch].described)


def described(kind: str) -> tuple[int, int, int, int] | None:
    """(period, group, columns, rows) of a descriptor parameter's type, None for any other; 0: as many as a key tile has rows."""
    if not kind.startswith("desc:"):
        return None
    period, group, columns, *rows = map(int, kind.split(":")[1:])
    return period, group, columns, rows[0] if rows else 0


def block_of(kind: str, block_n: int) -> list[int]:
    """What a descriptor of this type loads at once: [1, 1, rows, columns], or [1, 1, periods, group, columns]."""
    found = described(kind)
    assert found is not None, kind
    period, group, columns, rows = found
    rows, columns = rows or block_n, columns or block_n
    return [1, 1, rows, columns] if period == 1 else [1, 1, rows // group, group, columns]


def constants(
    source: KernelSource, config: LaunchConfig, variant: str, launch: int = 0
) -> dict[str, Any]:
    """Values of the ``tl.constexpr`` parameters, and ``None`` for arguments that the variant does not use."""
    text, chosen = unit(source, config, variant, launch)
    boxes = takes_descriptors(source, config, variant, launch)
    known = dict(chosen.values) | {"WIDE": variant == GENERAL, "TMA": boxes, "SWEEP": launch}
    values: dict[str, Any] = {n: known[n] for n in text.constexprs}
    grid = source.grids[launch]
    for name, kind in text.parameters:
        found = described(kind)
        if found is None:
            continue
        # rows of the tile itself have a number of their own; all others are visited
        used: tuple[Any, ...] = (grid.queries,) if found[3] else grid.described
        if not boxes or found[:2] not in used:
            values[name] = None
    return values


def signature(
    source: KernelSource, config: LaunchConfig, variant: str, launch: int = 0
) -> dict[str, str]:
    """Triton's type of every parameter, by name, in the kernel's order."""
    text, chosen = unit(source, config, variant, launch)
    fixed = constants(source, config, variant, launch)
    dtype = TRITON_DTYPE[source.dtype]
    out = {}
    for name, kind in text.parameters:
        if name in fixed:
            out[name] = "constexpr"
        elif kind.startswith("desc:"):
            block = block_of(kind, int(chosen["BLOCK_N"]))
            element = ELEMENTS.get(tensor_of(name), dtype)
            layout = _box_layout(block, element) if chosen["KERNEL"] == HOPPER else ""
            out[name] = f"tensordesc<{element}[{', '.join(map(str, block))}]{layout}>"
        elif kind == "stride":
            out[name] = "i64" if variant == GENERAL else "i32"
        else:
            out[name] = f"*{dtype}" if kind == "*data" else kind
    for name in text.constexprs:
        out[name] = "constexpr"
    return out


def tensor_of(name: str) -> str:
    """The tensor that a descriptor parameter is about: "Q", "DO", …"""
    return name.split("_")[0]


def _box_layout(block: list[int], element: str) -> str:
    """How a box lies in shared memory, as the type of a Gluon descriptor says it."""
    from triton.experimental.gluon import language as gl

    dtype = gl.float32 if element == "fp32" else gl.float16
    return f",{gl.NVMMASharedLayout.get_default_for(block, dtype)!r}"


def attributes(
    source: KernelSource, config: LaunchConfig, variant: str, launch: int = 0
) -> dict[tuple[int], list[list[Any]]]:
    """Divisibility that Triton may assume: of the tensors' addresses in bytes, of strides in elements."""
    if variant == GENERAL:
        return {}
    out = {}
    text, _ = unit(source, config, variant, launch)
    for i, (name, kind) in enumerate(text.parameters):
        if kind == "stride":
            out[(i,)] = [["tt.divisibility", STRIDE_MULTIPLE]]
        elif name in ALIGNED:
            out[(i,)] = [["tt.divisibility", ALIGNMENT]]
    return out


def options(
    source: KernelSource, config: LaunchConfig, variant: str, launch: int = 0
) -> dict[str, Any]:
    """Launch options of Triton.  Fused multiply-add is asked for by name: its default changes between versions."""
    _, chosen = unit(source, config, variant, launch)
    taken = {name: chosen[name] for name in LAUNCH_OPTIONS}
    if chosen["KERNEL"] == HOPPER:
        alone = int(chosen["BLOCK_M"]) == CONSUMER_ROWS and source.value_dim <= TWO_PROGRAMS
        taken |= {"num_warps": 4, "maxnreg": MAX_REGISTERS[1 if alone else 2]}
    return taken | {"enable_fp_fusion": True}
