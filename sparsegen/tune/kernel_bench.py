"""Candidates of a ``KernelTarget`` on the GPU, in the worker process: inputs, checks, launches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.errors import ToolchainError
from sparsegen.tune.check import Case, check, fresh_inputs, sampled_rows, small_lengths
from sparsegen.tune.measure import CudaClock

if TYPE_CHECKING:
    from sparsegen.tune.target import KernelTarget


class KernelBench:
    """Inputs of the timed problem on the GPU, in the worker process."""

    def __init__(self, target: KernelTarget) -> None:
        import torch

        self.target = target
        open_device(target)
        self.clock = CudaClock(target.gpu.l2_bytes)
        self.generator = torch.Generator("cuda").manual_seed(0)
        self.case = self._fresh(target.q_len, target.kv_len)
        self.out = torch.empty(
            (*self.case.q.shape[:3], target.problem.value_dim),
            dtype=self.case.q.dtype,
            device="cuda",
        )
        self.lse = torch.empty(self.case.q.shape[:3], dtype=torch.float32, device="cuda")

    def load(self, config: LaunchConfig, folder: Path) -> KernelCandidate:
        """See ``Bench``."""
        return KernelCandidate(self, config, folder)

    def refresh(self) -> Case:
        """The timed problem's tensors with new random values, and rows of it to compare."""
        for tensor in (self.case.q, self.case.k, self.case.v):
            tensor.normal_(generator=self.generator)
        rows = sampled_rows(self.target.q_len, self.generator)
        case = self.case
        return Case(case.q, case.k, case.v, case.keywords, rows=rows, watch=False)

    def small(self, whole_queries: bool = False) -> list[Case]:
        """New short inputs of ragged lengths, all rows of which are compared.

        Keys in whole periods, and queries where they are loaded so too: what the variants that a trial compiles take.
        """
        lengths = small_lengths(self.target.q_len, self.target.kv_len)
        whole = math.lcm(*(p for _, source in self.target.sources for p in source.periods))
        of_queries = whole if whole_queries else 1
        return [
            self._fresh(up_to(q_len, of_queries), up_to(kv_len, whole), size, batch=2)
            for q_len, kv_len, size in lengths
        ]

    def _fresh(self, q_len: int, kv_len: int, size: float = 1.0, batch: int | None = None) -> Case:
        target = self.target
        return fresh_inputs(
            target.pattern, target.problem, q_len, kv_len, "cuda", self.generator, size, batch
        )


def open_device(target: KernelTarget) -> None:
    """Make the target's GPU the current one.  ToolchainError: there is none here, or another than was asked for."""
    import torch

    from sparsegen.spec.gpu import current_gpu

    if not torch.cuda.is_available():
        raise ToolchainError("no GPU is here; tuning measures on one")
    torch.cuda.set_device(target.device)
    here = current_gpu()
    if here is None or here.name != target.gpu.name:
        name = here.name if here else torch.cuda.get_device_name()
        raise ToolchainError(f"the GPU here is {name}, tuning was asked for {target.gpu.name}")


def up_to(length: int, period: int) -> int:
    """The next multiple of the period."""
    return -(-length // period) * period


class KernelCandidate:
    """One loaded configuration of one of the kernels."""

    def __init__(self, bench: KernelBench, config: LaunchConfig, folder: Path) -> None:
        from sparsegen.launch import Kernel

        self._bench = bench
        self._target = bench.target
        source, plain = self._target.parts(config)
        names = self._target.timed(source, plain)
        self._kernel = Kernel(source, plain, {name: folder / name for name in names})
        self._calls = Calls(bench.target, self._kernel.source.tables)
        self._prepared: Any = None  # the timed launch

    def check(self) -> str:
        """Short ragged inputs, then rows of what is timed."""
        pattern = self._target.pattern
        special = self._kernel.config["KERNEL"] == "hopper"
        for case in self._bench.small(whole_queries=special):
            if wrong := check(self._run, case, pattern):
                return wrong
        return check(self._run, self._bench.refresh(), pattern)

    def launch(self) -> None:
        """One launch on the bench's tensors, prepared once as a callable does for a layout that it has seen.

        Preparing takes the host longer than a short kernel takes the GPU: the GPU would wait, and the host be timed
        (seen 2026-11-30 on an H200: 398 µs instead of 200).
        """
        bench, case = self._bench, self._bench.case
        if self._prepared is None:
            call = self._calls.of(case.q.shape[2], case.k.shape[2], case.keywords)
            self._prepared = self._kernel.prepare(case.q, case.k, case.v, bench.out, call)
        self._prepared(case.q, case.k, case.v, bench.out, bench.lse)

    def _run(self, q: Any, k: Any, v: Any, out: Any, lse: Any, keywords: Mapping[str, Any]) -> None:
        self._kernel(q, k, v, out, lse, self._calls.of(q.shape[2], k.shape[2], keywords))


class Calls:
    """The run-time arguments of a target's calls, kept by lengths: a candidate is timed with its arguments made."""

    def __init__(self, target: KernelTarget, tables: Any) -> None:
        """``tables``: those that the candidate's kernel draws."""
        self._target, self._tables = target, tables
        self._made: dict[tuple[int, int], Any] = {}

    def of(self, q_len: int, kv_len: int, keywords: Mapping[str, Any]) -> Any:
        """Those of a call of these lengths, the last one made with the same keywords."""
        from sparsegen.launch import Call
        from sparsegen.launch.tables import random_table

        pattern = self._target.pattern
        same = self._made.get((q_len, kv_len))
        if same is not None and same[0] is keywords:
            return same[1]
        relative = int(pattern.align == "bottom_right")
        first = kv_len - q_len if relative else 0
        scale = pattern.scale
        call = Call(
            relative=relative,
            scale=1.0 / math.sqrt(self._target.problem.head_dim) if scale is None else scale,
            tables=[random_table(t, first, q_len, kv_len, "cuda") for t in self._tables],
            **keywords,
        )
        self._made[q_len, kv_len] = (keywords, call)
        return call
