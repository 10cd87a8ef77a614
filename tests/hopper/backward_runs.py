"""Gradient kernels on the machine, by way of the real launch code; judged by float64 autograd of the reference.

Launches that the warp-specialised text does run on the machine; the others run in Triton's interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

from sparsegen.codegen.backward import KEYS, BackwardSource, default_config, render_backward
from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.launch import signature as sig
from sparsegen.launch.backward import Gradients, Room, Saved, make_room
from sparsegen.launch.backward_kernel import BackwardKernel
from sparsegen.launch.kernel import Call
from sparsegen.launch.module import load_module
from sparsegen.launch.tables import random_table
from sparsegen.schedule.build import build
from sparsegen.schedule.transpose import transpose
from sparsegen.schedule.tree import Schedule
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from tests.hopper.machine import Machine
from tests.hopper.runs import FOLDER, GPU, Run, descriptor
from tests.kernels.cases import Case
from tests.kernels.gradients import expected, judge, random_gradients

SMALL: dict[str, Any] = {"KERNEL": "hopper", "BLOCK_M": 128, "BLOCK_N": 32, "STAGES": 2}
BACKWARD = {"q": "DQ", "k": "DK", "v": "DV"}


class GradientsOnMachine(BackwardKernel):
    """Both kernels; ``ran`` tells the texts of a call's launches by source, "h" or "p" each."""

    def __init__(
        self,
        sources: Mapping[str, BackwardSource],
        configs: Mapping[str, LaunchConfig],
        seed: int = 0,
        rounds: bool = False,
    ):
        super().__init__(sources, configs, {})
        self._seed, self._rounds = seed, rounds
        self.ran: dict[str, str] = {}
        self.shared_bytes: dict[str, int] = {}  # tiles of the last program, by source
        self.texts: dict[str, str] = {}  # other texts than those rendered, by source

    def loaded(self, source: BackwardSource, variant: str, device: Any, launch: int) -> Any:
        config = self.configs[source.name]
        text, chosen = sig.unit(source, config, variant, launch)
        special = chosen["KERNEL"] == sig.HOPPER
        constants = sig.constants(source, config, variant, launch)
        if not special:
            constants |= {"BLOCK_M": 32, "BLOCK_N": 16}  # the interpreter's own
        names = [name for name, _ in text.parameters]
        kinds = dict(text.parameters)

        def run(programs: int, args: Any, addresses: Any) -> None:
            here = [self._at(address) for address in addresses]
            args = (*here, *args[len(here) :])
            given = {n: descriptor(x, n, kinds[n], constants, here) for n, x in zip(names, args)}
            given |= {n: constants[n] for n in names if n in constants}
            fixed = {n: constants[n] for n in text.constexprs}
            self.ran[source.name] = self.ran.get(source.name, "") + ("h" if special else "p")
            if special:
                rendered = self.texts.get(source.name, text.text)
                machine = Machine(rendered, self._seed, self._rounds)
                machine.launch(text.entry, programs, given, fixed)
                self.shared_bytes[source.name] = machine.shared_bytes
            else:
                _interpreted(source)[(programs,)](**given, **fixed)

        def prepare(programs: int, args: Any, moving: int) -> Any:
            return partial(run, programs, args)

        return SimpleNamespace(
            block_m=constants["BLOCK_M"], constants=(None,) * len(text.constexprs), prepare=prepare
        )

    def _at(self, address: int) -> Any:
        """The tensor that begins there, or what is left of one behind its first element: parts of heads."""
        if address in self._memory:
            return self._memory[address]
        begin = max(a for a in self._memory if a < address)
        t = self._memory[begin]
        first = t.storage_offset() + (address - begin) // t.element_size()
        left = t.untyped_storage().nbytes() // t.element_size() - first
        assert left > 0, "an address behind every tensor"
        return t.as_strided((left,), (1,), first)

    def gradients(self, saved: Saved, call: Call, wanted: Any) -> Gradients:
        """One pass, whose tensors are found by their addresses; all room that it makes holds NaN before."""
        given = [getattr(saved, f.name) for f in fields(saved)]
        self._memory = {t.data_ptr(): t for t in given if t is not None}
        self.ran = {}

        def make(saved: Saved, room: Room) -> Any:
            made = make_room(saved, room)
            made = made if room.zero else made.fill_(math.nan)
            self._memory[made.data_ptr()] = made
            return made

        return self(saved, call, tuple(wanted), make=make)


@cache
def _interpreted(source: BackwardSource) -> Any:
    path = FOLDER / f"{source.digest[:16]}.py"
    path.write_text(source.text)
    return getattr(load_module(path, source.digest), source.entry)


@cache
def sources(
    pattern: Pattern, problem: Problem, schedule: Schedule | None, turned: Schedule | None
) -> dict[str, BackwardSource]:
    """All four kernels by name."""
    found = transpose(pattern, problem)
    columns = turned or found.schedule
    made = [render_backward(pattern, schedule or build(pattern, problem), problem)]
    for outputs in (("DK", "DV"), ("DK",), ("DV",)):
        made.append(render_backward(pattern, columns, problem, KEYS, found.shift, outputs))
    return {source.name: source for source in made}


def kernel_of(run: Run, turned: Schedule | None = None) -> GradientsOnMachine:
    made = sources(run.pattern, run.problem, run.schedule, turned)
    values = default_config(run.problem, GPU).as_dict() | SMALL | dict(run.knobs)
    configs = dict.fromkeys(made, LaunchConfig.of(values))
    return GradientsOnMachine(made, configs, run.seed, run.rounds)


def case_of(run: Run) -> Case:
    """The same as the kernel tests' judge wants it."""
    return Case(
        run.name,
        run.pattern,
        run.q_len,
        run.kv_len,
        batch=run.batch,
        heads=run.heads,
        kv_heads=run.kv_heads,
        head_dim=run.head_dim,
        value_dim=run.value_dim,
        dtype="float32",
    )


def saved_of(run: Run, **given: Any) -> tuple[Saved, list[Any], dict[str, Any]]:
    """What the forward pass saves, the gradients in float64, and the extras of the call."""
    case, (q, k, v) = case_of(run), run.tensors()
    dout, dlse = random_gradients(case, q, v)
    return expected(case, q, k, v, dout, dlse, **given)


def gradients_of(
    kernel: GradientsOnMachine, run: Run, saved: Saved, wanted: Any = "qkv", **given: Any
) -> Gradients:
    """``wanted``: letters; ``given``: keywords of the call."""
    drawn = kernel.sources["keys"].tables
    call = run.call(**given)
    first = call.q_start + (run.kv_len - run.q_len if call.relative else 0)
    tables = [random_table(t, first, run.q_len, run.kv_len, "cpu") for t in drawn]
    return kernel.gradients(saved, Call(**{**vars(call), "tables": tables}), wanted)


def compare(
    run: Run, ran: tuple[str, str] = ("h", "h"), turned: Schedule | None = None, **given: Any
) -> GradientsOnMachine:
    """Kernels against float64 autograd; ``ran``: texts of the launches of queries and of keys.

    Sinks and the null key have a launch before all others; else the first ones of queries prepare.
    """
    kernel = kernel_of(run, turned)
    saved, want, extras = saved_of(run, **given)
    got = gradients_of(kernel, run, saved, **extras)
    before = "p" * (run.pattern.sink_logits or run.pattern.null_key)
    assert (kernel.ran["queries"], kernel.ran["keys"]) == (before + ran[0], ran[1])
    judge(case_of(run), got, want)
    return kernel
