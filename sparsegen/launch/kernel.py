"""A compiled kernel on tensors: guards, argument packing, launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsegen.codegen.grids import Grid
from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.codegen.source import KernelSource
from sparsegen.errors import UnsupportedError
from sparsegen.launch import signature as sig
from sparsegen.launch.loading import Loaded, Prepared, load
from sparsegen.launch.packing import View
from sparsegen.launch.sizes import Sizes

if TYPE_CHECKING:
    import torch

STRIDE_LIMIT = 1 << 23  # elements; 128 rows of a tile then stay inside 32 bits
_ALIGNED = "pointers on 16 bytes, strides multiples of 8 elements, those of rows below 2^23, positions within 32-bit arithmetic"
VARIANT_GUARDS = {
    sig.FAST: f"{_ALIGNED}; with descriptors also no zero strides of what they describe, at least one key and no per-batch kv_lengths",
    sig.POINTERS: _ALIGNED,
    sig.GENERAL: "always",
}


@dataclass(frozen=True)
class Call:
    """Run-time arguments of one launch besides the tensors.

    ``q_start`` is absolute when ``relative`` is 0; when it is 1 the kernel adds kv_len - q_len of the batch entry.
    Tensors are on the device of q: lengths and starts int32 [B], slopes and sinks float32 [H],
    null key [kv_heads, head_dim], null value [kv_heads, value_dim], tables int32.
    """

    q_start: int = 0
    k_start: int = 0
    relative: int = 1
    scale: float = 1.0
    q_lengths: torch.Tensor | None = None
    kv_starts: torch.Tensor | None = None
    kv_lengths: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    sink_logits: torch.Tensor | None = None
    null_key: tuple[torch.Tensor, torch.Tensor] | None = None
    joins: int = 1  # 0 leaves sink logits and null key out (partial results that merge later)
    tables: Sequence[tuple[torch.Tensor, int]] = field(
        default=()
    )  # (table, first block row) in the source's order


def last_position(q_len: int, kv_len: int, call: Call) -> int:
    """Largest magnitude of any position or length of a call."""
    first_q = call.q_start + (kv_len - q_len if call.relative else 0)
    ends = (first_q, first_q + q_len, call.k_start, call.k_start + kv_len, q_len, kv_len)
    # a ragged batch entry may be shorter on either side, which moves its first query by as much
    return max(map(abs, ends)) + (
        q_len + kv_len
        if call.relative
        and (
            call.q_lengths is not None or call.kv_lengths is not None or call.kv_starts is not None
        )
        else 0
    )


class Kernel:
    """Binaries of one kernel, loaded on first use on each device."""

    def __init__(
        self,
        source: KernelSource,
        config: LaunchConfig,
        directories: Mapping[str, Path],
    ):
        """``directories``: variant → folder with its binaries and what describes them."""
        self.source, self.config = source, config
        self._directories = {v: Path(d) for v, d in directories.items()}
        self._loaded: dict[tuple[str, int, int], Loaded] = {}

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        call: Call,
        variant: str | None = None,
    ) -> str:
        """Launch on the current stream and return the variant's name.

        q [B, H, Sq, D], k [B, Hkv, Skv, D], v [B, Hkv, Skv, Dv], out [B, H, Sq, Dv], lse [B, H, Sq] float32.
        ``variant`` asks for one by name; it raises ``UnsupportedError`` if its guard does not hold.
        """
        return self.prepare(q, k, v, out, call)(q, k, v, out, lse, variant)

    def prepare(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, call: Call
    ) -> Launch:
        """Everything about a launch but the addresses: good for all tensors of these shapes and strides."""
        return Launch(self, q, k, v, out, call)

    def loaded(self, variant: str, device: int, launch: int) -> Loaded:
        """The binary of one launch of a variant on a device, loaded on first use."""
        found = self._loaded.get((variant, device, launch))
        if found is None:
            folder = self._directories[variant]
            found = load(self.source, self.config, variant, folder, device, launch)
            self._loaded[variant, device, launch] = found
        return found


class Launch:
    """One kernel for one layout of tensors and one set of run-time arguments.

    Made once and called often: a call takes addresses, checks their alignment, and launches.
    """

    def __init__(self, kernel: Kernel, q: Any, k: Any, v: Any, out: Any, call: Call):
        self._kernel, self._call = kernel, call  # ``call`` keeps its tensors alive
        self._device = q.device.index
        strides = [strides_of(t) for t in (q, k, v, out)]
        self._strides = [s for per in strides for s in per]
        self._sizes, self._kv_rows = Sizes.of(q, k, v), k.shape[2]
        aligned = _aligned(strides) and (
            last_position(q.shape[2], k.shape[2], call) <= kernel.source.position_limit
        )
        self._tma = sig.by_boxes(kernel.config)
        described = strides[:3] if kernel.config["KERNEL"] == sig.HOPPER else strides[1:3]
        boxes = aligned and self._tma and _describable(described, k.shape[2], call)
        # in the order in which they are preferred; misaligned addresses leave the last one alone
        self._holding = tuple(
            name
            for name in sig.variants(kernel.source, kernel.config)
            if name == sig.GENERAL or (aligned and (name == sig.POINTERS or boxes or not self._tma))
        )
        self._partials = self._sizes.partials(kernel.source.grids)
        # made when first needed: descriptors are checked with tensors that are aligned
        self._prepared: dict[str, tuple[Prepared, ...]] = {}

    def __call__(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, variant: str | None = None
    ) -> str:
        """Launch on the current stream; see ``Kernel.__call__``."""
        addresses: tuple[int, ...] = (
            q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr()
        )  # fmt: skip
        holding = self._holding
        if _any_bit(*addresses) % sig.ALIGNMENT:
            holding = holding[-1:]
        chosen = holding[0]
        if variant is not None:
            if variant not in holding:
                raise UnsupportedError(
                    f"variant {variant!r} cannot take these tensors; it needs: {VARIANT_GUARDS[variant]}"
                )
            chosen = variant
        steps = self._prepared.get(chosen)
        if steps is None:
            steps = self._prepared[chosen] = self._prepare(chosen, (q, k, v))
        if self._partials:
            # of this call alone: the allocator hands it on only after what is launched on this stream
            room = lse.new_empty(sum(self._partials))
            addresses += (room.data_ptr(), room.data_ptr() + 4 * self._partials[0])
        for step in steps:
            step(addresses)
        return chosen

    def _prepare(self, variant: str, tensors: tuple[Any, Any, Any]) -> tuple[Prepared, ...]:
        """The launches of a variant that have any program; ``tensors``: q, k, v."""
        source, config = self._kernel.source, self._kernel.config
        moving = 5 + len(self._partials)  # q, k, v, out, lse, and partial results
        nothing = tensors[0].new_zeros(1, dtype=_int32())  # for pointers that are not read
        steps = []
        for i, grid in enumerate(source.grids):
            used = variant if self._takes(variant, grid, i) else sig.POINTERS  # this launch alone
            loaded = self._kernel.loaded(used, self._device, i)
            sizes, programs = self._sizes.of_launch(source, grid, self._call, loaded.block_m)
            if loaded.persistent:
                programs = min(programs, loaded.resident)
            if programs:
                boxes = views(source, config, used, i, tensors)
                rest = packed(self._strides, sizes, self._call, nothing)
                steps.append(loaded.prepare(programs, (*[0] * moving, *boxes, *rest), moving))
        return tuple(steps)

    def _takes(self, variant: str, grid: Grid, launch: int) -> bool:
        """Whether a launch of the variant can view its tensors in whole periods, if it has to."""
        if variant != sig.FAST or not self._tma:
            return True
        source, config = self._kernel.source, self._kernel.config
        special = sig.unit(source, config, variant, launch)[1]["KERNEL"] == sig.HOPPER
        rows = self._sizes.q_rows
        return whole_periods(grid, self._kv_rows, self._call) and not (
            special and not whole_queries(grid, rows, self._kv_rows, self._call)
        )


def views(
    source: KernelSource,
    config: LaunchConfig,
    variant: str,
    launch: int,
    tensors: tuple[Any, Any, Any],
) -> list[View | None]:
    """What each descriptor that the text of a launch has a parameter for describes; None where it takes none.

    ``tensors``: q, k, v.  Their addresses are the first ones of a call, in this order.
    """
    text, _ = sig.unit(source, config, variant, launch)
    fixed = sig.constants(source, config, variant, launch)
    out: list[View | None] = []
    for name, kind in text.parameters:
        found = sig.described(kind)
        if found is not None:
            of = "QKV".index(name[0])
            out.append(None if name in fixed else _view(tensors[of], found[0], of))
    return out


def _view(t: Any, period: int, of: int) -> View:
    shape, strides = list(t.shape), [*strides_of(t), 1]
    if period > 1:  # rows as [periods, row in it]; the guard says that they are whole periods
        shape[2:3] = [shape[2] // period, period]
        strides[2:3] = [strides[2] * period, strides[2]]
    return View(None, tuple(shape), tuple(strides), moves=of)


def _int32() -> Any:
    import torch

    return torch.int32


def _any_bit(a: int, b: int, c: int, d: int, e: int) -> int:
    return a | b | c | d | e


def _aligned(strides: list[tuple[int, int, int]]) -> bool:
    """What the layout decides of the guard that all variants but the general one share (``VARIANT_GUARDS``)."""
    if any(s % sig.STRIDE_MULTIPLE for per in strides for s in per):
        return False
    return all(r < STRIDE_LIMIT and max(b, h) < 1 << 31 for b, h, r in strides)


def _describable(strides: list[tuple[int, int, int]], kv_rows: int, call: Call) -> bool:
    """Whether descriptors can describe tensors of these strides, and read nothing beyond the last valid key."""
    return kv_rows > 0 and call.kv_lengths is None and all(s > 0 for per in strides for s in per)


def whole_periods(grid: Grid, kv_rows: int, call: Call) -> bool:
    """Whether the keys of a call are whole periods of what a launch loads: only then is there a view of them."""
    periods = [period for period, _ in grid.described if period > 1]
    return not periods or (
        call.kv_starts is None and not any(kv_rows % p or call.k_start % p for p in periods)
    )


def whole_queries(grid: Grid, q_rows: int, kv_rows: int, call: Call) -> bool:
    """The same of the queries, where a launch loads them through descriptors."""
    if grid.queries is None or grid.queries[0] == 1:
        return True
    period, _ = grid.queries
    own = (call.q_lengths, call.kv_starts, call.kv_lengths)
    if call.relative and any(t is not None for t in own):
        return False
    first = call.q_start + (kv_rows - q_rows if call.relative else 0)
    return q_rows % period == 0 and first % period == 0


def strides_of(t: Any) -> tuple[int, int, int]:
    """Strides of batch, head and row.  One entry's stride is free: give it a multiple that suits every guard."""
    multiple = sig.STRIDE_MULTIPLE
    row = t.stride(2) if t.shape[2] > 1 else max(multiple, -(-t.shape[3] // multiple) * multiple)
    batch, head = (t.stride(i) if t.shape[i] > 1 else row for i in (0, 1))
    return batch, head, row


def packed(strides: list[int], sizes: list[int], call: Call, nothing: Any) -> list[Any]:
    """Arguments after the descriptors, in the order of ``codegen.planner``: strides, lengths, features, tables."""
    lengths = (call.q_lengths, call.kv_starts, call.kv_lengths)
    args: list[Any] = [
        *strides,
        *(nothing if t is None else t for t in lengths),
        *(int(t is not None) for t in lengths),
        *sizes,
        call.q_start,
        call.k_start,
        call.relative,
        call.scale,
    ]
    if call.alibi_slopes is not None:
        args.append(call.alibi_slopes)
    if call.sink_logits is not None:
        args.append(call.sink_logits)
    if call.null_key is not None:
        args += call.null_key
    if call.sink_logits is not None or call.null_key is not None:
        args.append(call.joins)
    for table, first_row in call.tables:
        args += (table, first_row)
    return args
