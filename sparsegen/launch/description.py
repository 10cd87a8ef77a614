"""What a driver needs to launch a binary: its platform, name, threads and parameters, as JSON beside it.

Made when a kernel is compiled, from the types that Triton was given and from Triton's metadata.  Whoever launches
needs this file and the binary, and no Triton.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparsegen.errors import ArtifactError, ToolchainError

LAUNCH = "launch.json"
SCHEMA = 2
CUDA, HIP = "cuda", "hip"  # platforms, by the driver that launches
SUFFIXES = {CUDA: "cubin", HIP: "hsaco"}  # of a binary's file
POINTER, INT32, INT64, FLOAT32, DESCRIPTOR = "pointer", "int32", "int64", "float32", "descriptor"
BYTES = {POINTER: 8, INT32: 4, INT64: 8, FLOAT32: 4, DESCRIPTOR: 128}
SCRATCH = ("global_scratch", "profile_scratch")  # pointers that Triton puts behind all others
_KINDS = {"i32": INT32, "i64": INT64, "fp32": FLOAT32}
_NOT_ON_HIP = ("launch_pdl", "global_scratch_size")
# CUtensorMapDataType of the CUDA driver, by Triton's names
_TENSOR_TYPES = {"fp16": 6, "fp32": 7, "bf16": 9}


@dataclass(frozen=True)
class Box:
    """What one tensor descriptor loads: an element's type as the driver numbers it and its bytes, the swizzle's number,
    and the rows and columns of a box, outermost first."""

    element: int
    element_bytes: int
    swizzle: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Parameter:
    """One run-time argument of the kernel.  A descriptor is followed by its shape (int32) and strides (int64)."""

    name: str
    kind: str
    box: Box | None = None

    def binary_kinds(self) -> tuple[str, ...]:
        """The binary's parameters that this argument becomes."""
        if self.box is None:
            return (self.kind,)
        rank = len(self.box.shape)
        return (DESCRIPTOR, *[INT32] * rank, *[INT64] * rank)


@dataclass(frozen=True)
class Description:
    """One launch of a variant, by the driver of ``platform``.

    ``threads`` a program; ``shared_bytes`` a program, beside what the binary declares.
    """

    platform: str
    kernel: str
    threads: int
    shared_bytes: int
    parameters: tuple[Parameter, ...]

    def binary_kinds(self) -> tuple[str, ...]:
        """Kinds of all parameters of the binary, in order."""
        kinds = [kind for p in self.parameters for kind in p.binary_kinds()]
        return (*kinds, *[POINTER] * len(SCRATCH))

    def to_json(self) -> str:
        """The text of ``launch.json``."""
        plain = {"schema": SCHEMA, **asdict(self)}
        return json.dumps(plain, sort_keys=True, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = LAUNCH) -> Description:
        """Inverse of ``to_json``; ``ArtifactError`` names ``where`` and what is wrong."""
        try:
            return _description(json.loads(text))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ArtifactError(
                f"{where} is no launch description that this version reads ({error}); build it again"
            ) from None


def describe(signature: Mapping[str, str], metadata: Mapping[str, Any]) -> Description:
    """The description of a compiled kernel.

    ``signature``: Triton's type of every parameter by name, ``metadata``: Triton's JSON.  ``ToolchainError`` for what this
    launcher does not do: clusters, cooperative and dependent launches, scratch memory, descriptors on AMD's GPUs.
    """
    platform = str(metadata["target"]["backend"])
    _refuse(metadata, platform)
    boxes = iter(metadata.get("tensordesc_meta") or ())
    parameters = []
    for name, kind in signature.items():
        if kind == "constexpr":
            continue
        if kind.startswith("tensordesc"):
            if platform != CUDA:
                raise ToolchainError(
                    f"{metadata['name']}: {name} is a tensor descriptor, and those are launched on NVIDIA's GPUs alone"
                )
            found = next(boxes, None)
            if found is None:
                raise ToolchainError(f"{metadata['name']}: {name} became no tensor descriptor")
            parameters.append(Parameter(name, DESCRIPTOR, _box(kind, found)))
        else:
            parameters.append(Parameter(name, POINTER if kind[0] == "*" else _KINDS[kind]))
    threads = int(metadata["num_warps"]) * int(metadata["target"]["warp_size"])
    shared = int(metadata["shared"])
    return Description(platform, metadata["name"], threads, shared, tuple(parameters))


