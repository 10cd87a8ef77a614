"""Small decision trees over the features of problems: a question only where one configuration does not do for all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from sparsegen.tune.features import MEANING, Feature

# The name of a configuration; or feature, bound, where it is at most that (where it holds), where not.
Tree = str | tuple[str, float | bool, "Tree", "Tree"]
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
        if values and isinstance(values[0], bool):
            if len(values) == 2:
                yield name, True
            continue
        for low, high in itertools.pairwise(map(float, values)):  # type: ignore[arg-type]
            middle = (low * high) ** 0.5 if low > 0 else (low + high) / 2
            short = float(f"{middle:.2g}")
            bound = short if low <= short < high else low
            yield name, int(bound) if bound == int(bound) else bound


def _answer(value: Feature, bound: float | bool) -> bool:
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


def code(tree: Tree, indent: str = "") -> str:
    """A tree as the text that ``rule`` reads."""
    if isinstance(tree, str):
        return f"{indent}return {tree}\n"
    name, bound, yes, no = tree
    test = name if bound is True else f"{name} <= {bound}"
    inner = indent + "    "
    return f"{indent}if {test}:\n{code(yes, inner)}{indent}else:\n{code(no, inner)}"


def leaves(tree: Tree) -> set[str]:
    """The names that a tree can give."""
    return {tree} if isinstance(tree, str) else leaves(tree[2]) | leaves(tree[3])
