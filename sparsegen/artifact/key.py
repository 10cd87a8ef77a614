"""The key of an artifact: everything that was asked, nothing that was decided."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparsegen.codegen import Template
    from sparsegen.schedule.tree import Schedule
    from sparsegen.spec.gpu import Gpu
    from sparsegen.spec.pattern import Pattern
    from sparsegen.spec.problem import Problem

SHORT = 12  # hex digits of the digest that a folder name shows; the manifest holds the whole key
# The rooms whose code decides what an artifact holds; a change elsewhere keeps the cache.
_CODE_ROOMS = ("spec", "schedule", "codegen", "launch")
# Field -> allowed types, by the annotation's text (annotations are text in this module).
_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "bool": (bool,),
    "int": (int,),
    "int | None": (int, type(None)),
    "float | None": (float, type(None)),
    "int | str": (int, str),
}


@dataclass(frozen=True)
class ArtifactKey:
    """What was asked.  Tile sizes, warps and all else that tuning decides stand in the manifest.

    mask             sha256 (hex) of the canonical mask of every head rule; patterns that see the
                     same cells under any spelling share it.  Names and comments are not in it
    head_rules       which query heads each mask covers: ``all`` or ``0,2-3 | rest``; heads with equal
                     masks are one group
    max_position     the schedule is proven for positions below this only, ``None`` = for all.  Set where
                     the lengths of the problem make a part of the mask idle, as a window that no
                     call exceeds
    min_position     the same at the lower end: proven for positions from this on
    align            position of query 0 where lengths differ: ``bottom_right`` or ``top_left``
    scale            factor of q·k; ``None`` = 1 / sqrt(head_dim)
    softcap          scores become softcap · tanh(score / softcap); ``None`` = off
    alibi            the kernel takes ``alibi_slopes``
    sink_logits      the kernel takes a logit per head for the denominator
    null_key         the kernel takes a key and value that every row sees
    head_dim         elements of a query and a key row
    value_dim        elements of a value row
    heads            query heads
    kv_heads         key and value heads
    dtype            of q, k, v and out: ``bfloat16``, ``float16`` or ``float32``
    gpu              GPU type, by the name that ``tuned/`` uses, e.g. ``nvidia-h200``
    backend          ``cuda`` or ``hip``: which assembler made the binaries
    arch             what the binaries run on: 90 for sm_90, or ``gfx942``
    template         name of the kernel template
    template_digest  sha256 (hex) of the template's text, phases included
    code             version of sparsegen and a digest of the code that turns a pattern to a binary
    triton           Triton's version: its compiler and its binary metadata change with it
    torch            torch's major.minor: operators and launch arguments follow it
    """

    mask: str
    head_rules: str
    max_position: int | None
    min_position: int | None
    align: str
    scale: float | None
    softcap: float | None
    alibi: bool
    sink_logits: bool
    null_key: bool
    head_dim: int
    value_dim: int
    heads: int
    kv_heads: int
    dtype: str
    gpu: str
    backend: str
    arch: int | str
    template: str
    template_digest: str
    code: str
    triton: str
    torch: str

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) not in _TYPES[str(field.type)]:
                raise TypeError(f"key field {field.name} must be {field.type}, got {value!r}")

    @classmethod
    def of(
        cls,
        pattern: Pattern,
        problem: Problem,
        gpu: Gpu,
        schedule: Schedule,
        template: Template,
    ) -> ArtifactKey:
        """Key of a pattern for a problem on a GPU type, with the versions installed here.

        ``schedule`` is any candidate of the pattern for this problem: all have the canonical masks that the key holds.
        """
        mask, head_rules, max_position, min_position = heads_and_masks(schedule)
        return cls(
            mask=mask,
            head_rules=head_rules,
            max_position=max_position,
            min_position=min_position,
            align=pattern.align,
            scale=None if pattern.scale is None else float(pattern.scale),
            softcap=None if pattern.softcap is None else float(pattern.softcap),
            alibi=bool(pattern.alibi),
            sink_logits=bool(pattern.sink_logits),
            null_key=bool(pattern.null_key),
            head_dim=problem.head_dim,
            value_dim=problem.head_dim if problem.value_dim is None else problem.value_dim,
            heads=problem.heads,
            kv_heads=problem.heads if problem.kv_heads is None else problem.kv_heads,
            dtype=problem.dtype,
            gpu=gpu.name,
            backend=gpu.backend,
            arch=gpu.arch,
            template=template.name,
            template_digest=template.digest,
            code=code_version(),
            triton=installed("triton") or "absent",
            torch=".".join((installed("torch") or "absent").split(".")[:2]),
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ArtifactKey:
        """Inverse of ``as_dict``; ValueError or TypeError say what does not fit."""
        names = [field.name for field in fields(cls)]
        if set(data) != set(names):
            missing, unknown = sorted(set(names) - set(data)), sorted(set(data) - set(names))
            raise ValueError(f"key fields missing: {missing}, unknown: {unknown}")
        return cls(**data)

    def as_dict(self) -> dict[str, str | int | float | bool | None]:
        """Plain values by field name, in the order of the fields."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def digest(self) -> str:
        """sha256 (64 hex digits) of all fields."""
        text = json.dumps(self.as_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def short(self) -> str:
        """The first digits of the digest, as folder names and listings show them."""
        return self.digest()[:SHORT]

    def like(self, other: ArtifactKey) -> bool:
        """Whether the two ask for the same, on whatever GPU type."""
        return {name for name, _, _ in self.difference(other)} <= {"gpu", "backend", "arch"}

    def difference(self, other: ArtifactKey) -> list[tuple[str, Any, Any]]:
        """``(field, mine, theirs)`` for every field whose values differ."""
        pairs = [(f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self)]
        return [(name, mine, theirs) for name, mine, theirs in pairs if mine != theirs]


def describe_difference(
    difference: list[tuple[str, Any, Any]], mine: str = "asked", theirs: str = "stored"
) -> str:
    """One clause a field: ``triton: asked 3.9.0, stored 3.6.0; …``."""
    return "; ".join(f"{n}: {mine} {_brief(a)}, {theirs} {_brief(b)}" for n, a, b in difference)


def heads_and_masks(schedule: Schedule) -> tuple[str, str, int | None, int | None]:
    """The fields of a key that a schedule gives: mask, head_rules, max_position, min_position."""
    rules = [_heads_text(c.heads) for c in schedule.classes]
    text = "\n".join(f"{h}: {c.mask_text}" for h, c in zip(rules, schedule.classes, strict=True))
    mask = hashlib.sha256(text.encode()).hexdigest()
    return mask, " | ".join(rules), schedule.max_position, schedule.min_position


@cache
def code_version() -> str:
    """sparsegen's version, ``+``, and 12 hex digits over the code that makes artifacts."""
    import sparsegen

    root = Path(sparsegen.__file__).parent
    total = hashlib.sha256()
    for room in _CODE_ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            total.update(path.relative_to(root).as_posix().encode() + b"\0")
            total.update(hashlib.sha256(path.read_bytes()).digest())
    return f"{sparsegen.__version__}+{total.hexdigest()[:SHORT]}"


def installed(package: str) -> str | None:
    """Version of an installed package, ``None`` where it is absent.

    The package's metadata decides and not the module, which may say it differently: a key must not depend on what
    happens to be imported.  A package without metadata is imported to ask it.
    """
    from importlib.metadata import PackageNotFoundError, version

    # Some packages come under several names; Triton's follows the build of torch.
    names: dict[str, tuple[str, ...]] = {
        "triton": ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm"),
        "psycopg2": ("psycopg2", "psycopg2-binary"),
    }
    for name in names.get(package, (package,)):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    if find_spec(package) is None:
        return None
    found = getattr(import_module(package), "__version__", None)
    return None if found is None else str(found)


def _heads_text(ranges: tuple[tuple[int, int], ...] | None) -> str:
    """``0,2-3`` for inclusive ranges, ``rest`` for no list (all heads, if it is the only rule)."""
    if ranges is None:
        return "rest"
    return ",".join(str(lo) if lo == hi else f"{lo}-{hi}" for lo, hi in ranges)


def _brief(value: Any) -> str:
    """A value for a message; long digests are cut."""
    text = str(value)
    return text[:SHORT] + "…" if len(text) == 64 else text
