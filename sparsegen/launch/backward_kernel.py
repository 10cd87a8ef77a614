"""The two backward kernels as one callable: on a GPU from binaries, on the CPU through Triton's interpreter."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsegen.codegen.backward import KEYS, QUERIES, BackwardSource
from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.errors import InputError, UnsupportedError
from sparsegen.launch import signature as sig
from sparsegen.launch.backward import ALL, Gradients, Saved, gradients
from sparsegen.launch.binary import CompileError
from sparsegen.launch.kernel import (
    STRIDE_LIMIT,
    VARIANT_GUARDS,
    Call,
    last_position,
    strides_of,
)
from sparsegen.launch.loading import Loaded
from sparsegen.launch.module import load_module, write_modules
from sparsegen.launch.pool import Job, compile_many
from sparsegen.spec.gpu import Gpu


class BackwardKernel:
    """Binaries of both kernels, loaded on first use on each device."""

    def __init__(
        self,
        sources: Mapping[str, BackwardSource],
        configs: Mapping[str, LaunchConfig],
        modules: Mapping[str, Path],
        directories: Mapping[str, Mapping[str, Path]],
    ):
        """By name of the source: ``modules`` the rendered text on disk, ``directories`` variant → folder with Triton's files."""
        self.sources, self.configs = dict(sources), dict(configs)
        self._modules, self._directories = dict(modules), dict(directories)
        self._loaded: dict[tuple[str, str, int, int], Loaded] = {}

    def __call__(
        self,
        saved: Saved,
        call: Call,
        wanted: Collection[str] = ALL,
        variant: str | None = None,
    ) -> Gradients:
        """Gradients on the current stream.  ``variant`` asks for one by name; ``UnsupportedError`` if it does not hold."""
        fast = self._aligned(saved, call)
        if variant == sig.FAST and not fast:
            raise UnsupportedError(
                f"variant {variant!r} cannot take these tensors; it needs: {VARIANT_GUARDS[variant]}"
            )
        chosen = variant or (sig.FAST if fast else sig.GENERAL)
        device = saved.q.device.index

        def loaded(source: BackwardSource, launch: int) -> Loaded:
            return self._load(source, chosen, device, launch)

        def run(source: BackwardSource, launch: int, n: int, args: Mapping[str, Any]) -> None:
            binary = loaded(source, launch)
            binary.run(n, (*args.values(), *binary.constants))

        def block_rows(source: BackwardSource, launch: int) -> int:
            return loaded(source, launch).block_m

        return gradients(self.sources, run, block_rows, saved, call, wanted)

    def _aligned(self, saved: Saved, call: Call) -> bool:
        tensors = (saved.q, saved.k, saved.v, saved.out, saved.dout)
        strides = [s for t in tensors for s in strides_of(t)]
        addresses = [t.data_ptr() for t in (*tensors, saved.lse)]
        if saved.dlse is not None:
            addresses.append(saved.dlse.data_ptr())
        furthest = last_position(saved.q.shape[2], saved.k.shape[2], call)
        return (
            not any(s % sig.STRIDE_MULTIPLE for s in strides)
            and not any(a % sig.ALIGNMENT for a in addresses)
            and all(strides_of(t)[2] < STRIDE_LIMIT for t in tensors)
            and max(strides) < 1 << 31
            and all(furthest + s.shift <= s.position_limit for s in self.sources.values())
        )

    def _load(self, source: BackwardSource, variant: str, device: int, launch: int) -> Loaded:
        key = source.name, variant, device, launch
        found = self._loaded.get(key)
        if found is None:
            config, module = self.configs[source.name], self._modules[source.name]
            folder = self._directories[source.name][variant]
            found = Loaded(source, config, variant, module, folder, device, launch)
            self._loaded[key] = found
        return found


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
        modules = {p: write_modules(pair.folder / p, s) for p, s in pair.sources.items()}
        folders: dict[str, dict[str, Path]] = {name: {} for name in pair.sources}
        for job in some:
            folders[job.directory.parent.name][job.variant] = job.directory
        out.append(BackwardKernel(pair.sources, pair.configs, modules, folders))
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
    ) -> Gradients:
        """As ``BackwardKernel``, without guards: the variant asked for is what runs."""

        def constants(source: BackwardSource, launch: int) -> dict[str, Any]:
            return sig.constants(source, self.configs[source.name], variant or sig.FAST, launch)

        def run(source: BackwardSource, launch: int, n: int, args: Mapping[str, Any]) -> None:
            function = self._functions[source.name]
            if type(function).__name__ != "InterpretedFunction":
                raise InputError("set TRITON_INTERPRET=1 before triton is imported")
            function[(n,)](**args, **constants(source, launch))

        def block_rows(source: BackwardSource, launch: int) -> int:
            return int(constants(source, launch)["BLOCK_M"])

        return gradients(self.sources, run, block_rows, saved, call, wanted)


__all__ = ["KEYS", "QUERIES", "BackwardKernel", "InterpretedBackward", "Pair", "compile_pairs"]
