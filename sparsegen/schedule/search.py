"""Candidate schedules of a pattern: every head class in its cheapest ways, joined, cheapest first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from sparsegen.schedule import cost, key_boxes, naming, reach, shortfalls
from sparsegen.schedule.choose import choose
from sparsegen.schedule.cost import Call, Cost
from sparsegen.schedule.facts import ANALYSIS, ANY_LENGTH, Domain
from sparsegen.schedule.formula import dnf_text
from sparsegen.schedule.machine import H200, Machine, Sizes
from sparsegen.schedule.prepare import Draft, Plan, Rules, prepare
from sparsegen.schedule.tree import HeadClass, Schedule, Segment, Sweep
from sparsegen.schedule.ways import Way, Ways

TILE = (128, 64)  # BLOCK_M, BLOCK_N that schedules are compared at
LENGTH, SHORTEST, LONGEST = 32_768, 2_048, 65_536  # keys of the call that they are compared at
MOST_CANDIDATES = 3
WITHIN = 1.3  # times the best predicted time: the model is too rough to drop what is nearer
DOUBT = 1.05  # a way with other tilings must be predicted faster than runs by this much


@dataclass(frozen=True)
class Candidate:
    """A schedule and its predicted cost for the call that candidates are compared at.

    ``to_measure``: near enough to the best to be worth a measurement; False for the plain one that is only listed.
    """

    schedule: Schedule
    cost: Cost
    to_measure: bool = True


def candidates(
    rules: Rules,
    align: str = "bottom_right",
    lengths: Iterable[tuple[int, int]] = (),
    tile: tuple[int, int] = TILE,
    *,
    most_keys: int | None = None,
    sizes: Sizes | None = None,
    machine: Machine = H200,
) -> tuple[Candidate, ...]:
    """Schedules worth measuring, cheapest first; then the plain one if it is none of them.

    ``rules``: (inclusive head ranges, None = the rest; mask).  ``most_keys``: no call has more.
    ``sizes``: heads and dimensions that costs are predicted for, 8 heads of 128 where none are given.
    """
    lengths, sizes = tuple(lengths), sizes or Sizes()
    q_len, kv_len = typical_call(lengths, most_keys)
    call: Call = (kv_len - q_len if align == "bottom_right" else 0, q_len, 0, kv_len)
    with ANALYSIS:
        found = of_plan(prepare(rules, align, lengths), call, tile, sizes, machine)
    return _with_twins(found, call, tile, sizes, machine)


def _with_twins(
    found: tuple[Candidate, ...],
    call: Call,
    tile: tuple[int, int],
    sizes: Sizes,
    machine: Machine,
) -> tuple[Candidate, ...]:
    """And with boxes for key tiles (``key_boxes``), wherever these are near the best; each behind what it is made of."""
    _, q_len, k_start, kv_len = call
    near = [c for c in found if c.to_measure]
    for c in tuple(near):
        schedule = key_boxes.twin(c.schedule, call)
        if schedule is not None:
            seconds = cost.cost_of(schedule, q_len, kv_len, tile, sizes, machine, k_start)
            if seconds.seconds <= WITHIN * found[0].cost.seconds:
                near.append(Candidate(schedule, seconds))
    return (*sorted(near, key=_doubted), *(c for c in found if not c.to_measure))


def of_plan(
    plan: Plan,
    call: Call,
    tile: tuple[int, int],
    sizes: Sizes,
    machine: Machine = H200,
    dom: Domain = ANY_LENGTH,
) -> tuple[Candidate, ...]:
    """The same for prepared classes, compared at ``call``; ``dom``: positions that a call may have."""
    _, q_len, k_start, kv_len = call
    with ANALYSIS:
        ranked = [_ranked(c, call, tile, sizes, machine, dom) for c in plan.classes]
    notes = tuple(note for _, notes in ranked for note in notes)
    plan = replace(plan, notes=(*plan.notes, *notes))
    out: dict[str, Candidate] = {}
    for i in range(max((len(ways) for ways, _ in ranked), default=1)):
        ways = [ways[min(i, len(ways) - 1)] for ways, _ in ranked]
        schedule = _schedule(plan, ways)
        if schedule.label not in out:
            seconds = cost.cost_of(schedule, q_len, kv_len, tile, sizes, machine, k_start)
            out[schedule.label] = Candidate(schedule, seconds)
    return tuple(map(_with_shortfalls, _kept(tuple(sorted(out.values(), key=_doubted)))))


def _with_shortfalls(c: Candidate) -> Candidate:
    """With a note for every segment that was closed without a form for its length."""
    segments = (s for one in c.schedule.classes for w in one.sweeps for s in w.segments)
    found = dict.fromkeys(note for s in segments for note in shortfalls.of_segment(s))
    notes = (*c.schedule.notes, *found)
    return replace(c, schedule=replace(c.schedule, notes=notes))


def _doubted(c: Candidate) -> float:
    """Predicted seconds; runs are given the benefit of the model's doubt."""
    return c.cost.seconds * (1.0 if _is_plain(c.schedule) else DOUBT)


