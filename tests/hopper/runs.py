"""Kernels on the machine, by way of the real launch code: guards, variants, descriptors and argument order are ours.

Launches that the warp-specialised text does run on the machine; the others run in Triton's interpreter.
"""

from __future__ import annotations

import ctypes
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from sparsegen.codegen import KernelSource, LaunchConfig, load_template, render
from sparsegen.launch import Call, Kernel
from sparsegen.launch import signature as sig
from sparsegen.launch.module import load_module
from sparsegen.launch.packing import View
from sparsegen.schedule.build import build
from sparsegen.schedule.tree import Schedule
from sparsegen.spec.gpu import find_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from sparsegen.spec.reference import reference
from sparsegen.tune.accept import within_tolerance
from sparsegen.tune.eager import eager_attention
from tests.hopper.machine import Machine

GPU = find_gpu("nvidia-h200")
FOLDER = Path(tempfile.mkdtemp(prefix="sparsegen-hopper-"))
SMALL: dict[str, Any] = {"KERNEL": "hopper", "BLOCK_M": 128, "BLOCK_N": 32, "STAGES": 2}
RESIDENT = 3  # programs of a persistent launch
NEAR = 3e-5  # of float32 arithmetic from float64, for values of order 1


class OnMachine(Kernel):
    """A kernel whose binaries are run by the machine, or by Triton's interpreter for portable launches."""

    def __init__(
        self, source: KernelSource, config: LaunchConfig, seed: int = 0, rounds: bool = False
    ):
        super().__init__(source, config, {})
        self._seed, self._rounds = seed, rounds
        self.ran: list[str] = []  # the texts of a call's launches: "hopper" or "portable"
        self.shared_bytes = 0  # tiles of the last program

    def loaded(self, variant: str, device: int, launch: int) -> Any:
        text, chosen = sig.unit(self.source, self.config, variant, launch)
        special = chosen["KERNEL"] == sig.HOPPER
        constants = sig.constants(self.source, self.config, variant, launch)
        if not special:
            constants = self._portable_constants(variant, launch)

        def run(programs: int, args: tuple[Any, ...]) -> None:
            kinds = dict(text.parameters)
            names = list(kinds)
            boxed = (
                descriptor(x, n, kinds[n], constants, self._given) for n, x in zip(names, args)
            )
            given = self._tensors(dict(zip(names, boxed)))
            for name in names:
                if name in constants:
                    given[name] = constants[name]
            fixed = {name: constants[name] for name in text.constexprs}
            self.ran.append("hopper" if special else "portable")
            if special:
                machine = Machine(text.text, self._seed, self._rounds)
                machine.launch(text.entry, programs, given, fixed)
                self.shared_bytes = machine.shared_bytes
            else:
                _interpreted(self.source)[(programs,)](**given, **fixed)

        def prepare(programs: int, args: Sequence[Any], moving: int) -> Any:
            return lambda addresses: run(programs, (*addresses, *args[moving:]))

        return SimpleNamespace(
            block_m=constants["BLOCK_M"],
            persistent=constants["PERSISTENT"],
            resident=RESIDENT,
            constants=(None,) * len(text.constexprs),
            prepare=prepare,
        )

    def _portable_constants(self, variant: str, launch: int) -> dict[str, Any]:
        """Small tiles, by pointers: the interpreter's own."""
        own = self.config.as_dict() | {"KERNEL": "portable", "BLOCK_M": 32, "TMA": False}
        plain = LaunchConfig.of(own)
        return sig.constants(self.source, plain, variant, launch)

    def _tensors(self, given: dict[str, Any]) -> dict[str, Any]:
        """Addresses of a launch's tensors as the tensors that are there."""
        known = {t.data_ptr(): t for t in self._given}
        for name in ("Q", "K", "V", "OUT", "LSE", "PARTIAL_OUT", "PARTIAL_LSE"):
            if name in given:
                address = given[name]
                given[name] = known[address] if address in known else self._room(address, name)
        return given

    def _room(self, address: int, name: str) -> torch.Tensor:
        """Partial results, which the launch code makes room for itself."""
        out, lse = self._partials
        count = out if name == "PARTIAL_OUT" else lse
        return torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)

    def attend(self, q: Any, k: Any, v: Any, call: Call) -> tuple[Any, Any]:
        """Output and LSE of the fast variant, both NaN before."""
        out = torch.full((*q.shape[:3], v.shape[3]), math.nan, dtype=q.dtype)
        lse = torch.full(q.shape[:3], math.nan)
        self._given, self.ran = (q, k, v, out, lse), []
        launch = self.prepare(q, k, v, out, call)
        self._partials = launch._partials
        launch(q, k, v, out, lse, sig.FAST)
        return out, lse


