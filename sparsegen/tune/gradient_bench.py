"""Candidates of a ``GradientTarget`` on the GPU, in the worker process: inputs, checks, passes."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsegen.codegen.backward_planner import KEYS, QUERIES
from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.tune.check import sampled_rows, small_lengths
from sparsegen.tune.gradient_check import GradientCase, check_gradients, long_case, short_case
from sparsegen.tune.gradient_target import GIVES, GradientTarget
from sparsegen.tune.kernel_bench import Calls, open_device, up_to
from sparsegen.tune.measure import CudaClock

if TYPE_CHECKING:
    from sparsegen.codegen.backward import BackwardSource
    from sparsegen.launch.backward import Gradients
    from sparsegen.launch.backward_kernel import BackwardKernel


class GradientBench:
    """Inputs of the timed problem on the GPU, in the worker process.

    The first launch of a pass is one of the kernel of queries: for a candidate of keys that one is compiled here, in its
    default configuration.
    """

    def __init__(self, target: GradientTarget) -> None:
        import torch

        self.target = target
        open_device(target)
        self.clock = CudaClock(target.gpu.l2_bytes)
        self.generator = torch.Generator("cuda").manual_seed(0)
        self.case = long_case(
            target.pattern, target.problem, target.q_len, target.kv_len, "cuda", self.generator
        )
        self.before: dict[str, Any] = {} if target.part == QUERIES else self._prepares()

    def _prepares(self) -> dict[str, Any]:
        from sparsegen.launch import compile_kernel

        t = self.target
        other = GradientTarget.for_part(t.pattern, t.problem, t.gpu, QUERIES)
        source, config = other.parts(other.default)
        folder = Path(tempfile.mkdtemp(prefix="sparsegen-prepare-"))
        compile_kernel(source, config, "fast", t.gpu, folder / "fast")
        return {
            "source": source,
            "config": config,
            "directories": {"fast": folder / "fast"},
        }

    def load(self, config: LaunchConfig, folder: Path) -> GradientCandidate:
        """See ``Bench``."""
        return GradientCandidate(self, config, folder)

    def short(self) -> list[GradientCase]:
        """New short inputs of ragged lengths, every gradient of which is compared."""
        target, whole = self.target, self.target.whole
        return [
            short_case(
                target.pattern,
                target.problem,
                up_to(q_len, whole),
                up_to(kv_len, whole),
                "cuda",
                self.generator,
                size,
                batch=2,
            )
            for q_len, kv_len, size in small_lengths(target.q_len, target.kv_len)
        ]

    def refresh(self) -> GradientCase:
        """The timed problem's tensors with new random values, and rows of it to compare."""
        import torch

        saved, target = self.case.saved, self.target
        for tensor in (saved.q, saved.k, saved.v, saved.dout):
            tensor.normal_(generator=self.generator)
        length = {QUERIES: target.q_len, KEYS: target.kv_len}.get(
            target.part, min(target.q_len, target.kv_len)
        )
        rows = sampled_rows(length, self.generator)
        rows = torch.arange(length, device="cuda") if rows is None else rows
        return GradientCase(saved, self.case.keywords, rows)


class GradientCandidate:
    """One loaded configuration of one part."""

    def __init__(self, bench: GradientBench, config: LaunchConfig, folder: Path) -> None:
        self._bench, target = bench, bench.target
        source, plain = target.parts(config)
        names = target.timed(source, plain)
        found = {
            "source": source,
            "config": plain,
            "directories": {name: folder / name for name in names},
        }
        self._kernel = kernel_of(*([bench.before] if bench.before else []), found)
        self._calls = Calls(target, source.tables)

    def check(self) -> str:
        """Short ragged inputs, then rows of what is timed."""
        target = self._bench.target
        for case in (*self._bench.short(), self._bench.refresh()):
            if wrong := check_gradients(self._run, case, target.pattern, GIVES[target.part]):
                return wrong
        return ""

    def launch(self) -> None:
        """One pass for this part on the bench's tensors; the kernel prepares it once."""
        case = self._bench.case
        self._run(case.saved, case.keywords, None)

    def _run(self, saved: Any, keywords: Mapping[str, Any], make: Any) -> Gradients:
        call = self._calls.of(saved.q.shape[2], saved.k.shape[2], keywords)
        return self._kernel(saved, call, GIVES[self._bench.target.part], None, make)


def kernel_of(*given: Mapping[str, Any]) -> BackwardKernel:
    """Parts of a backward pass as one callable; each: its source, config and directories."""
    from sparsegen.launch.backward_kernel import BackwardKernel

    named: dict[str, Mapping[str, Any]] = {_source(g).name: g for g in given}
    pick = lambda what: {name: g[what] for name, g in named.items()}
    return BackwardKernel(pick("source"), pick("config"), pick("directories"))


def _source(given: Mapping[str, Any]) -> BackwardSource:
    found: BackwardSource = given["source"]
    return found
