"""``sparsegen bench``: patterns x lengths x contenders, each result compared before its time is taken."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from sparsegen.bench import ours, roofline
from sparsegen.bench.case import Case, Inputs
from sparsegen.bench.interleaved import in_turns
from sparsegen.bench.peers import Contender, Selection, check_names, contenders, select
from sparsegen.bench.results import OURS, LeftOut, Measured, Refused, Results, Row
from sparsegen.bench.roofline import Work
from sparsegen.errors import SparsegenError, ToolchainError, UnsupportedError
from sparsegen.tune.measure import PUBLISHED, Turns

if TYPE_CHECKING:
    from sparsegen.bench.clock import Device
    from sparsegen.bench.ours import Built
    from sparsegen.spec.gpu import Gpu

AGREE = 0.02  # relative L2 error between two right results in bfloat16 is 0.002 to 0.006
Lengths = tuple[int, int]
Progress = Callable[[int, int, str], None]
Build = Callable[[Case, ours.Say], "Built"]
Keep = Callable[[Results], None]


class WrongResult(Exception):
    """Our own kernel is not right; the case is left out and the run fails."""


def bench(
    patterns: Sequence[str] | None = None,
    lengths: Sequence[Lengths] | None = None,
    *,
    against: Sequence[str] | None = None,
    tune: str = "off",
    turns: Turns = PUBLISHED,
    progress: Progress | None = None,
    keep: Keep | None = None,
) -> Results:
    """Measure patterns (files or shipped names; None: all shipped) on the GPU here, beside their peers.

    Args:
        lengths: (q_len, kv_len) of every pattern; None: those of each pattern's problem.
        against: names of peers, see ``peers.select``.
        tune: ``off`` takes the best configuration on record, ``quick`` measures for two minutes a case first.
        keep: is given the results so far after every case.

    A case that cannot be measured is in ``left_out`` with its reason.  Raises ``ToolchainError`` where there is no GPU,
    ``SpecError`` and ``InputError`` for patterns and peers that do not exist.
    """
    check_names(against)
    cases, left_out = planned(patterns, lengths)
    gpu = _gpu_here()
    from sparsegen.bench.clock import CudaDevice

    selection, device = select(against), CudaDevice(gpu.l2_bytes)
    build = lambda case, say: ours.build(case, gpu, tune, say)
    empty = replace(_empty(gpu, turns, device, selection), left_out=tuple(left_out))
    return measured(empty, cases, selection, device, build, turns, progress, keep)


def planned(
    patterns: Sequence[str] | None, lengths: Sequence[Lengths] | None
) -> tuple[list[Case], list[LeftOut]]:
    """The cases asked for, and those that cannot be: run-time data, or keys beyond a grid."""
    from sparsegen.spec.pattern import Pattern
    from sparsegen.spec.problem import Problem
    from sparsegen.spec.shipped import shipped_patterns

    cases, left_out = [], []
    for name in patterns or shipped_patterns():
        pattern = Pattern.from_yaml(name)
        for pair in lengths or (pattern.problem or Problem()).lengths:
            try:
                if not pattern.position_only:
                    needs = ", ".join(pattern.runtime_names) or "scores of blocks"
                    raise UnsupportedError(
                        f"its mask needs data at run time ({needs}): no kernel yet"
                    )
                cases.append(Case.of(pattern, pair))
            except SparsegenError as error:
                left_out.append(LeftOut(pattern.name, size_of(pair), str(error)))
    return cases, left_out


def measured(
    results: Results,
    cases: Sequence[Case],
    selection: Selection,
    device: Device,
    build: Build,
    turns: Turns,
    progress: Progress | None = None,
    keep: Keep | None = None,
) -> Results:
    """``results`` with all cases added, one after the other."""
    tell = progress or (lambda done, total, message: None)
    if keep is not None:
        keep(results)
    for number, case in enumerate(cases):
        name, at = case.pattern.name, size_of((case.q_len, case.kv_len))
        tell(number, len(cases), f"{name} {at}")
        say = partial(_said, tell, number, len(cases), f"{name} {at}")
        try:
            built = build(case, say)
            one = measure_case(case, built, selection, device, turns)
            results = replace(results, cases=(*results.cases, one))
        except (SparsegenError, WrongResult) as error:
            lost = LeftOut(name, at, str(error), wrong=isinstance(error, WrongResult))
            results = replace(results, left_out=(*results.left_out, lost))
        device.release()
        if keep is not None:
            keep(results)
    tell(len(cases), len(cases), "done")
    return results


def _said(tell: Progress, done: int, total: int, where: str, message: str) -> None:
    tell(done, total, f"{where}: {message}")


def measure_case(
    case: Case, built: Built, selection: Selection, device: Device, turns: Turns
) -> Measured:
    """Check and time our kernel and every peer that gives the same result.

    Raises:
        WrongResult: ours is not within the tolerance of the float64 reference.
    """
    import torch

    refused: list[Refused] = []
    inputs = Inputs.of(case, device.name)
    refuse = lambda name, reason: refused.append(Refused(name, reason))
    own = lambda: built.attend(inputs.q, inputs.k, inputs.v, **inputs.extras)
    with torch.no_grad():
        out = own()
        if reason := ours.wrong(case, inputs, out):
            raise WrongResult(f"wrong result: {reason}")
        found = contenders(case, inputs, selection.peers, refuse)
        agreed = {OURS: (Contender(OURS, own), 0.0)}
        for one in found:
            if (error := _difference(one, out, device, refused)) is not None:
                agreed[one.name] = (one, error)
        del out
        rows = tuple(_rows(agreed, device, turns))
    cells = ours.count(case, built.schedule, built.tile)
    work = Work.of(case.problem, cells.visible)
    p = case.problem
    return Measured(
        pattern=case.pattern.name,
        problem=case.size,
        q_len=case.q_len,
        kv_len=case.kv_len,
        schedule=built.schedule.label,
        config=built.config,
        chosen_by=built.chosen_by,
        cells=cells.visible,
        cells_exact=cells.exact,
        all_cells=p.batch * p.heads * case.q_len * case.kv_len,
        computed_cells=cells.computed,
        flop=work.flop,
        bytes=work.bytes,
        rows=rows,
        refused=tuple(refused),
    )


def _difference(one: Contender, out: Any, device: Device, refused: list[Refused]) -> float | None:
    """The relative error of a peer's result against ours; None, and a refusal, where it fails or disagrees."""
    try:
        other = one.launch()
        device.wait()
        if other.shape != out.shape:
            refused.append(Refused(one.name, f"gives {tuple(other.shape)}, not {tuple(out.shape)}"))
            return None
        apart = float((out.float() - other.float()).norm() / out.float().norm().clamp(min=1e-30))
    except (
        Exception
    ) as error:  # whatever a peer's compiler raises at its first call: said, not ours
        refused.append(Refused(one.name, f"{type(error).__name__}: {str(error)[:200]}"))
        return None
    if apart <= AGREE:  # NaN is not
        return apart
    refused.append(Refused(one.name, f"disagrees, relative error {apart:.2g}: not timed", apart))
    return None


