"""The two backward kernels as one callable: on a GPU from binaries, on the CPU through Triton's interpreter."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsegen.codegen.backward import KEYS, QUERIES, BackwardSource
from sparsegen.codegen.backward_planner import FUSED, STORED
from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.errors import InputError, UnsupportedError
from sparsegen.launch import signature as sig
from sparsegen.launch.backward import ALL, Gradients, Make, Plan, Saved, Step
from sparsegen.launch.backward_boxes import arguments, takes_all, variant_of
from sparsegen.launch.binary import CompileError
from sparsegen.launch.capture import capturing
from sparsegen.launch.kernel import (
    STRIDE_LIMIT,
    VARIANT_GUARDS,
    Call,
    last_position,
    strides_of,
)
from sparsegen.launch.loading import Loaded, load
from sparsegen.launch.loading import Prepared as Launchable
from sparsegen.launch.module import load_module
from sparsegen.launch.pool import Job, compile_many
from sparsegen.spec.gpu import Gpu

STORED_PAIR = (f"{STORED}-{KEYS}", f"{STORED}-{QUERIES}")
KEPT = 64  # prepared passes of one kernel


class BackwardKernel:
    """Binaries of both kernels, loaded on first use on each device."""

    def __init__(
        self,
        sources: Mapping[str, BackwardSource],
        configs: Mapping[str, LaunchConfig],
        directories: Mapping[str, Mapping[str, Path]],
        workspace: int | None = None,
    ):
        """``directories``: name of the source → variant → folder with its binaries and what describes them.

        ``workspace``: bytes that a pass with stored dS may take.
        """
        self.sources, self.configs, self.workspace = dict(sources), dict(configs), workspace
        self._directories = dict(directories)
        self._loaded: dict[tuple[str, str, int, int], Loaded] = {}
        self._prepared: dict[Any, Prepared] = {}  # passes, by all that decides their launches

    def __call__(
        self,
        saved: Saved,
        call: Call,
        wanted: Collection[str] = ALL,
        variant: str | None = None,
        make: Make | None = None,
    ) -> Gradients:
        """Gradients on the current stream.  ``variant`` asks for one by name; ``UnsupportedError`` if it does not hold.

        All but addresses is prepared once for tensors of one layout and one set of arguments.  ``make`` makes the memory
        of the pass, for checks.
        """
        fixed = reproducible()
        key = (
            variant,
            fixed,
            on_16_bytes(saved),
            tuple(wanted),
            *layout(saved),
            *arguments_of(call),
        )
        prepared = self._prepared.get(key)
        if prepared is None:
            chosen = self._chosen(saved, call, variant)
            prepared = Prepared(self, saved, call, wanted, chosen)
            if not capturing():
                if len(self._prepared) >= KEPT:
                    self._prepared.clear()
                self._prepared[key] = prepared
        return prepared(saved, make)

    def _chosen(self, saved: Saved, call: Call, variant: str | None) -> str:
        fast = self._aligned(saved, call)
        if variant == sig.FAST and not fast:
            raise UnsupportedError(
                f"variant {variant!r} cannot take these tensors; it needs: {VARIANT_GUARDS[variant]}"
            )
        return variant or (sig.FAST if fast else sig.GENERAL)

    def _aligned(self, saved: Saved, call: Call) -> bool:
        tensors = (saved.q, saved.k, saved.v, saved.out, saved.dout)
        strides = [s for t in tensors for s in strides_of(t)]
        furthest = last_position(saved.q.shape[2], saved.k.shape[2], call)
        return (
            not any(s % sig.STRIDE_MULTIPLE for s in strides)
            and on_16_bytes(saved)
            and all(strides_of(t)[2] < STRIDE_LIMIT for t in tensors)
            and max(strides) < 1 << 31
            and all(furthest + s.shift <= s.position_limit for s in self.sources.values())
        )

    def loaded(self, source: BackwardSource, variant: str, device: int, launch: int) -> Loaded:
        """The binary of one launch of a variant on a device, loaded on first use."""
        key = source.name, variant, device, launch
        found = self._loaded.get(key)
        if found is None:
            config = self.configs[source.name]
            folder = self._directories[source.name][variant]
            found = load(source, config, variant, folder, device, launch)
            self._loaded[key] = found
        return found


class Prepared:
    """A backward pass on tensors of one layout: all about its launches but the addresses that a call brings."""

    def __init__(
        self,
        kernel: BackwardKernel,
        saved: Saved,
        call: Call,
        wanted: Collection[str],
        variant: str,
    ):
        self._kernel, self._variant, self._device = kernel, variant, saved.q.device.index
        # which of the kernel's variants does a launch; descriptors may not be able to view these tensors
        self._used: dict[tuple[str, int], str] = {
            (source.name, i): variant_of(
                source, kernel.configs[source.name], variant, i, saved, call
            )
            for source in kernel.sources.values()
            for i in range(len(source.grids))
        }
        self.fused = not reproducible() and self._takes((FUSED,), saved, call, wanted)
        stored = kernel.workspace is not None and self._takes(STORED_PAIR, saved, call, wanted)
        self.workspace = kernel.workspace if stored and not self.fused else None
        design = self.fused, self.workspace, self._prepared(wanted)
        self._plan = Plan(kernel.sources, self._block_rows, saved, call, wanted, *design)
        # by number of the step: the launch, and the memory whose addresses it takes
        self._launches: dict[int, tuple[Launchable, tuple[str, ...]]] = {}

    def _prepared(self, wanted: Collection[str]) -> bool:
        """Whether all first launches of queries are in the pass, and by a text that stores STATS."""
        if self.fused or self.workspace is not None or "q" not in wanted:
            return False
        source = self._kernel.sources[QUERIES]
        config = self._kernel.configs[QUERIES]
        special = source.hopper
        if not isinstance(special, BackwardSource) or not special.prepares:
            return False
        texts = (sig.unit(source, config, self._used[QUERIES, i], i)[0] for i in special.prepares)
        return all(text is special for text in texts)

    def _takes(
        self, names: Sequence[str], saved: Saved, call: Call, wanted: Collection[str]
    ) -> bool:
        """Whether kernels of these names are here and do the call; the split ones do all others."""
        kernel = self._kernel
        if self._variant != sig.FAST or not set(ALL) <= set(wanted):
            return False
        if any(name not in kernel.sources for name in names):
            return False
        given = [(kernel.sources[name], kernel.configs[name]) for name in names]
        return all(takes_all(source, config, saved, call) for source, config in given)

    def __call__(self, saved: Saved, make: Make | None = None) -> Gradients:
        """Gradients for tensors of that layout, on the current stream."""
        return self._plan.run(saved, self._run, make)

    def _run(self, step: Step, number: int, memory: Mapping[str, Any]) -> None:
        found = self._launches.get(number)
        if found is None:
            found = self._launches[number] = self._prepare(step, memory)
        launch, names = found
        launch([memory[name].data_ptr() for name in names])

    def _prepare(self, step: Step, memory: Mapping[str, Any]) -> tuple[Launchable, tuple[str, ...]]:
        source, kernel = step.source, self._kernel
        variant = self._used[source.name, step.launch]
        values = step.values(memory)
        moving = list(step.memory)  # parameters; they are the kernel's first
        config = kernel.configs[source.name]
        args = arguments(source, config, variant, step.launch, values, moving)
        loaded = kernel.loaded(source, variant, self._device, step.launch)
        given = (*[0] * len(moving), *args[len(moving) :], *loaded.constants)
        return loaded.prepare(step.programs, given, len(moving)), tuple(step.memory.values())

    def _block_rows(self, source: BackwardSource, launch: int) -> int:
        used = self._used[source.name, launch]
        return self._kernel.loaded(source, used, self._device, launch).block_m


def on_16_bytes(saved: Saved) -> bool:
    """Whether all addresses of a call are aligned for the fast variant."""
    tensors = (saved.q, saved.k, saved.v, saved.out, saved.dout, saved.lse, saved.dlse)
    return not any(t.data_ptr() % sig.ALIGNMENT for t in tensors if t is not None)


def reproducible() -> bool:
    """Whether the process asked for ``torch.use_deterministic_algorithms``."""
    import torch

    return torch.are_deterministic_algorithms_enabled()


def layout(saved: Saved) -> tuple[Any, ...]:
    """What the launches of a pass depend on of its tensors, but for the alignment of addresses."""
    tensors = (saved.q, saved.k, saved.v, saved.out, saved.dout)
    return (
        saved.q.device.index,
        saved.dlse is None,
        *(t.shape for t in tensors),
        *(t.stride() for t in tensors),
    )


def arguments_of(call: Call) -> tuple[Any, ...]:
    """The same of the run-time arguments.  Tensors count by their memory, which a prepared pass keeps alive."""
    tensors = (call.q_lengths, call.kv_starts, call.kv_lengths, call.alibi_slopes, call.sink_logits)
    null = call.null_key or ()
    return (
        *(call.q_start, call.k_start, call.relative, call.scale, call.joins),
        *(None if t is None else t.data_ptr() for t in tensors),
        *(t.data_ptr() for t in null),
        *((t.data_ptr(), first) for t, first in call.tables),
    )


@dataclass(frozen=True)
class Pair:
    """The kernels of a problem by name, and the folder that their binaries go to."""

    sources: Mapping[str, BackwardSource]
    configs: Mapping[str, LaunchConfig]
    folder: Path

    def jobs(self, gpu: Gpu) -> list[Job]:
        """One for each variant of each kernel."""
        return [
            Job(source, self.configs[name], variant, gpu, self.folder / name / variant)
            for name, source in self.sources.items()
            for variant in sig.variants(source, self.configs[name])
        ]


def compile_pairs(
    pairs: Sequence[Pair], gpu: Gpu, workers: int | None = None
) -> list[BackwardKernel]:
    """Every variant of every kernel, in parallel processes; ``CompileError`` where the compiler refuses one."""
    jobs = [pair.jobs(gpu) for pair in pairs]
    for outcome in compile_many([job for some in jobs for job in some], workers):
        if outcome.binary is None:
            raise CompileError(outcome.error)
    out = []
    for pair, some in zip(pairs, jobs, strict=True):
        folders: dict[str, dict[str, Path]] = {name: {} for name in pair.sources}
        for job in some:
            folders[job.directory.parent.name][job.variant] = job.directory
        out.append(BackwardKernel(pair.sources, pair.configs, folders))
    return out


class InterpretedBackward:
    """The same on CPU tensors, for tests, which set TRITON_INTERPRET=1 before triton is imported."""

    def __init__(
        self,
        sources: Mapping[str, BackwardSource],
        configs: Mapping[str, LaunchConfig],
        folder: Path,
    ):
        self.sources, self.configs = dict(sources), dict(configs)
        self._functions = {}
        for name, source in sources.items():
            path = Path(folder) / f"{name}_{source.digest[:12]}.py"
            path.write_text(source.text, encoding="utf-8")
            self._functions[name] = getattr(load_module(path, source.digest), source.entry)

    def __call__(
        self,
        saved: Saved,
        call: Call,
        wanted: Collection[str] = ALL,
        variant: str | None = None,
        make: Make | None = None,
    ) -> Gradients:
        """As ``BackwardKernel``, without guards: the variant asked for is what runs."""

        def constants(source: BackwardSource, launch: int) -> dict[str, Any]:
            return sig.constants(source, self.configs[source.name], variant or sig.FAST, launch)

        def run(step: Step, number: int, memory: Mapping[str, Any]) -> None:
            function = self._functions[step.source.name]
            if type(function).__name__ != "InterpretedFunction":
                raise InputError("set TRITON_INTERPRET=1 before triton is imported")
            fixed = constants(step.source, step.launch)
            function[(step.programs,)](**step.values(memory), **fixed)

        def block_rows(source: BackwardSource, launch: int) -> int:
            return int(constants(source, launch)["BLOCK_M"])

        return Plan(self.sources, block_rows, saved, call, wanted).run(saved, run, make)


__all__ = ["KEYS", "QUERIES", "BackwardKernel", "InterpretedBackward", "Pair", "compile_pairs"]
