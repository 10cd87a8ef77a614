"""The real candidate source: the kernels of a pattern's candidate schedules for one problem on one GPU."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sparsegen.codegen.knobs import Knob, LaunchConfig
from sparsegen.errors import UnsupportedError
from sparsegen.tune.candidates import Bench, Compiled, Limits
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
        from sparsegen.tune.kernel_bench import KernelBench

        return KernelBench(self)
