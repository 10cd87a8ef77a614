"""A compiled kernel on tensors: guards, argument packing, launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsegen.codegen.grids import Grid
from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.codegen.source import KernelSource
from sparsegen.errors import UnsupportedError
from sparsegen.launch import signature as sig
from sparsegen.launch.loading import Loaded
from sparsegen.launch.sizes import Sizes

if TYPE_CHECKING:
    import torch

STRIDE_LIMIT = 1 << 23  # elements; 128 rows of a tile then stay inside 32 bits
_ALIGNED = "pointers on 16 bytes, strides multiples of 8 elements, those of rows below 2^23, positions within 32-bit arithmetic"
VARIANT_GUARDS = {
    sig.FAST: f"{_ALIGNED}; with TMA also no zero strides of keys and values, at least one key and no per-batch kv_lengths",
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
        module: Path,
        directories: Mapping[str, Path],
    ):
        """``module``: the rendered text on disk; ``directories``: variant → folder with Triton's files."""
        self.source, self.config = source, config
        self._module = Path(module)
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
            found = Loaded(self.source, self.config, variant, self._module, folder, device, launch)
            self._loaded[variant, device, launch] = found
        return found


@dataclass(frozen=True)
class _Step:
    """One launch of a prepared kernel: all that does not change between calls."""

    run: Callable[[int, tuple[Any, ...]], None]
    programs: int
    boxes: tuple[bool, ...]  # which descriptors it takes
    rest: tuple[Any, ...]  # the arguments after them


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
        self._tma = bool(kernel.config["TMA"])
        boxes = aligned and self._tma and _describable(strides, k.shape[2], call)
        # in the order in which they are preferred; misaligned addresses leave the last one alone
        self._holding = tuple(
            name
            for name in sig.variants(kernel.source, kernel.config)
            if name == sig.GENERAL or (aligned and (name == sig.POINTERS or boxes or not self._tma))
        )
        self._boxes: tuple[
            _Box | None, ...
        ] = ()  # made when first needed, from tensors that are aligned
        descriptors = sum(kind.startswith("desc:") for _, kind in kernel.source.parameters)
        self._no_descriptors = (None,) * descriptors
        self._partials = self._sizes.partials(kernel.source)
        self._steps: dict[str, tuple[_Step, ...]] = {}

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
        steps = self._steps.get(chosen)
        if steps is None:
            steps = self._steps[chosen] = self._prepare(chosen)
        if self._partials:
            # of this call alone: the allocator hands it on only after what is launched on this stream
            room = lse.new_empty(sum(self._partials))
            addresses += (room.data_ptr(), room.data_ptr() + 4 * self._partials[0])
        descriptors: Any = self._no_descriptors
        if self._tma and chosen == sig.FAST and steps:
            self._boxes = self._boxes or _boxes(self._kernel, k, v, steps)
            descriptors = [box and box.around(k if box.of_keys else v) for box in self._boxes]
        for step in steps:
            given = [d if takes else None for d, takes in zip(descriptors, step.boxes)]
            step.run(step.programs, (*addresses, *given, *step.rest))
        return chosen

    def _prepare(self, variant: str) -> tuple[_Step, ...]:
        """The launches of a variant that have any program."""
        source, config = self._kernel.source, self._kernel.config
        steps = []
        for i, grid in enumerate(source.grids):
            used = variant
            if (
                variant == sig.FAST
                and self._tma
                and not whole_periods(grid, self._kv_rows, self._call)
            ):
                used = sig.POINTERS  # this launch alone
            loaded = self._kernel.loaded(used, self._device, i)
            sizes, programs = self._sizes.of_launch(source, grid, self._call, loaded.block_m)
            rest = packed(self._strides, sizes, self._call, loaded.nothing)
            if loaded.persistent:
                programs = min(programs, loaded.resident)
            if programs:
                fixed = sig.constants(source, config, used, i)
                names = [n for n, kind in source.parameters if kind.startswith("desc:")]
                boxes = tuple(n not in fixed for n in names)
                steps.append(_Step(loaded.run, programs, boxes, (*rest, *loaded.constants)))
        return tuple(steps)


class _Box:
    """Tensor descriptors of one column chunk: Triton's object, made anew around each tensor without its checks.

    The first one is made, and checked, by Triton's own constructor; the others differ in the address alone.
    """

    def __init__(self, t: Any, period: int, block: list[int], of_keys: bool):
        from triton.tools.tensor_descriptor import TensorDescriptor

        shape, strides = list(t.shape), [*strides_of(t), 1]
        if period > 1:  # rows as [periods, row in it]; the guard says that they are whole periods
            shape[2:3] = [shape[2] // period, period]
            strides[2:3] = [strides[2] * period, strides[2]]
        made = TensorDescriptor(t, shape, strides, block)
        self._type, self._fields = (
            TensorDescriptor,
            {n: x for n, x in vars(made).items() if n != "base"},
        )
        self.of_keys = of_keys

    def around(self, t: Any) -> Any:
        descriptor = object.__new__(self._type)
        descriptor.__dict__.update(self._fields, base=t)
        return descriptor


def _any_bit(a: int, b: int, c: int, d: int, e: int) -> int:
    return a | b | c | d | e


def _aligned(strides: list[tuple[int, int, int]]) -> bool:
    """What the layout decides of the guard that all variants but the general one share (``VARIANT_GUARDS``)."""
    if any(s % sig.STRIDE_MULTIPLE for per in strides for s in per):
        return False
    return all(r < STRIDE_LIMIT and max(b, h) < 1 << 31 for b, h, r in strides)


def _describable(strides: list[tuple[int, int, int]], kv_rows: int, call: Call) -> bool:
    """Whether descriptors can describe the keys and values, and read nothing beyond the last valid key."""
    return (
        kv_rows > 0 and call.kv_lengths is None and all(s > 0 for per in strides[1:3] for s in per)
    )


def whole_periods(grid: Grid, kv_rows: int, call: Call) -> bool:
    """Whether the keys of a call are whole periods of what a launch loads: only then is there a view of them."""
    periods = [period for period, _ in grid.described if period > 1]
    return not periods or (
        call.kv_starts is None and not any(kv_rows % p or call.k_start % p for p in periods)
    )


def _boxes(kernel: Kernel, k: Any, v: Any, steps: Sequence[_Step]) -> tuple[_Box | None, ...]:
    """One for every descriptor of the kernel that some launch takes: of fewer keys than a period there is no view."""
    rows = int(kernel.config["BLOCK_N"])
    taken = [any(flags) for flags in zip(*(step.boxes for step in steps))]
    kinds = [(n, kind) for n, kind in kernel.source.parameters if sig.described(kind) is not None]
    return tuple(
        _Box(k if name[0] == "K" else v, _period(kind), sig.block_of(kind, rows), name[0] == "K")
        if takes
        else None
        for (name, kind), takes in zip(kinds, taken)
    )


def _period(kind: str) -> int:
    found = sig.described(kind)
    assert found is not None, kind
    return found[0]


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
