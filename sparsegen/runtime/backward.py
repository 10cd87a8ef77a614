"""Attention with gradients, as PyTorch operators: shapes without data, autograd, no graph break under torch.compile.

``sparsegen::attend`` gives (out, LSE), ``sparsegen::attend_backward`` what is asked for of the gradients.  An operator
takes tensors, numbers and text, so kernels are registered under a name in this process (``register``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from sparsegen.errors import InputError, UnsupportedError
from sparsegen.launch.backward import Gradients, Saved
from sparsegen.launch.backward_kernel import arguments_of
from sparsegen.launch.capture import capturing
from sparsegen.launch.kernel import Call, Kernel
from sparsegen.runtime.tables import Tables

if TYPE_CHECKING:
    import torch

    from sparsegen.codegen.plan import Table

LAUNCHES_KEPT = 64  # prepared forward launches of one engine


@dataclass(frozen=True)
class Engine:
    """The kernels of one pattern and one set of dims.

    ``forward``: (q, k, v, out, lse, call) as ``launch.Kernel``; ``backward``: (saved, call, wanted) as
    ``launch.backward_kernel.BackwardKernel``, or None for calls that want no gradient.  ``tables``: those that the
    kernels draw.
    """

    forward: Callable[[Any, Any, Any, Any, Any, Call], Any]
    backward: Callable[[Saved, Call, Collection[str]], Gradients] | None
    tables: tuple[Table, ...] = ()
    _launches: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def run_forward(self, q: Any, k: Any, v: Any, out: Any, lse: Any, call: Call) -> None:
        """Launch ``forward``.  All about it but addresses is prepared once for tensors of these layouts and arguments."""
        if not isinstance(self.forward, Kernel):  # a stand-in
            self.forward(q, k, v, out, lse, call)
            return
        tensors = (q, k, v, out)
        key = (
            q.device.index,
            *(t.shape for t in tensors),
            *(t.stride() for t in tensors),
            *arguments_of(call),
        )
        launch = self._launches.get(key)
        if launch is None:
            launch = self.forward.prepare(q, k, v, out, call)
            if not capturing():
                if len(self._launches) >= LAUNCHES_KEPT:
                    self._launches.clear()
                self._launches[key] = launch
        launch(q, k, v, out, lse)


_ENGINES: dict[str, Engine] = {}
_TABLES = Tables()


def register(name: str, engine: Engine) -> None:
    """Kernels that operators find under ``name``: a digest of what they compute, the same in every process.

    Defines the operators on first use: torch is imported late.
    """
    operators()
    _ENGINES[name] = engine


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    engine: str,
    scale: float,
    q_start: int = 0,
    k_start: int = 0,
    relative: int = 1,
    joins: int = 1,
    q_lengths: torch.Tensor | None = None,
    kv_starts: torch.Tensor | None = None,
    kv_lengths: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sink_logits: torch.Tensor | None = None,
    null_key: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [B, H, Sq, Dv] and LSE [B, H, Sq]; gradients go to q, k, v, sink_logits and null_key, none to slopes.

    Arguments as ``launch.Call``.  Under autocast q, k and v and the null key are cast to its dtype.
    """
    import torch

    engine_of(engine)
    q, k, v, null_key = autocast(q, k, v, null_key)
    tensors = [q, k, v, *(null_key or (None, None))]
    out: tuple[torch.Tensor, torch.Tensor] = torch.ops.sparsegen.attend(
        *tensors, sink_logits, alibi_slopes, q_lengths, kv_starts, kv_lengths,
        engine, q_start, k_start, relative, joins, scale,
    )  # fmt: skip
    return out


def autocast(q: Any, k: Any, v: Any, null_key: Any) -> tuple[Any, Any, Any, Any]:
    """The same tensors, under autocast in its dtype."""
    import torch

    if not torch.is_autocast_enabled(q.device.type):
        return q, k, v, null_key
    low = torch.get_autocast_dtype(q.device.type)
    null = None if null_key is None else tuple(t.to(low) for t in null_key)
    return q.to(low), k.to(low), v.to(low), null


def refuse_transforms(q: Any, k: Any, v: Any) -> None:
    """UnsupportedError where a transform of torch.func holds one of these tensors: it has no memory to launch on."""
    import torch

    if any(map(torch._C._functorch.is_batchedtensor, (q, k, v))):
        _refuse_vmap(None, None)
    if any(map(torch._C._functorch.is_functorch_wrapped_tensor, (q, k, v))):
        raise UnsupportedError(
            "torch.func's derivatives of sparsegen's attention are not supported: "
            "use torch.autograd.grad or backward()"
        )


# ---- the operators ----

LEARNED = (
    "q",
    "k",
    "v",
    "null_k",
    "null_v",
    "sink_logits",
)  # what may get a gradient, first in this order
_TENSORS = 10  # that an operator takes before its numbers
_CALL = (
    "Tensor? null_k, Tensor? null_v, Tensor? sink_logits, Tensor? alibi_slopes, Tensor? q_lengths, "
    "Tensor? kv_starts, Tensor? kv_lengths, "
    "str engine, SymInt q_start, SymInt k_start, int relative, int joins, float scale"
)
_FORWARD = f"(Tensor q, Tensor k, Tensor v, {_CALL}) -> (Tensor, Tensor)"
_BACKWARD = (
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_CALL}, str wanted) -> Tensor[]"
)


