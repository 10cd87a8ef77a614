"""Small decision trees over the features of problems: a question only where one configuration does not do for all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparsegen.tune.features import MEANING, Feature

if TYPE_CHECKING:
    from sparsegen.codegen.knobs import LaunchConfig

# The name of a configuration; or feature, bound, where it is at most that (where it holds; where it is that text), where not.
Tree = str | tuple[str, float | bool | str, "Tree", "Tree"]
Costs = Mapping[str, Mapping[str, float]]  # loss by problem and name of a configuration


def grow(
    here: Sequence[str],
    names: Sequence[str],
    costs: Mapping[str, Mapping[str, float]],
    features: Mapping[str, Mapping[str, Feature]],
    limit: float,
    depth: int,
) -> Tree:
    """A tree of at most ``depth`` questions: one more is asked only where one configuration does not do for all."""
    leaf, faults, total = _leaf(here, names, costs, limit)
    if not faults or not depth:
        return leaf
    best: tuple[tuple[float, ...], Tree] = ((float(faults), total), leaf)
    name: str
    bound: float | bool | str
    for name, bound in _questions(here, features):
        yes = [n for n in here if _answer(features[n][name], bound)]
        no = [n for n in here if n not in yes]
        (_, f1, t1), (_, f2, t2) = (_leaf(part, names, costs, limit) for part in (yes, no))
        if (float(f1 + f2), t1 + t2) < best[0]:
            best = (float(f1 + f2), t1 + t2), (name, bound, leaf, leaf)
            cut = yes, no
    if isinstance(best[1], str):
        return leaf
    name, bound, _, _ = best[1]
    parts = [grow(part, names, costs, features, limit, depth - 1) for part in cut]
    return parts[0] if parts[0] == parts[1] else (name, bound, parts[0], parts[1])


def _leaf(
    here: Sequence[str],
    names: Sequence[str],
    costs: Mapping[str, Mapping[str, float]],
    limit: float,
) -> tuple[str, int, float]:
    """(the configuration that is above the limit least often, how often, its losses in all; 1 for one unmeasured)."""

    def rank(letter: str) -> tuple[int, float]:
        lost = [costs[n][letter] for n in here]
        return sum(x >= limit for x in lost), sum(min(x, 1.0) for x in lost)

    letter = min(names, key=rank)
    return (letter, *rank(letter))


def _questions(
    here: Sequence[str], features: Mapping[str, Mapping[str, Feature]]
) -> Iterator[tuple[str, float | bool]]:
    """Bounds half way (in ratio) between neighbouring values, rounded to two digits where they still part them."""
    for name in MEANING:
        values = sorted({features[n][name] for n in here})  # type: ignore[type-var]
        if values and isinstance(values[0], str):
            continue  # a pattern's name: ``by_pattern`` asks for it
        if values and isinstance(values[0], bool):
            if len(values) == 2:
                yield name, True
            continue
        for low, high in itertools.pairwise(map(float, values)):  # type: ignore[arg-type]
            middle = (low * high) ** 0.5 if low > 0 else (low + high) / 2
            short = float(f"{middle:.2g}")
            bound = short if low <= short < high else low
            yield name, int(bound) if bound == int(bound) else bound


def _answer(value: Feature, bound: float | bool | str) -> bool:
    if isinstance(bound, str):
        return value == bound
    return bool(value) if bound is True else value <= bound  # type: ignore[operator]


def follow(tree: Tree, features: Mapping[str, Feature]) -> str:
    """The name at the end of a tree's questions."""
    while not isinstance(tree, str):
        name, bound, yes, no = tree
        tree = yes if _answer(features[name], bound) else no
    return tree


def size(tree: Tree) -> float:
    """How many questions a tree has."""
    return 0.0 if isinstance(tree, str) else 1.0 + size(tree[2]) + size(tree[3])


