"""The real candidate source: the kernels of a pattern's candidate schedules for one problem on one GPU."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsegen.codegen.knobs import Knob, LaunchConfig
from sparsegen.errors import ToolchainError, UnsupportedError
from sparsegen.tune.candidates import Bench, Compiled, Limits
from sparsegen.tune.check import Case, check, fresh_inputs, sampled_rows, small_lengths
from sparsegen.tune.measure import CudaClock
from sparsegen.tune.schedules import candidates_of, joined, knobs_of, split
from sparsegen.tune.space import Space

if TYPE_CHECKING:
    from sparsegen.codegen import KernelSource, Template
    from sparsegen.spec.gpu import Gpu
    from sparsegen.spec.pattern import Pattern
    from sparsegen.spec.problem import Problem


@dataclass(frozen=True)
class KernelTarget:
    """A ``CandidateSource``: the kernels of ``pattern`` for ``problem``, timed at one pair of lengths.

    ``sources``: (label of the schedule, its kernel), best prediction first.  ``device`` is the index of the CUDA device
    that the worker measures on.
    """

    pattern: Pattern
    problem: Problem
    gpu: Gpu
    sources: tuple[tuple[str, KernelSource], ...]
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
        """Analyse ``pattern`` and render its candidates; ``lengths`` (q_len, kv_len) default to the problem's first.

        Raises:
            UnsupportedError: the template cannot do the pattern, or it needs run-time data.
        """
        from sparsegen.codegen import render

        if pattern.runtime_names:
            raise UnsupportedError(
                f"pattern {pattern.name} needs {', '.join(pattern.runtime_names)} at run time; "
                "tuning makes its own inputs and cannot make these yet"
            )
        q_len, kv_len = lengths or problem.lengths[0]
        sources = tuple(
            (c.schedule.label, render(pattern, c.schedule, problem, template))
            for c in candidates_of(pattern, problem)
            if c.to_measure
        )
        return cls(pattern, problem, gpu, sources, q_len, kv_len, device)

    @property
    def key(self) -> str:
        """Everything that a time depends on: names to read, then digests of pattern and problem, and of all kernels.

        The version of Triton is part of it, since another compiler makes another kernel from the same text.
        """
        from importlib.metadata import version

        fields = (self.problem.to_data(), self.q_len, self.kv_len, self.pattern.digest())
        digest = hashlib.sha256(repr(fields).encode()).hexdigest()[:12]
        return (
            f"{self.gpu.name} {self.pattern.name} {self.q_len}x{self.kv_len} {self.problem.dtype} "
            f"{self.template.name} triton {version('triton')} {digest} {self._sources_digest[:12]}"
        )

    @property
    def _sources_digest(self) -> str:
        """The kernel's own digest where there is one alone."""
        if len(self.sources) == 1:
            return self.sources[0][1].digest
        named = [(label, source.digest) for label, source in self.sources]
        return hashlib.sha256(repr(named).encode()).hexdigest()

    @property
    def template(self) -> Template:
        """The template that the sources were rendered from."""
        from sparsegen.codegen.template import load_template

        return load_template(self.sources[0][1].template)

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the schedules, best prediction first."""
        return tuple(label for label, _ in self.sources)

    def parts(self, config: LaunchConfig) -> tuple[KernelSource, LaunchConfig]:
        """The kernel and the template's configuration that a configuration of the study means.

        Raises:
            TuneError: its schedule is no candidate.
        """
        label, plain = split(config, self.labels)
        return dict(self.sources)[label], plain

    @property
    def knobs(self) -> tuple[Knob, ...]:
        """See ``CandidateSource``: which schedule, where there are several, then the template's own knobs."""
        return (*knobs_of(self.labels), *self.template.knobs)

    @property
    def default(self) -> LaunchConfig:
        """See ``CandidateSource``: the template's choice for the schedule that is predicted best."""
        plain = self.template.default(self.problem, self.gpu)
        return joined(plain, self.labels[0], self.labels)

    @property
    def starts(self) -> tuple[LaunchConfig, ...]:
        """What is measured first: the warp-specialised kernel where there is one, then each other schedule.

        Best prediction first, so no schedule goes unmeasured.
        """
        first, *others = (self._starts_of(label) for label in self.labels)
        return (*first[1:], *(c for starts in others for c in starts[:2]))

    def _starts_of(self, label: str) -> list[LaunchConfig]:
        """The template's choice for a schedule, and starts of its warp-specialised kernel."""
        from sparsegen.codegen.hopper import starts

        plain = self.template.default(self.problem, self.gpu)
        special = dict(self.sources)[label].hopper is not None
        found = starts(plain.as_dict(), self.problem, self.gpu) if special else ()
        space = Space(self.template.knobs)
        return [
            joined(c, label, self.labels) for c in (plain, *(space.canonical(f) for f in found))
        ]

    @property
    def limits(self) -> Limits:
        """See ``CandidateSource``."""
        return Limits(shared_bytes=self.gpu.shared_bytes)

    def invalid(self, config: LaunchConfig) -> str | None:
        """See ``CandidateSource``."""
        source, plain = self.parts(config)
        if plain["KERNEL"] == "hopper" and source.hopper is None:
            return "KERNEL=hopper does no launch of this schedule"
        return self.template.invalid(plain, self.problem, self.gpu)

    def compile(self, config: LaunchConfig, folder: Path) -> dict[str, Compiled]:
        """See ``CandidateSource``; each variant in a folder of its name."""
        from sparsegen.launch import compile_kernel

        source, plain = self.parts(config)
        found = {}
        for variant in self.timed(source, plain):
            binary = compile_kernel(source, plain, variant, self.gpu, folder / variant)
            found[variant] = Compiled(binary.registers, binary.spill_bytes, binary.shared_bytes)
        return found

    def timed(self, source: KernelSource, config: LaunchConfig) -> tuple[str, ...]:
        """Variants that the timed problem's launches take: the first, and its stand-in for odd numbers of keys.

        The others are the same for every configuration, so a trial says nothing about them.
        """
        from sparsegen.launch import variants

        odd = any(n % p for n in (self.q_len, self.kv_len) for p in source.periods)
        return variants(source, config)[: 1 + odd]

    def bench(self) -> Bench:
        """See ``CandidateSource``.

        Raises:
            ToolchainError: there is no GPU here, or another one than the target's.
        """
        return KernelBench(self)


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
        from sparsegen.launch.module import write_modules

        self._bench = bench
        self._target = bench.target
        source, plain = self._target.parts(config)
        module = write_modules(folder, source)
        names = self._target.timed(source, plain)
        self._kernel = Kernel(source, plain, module, {name: folder / name for name in names})
        self._calls: dict[tuple[int, int], Any] = {}
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
            call = self._call(case.q.shape[2], case.k.shape[2], case.keywords)
            self._prepared = self._kernel.prepare(case.q, case.k, case.v, bench.out, call)
        self._prepared(case.q, case.k, case.v, bench.out, bench.lse)

    def _run(self, q: Any, k: Any, v: Any, out: Any, lse: Any, keywords: Mapping[str, Any]) -> None:
        self._kernel(q, k, v, out, lse, self._call(q.shape[2], k.shape[2], keywords))

    def _call(self, q_len: int, kv_len: int, keywords: Mapping[str, Any]) -> Any:
        """The run-time arguments for these lengths, kept: a candidate is timed with its arguments made."""
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
                random_table(t, first, q_len, kv_len, "cuda") for t in self._kernel.source.tables
            ],
            **keywords,
        )
        self._calls[q_len, kv_len] = (keywords, call)
        return call