@cache
def operators() -> Any:
    """``sparsegen::attend`` and its gradient, defined once."""
    import torch

    define = torch.library.custom_op
    forward = define("sparsegen::attend", _forward, mutates_args=(), schema=_FORWARD)
    backward = define("sparsegen::attend_backward", _backward, mutates_args=(), schema=_BACKWARD)
    forward.register_fake(lambda q, k, v, *rest: _outputs(q, v))
    backward.register_fake(_fake_backward)
    forward.register_autograd(_autograd(backward), setup_context=_save)
    forward.register_vmap(_refuse_vmap)
    return forward


def _forward(q: Any, k: Any, v: Any, *rest: Any) -> tuple[Any, Any]:
    found, call = _call(q, k, *rest)
    out, lse = _outputs(q, v)
    if q.numel():
        found.run_forward(q, k, v, out, lse, call)
    return out, lse


def _backward(
    dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *rest: Any
) -> list[Any]:
    *given, wanted = rest
    names = wanted.split()
    if not q.numel():
        every = dict(zip(LEARNED, (q, k, v, *rest[:3])))
        return [every[name].new_zeros(every[name].shape) for name in names]
    found, call = _call(q, k, *given)
    if found.backward is None:
        raise InputError("a gradient is wanted of a call that was traced for none: trace it anew")
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    got = found.backward(Saved(q, k, v, out, lse, dout, dlse), call, names)
    null = got.null_key or (None, None)
    every = dict(zip(LEARNED, (got.q, got.k, got.v, *null, got.sink_logits)))
    return [_given(every, name) for name in names]


def engine_of(name: str) -> Engine:
    """The registered kernels of that name."""
    found = _ENGINES.get(name)
    if found is None:
        raise InputError(f"no kernels are registered under {name!r} in this process")
    return found


def _given(every: dict[str, Any], name: str) -> Any:
    t = every[name]
    assert t is not None, f"no gradient of {name} came back"
    return t


def _outputs(q: Any, v: Any) -> tuple[Any, Any]:
    """Empty outputs: out laid out as q is where their shapes are alike, LSE float32."""
    import torch

    out = torch.empty_like(q) if q.shape == (*q.shape[:3], v.shape[3]) else None
    if out is None or out.stride(-1) != 1:
        out = q.new_empty((*q.shape[:3], v.shape[3]))
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


def _fake_backward(
    dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *rest: Any
) -> list[Any]:
    null_k, null_v, sinks = rest[:3]
    every = dict(zip(LEARNED, (q, k, v, null_k, null_v, sinks)))
    return [every[name].new_empty(every[name].shape) for name in rest[-1].split()]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:_TENSORS], *output)
    ctx.numbers = inputs[_TENSORS:]


def _autograd(backward_op: Any) -> Callable[..., tuple[Any, ...]]:
    def run(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
        import torch

        *inputs, out, lse = ctx.saved_tensors
        needed = ctx.needs_input_grad
        wanted = [name for i, name in enumerate(LEARNED) if needed[i] and inputs[i] is not None]
        if not wanted or (dout is None and dlse is None):
            return (None,) * (_TENSORS + len(ctx.numbers))
        dout = torch.zeros_like(out) if dout is None else dout
        q, k, v, *others = inputs
        got = backward_op(dout, dlse, q, k, v, out, lse, *others, *ctx.numbers, " ".join(wanted))
        found = dict(zip(wanted, got))
        rest = (None,) * (_TENSORS - len(LEARNED) + len(ctx.numbers))
        return (*(found.get(name) for name in LEARNED), *rest)

    return run


def _refuse_vmap(info: Any, in_dims: Any, *args: Any) -> Any:
    raise UnsupportedError(
        "torch.func.vmap over sparsegen's attention is not supported: q, k and v have a batch dimension for it"
    )


def _call(
    q: Any,
    k: Any,
    null_k: Any,
    null_v: Any,
    sink_logits: Any,
    alibi_slopes: Any,
    q_lengths: Any,
    kv_starts: Any,
    kv_lengths: Any,
    engine: str,
    q_start: int,
    k_start: int,
    relative: int,
    joins: int,
    scale: float,
) -> tuple[Engine, Call]:
    """The kernels, and their call, from what an operator was given."""
    found = engine_of(engine)
    q_len, kv_len = q.shape[2], k.shape[2]
    first = q_start + (kv_len - q_len if relative else 0)
    call = Call(
        q_start=q_start,
        k_start=k_start,
        relative=relative,
        scale=scale,
        q_lengths=q_lengths,
        kv_starts=kv_starts,
        kv_lengths=kv_lengths,
        alibi_slopes=alibi_slopes,
        sink_logits=sink_logits,
        null_key=None if null_k is None else (null_k, null_v),
        joins=joins,
        tables=[_TABLES.of(t, first, q_len, kv_len, q.device) for t in found.tables],
    )
    return found, call