def typical_call(
    lengths: Sequence[tuple[int, int]], most_keys: int | None = None
) -> tuple[int, int]:
    """(q_len, kv_len) that schedules are compared at: the longest of the problem, neither tiny nor huge."""
    q_len, kv_len = max(lengths, key=lambda x: (x[1], x[0]), default=(LENGTH, LENGTH))
    square = q_len == kv_len
    kv_len = min(max(kv_len, SHORTEST), LONGEST, most_keys or LONGEST)
    return (kv_len if square else min(q_len, LONGEST)), kv_len


def _ranked(
    c: Draft, call: Call, tile: tuple[int, int], sizes: Sizes, machine: Machine, dom: Domain
) -> tuple[list[Way], list[str]]:
    """Ways of one class, cheapest first, and what was found."""
    chosen = choose(list(c.cubes), dom, call[2])
    ways = Ways(call, tile, sizes, machine, from_zero=dom.q_lo >= 0)
    plain = ways.plain(chosen.branches)
    others = ways.best(chosen.found)
    ranked = sorted(others.values(), key=lambda w: (w.seconds * DOUBT, w.label))
    ranked.append(plain)
    ranked.sort(key=lambda w: w.seconds * (1.0 if w is plain else DOUBT))
    notes = [str(chosen)]
    if ways.exhausted:
        notes.append("the search for tilings stopped at its budget: better ones may exist")
    return ranked, notes


def _kept(found: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """The first few near the best; the plain one always, at its place."""
    best = found[0].cost.seconds
    near = [c for c in found if c.cost.seconds <= WITHIN * best or c is found[0]]
    kept = near[:MOST_CANDIDATES]
    plain = [c for c in found if c not in kept and _is_plain(c.schedule)]
    return (*kept, *(replace(c, to_measure=False) for c in plain[:1]))


def _is_plain(s: Schedule) -> bool:
    sweeps = [w for c in s.classes for w in c.sweeps]
    return (
        len(sweeps) == len(s.classes)
        and not any(w.tiling.q_cuts for w in sweeps)
        and not any(x.tiling.k_cuts for w in sweeps for x in w.segments)
    )


def _schedule(plan: Plan, ways: Sequence[Way]) -> Schedule:
    classes = tuple(
        HeadClass(c.heads, _named(w.sweeps), dnf_text(c.cubes))
        for c, w in zip(plan.classes, ways, strict=True)
    )
    for c in classes:
        _check(c)
    limits = [c.max_position for c in plan.classes if c.max_position is not None]
    floors = [c.min_position for c in plan.classes if c.min_position is not None]
    segments = [s for c in classes for w in c.sweeps for s in w.segments]
    return Schedule(
        align=plan.align,
        classes=classes,
        position_limit=reach.position_limit(segments),
        max_position=min(limits, default=None),
        min_position=max(floors, default=None),
        notes=plan.notes,
        label=" / ".join(dict.fromkeys(w.label for w in ways)) or "runs",
    )


def _named(sweeps: tuple[Sweep, ...]) -> tuple[Sweep, ...]:
    """Segments named over all sweeps of a class, and in order within each."""
    every = [s for w in sweeps for s in w.segments]
    named = naming.ordered(tuple(every))
    return tuple(
        replace(w, segments=tuple(s for s in named if any(_same(s, x) for x in w.segments)))
        for w in sweeps
    )


def _same(a: Segment, b: Segment) -> bool:
    return a.branch == b.branch and a.tiling == b.tiling


def _check(c: HeadClass) -> None:
    """Cheap structural checks; a failure is a fault of the search or of the closed forms."""
    first = c.sweeps[0]
    assert first.rows is None and not first.split, "the first sweep covers all rows"
    for sweep in c.sweeps:
        assert not sweep.split or (sweep.rows and not sweep.tiling.q_cuts), "split rows are runs"
        for s in sweep.segments:
            kinds = [x.kind for x in s.spans]
            assert s.tiling.q_cuts == sweep.tiling.q_cuts, s.branch
            assert s.tiling.extent == sweep.tiling.extent, s.branch
            assert ("full" in kinds) == (s.full_lo is not None) == (s.full_hi is not None), s.branch
            assert "whole" in kinds or "tail" in kinds, f"{s.branch} leaves keys out"
            assert not s.guards or "full" in kinds, f"{s.branch}: guards without a full part"
