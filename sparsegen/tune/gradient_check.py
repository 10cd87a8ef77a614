"""Checking gradients before they are timed: fresh random inputs, room full of NaN, float64 as the judge."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparsegen.tune.accept import within_tolerance
from sparsegen.tune.check import fresh_inputs
from sparsegen.tune.eager import eager_attention
from sparsegen.tune.gradient_rows import GradientRows

if TYPE_CHECKING:
    import torch

    from sparsegen.launch.backward import Gradients, Room, Saved
    from sparsegen.spec.pattern import Pattern
    from sparsegen.spec.problem import Problem

# kernel(saved, keywords, make): the gradients; ``make`` makes the memory of its pass
Run = Callable[..., "Gradients"]


@dataclass(frozen=True)
class GradientCase:
    """Inputs of one check: what a backward pass is given, and the keywords of the call.

    ``rows``: indexes of the queries, or of the keys, whose gradients are compared by their formula; None: all are, with
    autograd of the dense reference, and the inputs are compared with a copy afterwards.
    """

    saved: Saved
    keywords: Mapping[str, Any]
    rows: torch.Tensor | None = None


def check_gradients(run: Run, case: GradientCase, pattern: Pattern, wanted: tuple[str, ...]) -> str:
    """What is wrong with the gradients of ``wanted`` ("q"; "k", "v") on this case, in one sentence; "" if nothing is."""
    import torch

    s = case.saved
    given = {"q": s.q, "k": s.k, "v": s.v, "out": s.out, "lse": s.lse, "dout": s.dout}
    before = {} if case.rows is not None else {name: t.clone() for name, t in given.items()}
    got = run(s, case.keywords, full_of_nan)
    for name, copy in before.items():
        if not torch.equal(given[name], copy):
            return f"{_size(case)}: the kernel changed its input {name}"
    found = {f"d{name}": getattr(got, name) for name in wanted}
    if "q" in wanted and case.rows is None:
        found |= {} if got.sink_logits is None else {"dsink_logits": got.sink_logits}
        found |= {} if got.null_key is None else dict(zip(("dnull_k", "dnull_v"), got.null_key))
    for name, t in found.items():
        odd = int((~t.isfinite()).sum())
        if odd:
            return f"{_size(case)}: {odd} values of {name} are NaN or infinite"
    right, yard = _dense(case, pattern) if case.rows is None else _some(case, pattern, wanted)
    for name, t in found.items():
        one = t if case.rows is None else t[:, :, case.rows]
        verdict = within_tolerance(one, right[name], yard[name])
        if not verdict:
            return f"{_size(case)}: {name}: {verdict.reason}"
    return ""


def full_of_nan(saved: Saved, room: Room) -> torch.Tensor:
    """Memory of a pass for a check: what a kernel leaves unwritten, or adds to what is there, shows."""
    from sparsegen.launch.backward import make_room

    made = make_room(saved, room)
    return made if room.zero else made.fill_(math.nan)


def short_case(
    pattern: Pattern,
    problem: Problem,
    q_len: int,
    kv_len: int,
    device: str,
    generator: torch.Generator,
    size: float = 1.0,
    batch: int | None = None,
) -> GradientCase:
    """Random inputs as ``check.fresh_inputs``, and what the reference makes of them, rounded as a forward kernel rounds."""
    import torch

    from sparsegen.launch.backward import Saved
    from sparsegen.spec.reference import reference

    case = fresh_inputs(pattern, problem, q_len, kv_len, device, generator, size, batch)
    out, lse = reference(pattern, case.q, case.k, case.v, **case.keywords)
    out = out.to(case.q.dtype)
    dout = torch.randn(out.shape, dtype=out.dtype, device=device, generator=generator)
    saved = Saved(case.q, case.k, case.v, out, lse.float().contiguous(), dout)
    return GradientCase(saved, case.keywords)


def long_case(
    pattern: Pattern,
    problem: Problem,
    q_len: int,
    kv_len: int,
    device: str,
    generator: torch.Generator,
) -> GradientCase:
    """Random inputs of the timed lengths.  OUT and LSE are made up, near what attention over all keys would give.

    A gradient is a function of them whatever they are, so no forward kernel is needed here.
    """
    import torch

    from sparsegen.launch.backward import Saved

    case = fresh_inputs(pattern, problem, q_len, kv_len, device, generator)
    shape = (*case.q.shape[:3], problem.value_dim)
    draw = lambda: torch.randn(shape, dtype=case.q.dtype, device=device, generator=generator)
    lse = torch.full(case.q.shape[:3], math.log(kv_len) + 0.5, device=device)
    saved = Saved(case.q, case.k, case.v, 0.1 * draw(), lse, draw())
    return GradientCase(saved, case.keywords)


def _dense(case: GradientCase, pattern: Pattern) -> tuple[dict[str, Any], dict[str, Any]]:
    from sparsegen.spec.reference import reference

    return _autograd(case, pattern, reference, True), _autograd(
        case, pattern, eager_attention, False
    )


def _autograd(
    case: GradientCase, pattern: Pattern, attend: Callable[..., Any], wide: bool
) -> dict[str, Any]:
    """Gradients by name; in float64 where ``wide``."""
    import torch

    s, keywords = case.saved, dict(case.keywords)
    leaf = lambda t: (t.detach().double() if wide else t.detach().clone()).requires_grad_()
    leaves = {"dq": leaf(s.q), "dk": leaf(s.k), "dv": leaf(s.v)}
    q, k, v = leaves.values()
    if "sink_logits" in keywords:
        keywords["sink_logits"] = leaves["dsink_logits"] = leaf(keywords["sink_logits"])
    if "null_key" in keywords:
        null = tuple(map(leaf, keywords["null_key"]))
        keywords["null_key"] = null
        leaves |= dict(zip(("dnull_k", "dnull_v"), null))
    out, _ = attend(pattern, q, k, v, **keywords)
    found = torch.autograd.grad(out, list(leaves.values()), s.dout.to(out.dtype))
    return dict(zip(leaves, found))


def _some(
    case: GradientCase, pattern: Pattern, wanted: tuple[str, ...]
) -> tuple[dict[str, Any], dict[str, Any]]:
    import torch

    s, rows = case.saved, case.rows
    assert rows is not None
    scale = 1.0 / math.sqrt(s.q.shape[3]) if pattern.scale is None else pattern.scale
    out = []
    for dtype in (torch.float64, s.q.dtype):
        one = GradientRows(pattern, s, scale, dtype, case.keywords.get("alibi_slopes"))
        found = (
            *((one.queries(rows),) if "q" in wanted else ()),
            *(one.keys(rows) if "k" in wanted else ()),
        )
        out.append(dict(zip((f"d{name}" for name in wanted), found)))
    return out[0], out[1]


def _size(case: GradientCase) -> str:
    return f"{case.saved.q.shape[2]} queries, {case.saved.k.shape[2]} keys"