def _refuse(metadata: Mapping[str, Any], platform: str) -> None:
    plain = {
        "num_ctas": 1,
        "launch_cooperative_grid": False,
        "launch_pdl": False,
        "global_scratch_size": 0,
        "profile_scratch_size": 0,
    }
    if platform not in (CUDA, HIP):
        raise ToolchainError(
            f"{metadata['name']} was compiled for {platform!r}, which has no launcher"
        )
    if platform == HIP:  # there, no Triton says the first, and Triton 3.6 not the second
        plain = {n: v for n, v in plain.items() if n not in _NOT_ON_HIP or n in metadata}
    for name, usual in plain.items():
        if metadata[name] != usual:
            raise ToolchainError(
                f"{metadata['name']} was compiled with {name} = {metadata[name]}, the launcher knows {usual} alone"
            )


def _box(kind: str, found: Mapping[str, Any]) -> Box:
    if found["fp4_padded"] or found.get("is_im2col", False):
        raise ToolchainError(f"no launcher for descriptors of this kind: {dict(found)}")
    dtype = kind.removeprefix("tensordesc<").split("[")[0]
    return Box(
        _TENSOR_TYPES[dtype],
        int(found["elem_size"]),
        int(found["swizzle"]),
        tuple(map(int, found["block_size"])),
    )


def read_description(folder: Path) -> Description:
    """The description of the launch whose files are in ``folder``."""
    return Description.from_json((folder / LAUNCH).read_text(), str(folder / LAUNCH))


# --- plain data -> description; every failure is a ValueError, TypeError or KeyError ---


def _description(data: Any) -> Description:
    _fields(data, {"schema", *Description.__dataclass_fields__})
    if data["schema"] != SCHEMA:
        raise ValueError(f"schema {data['schema']!r}")
    if data["platform"] not in (CUDA, HIP):
        raise ValueError(f"platform {data['platform']!r}")
    if type(data["kernel"]) is not str:
        raise ValueError(f"kernel {data['kernel']!r}")
    parameters = tuple(map(_parameter, data["parameters"]))
    if data["platform"] == HIP and any(p.box is not None for p in parameters):
        raise ValueError("tensor descriptors on AMD's GPUs")
    return Description(
        data["platform"],
        data["kernel"],
        _count(data["threads"], 1, 1024),
        _count(data["shared_bytes"], 0, 1 << 20),
        parameters,
    )


def _parameter(data: Any) -> Parameter:
    _fields(data, set(Parameter.__dataclass_fields__))
    name, kind, box = data["name"], data["kind"], data["box"]
    if type(name) is not str or kind not in BYTES or (kind == DESCRIPTOR) != (box is not None):
        raise ValueError(f"parameter {data!r}")
    if box is None:
        return Parameter(name, kind)
    _fields(box, set(Box.__dataclass_fields__))
    shape = tuple(_count(n, 1, 256) for n in box["shape"])
    if not 1 <= len(shape) <= 5:
        raise ValueError(f"a box of {len(shape)} dimensions")
    element, swizzle = _count(box["element"], 0, 15), _count(box["swizzle"], 0, 7)
    return Parameter(name, kind, Box(element, _count(box["element_bytes"], 1, 8), swizzle, shape))


def _fields(data: Any, names: set[str]) -> None:
    if not isinstance(data, dict) or set(data) != names:
        raise ValueError(f"expected the fields {', '.join(sorted(names))}")


def _count(value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{value!r} is not within {least}..{most}")
    return value
