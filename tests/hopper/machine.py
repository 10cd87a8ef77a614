"""A machine for warp-specialised kernels: it runs the rendered Gluon text itself on the CPU, under a seeded scheduler.

The text imports stand-ins instead of Gluon.  What they leave out is what the compiler checks: types and layouts.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Mapping
from functools import cache, partial
from types import CodeType, SimpleNamespace
from typing import Any

import torch

from tests.hopper import registers as reg
from tests.hopper.registers import DType, Pointer, Value
from tests.hopper.schedulers import Scheduler
from tests.hopper.shared import Barrier, Barriers, Outgoing, Product, View, load_box


class Layout:
    """Says how a tensor lies; nothing here asks."""

    def __init__(self, *_: Any):
        pass

    @staticmethod
    def get_default_for(*_: Any) -> Layout:
        return Layout()


class BarrierLayout(Layout):
    """Marks memory that holds barriers."""


@cache
def _compiled(text: str) -> tuple[CodeType, tuple[str, ...]]:
    """The text's code, and the names of its arrays in shared memory in the order of their allocation."""
    tree = ast.parse(text)
    calls = [
        n for n in ast.walk(tree) if isinstance(n, ast.Assign) and isinstance(n.value, ast.Call)
    ]
    made = [n for n in calls if getattr(n.value.func, "attr", "") == "allocate_shared_memory"]
    names = [n.targets[0].id for n in sorted(made, key=lambda n: n.lineno)]
    return compile(tree, "hopper.py", "exec"), tuple(names)


