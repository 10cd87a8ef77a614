"""Stand-ins for kernels that compute densely: for tests of what is around kernels, where the interpreter is too slow."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch

from sparsegen.codegen.backward import QUERIES
from sparsegen.launch.backward import Gradients
from sparsegen.launch.kernel import Call
from sparsegen.runtime.attend import Attend
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from sparsegen.spec.reference import reference


def attention(pattern: Pattern, q: Any, k: Any, v: Any, call: Call, **extras: Any) -> Any:
    given = {n: getattr(call, n) for n in ("q_lengths", "kv_starts", "kv_lengths")}
    first = call.q_start + (k.shape[2] - q.shape[2] if call.relative else 0)
    place = {"q_start": first, "k_start": call.k_start, "partial": not call.joins}
    return reference(pattern, q, k, v, scale=call.scale, **given, **place, **extras)


def extras_of(call: Call) -> dict[str, Any]:
    every = {n: getattr(call, n) for n in ("sink_logits", "null_key", "alibi_slopes")}
    return {n: t for n, t in every.items() if t is not None}


class Forward:
    def __init__(self, pattern: Pattern, problem: Problem):
        self.pattern, self.config = pattern, ""
        digest = f"dense {pattern.name} {problem}"
        self.source = SimpleNamespace(max_position=None, tables=(), digest=digest)

    def __call__(self, q: Any, k: Any, v: Any, out: Any, lse: Any, call: Call) -> None:
        found, sums = attention(self.pattern, q, k, v, call, **extras_of(call))
        out.copy_(found)
        lse.copy_(sums)

    def prepare(self, q: Any, k: Any, v: Any, out: Any, call: Call) -> Any:
        return lambda q, k, v, out, lse, variant=None: self(q, k, v, out, lse, call)


class Backward:
    """Gradients by autograd; ``asked``: which ones, call by call."""

    def __init__(self, pattern: Pattern):
        self.pattern, self.configs, self.asked = pattern, {QUERIES: ""}, []
        self.sources = {QUERIES: SimpleNamespace(max_position=None, tables=(), digest="dense")}

    def __call__(self, saved: Any, call: Call, wanted: Any) -> Gradients:
        """In a thread of its own: inside an operator autograd records nothing."""
        self.asked.append(list(wanted))
        with ThreadPoolExecutor(1) as one:
            return one.submit(self._gradients, saved, call).result()

    def _gradients(self, saved: Any, call: Call) -> Gradients:
        leaf = lambda t: t.detach().double().requires_grad_()
        found = {"q": leaf(saved.q), "k": leaf(saved.k), "v": leaf(saved.v)}
        extras = extras_of(call)
        if "sink_logits" in extras:
            found["sink_logits"] = extras["sink_logits"] = leaf(extras["sink_logits"])
        if "null_key" in extras:
            null = tuple(map(leaf, extras["null_key"]))
            found["null_k"], found["null_v"] = extras["null_key"] = null
        q, k, v = (found[n] for n in "qkv")
        out, lse = attention(self.pattern, q, k, v, call, **extras)
        outputs, grads = [out], [saved.dout.double()]
        if saved.dlse is not None:
            outputs, grads = [out, lse], [*grads, saved.dlse.double()]
        dtypes = {"q": saved.q, "k": saved.k, "v": saved.v, "null_k": saved.q, "null_v": saved.q}
        got = {
            name: g.to(dtypes[name].dtype) if name in dtypes else g.float()
            for name, g in zip(found, torch.autograd.grad(outputs, list(found.values()), grads))
        }
        null = (got["null_k"], got["null_v"]) if "null_k" in got else None
        return Gradients(got["q"], got["k"], got["v"], got.get("sink_logits"), null)


def callable_of(pattern: Pattern, problem: Problem, *asked: Any, backward: bool = True) -> Attend:
    """An ``Attend`` of the problem; ``backward`` False: its gradients come when they are first needed."""
    make = lambda _: Backward(pattern)
    here = make(problem) if backward else None
    return Attend(pattern, problem, Forward(pattern, problem), None, make, here)
