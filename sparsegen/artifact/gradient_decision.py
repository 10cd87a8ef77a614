"""What the manifest says of an artifact of gradients: schedules, configurations, variants and when each may be launched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

from sparsegen.artifact.build import Request
from sparsegen.artifact.compiler import Choice
from sparsegen.artifact.gradient_texts import Both, module_of
from sparsegen.artifact.manifest import LEVELS, Considered, Decision, Variant
from sparsegen.artifact.rendering import SCHEDULE, considered
from sparsegen.codegen.backward_planner import FUSED, QUERIES
from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.tune import gradient_designs as designs

if TYPE_CHECKING:
    from sparsegen.launch import Binary


def decision_of(
    request: Request,
    both: Both,
    chosen: Mapping[str, Choice],
    kernels: Mapping[str, LaunchConfig],
    binaries: Mapping[str, Binary],
    why: str,
) -> Decision:
    """``why``: the design was chosen, "" where there was no choice."""
    candidates, predicted_for = _predicted(both)
    timed = [c for part, c in chosen.items() if FUSED not in chosen or part == FUSED]
    steps = {c.how for c in chosen.values()}
    said = "; ".join(f"{part}: {c.how}" for part, c in chosen.items())
    first, *others = chosen.values()
    return Decision(
        label=both.label,
        candidates=candidates,
        predicted_for=predicted_for,
        config=first.config,
        kernels=kernels,
        chosen_by=(first.how if len(steps) == 1 else said) + (f"; design: {why}" if why else ""),
        # the lower of the two: a study that was kept out reached nothing
        tune=min((c.level for c in chosen.values()), key=LEVELS.index),
        variants=tuple(
            Variant(
                name=name,
                guard=_guard(kernel := name.split("/")[0], b.variant, kernels[kernel]),
                registers=b.registers,
                spill_bytes=b.spill_bytes,
                shared_bytes=b.shared_bytes,
                files=tuple(f"{name}/{file}" for file in b.files),
            )
            for name, b in binaries.items()
        ),
        schedule=SCHEDULE,
        source=module_of(QUERIES),
        problem={f.name: getattr(request.problem, f.name) for f in fields(request.problem)},
        time_us=_total(c.time_us for c in timed),
        baseline_us=_total(c.baseline_us for c in timed),
        measured="; ".join(f"{part}: {c.measured}" for part, c in chosen.items() if c.measured),
    )


def _total(times: Iterable[float | None]) -> float | None:
    """The parts that give all gradients, each with the launch that prepares; None where one was not measured."""
    found = list(times)
    known = [t for t in found if t is not None]
    return sum(known) if len(known) == len(found) else None


def _guard(name: str, variant: str, config: LaunchConfig) -> str:
    """When a variant of a kernel may be launched; descriptors are the warp-specialised kernel's alone."""
    from sparsegen.launch import signature as sig
    from sparsegen.launch.backward_boxes import FUSED_GUARD, GUARD, STORED_GUARD
    from sparsegen.launch.kernel import VARIANT_GUARDS

    plain = VARIANT_GUARDS[sig.POINTERS if variant == sig.FAST else variant]
    if variant != sig.FAST or not sig.by_boxes(config):
        return plain
    if name == FUSED:
        return f"{plain}; {FUSED_GUARD}"
    if name in designs.STORES:
        return f"{plain}; {STORED_GUARD}"
    return f"{plain}; with descriptors also {GUARD}"


def _predicted(both: Both) -> tuple[tuple[Considered, ...], str]:
    """What the schedules were chosen by: the time of a forward pass over each, added up."""
    used = (both.queries, both.keys) if both.fused is None else (both.fused,)
    found = [considered((one,), {}) for one in used]
    total = round(sum(one.predicted_ms for (one,), _ in found), 4)
    listed = (Considered(both.label, total, None),)
    return listed, f"a forward pass over each schedule, {found[0][1]}"
