"""Few configurations that lose little anywhere: a set cover of measured problems, and the rule that chooses among them.

A configuration serves a problem if it was measured there, was right, and takes at most ``limit`` longer than the best that
was measured.  What was not measured serves nothing: no time is ever guessed.  The problems of a pattern are one group, or as few as one
configuration each serves, with two thirds of the limit; the set is the smallest that serves every group of the training part.  The rule is a small tree over features
(``features``) for any pattern, behind those of patterns that it would answer otherwise; both are judged on problems held out.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from string import ascii_uppercase

from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.errors import TuneError
from sparsegen.tune.features import Feature
from sparsegen.tune.recording import Recorded, Recording
from sparsegen.tune.rule import Rule
from sparsegen.tune.tree import (
    Tree,
    all_groups,
    by_pattern,
    code,
    follow,
    grouped,
    grow,
    leaves,
    named,
    size,
)

LIMIT = 0.03
HELD_OUT = 1 / 3
_AIM = 2 / 3  # of the limit, for problems of the training part: others like them lose more
_DEPTH = 4  # questions in a row
_SETS = 200  # smallest sets that are tried for the one with the best rule
_WIDER = 2  # sets of so many more configurations, where no rule tells those of the smallest apart

Times = Mapping[str, Mapping[LaunchConfig, float]]  # µs by problem and configuration


@dataclass(frozen=True)
class Loss:
    """One problem under the rule: shares of the best time, None where the chosen configuration was not measured there."""

    problem: str
    held_out: bool
    chosen: str
    rule: float | None
    kept: float | None  # of the best of the kept ones: what a perfect rule would lose


@dataclass(frozen=True)
class Cover:
    """The result: kept configurations by name, the rule, what every problem loses, and pairs without a time."""

    rule: Rule
    losses: tuple[Loss, ...]
    limit: float
    measured: int
    pairs: int
    missing: Mapping[str, int] = field(default_factory=dict)

    def worst(self, held_out: bool) -> float | None:
        """The largest loss in one part; None if one of its problems has an unknown loss."""
        found = [one.rule for one in self.losses if one.held_out is held_out]
        known = [loss for loss in found if loss is not None]
        return max(known, default=0.0) if len(known) == len(found) else None

    @property
    def ok(self) -> bool:
        """Whether every problem, held out or not, is known to lose less than the limit."""
        return all(one.rule is not None and one.rule < self.limit for one in self.losses)


def cover(recording: Recording, limit: float = LIMIT, held_out: float = HELD_OUT) -> Cover:
    """The fewest configurations for the problems of a recording, and the rule.

    Problems that a run had no time for, without a single trial, are no part of it.

    Args:
        limit: the share of the best time that may be lost, above 0.
        held_out: the share of problems, at least, that the choice does not see.

    Raises:
        TuneError: nothing was measured of a problem, there are too few to hold any out, or more configurations are
            needed than have names.
    """
    if not limit > 0:
        raise TuneError(f"the limit must be above 0, got {limit:g}: something is always lost")
    times = {name: recording.times(name) for name in recording.problems}
    begun = {name: p for name, p in recording.problems.items() if recording.trials[name]}
    problems = {name: p for name, p in begun.items() if p.features}
    empty = [name for name in problems if not times[name]]
    if empty:
        raise TuneError(f"nothing was measured of {empty[0]} (and {len(empty) - 1} more)")
    apart = split(list(problems.values()), held_out)
    train = [name for name in problems if name not in apart]
    if not train or not apart:
        raise TuneError(f"{len(problems)} problems are too few to hold {held_out:.0%} of them out")
    features = {name: {**p.features, "pattern": p.pattern} for name, p in problems.items()}
    chosen, tree = _best(train, times, features, limit * _AIM)
    names = {config: _letter(i) for i, config in enumerate(chosen)}
    rule = _rule(recording, list(problems.values()), names, tree, {})
    losses = tuple(
        _loss(name, name in apart, rule, features[name], times[name]) for name in problems
    )
    configs = {c for name in problems for c in recording.trials[name]}
    every = [recording.trials[n].get(c) for n in problems for c in configs]
    why = ["not tried" if e is None else e.kind for e in every if e is None or e.time_us is None]
    found = Cover(
        rule,
        losses,
        limit,
        len(every) - len(why),
        len(every),
        {kind: why.count(kind) for kind in dict.fromkeys(sorted(why))},
    )
    stated = {
        "limit": limit,
        "training": {"problems": len(train), "worst": _rounded(found.worst(False))},
        "held_out": {"problems": len(apart), "worst": _rounded(found.worst(True))},
        "without_a_time": dict(found.missing),
    }
    rule = _rule(recording, list(problems.values()), names, tree, stated)
    return Cover(rule, losses, limit, found.measured, found.pairs, found.missing)


def split(problems: Sequence[Recorded], share: float) -> set[str]:
    """The names that are held out: of every pattern at least ``share``, but never all of it if there are enough.

    By a digest of the name, so that the choice is nobody's, and the same at every run.
    """
    by_pattern: dict[str, list[str]] = {}
    for p in problems:
        by_pattern.setdefault(p.pattern, []).append(p.name)
    apart: set[str] = set()
    for names in by_pattern.values():
        names.sort(key=_drawn)
        apart.update(names[: min(math.ceil(len(names) * share), len(names) - 1)])
    # Patterns of one problem, until there are enough: of those the choice has seen nothing at all.
    single = sorted(
        (n for names in by_pattern.values() if len(names) == 1 for n in names), key=_drawn
    )
    return apart.union(single[: max(math.ceil(len(problems) * share) - len(apart), 0)])


def _drawn(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def fewest(
    groups: Sequence[Sequence[str]], times: Times, limit: float
) -> Iterator[tuple[LaunchConfig, ...]]:
    """Sets that serve every group of problems: all of the smallest size, then some that are larger by one and by two.

    Exact: a set must serve the group that fewest can serve, so only those are tried next, size after size.
    """
    serves = _served(groups, times, limit)
    everything = (1 << len(groups)) - 1
    largest: int | None = None
    size = 0
    seen: set[frozenset[LaunchConfig]] = set()
    while largest is None or size < largest:
        size += 1
        for chosen in _covers((), everything, size, serves):
            largest = largest or size + _WIDER
            if frozenset(chosen) not in seen:
                seen.add(frozenset(chosen))
                yield tuple(sorted(chosen, key=str))


def _covers(
    chosen: tuple[LaunchConfig, ...], left: int, room: int, serves: Mapping[LaunchConfig, int]
) -> Iterator[tuple[LaunchConfig, ...]]:
    if not left:
        yield chosen
        return
    if not room:
        return
    bits = [1 << i for i in range(left.bit_length()) if left >> i & 1]
    hardest = min(bits, key=lambda bit: sum(bool(mask & bit) for mask in serves.values()))
    able = [c for c, mask in serves.items() if mask & hardest]
    for config in sorted(able, key=lambda c: (-(serves[c] & left).bit_count(), str(c))):
        yield from _covers((*chosen, config), left & ~serves[config], room - 1, serves)


def _served(groups: Sequence[Sequence[str]], times: Times, limit: float) -> dict[LaunchConfig, int]:
    """A bit for each group that a configuration serves; one that none serves has a bit of those that lose least there."""
    found: dict[LaunchConfig, int] = {}
    for bit, names in enumerate(groups):
        losses = [_losses(times[n]) for n in names]
        worst = {c: max(x[c] for x in losses) for c in set.intersection(*map(set, losses))}
        most = max(limit, min(worst.values()) * (1.0 + 1e-9))
        for config, lost in worst.items():
            if lost < most:
                found[config] = found.get(config, 0) | 1 << bit
    return found


def _losses(times: Mapping[LaunchConfig, float]) -> dict[LaunchConfig, float]:
    """What each configuration loses, as a share of the best time."""
    best = min(times.values())
    return {config: us / best - 1.0 for config, us in times.items()}


def _best(
    train: Sequence[str], times: Times, features: Mapping[str, Mapping[str, Feature]], limit: float
) -> tuple[tuple[LaunchConfig, ...], Tree]:
    """The set, and the tree over it, that leaves the fewest training problems above the limit.

    Among those the smaller set, then the one with the better and the simpler tree for any pattern, then the smaller loss in all.
    """
    patterns: dict[str, list[str]] = {}
    for name in train:
        patterns.setdefault(str(features[name]["pattern"]), []).append(name)
    losses = {name: _losses(times[name]) for name in train}
    parts = {p: grouped(names, losses, features, limit) for p, names in patterns.items()}
    groups: list[Sequence[str]] = []
    for group in (g.problems for tree in parts.values() for g in all_groups(tree)):
        together = set.intersection(*(set(losses[n]) for n in group))
        groups += [group] if together else [(n,) for n in group]
    best: tuple[tuple[float, ...], tuple[LaunchConfig, ...], Tree] | None = None
    tried: dict[int, int] = {}
    for chosen in fewest(groups, times, limit):
        if (
            best is not None
            and best[0][:3] == (0.0, len(best[1]), 0.0)
            and len(chosen) > len(best[1])
        ):
            break  # the smallest sets have a rule without fault
        tried[len(chosen)] = tried.get(len(chosen), 0) + 1
        if tried[len(chosen)] > _SETS:
            break
        costs = {n: _costs(times[n], chosen) for n in train}
        names = [_letter(i) for i in range(len(chosen))]
        general = grow(train, names, costs, features, limit, _DEPTH)
        own = {p: named(tree, costs, names, limit) for p, tree in parts.items()}
        tree = by_pattern(own, general, features)
        lost, any_ = ([costs[n][follow(t, features[n])] for n in train] for t in (tree, general))
        faults = [float(sum(x >= limit for x in some)) for some in (lost, any_)]
        rank = (faults[0], float(len(chosen)), faults[1], size(tree), sum(lost))
        if best is None or rank < best[0]:
            best = rank, chosen, tree
    assert best is not None  # each problem's own best serves it
    return best[1], best[2]


def _costs(times: Mapping[LaunchConfig, float], chosen: Sequence[LaunchConfig]) -> dict[str, float]:
    """Loss by name of a kept configuration; infinite where it was not measured."""
    best = min(times.values())
    return {
        _letter(i): times[c] / best - 1.0 if c in times else float("inf")
        for i, c in enumerate(chosen)
    }


def _letter(number: int) -> str:
    if number >= len(ascii_uppercase):
        raise TuneError(
            f"more than {len(ascii_uppercase)} configurations are needed: allow more loss with --limit"
        )
    return ascii_uppercase[number]


def _rule(
    recording: Recording,
    problems: Sequence[Recorded],
    names: Mapping[LaunchConfig, str],
    tree: Tree,
    losses: Mapping[str, object],
) -> Rule:
    origin = recording.origin
    of = [p.problem for p in problems]
    fields = ("dtype", "head_dim", "value_dim")
    used = {n for n in names.values() if n in leaves(tree)}
    return Rule(
        gpu=origin.gpu,
        template=origin.template,
        template_digest=origin.template_digest,
        code=code(tree).rstrip("\n"),
        configurations={n: c for c, n in names.items() if n in used},
        measured={name: sorted({getattr(p, name) for p in of}) for name in fields},
        losses=losses,
        versions=origin.versions,
        date=origin.date,
    )


def _loss(
    name: str,
    held_out: bool,
    rule: Rule,
    features: Mapping[str, Feature],
    times: Mapping[LaunchConfig, float],
) -> Loss:
    best = min(times.values())
    chosen = rule.choose(features)
    us = times.get(rule.configurations[chosen])
    kept = [times[c] for c in rule.configurations.values() if c in times]
    return Loss(
        name,
        held_out,
        chosen,
        None if us is None else us / best - 1.0,
        min(kept) / best - 1.0 if kept else None,
    )


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 4)
