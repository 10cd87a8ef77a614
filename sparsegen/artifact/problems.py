"""Other problems than the one a pattern states: a file of changes, each applied to every pattern of a fleet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsegen.errors import InputError, SpecError

if TYPE_CHECKING:
    from sparsegen.spec.pattern import Pattern
    from sparsegen.spec.problem import Problem

Changes = Mapping[str, Any]
MOST_BYTES = 1 << 20


def read_problems(path: str | Path) -> list[Changes]:
    """A YAML list of mappings, each with the fields of ``problem:`` that differ; ``{}`` is what each pattern states.

    Raises:
        InputError: it cannot be read or is no such list, or a field or an entry stands there twice.
    """
    from sparsegen.spec.text_file import read_text
    from sparsegen.spec.yaml_tree import read_tree

    text = read_text(path, MOST_BYTES)
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    tree = read_tree(text if any(lines) else "[]", str(path))
    if tree.mistakes:
        more = f" (and {len(tree.mistakes) - 1} more)" if len(tree.mistakes) > 1 else ""
        raise InputError(f"{tree.mistakes[0]}{more}")
    data = tree.data
    if not isinstance(data, list) or not data or not all(isinstance(one, dict) for one in data):
        raise InputError(f"{path}: must be a list of problems, as - {{dtype: float16, heads: 64}}")
    for number, one in enumerate(data, 1):
        if data.index(one) != number - 1:
            raise InputError(f"{path}: problem {number} is problem {data.index(one) + 1} again")
    return data


def changed(pattern: Pattern, changes: Changes) -> Problem:
    """The pattern's own problem with some fields replaced; what follows from others (value_dim, kv_heads) follows anew.

    Raises:
        InputError: an unknown field, or values that do not fit.
    """
    from sparsegen.spec.problem import Problem

    own = {} if pattern.problem is None else pattern.problem.to_data()
    try:
        return Problem(**{**own, **changes})
    except (SpecError, TypeError) as error:
        raise InputError(f"problem {words(changes)} for {pattern.name}: {error}") from error


def words(changes: Changes) -> str:
    """``dtype float16, heads 64``; ``as stated`` where nothing is changed."""
    return ", ".join(f"{name} {value}" for name, value in changes.items()) or "as stated"
