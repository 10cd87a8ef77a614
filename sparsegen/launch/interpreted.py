"""The rendered kernel on CPU tensors, through Triton's interpreter: the kernel's arithmetic proven without a GPU."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.codegen.source import KernelSource
from sparsegen.errors import InputError
from sparsegen.launch import signature as sig
from sparsegen.launch.kernel import Call, packed, strides_of
from sparsegen.launch.module import load_module
from sparsegen.launch.sizes import Sizes


class Interpreted:
    """For tests, which set TRITON_INTERPRET=1 before triton is imported."""

    def __init__(self, source: KernelSource, config: LaunchConfig, module: Path):
        module = Path(module)
        module.write_text(source.text)
        self.source, self.config = source, config
        self._function = getattr(load_module(module, source.digest), source.entry)

    def __call__(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, call: Call, variant: str = sig.FAST
    ) -> str:
        """As ``Kernel.__call__``, without guards: the variant asked for is what runs."""
        import torch

        if type(self._function).__name__ != "InterpretedFunction":
            raise InputError("set TRITON_INTERPRET=1 before triton is imported")
        strides = [s for t in (q, k, v, out) for s in strides_of(t)]
        all_sizes, nothing = Sizes.of(q, k, v), torch.zeros(1, dtype=torch.int32)
        partials = [torch.full((n,), math.nan) for n in all_sizes.partials(self.source.grids)]
        given = dict(zip((n for n, _ in self.source.parameters), (q, k, v, out, lse, *partials)))
        given |= {n: None for n, kind in self.source.parameters if kind.startswith("desc:")}
        rest = [n for n, _ in self.source.parameters if n not in given]
        for i, grid in enumerate(self.source.grids):
            constants = sig.constants(self.source, self.config, variant, i)
            sizes, programs = all_sizes.of_launch(self.source, grid, call, constants["BLOCK_M"])
            values = dict(zip(rest, packed(strides, sizes, call, nothing), strict=True))
            if programs:
                count = min(programs, 3) if constants["PERSISTENT"] else programs
                self._function[(count,)](**(given | values | constants))
        return variant
