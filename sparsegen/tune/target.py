"""The real candidate source: one kernel source for one problem on one GPU."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsegen.codegen.knobs import Knob, LaunchConfig
from sparsegen.errors import ToolchainError, UnsupportedError
from sparsegen.tune.candidates import Compiled, Limits
from sparsegen.tune.check import Case, check, fresh_inputs, sampled_rows, small_lengths
from sparsegen.tune.measure import CudaClock

if TYPE_CHECKING:
    from sparsegen.codegen import KernelSource, Template
    from sparsegen.spec.gpu import Gpu
    from sparsegen.spec.pattern import Pattern
    from sparsegen.spec.problem import Problem


@dataclass(frozen=True)
class KernelTarget:
    """A ``CandidateSource``: ``source`` rendered for ``pattern`` and ``problem``, timed at one pair of lengths.

    ``device`` is the index of the CUDA device that the worker measures on.
    """

    pattern: Pattern
    problem: Problem
    gpu: Gpu
    source: KernelSource
    q_len: int
    kv_len: int
    device: int = 0

    @classmethod
    def of(
        cls,
        pattern: Pattern,
        problem: Problem,
        gpu: Gpu,
        *,
        template: str = "forward",
        lengths: tuple[int, int] | None = None,
        device: int = 0,
    ) -> KernelTarget:
        """Analyse and render ``pattern``; ``lengths`` (q_len, kv_len) default to the problem's first.

        Raises:
            UnsupportedError: the template cannot do the pattern, or it needs run-time data.
        """
        from sparsegen.codegen import render
        from sparsegen.schedule.build import build

        if pattern.runtime_names:
            raise UnsupportedError(
                f"pattern {pattern.name} needs {', '.join(pattern.runtime_names)} at run time; "
                "tuning makes its own inputs and cannot make these yet"
            )
        q_len, kv_len = lengths or problem.lengths[0]
        source = render(pattern, build(pattern, problem), problem, template)
        return cls(pattern, problem, gpu, source, q_len, kv_len, device)

    @property
    def key(self) -> str:
        """Everything that a time depends on: names to read, then digests of pattern, kernel text and problem.

        The version of Triton is part of it, since another compiler makes another kernel from the same text.
        """
        from importlib.metadata import version

        fields = (self.problem.to_data(), self.q_len, self.kv_len, self.pattern.digest())
        digest = hashlib.sha256(repr(fields).encode()).hexdigest()[:12]
        return (
            f"{self.gpu.name} {self.pattern.name} {self.q_len}x{self.kv_len} {self.problem.dtype} "
            f"{self.source.template} triton {version('triton')} {digest} {self.source.digest[:12]}"
        )

    @property
    def template(self) -> Template:
        """The template that the source was rendered from."""
        from sparsegen.codegen.template import load_template

        return load_template(self.source.template)

    @property
    def knobs(self) -> tuple[Knob, ...]:
        """See ``CandidateSource``."""
        return self.template.knobs

    @property
    def default(self) -> LaunchConfig:
        """See ``CandidateSource``."""
        return self.template.default(self.problem, self.gpu)

    @property
    def limits(self) -> Limits:
        """See ``CandidateSource``."""
        return Limits(shared_bytes=self.gpu.shared_bytes)

    def invalid(self, config: LaunchConfig) -> str | None:
        """See ``CandidateSource``."""
        return self.template.invalid(config, self.problem, self.gpu)

    def compile(self, config: LaunchConfig, folder: Path) -> dict[str, Compiled]:
        """See ``CandidateSource``; each variant in a folder of its name.

        Only the first: the others are the same for every configuration, so a trial says nothing about them.
        """
        from sparsegen.launch import compile_kernel, variants

        found = {}
        for variant in variants(self.source, config)[:1]:
            binary = compile_kernel(self.source, config, variant, self.gpu, folder / variant)
            found[variant] = Compiled(binary.registers, binary.spill_bytes, binary.shared_bytes)
        return found

    def bench(self) -> KernelBench:
        """See ``CandidateSource``.

        Raises:
            ToolchainError: there is no GPU here, or another one than the target's.
        """
        return KernelBench(self)


class KernelBench:
    """Inputs of the timed problem on the GPU, in the worker process."""

    def __init__(self, target: KernelTarget) -> None:
        import torch

        from sparsegen.spec.gpu import current_gpu

        self.target = target
        if not torch.cuda.is_available():
            raise ToolchainError("no GPU is here; tuning measures on one")
        torch.cuda.set_device(target.device)
        here = current_gpu()
        if here is None or here.name != target.gpu.name:
            name = here.name if here else torch.cuda.get_device_name()
            raise ToolchainError(f"the GPU here is {name}, tuning was asked for {target.gpu.name}")
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

    def small(self) -> list[Case]:
        """New short inputs of ragged lengths, all rows of which are compared."""
        lengths = small_lengths(self.target.q_len, self.target.kv_len)
        return [self._fresh(q_len, kv_len, size, batch=2) for q_len, kv_len, size in lengths]

    def _fresh(self, q_len: int, kv_len: int, size: float = 1.0, batch: int | None = None) -> Case:
        target = self.target
        return fresh_inputs(
            target.pattern, target.problem, q_len, kv_len, "cuda", self.generator, size, batch
        )


class KernelCandidate:
    """One loaded configuration of the kernel."""

    def __init__(self, bench: KernelBench, config: LaunchConfig, folder: Path) -> None:
        from sparsegen.launch import Kernel, variants

        self._bench = bench
        self._target = bench.target
        source = self._target.source
        module = folder / "kernel.py"
        module.write_text(source.text)
        names = variants(source, config)[:1]
        self._kernel = Kernel(source, config, module, {name: folder / name for name in names})
        self._calls: dict[tuple[int, int], Any] = {}

    def check(self) -> str:
        """Short ragged inputs, then rows of what is timed."""
        pattern = self._target.pattern
        for case in self._bench.small():
            if wrong := check(self._run, case, pattern):
                return wrong
        return check(self._run, self._bench.refresh(), pattern)

    def launch(self) -> None:
        """One launch on the bench's tensors; arguments are packed as in any call, tables are made once."""
        bench, case = self._bench, self._bench.case
        call = self._call(case.q.shape[2], case.k.shape[2], case.keywords)
        self._kernel(case.q, case.k, case.v, bench.out, bench.lse, call)

    def _run(self, q: Any, k: Any, v: Any, out: Any, lse: Any, keywords: Mapping[str, Any]) -> None:
        self._kernel(q, k, v, out, lse, self._call(q.shape[2], k.shape[2], keywords))

    def _call(self, q_len: int, kv_len: int, keywords: Mapping[str, Any]) -> Any:
        """The run-time arguments for these lengths, kept: a candidate is timed with its arguments made."""
        import math

        from sparsegen.launch import Call
        from sparsegen.launch.tables import random_table

        pattern = self._target.pattern
        same = self._calls.get((q_len, kv_len))
        if same is not None and same[0] is keywords:
            return same[1]
        relative = int(pattern.align == "bottom_right")
        first = kv_len - q_len if relative else 0
        call = Call(
            relative=relative,
            scale=1.0 / math.sqrt(self._target.problem.head_dim)
            if pattern.scale is None
            else pattern.scale,
            tables=[
                random_table(t, first, q_len, kv_len, "cuda") for t in self._target.source.tables
            ],
            **keywords,
        )
        self._calls[q_len, kv_len] = (keywords, call)
        return call