class Machine:
    """Runs one text.  ``rounds``: values and weights are rounded to their 16 bits; else all is float32."""

    def __init__(self, text: str, seed: int = 0, rounds: bool = False):
        code, self._names = _compiled(text)
        self._scheduler = Scheduler(seed)
        self._rounds = rounds
        self._program = self._programs = 0
        self._arrays: list[View | Barriers] = []
        self._open: dict[str, list[Product]] = {}
        self._stored: dict[str, list[View]] = {}
        self._sent: dict[str, list[Outgoing]] = {}
        self.shared_bytes = 0  # of a program
        modules = self._modules()

        def importing(name: str, *_: Any) -> Any:
            return modules[name]

        own = {"__import__": importing, "range": self._range}
        self._text: dict[str, Any] = {"__builtins__": vars(builtins) | own}
        exec(code, self._text)

    def launch(
        self, entry: str, programs: int, arguments: Mapping[str, Any], constants: Mapping[str, Any]
    ) -> None:
        """Run the programs one after the other; tensors are passed as they are, descriptors as Triton's."""
        taken = {name: _argument(x) for name, x in arguments.items()} | dict(constants)
        self._programs = programs
        for self._program in range(programs):
            self._arrays, self._open, self._stored, self._sent = [], {}, {}, {}
            self._text[entry](**taken)

    # ---------------------------------------------------------------------- stand-ins
    def _modules(self) -> dict[str, Any]:
        hopper = SimpleNamespace(
            fence_async_shared=self._fence,
            mbarrier=SimpleNamespace(
                MBarrierLayout=BarrierLayout,
                init=lambda barrier, count: barrier.init(count),
                wait=self._wait,
                arrive=self._arrive,
                expect=self._expect,
            ),
            tma=SimpleNamespace(
                async_load=self._load_box,
                async_atomic_add=partial(self._send_box, True),
                async_store=partial(self._send_box, False),
                store_wait=self._boxes_read,
            ),
            warpgroup_mma=self._multiply,
            warpgroup_mma_wait=self._products_done,
        )
        gluon = SimpleNamespace(
            jit=lambda f: f, constexpr_function=lambda f: f, language=self._language()
        )
        root = "triton.experimental"
        return {
            root: SimpleNamespace(gluon=gluon),
            f"{root}.gluon": gluon,
            f"{root}.gluon.language.nvidia": SimpleNamespace(hopper=hopper),
            f"{root}.gluon.language.nvidia.hopper": hopper,
        }

    def _language(self) -> Any:
        low = {n: getattr(torch, n) if self._rounds else None for n in ("float16", "bfloat16")}
        layouts = ("BlockedLayout", "SliceLayout", "DotOperandLayout", "NVMMADistributedLayout", "NVMMASharedLayout")  # fmt: skip
        return SimpleNamespace(
            **{name: DType(name, True, rounds) for name, rounds in low.items()},
            **dict.fromkeys(layouts, Layout),
            float32=DType("float32", True, wide=True),
            int32=DType("int32"),
            int64=DType("int64"),
            constexpr=lambda x: x,
            to_tensor=lambda x: Value(reg.plain(x)),
            convert_layout=lambda x, layout, assert_trivial=False: x,
            where=reg.where, minimum=reg.minimum, maximum=reg.maximum, cdiv=reg.cdiv,
            exp2=reg.exp2, log2=reg.log2, abs=reg.absolute, sum=reg.total, max=reg.largest,
            arange=reg.arange, full=reg.full, zeros=reg.zeros, load=reg.load, store=reg.store,
            program_id=lambda axis: Value(self._program),
            num_programs=lambda axis: Value(self._programs),
            static_range=range,
            allocate_shared_memory=self._allocate,
            warp_specialize=self._specialize,
        )  # fmt: skip

    @staticmethod
    def _range(start: Any, stop: Any, step: Any = 1) -> Any:
        return map(Value, range(int(reg.plain(start)), int(reg.plain(stop)), int(reg.plain(step))))

    def _allocate(self, dtype: DType, shape: list[int], layout: Layout) -> View | Barriers:
        name = self._names[len(self._arrays)]
        if isinstance(layout, BarrierLayout):
            self._arrays.append(Barriers(name, shape[0], self._scheduler))
            return self._arrays[-1]
        self._arrays.append(View.allocate(name, shape, self._store, 4 if dtype.wide else 2))
        used = sum(x.bytes for x in self._arrays if isinstance(x, View))
        self.shared_bytes = max(self.shared_bytes, used)
        return self._arrays[-1]

    def _barriers(self) -> list[Barrier]:
        return [b for x in self._arrays if isinstance(x, Barriers) for b in x]

    def _specialize(self, partitions: list[Any], warps: list[int], registers: list[int]) -> None:
        assert len(warps) == len(registers) == len(partitions) - 1
        functions = [function for function, _ in partitions]
        work: list[tuple[str, Callable[[], None]]] = []
        for i, (function, arguments) in enumerate(partitions):
            name = function.__name__
            if functions.count(function) > 1:
                name += f" {functions[:i].count(function)}"
            work.append((name, lambda f=function, a=arguments: f(*a)))
        self._scheduler.run(work)
        for barrier in self._barriers():
            assert barrier.at_rest, f"{barrier.name} still expects bytes, or got too many"
        assert not any(self._open.values()), "a product that nobody waits for"

    # ---------------------------------------------------------------------- barriers, boxes, products
    def _wait(self, barrier: Barrier, parity: Any) -> None:
        barrier.wait(parity)

    def _arrive(self, barrier: Barrier, *, count: int = 1) -> None:
        self._scheduler.step()
        barrier.arrive(count)
        self._scheduler.step()

    def _expect(self, barrier: Barrier, bytes_: int) -> None:
        self._scheduler.step()
        barrier.arrive(1, int(reg.plain(bytes_)))
        self._scheduler.step()

    def _load_box(self, descriptor: Any, corner: list[Any], barrier: Barrier, place: View) -> None:
        load_box(self._scheduler, descriptor, corner, barrier, place)
        self._scheduler.step()

    def _send_box(self, adds: bool, descriptor: Any, corner: list[Any], source: View) -> None:
        sent = self._sent.setdefault(self._scheduler.current, [])
        sent.append(Outgoing(self._scheduler, descriptor, corner, source, adds))
        self._scheduler.step()

    def _boxes_read(self, outstanding: int) -> None:
        """All but the youngest ``outstanding`` boxes that this partition sent have left shared memory."""
        sent = self._sent.setdefault(self._scheduler.current, [])
        older = sent[: max(len(sent) - outstanding, 0)]
        self._scheduler.wait(lambda: all(x.done for x in older), "boxes that it sends to memory")

    def _store(self, view: View) -> None:
        self._stored.setdefault(self._scheduler.current, []).append(view)
        self._scheduler.step()

    def _fence(self) -> None:
        """What the partition stored is there for the asynchronous units; so are barriers that it made."""
        for view in self._stored.pop(self._scheduler.current, []):
            view.dirty.fill_(False)
        for barrier in self._barriers():
            barrier.fenced |= barrier.count > 0
        self._scheduler.step()

    def _multiply(
        self, a: Any, b: View, acc: Any, *, use_acc: bool = True, is_async: bool = False
    ) -> Product:
        assert is_async, "the template asks for asynchronous products only"
        who = self._scheduler.current
        product = Product(who, a, b, acc, use_acc)
        self._open.setdefault(who, []).append(product)
        self._scheduler.step()
        return product

    def _products_done(self, outstanding: int, deps: tuple[Any, ...]) -> Any:
        """All but the youngest ``outstanding`` products are done; the others may still read their operands."""
        self._scheduler.step()
        under_way = self._open.setdefault(self._scheduler.current, [])
        while len(under_way) > outstanding:
            under_way.pop(0).finish()
        done = tuple(Value(x.data) for x in deps)
        return done[0] if len(done) == 1 else done


def _argument(x: Any) -> Any:
    """A run-time argument as the text sees it: tensors are addresses, numbers are values."""
    if isinstance(x, torch.Tensor):
        return Pointer.to(x)
    return Value(x) if isinstance(x, (int, float)) else x