def descriptor(
    x: Any, name: str, kind: str, constants: Mapping[str, Any], tensors: Sequence[Any]
) -> Any:
    """What the launch code says of a descriptor, as the machine takes it; ``tensors``: those of the call, by number."""
    if not isinstance(x, View):
        return x
    block = sig.block_of(kind, constants["BLOCK_N"])
    base = tensors[x.moves]
    if sig.ELEMENTS.get(sig.tensor_of(name)) == "bf16":
        base = base.view(torch.bfloat16)
    return SimpleNamespace(base=base, shape=x.shape, strides=x.strides, block_shape=block)


@cache
def _interpreted(source: KernelSource) -> Any:
    path = FOLDER / f"{source.digest[:16]}.py"
    path.write_text(source.text)
    return getattr(load_module(path, source.digest), source.entry)


@dataclass(frozen=True)
class Run:
    """One comparison: a pattern, a schedule, knobs and a call."""

    name: str
    pattern: Pattern
    q_len: int
    kv_len: int
    batch: int = 1
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 16
    value_dim: int = 16
    knobs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    schedule: Schedule | None = None
    rounds: bool = False
    seed: int = 0

    def __str__(self) -> str:
        knobs = "".join(f"-{n}={x}" for n, x in self.knobs.items())
        dims = f"d{self.head_dim}-{self.value_dim}"
        return f"{self.name}-{self.q_len}x{self.kv_len}-{dims}{knobs}"

    @property
    def problem(self) -> Problem:
        return Problem(
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            heads=self.heads,
            kv_heads=self.kv_heads,
            dtype="float16",
        )

    def source(self) -> KernelSource:
        return rendered(self.pattern, self.problem, self.schedule)

    def config(self) -> LaunchConfig:
        values = load_template().default(self.problem, GPU).as_dict()
        return LaunchConfig.of(values | SMALL | dict(self.knobs))

    def kernel(self) -> OnMachine:
        return OnMachine(self.source(), self.config(), self.seed, self.rounds)

    def tensors(self) -> tuple[Any, Any, Any]:
        g = torch.Generator().manual_seed(self.seed)
        dtype = torch.float16 if self.rounds else torch.float32

        def make(*shape: int) -> Any:
            return torch.randn(*shape, generator=g).to(dtype)

        return (
            make(self.batch, self.heads, self.q_len, self.head_dim),
            make(self.batch, self.kv_heads, self.kv_len, self.head_dim),
            make(self.batch, self.kv_heads, self.kv_len, self.value_dim),
        )

    def call(self, **given: Any) -> Call:
        pattern = self.pattern
        scale = self.head_dim**-0.5 if pattern.scale is None else pattern.scale
        relative = int(pattern.align == "bottom_right")
        return Call(**({"relative": relative, "scale": scale} | given))


@cache
def rendered(pattern: Pattern, problem: Problem, schedule: Schedule | None) -> KernelSource:
    return render(pattern, schedule or build(pattern, problem), problem)


def compare(run: Run, ran: str = "hopper", **given: Any) -> OnMachine:
    """The kernel against the float64 reference; ``ran``: which texts its launches run."""
    kernel, (q, k, v) = run.kernel(), run.tensors()
    out, lse = kernel.attend(q, k, v, run.call(**given))
    assert " ".join(kernel.ran) == ran
    judge(run, q, k, v, out, lse, **given)
    return kernel


def judge(run: Run, q: Any, k: Any, v: Any, out: Any, lse: Any, **given: Any) -> None:
    want, want_lse = reference(run.pattern, q, k, v, **given)
    assert torch.equal(lse.isinf(), want_lse.isinf()), "rows that see no key"
    assert (out[want_lse.isinf()] == 0).all()
    if run.rounds:
        low, low_lse = eager_attention(run.pattern, q, k, v, **given)
        for verdict in (within_tolerance(out, want, low), within_tolerance(lse, want_lse, low_lse)):
            assert verdict, str(verdict)
        return
    assert not out.isnan().any(), "not written, or made of what was not there yet"
    assert (out - want).abs().max() < NEAR
    seen = want_lse.isfinite()
    assert (lse[seen] - want_lse[seen]).abs().max() < NEAR if seen.any() else True