def _rows(
    agreed: dict[str, tuple[Contender, float]], device: Device, turns: Turns
) -> Iterator[Row]:
    launches = {name: one.launch for name, (one, _) in agreed.items()}
    exposed = {name: device.exposed(launch) for name, launch in launches.items()}
    timed = in_turns(launches, device.clock, turns, sustained=False)
    for name, (one, difference) in agreed.items():
        us = timed[name].us
        yield Row(
            contender=name,
            us=us,
            spread_us=timed[name].spread_us,
            sustained_us=device.sustained_us(one.launch),
            host_us=device.host_us(one.launch, us),
            peak_bytes=device.peak_bytes(one.launch) + one.setup_bytes,
            setup_ms=one.setup_ms,
            setup_bytes=one.setup_bytes,
            difference=difference,
            host_in_time=exposed[name],
        )


def size_of(lengths: Lengths) -> str:
    """``4096``, or ``1x4096`` where queries and keys differ."""
    return str(lengths[0]) if lengths[0] == lengths[1] else f"{lengths[0]}x{lengths[1]}"


def _gpu_here() -> Gpu:
    from sparsegen.spec.gpu import current_gpu

    gpu = current_gpu()
    if gpu is None:
        raise ToolchainError("bench measures on a GPU that torch can use, and there is none here")
    return gpu


def _empty(gpu: Gpu, turns: Turns, device: Device, selection: Selection) -> Results:
    from sparsegen.tune.winners import current_versions

    return Results(
        gpu=gpu.name,
        versions={**current_versions(), **_peer_versions(selection)},
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        protocol=(
            f"{turns.rounds} rounds in turns, {turns.idle_s:g} s idle, {turns.warm_up_ms:g} ms warm-up, "
            f"{turns.measured_ms:g} ms measured a turn, medians, L2 flushed"
        ),
        roof=roofline.measure(device, turns),
        missing=selection.missing,
    )


def _peer_versions(selection: Selection) -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name, package in (("fa4", "flash-attn-4"), ("flashinfer", "flashinfer-python")):
        if any(p.name == name for p in selection.peers):
            try:
                found[package] = version(package)
            except PackageNotFoundError:
                found[package] = "unknown"
    return found