def code(tree: Tree, indent: str = "", word: str = "if") -> str:
    """A tree as the text that ``rule`` reads; questions for one text after the other stand side by side."""
    if isinstance(tree, str):
        return f"{indent}return {tree}\n"
    name, bound, yes, no = tree
    test = name if bound is True else f"{name} <= {bound}"
    if isinstance(bound, str):
        test = f'{name} == "{bound}"'
    inner = indent + "    "
    asked = f"{indent}{word} {test}:\n{code(yes, inner)}"
    if isinstance(bound, str) and not isinstance(no, str) and isinstance(no[1], str):
        return asked + code(no, indent, "elif")
    return f"{asked}{indent}else:\n{code(no, inner)}"


@dataclass(frozen=True)
class Group:
    """Problems of one pattern that get one configuration: one that serves them all, or what loses least."""

    problems: tuple[str, ...]


# A group; or a question as of a tree.
Groups = Group | tuple[str, float | bool | str, "Groups", "Groups"]


def grouped(
    here: Sequence[str],
    losses: Mapping[str, Mapping[LaunchConfig, float]],
    features: Mapping[str, Mapping[str, Feature]],
    limit: float,
) -> Groups:
    """The problems of a pattern in one group, or in groups on the two sides of questions where no configuration serves all.

    A question has two problems on each side: one that a single problem asks for says more of that problem than of others.
    It may have one where configurations that serve some were not measured at others, since a gap says nothing.
    ``losses``: of the configurations that were measured at a problem, one at least of them below the limit.
    """

    def served(part: Sequence[str]) -> tuple[bool, float]:
        """Whether no configuration is below the limit at all of them, and the least that has to be lost somewhere."""
        every = set.intersection(*(set(losses[n]) for n in part))
        worst = min((max(losses[n][c] for n in part) for c in every), default=float("inf"))
        return worst >= limit, min(worst, 1.0)

    if not served(here)[0]:
        return Group(tuple(here))
    able = {c for n in here for c, lost in losses[n].items() if lost < limit}
    fewest = 2 if all(able <= losses[n].keys() for n in here) else 1
    best: tuple[tuple[float, ...], str, float | bool] | None = None
    for name, bound in _questions(here, features):
        yes = [n for n in here if _answer(features[n][name], bound)]
        no = [n for n in here if n not in yes]
        if min(len(yes), len(no)) < fewest:
            continue
        ranks = served(yes), served(no)
        # sides that need no further question, then even ones, then those that lose least
        rank = (sum(r[0] for r in ranks), max(len(yes), len(no)), sum(r[1] for r in ranks))
        if best is None or rank < best[0]:
            best, cut = (rank, name, bound), (yes, no)
    if best is None:
        return Group(tuple(here))
    parts = [grouped(part, losses, features, limit) for part in cut]
    if any(served(g.problems)[0] for part in parts for g in all_groups(part)):
        return Group(tuple(here))  # and no question that leaves some above the limit
    return best[1], best[2], parts[0], parts[1]


def all_groups(tree: Groups) -> Iterator[Group]:
    """The groups at the ends of questions."""
    if isinstance(tree, Group):
        yield tree
    else:
        yield from all_groups(tree[2])
        yield from all_groups(tree[3])


def named(tree: Groups, costs: Costs, names: Sequence[str], limit: float) -> Tree:
    """The tree with the configuration that serves each group and loses least there in all."""
    if not isinstance(tree, Group):
        yes, no = (named(part, costs, names, limit) for part in tree[2:])
        return yes if yes == no else (tree[0], tree[1], yes, no)
    return _leaf(tree.problems, names, costs, limit)[0]


def by_pattern(
    own: Mapping[str, Tree], general: Tree, features: Mapping[str, Mapping[str, Feature]]
) -> Tree:
    """``general`` behind the trees of single patterns, of those that it would answer otherwise.

    ``features``: of all problems that are known, measured or not.
    """
    tree = general
    for pattern in sorted(own, reverse=True):
        mine = [f for f in features.values() if f["pattern"] == pattern]
        if any(follow(own[pattern], f) != follow(general, f) for f in mine):
            tree = ("pattern", pattern, own[pattern], tree)
    return tree


def leaves(tree: Tree) -> set[str]:
    """The names that a tree can give."""
    return {tree} if isinstance(tree, str) else leaves(tree[2]) | leaves(tree[3])
