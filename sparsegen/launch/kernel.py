"""A compiled kernel on tensors: guards, argument packing, launch.

``Kernel`` launches binaries on a GPU.  ``Interpreted`` runs the same rendered text on CPU tensors through Triton's
interpreter; it exists for tests, where its answers prove the kernel's arithmetic without a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.codegen.source import KernelSource
from sparsegen.errors import InputError, UnsupportedError
from sparsegen.launch import signature as sig
from sparsegen.launch.module import ast_source, load_module

if TYPE_CHECKING:
    import torch

STRIDE_LIMIT = 1 << 23  # elements; 128 rows of a tile then stay inside 32 bits
VARIANT_GUARDS = {
    sig.FAST: "pointers on 16 bytes, strides multiples of 8 elements below 2^23, positions within 32-bit arithmetic; "
    "with TMA also no zero strides, at least one key and no per-batch kv_lengths",
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
        self._module, self._directories = Path(module), {v: Path(d) for v, d in directories.items()}
        self._loaded: dict[tuple[str, int], _Loaded] = {}
        self._layouts: dict[Any, tuple[str, tuple[Any, ...], int]] = {}
        self.tma = bool(config["TMA"])

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
        import torch

        key = (
            q.shape,
            q.stride(),
            k.shape,
            k.stride(),
            v.stride(),
            out.stride(),
            call.kv_lengths is None,
        )
        pointers = (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr())
        prepared = self._layouts.get(key)
        if prepared is None:
            prepared = self._layouts[key] = self._layout(q, k, v, out, call)
        best, numbers, batch_heads = prepared
        if best == sig.FAST and (
            (pointers[0] | pointers[1] | pointers[2] | pointers[3] | pointers[4]) % sig.ALIGNMENT
            or last_position(q.shape[2], k.shape[2], call) > self.source.position_limit
        ):
            best = sig.GENERAL
        if variant == sig.GENERAL:
            best = sig.GENERAL
        elif variant is not None and variant != best:
            raise UnsupportedError(
                f"variant {variant!r} cannot take these tensors; it needs: {VARIANT_GUARDS[variant]}"
            )
        loaded = self._loaded.get((best, q.device.index))
        if loaded is None:
            loaded = self._load(best, q.device.index)
        use_tma = self.tma and best == sig.FAST
        args = _pack(
            self.source, q, k, v, pointers, numbers, call, use_tma, self.config, loaded.nothing
        )
        programs = -(-q.shape[2] // loaded.block_m) * batch_heads
        grid = min(programs, loaded.resident) if loaded.persistent else programs
        if grid:
            stream = torch.cuda.current_stream(q.device).cuda_stream
            loaded.launch(
                grid,
                1,
                1,
                stream,
                loaded.function,
                loaded.metadata,
                None,
                None,
                None,
                *args,
                *loaded.rest,
            )
        return best

    def _layout(
        self, q: Any, k: Any, v: Any, out: Any, call: Call
    ) -> tuple[str, tuple[Any, ...], int]:
        strides = [_strides(t) for t in (q, k, v, out)]
        fast = all(
            s % sig.STRIDE_MULTIPLE == 0 and s < STRIDE_LIMIT for per in strides for s in per[2:]
        )
        fast = fast and all(
            s % sig.STRIDE_MULTIPLE == 0 and s < 1 << 31 for per in strides for s in per[:2]
        )
        if self.tma:
            fast = (
                fast
                and k.shape[2] > 0
                and call.kv_lengths is None
                and all(s > 0 for per in strides[1:3] for s in per)
            )
        b, h, q_rows, _ = q.shape
        numbers = (
            *(s for per in strides for s in per),
            h,
            h // k.shape[1],
            b * h,
            q_rows,
            k.shape[2],
        )
        return (sig.FAST if fast else sig.GENERAL), numbers, b * h

    def _load(self, variant: str, device: int) -> _Loaded:
        import torch

        with torch.cuda.device(device):
            loaded = _Loaded(
                self.source, self.config, variant, self._module, self._directories[variant], device
            )
        self._loaded[variant, device] = loaded
        return loaded


class _Loaded:
    """One binary on one device."""

    def __init__(
        self,
        source: KernelSource,
        config: LaunchConfig,
        variant: str,
        module: Path,
        directory: Path,
        device: int,
    ):
        import torch
        from triton.compiler import CompiledKernel

        unit = ast_source(module, source, config, variant)
        files = {p.name: str(p) for p in sorted(directory.iterdir()) if p.stem == source.entry}
        compiled = CompiledKernel(unit, files, source.digest)
        self.launch = compiled.run  # loads the cubin and makes the launcher
        self.function, self.metadata = compiled.function, compiled.packed_metadata
        self.rest = (None,) * len(source.constexprs)  # constants are in the binary
        properties = torch.cuda.get_device_properties(device)
        chosen = sig.variant_config(config, variant)
        self.block_m, self.persistent = int(chosen["BLOCK_M"]), bool(chosen["PERSISTENT"])
        threads = int(chosen["num_warps"]) * 32
        by_registers = 65_536 // max(1, compiled.n_regs * threads)
        by_shared = properties.shared_memory_per_multiprocessor // (compiled.metadata.shared + 1024)
        self.resident = properties.multi_processor_count * max(1, min(by_registers, by_shared))
        self.nothing = torch.zeros(1, dtype=torch.int32, device=f"cuda:{device}")


def _strides(t: Any) -> tuple[int, int, int]:
    """Strides of batch, head and row.  One entry's stride is free: give it a multiple that suits every guard."""
    row = (
        t.stride(2)
        if t.shape[2] > 1
        else max(sig.STRIDE_MULTIPLE, -(-t.shape[3] // sig.STRIDE_MULTIPLE) * sig.STRIDE_MULTIPLE)
    )
    return tuple(t.stride(i) if t.shape[i] > 1 else row for i in (0, 1)) + (row,)


def _pack(
    source: KernelSource,
    q: Any,
    k: Any,
    v: Any,
    pointers: tuple[Any, ...],
    numbers: tuple[Any, ...],
    call: Call,
    tma: bool,
    config: LaunchConfig,
    nothing: Any,
) -> list[Any]:
    """Arguments in the order of ``codegen.plan._parameters``."""
    descriptors: list[Any] = []
    for name, kind in source.parameters:
        if kind.startswith("desc:"):
            descriptors.append(
                _descriptor(k if name[0] == "K" else v, int(config["BLOCK_N"]), int(kind[5:]))
                if tma
                else None
            )
    args = [
        *pointers,
        *descriptors,
        *numbers[:12],
        nothing if call.q_lengths is None else call.q_lengths,
        nothing if call.kv_starts is None else call.kv_starts,
        nothing if call.kv_lengths is None else call.kv_lengths,
        int(call.q_lengths is not None),
        int(call.kv_starts is not None),
        int(call.kv_lengths is not None),
        *numbers[12:],
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


def _descriptor(t: Any, rows: int, width: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(t, list(t.shape), [*_strides(t), 1], [1, 1, rows, width])


class Interpreted:
    """The rendered kernel on CPU tensors, through Triton's interpreter (TRITON_INTERPRET=1).  For tests."""

    def __init__(self, source: KernelSource, config: LaunchConfig, module: Path):
        module = Path(module)
        module.write_text(source.text)
        self.source, self.config = source, config
        self._function = getattr(load_module(module, source.digest), source.entry)

    def __call__(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, call: Call, variant: str = sig.FAST
    ) -> str:
        import torch

        if type(self._function).__name__ != "InterpretedFunction":
            raise InputError("set TRITON_INTERPRET=1 before triton is imported")
        strides = [_strides(t) for t in (q, k, v, out)]
        b, h, q_rows, _ = q.shape
        numbers = (
            *(s for per in strides for s in per),
            h,
            h // k.shape[1],
            b * h,
            q_rows,
            k.shape[2],
        )
        nothing = torch.zeros(1, dtype=torch.int32)
        constants = sig.constants(self.source, self.config, variant)
        args = _pack(
            self.source,
            q,
            k,
            v,
            (q, k, v, out, lse),
            numbers,
            call,
            bool(constants["TMA"]),
            self.config,
            nothing,
        )
        constants = {n: c for n, c in constants.items() if not n.endswith(("DESC0", "DESC1"))}
        programs = -(-q_rows // constants["BLOCK_M"]) * b * h
        if programs:
            grid = min(programs, 3) if constants["PERSISTENT"] else programs
            self._function[(grid,)](*args, **constants)
        return variant
