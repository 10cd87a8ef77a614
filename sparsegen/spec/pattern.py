"""``Pattern``: a whole pattern file, frozen and hashable, and everything that can be asked of it without a GPU."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic.dataclasses import dataclass

from sparsegen.errors import InputError
from sparsegen.spec import expr
from sparsegen.spec.fields import number, speaks, text, truth, word, wrong
from sparsegen.spec.fields import rule as broken_rule
from sparsegen.spec.node import Node
from sparsegen.spec.problem import Problem
from sparsegen.spec.shipped import read_file

Ranges = tuple[tuple[int, int], ...]

# Keywords of a call that place the tensors on the positions; every pattern takes them.
POSITION_NAMES = ("q_start", "k_start", "q_lengths", "kv_starts", "kv_lengths")

_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}"
_NAMES = "1 to 100 letters, digits, '_', '-' or '.', the first a letter or digit"


def _known_name(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(_NAME, value):
        raise wrong(_NAMES)
    return value


Name = Annotated[
    str,
    BeforeValidator(_known_name),
    WithJsonSchema({"type": "string", "pattern": f"^{_NAME}$"}),
    Field(description="Name of the pattern and of its artifacts: " + _NAMES + "."),
]


@speaks
@dataclass(frozen=True, config=ConfigDict(extra="forbid", arbitrary_types_allowed=True))
class HeadRule:
    """One mask for some query heads: ranges (first, last), or None for the rest (all, where there is one rule)."""

    heads: Any
    mask: Node

    def __post_init__(self) -> None:
        if self.heads is not None:
            object.__setattr__(self, "heads", tuple((low, high) for low, high in self.heads))


@speaks
@dataclass(frozen=True, config=ConfigDict(extra="forbid", arbitrary_types_allowed=True))
class Pattern:
    """A sparse-attention pattern.  Made by ``from_yaml``, ``from_yaml_text`` or ``from_dict``, which check it.

    ``scale`` None is 1/sqrt(head_dim).  ``alibi``, ``sink_logits`` and ``null_key`` say that a call gives
    ``alibi_slopes`` [H], ``sink_logits`` [H], ``null_key`` (k [Hkv, D], v [Hkv, Dv]).  Two patterns are equal when their
    files say the same, wherever they came from.
    """

    rules: tuple[HeadRule, ...]
    name: Name = "pattern"
    summary: text(2000) = ""  # type: ignore[valid-type]
    align: word("bottom_right", "top_left") = "bottom_right"  # type: ignore[valid-type]
    scale: number(optional=True) = None  # type: ignore[valid-type]
    softcap: number(positive=True, optional=True) = None  # type: ignore[valid-type]
    alibi: truth() = False  # type: ignore[valid-type]
    sink_logits: truth() = False  # type: ignore[valid-type]
    null_key: truth() = False  # type: ignore[valid-type]
    problem: Any = None
    source: Any = field(default=None, compare=False, repr=False)  # (file, {path: (line, column)})

    def __post_init__(self) -> None:
        if not self.rules:
            raise broken_rule("rules must hold at least one HeadRule")

    # ------------------------------------------------------------------ in and out
    @classmethod
    def from_yaml(cls, path_or_name: str | Path) -> Pattern:
        """The pattern of a file, or of a shipped pattern by its name.  SpecError lists every mistake of the file."""
        text, stem = read_file(path_or_name)
        return cls.from_yaml_text(text, file=str(path_or_name), name=stem)

    @classmethod
    def from_yaml_text(cls, text: str, file: str = "<text>", *, name: str = "pattern") -> Pattern:
        """The pattern that YAML text describes; ``file`` stands in the mistakes, ``name`` is used if it gives none."""
        from sparsegen.spec.reader import read_pattern
        from sparsegen.spec.yaml_tree import read_tree

        if not isinstance(text, str):
            raise InputError(f"the text of a pattern must be a str, got {type(text).__name__}")
        return read_pattern(read_tree(text, file), file, _fitting(name))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Pattern:
        """The pattern that plain values describe: what ``yaml.safe_load`` would give, with tuples for lists if you like."""
        from sparsegen.spec.reader import read_pattern
        from sparsegen.spec.yaml_tree import tree_of

        return read_pattern(tree_of(data, "<dict>"), "<dict>", "pattern")

    def to_dict(self) -> dict[str, Any]:
        """Plain values with ``from_dict(p.to_dict()) == p``; settings at their default are left out."""
        data: dict[str, Any] = {"name": self.name}
        if self.summary:
            data["summary"] = self.summary
        data.update(self._meaning())
        if self.problem is not None:
            data["problem"] = self.problem.to_data()
        return data

    def to_yaml(self) -> str:
        """YAML text with ``from_yaml_text(p.to_yaml()) == p``."""
        import yaml

        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True, width=100)

    def digest(self) -> str:
        """sha256 (hex) of what the pattern means: not of its name, summary, problem, comments or order of keys."""
        canonical = json.dumps(self._meaning(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def _meaning(self) -> dict[str, Any]:
        data: dict[str, Any] = {}
        if self.rules[0].heads is None and len(self.rules) == 1:
            data["mask"] = self.rules[0].mask.to_data()
        else:
            data["heads"] = [
                {"heads": _written(rule.heads), "mask": rule.mask.to_data()} for rule in self.rules
            ]
        for name, default in _DEFAULTS.items():
            if getattr(self, name) != default:
                data[name] = getattr(self, name)
        return data

    # ------------------------------------------------------------------ what it needs
    @cached_property
    def exprs(self) -> tuple[tuple[Ranges | None, expr.Bool], ...]:
        """(heads, when visible) of each rule, in order; heads None is the rest (all, where there is one rule)."""
        return tuple((rule.heads, rule.mask.expr()) for rule in self.rules)

    def nodes(self) -> Iterator[tuple[str, Node]]:
        """(path, node) of every node of every rule, outside in."""
        single = self.rules[0].heads is None and len(self.rules) == 1
        for i, rule in enumerate(self.rules):
            yield from rule.mask.walk("mask" if single else f"heads[{i}].mask")

    @cached_property
    def runtime_needs(self) -> tuple[tuple[str, ...], ...]:
        """Run-time keywords of the mask, as groups: a call gives exactly one of each group."""
        return tuple(dict.fromkeys(group for _, node in self.nodes() for group in node.needs()))

    @property
    def runtime_names(self) -> tuple[str, ...]:
        """All run-time keywords that the mask takes, alternatives one after the other."""
        return tuple(name for group in self.runtime_needs for name in group)

    @property
    def position_only(self) -> bool:
        """True when positions alone decide the mask (``random_blocks`` included: it is drawn from the pattern)."""
        return not any(node.decided_by_data for _, node in self.nodes())

    def place(self, path: str) -> str:
        """``file:line:column`` of a path such as ``mask.any_of[1]``, as far as it is known; else the path itself."""
        if self.source is None:
            return path
        file, values = self.source
        line, column = values.get(path, (0, 0))
        return f"{file}:{line}:{column}" if line else path

    def head_rule_of(self, heads: int) -> list[int]:
        """Index of the rule of each query head.  InputError if a head has none, or a rule names a head >= heads."""
        owner = [-1] * heads
        rest = None
        for index, rule in enumerate(self.rules):
            if rule.heads is None:
                rest = index
                continue
            for low, high in rule.heads:
                if high >= heads:
                    raise InputError(
                        f"{self.name}: heads[{index}] names head {high}, but there are {heads} heads"
                    )
                owner[low : high + 1] = [index] * (high - low + 1)
        if rest is None and -1 in owner:
            raise InputError(
                f"{self.name}: head {owner.index(-1)} of {heads} has no rule; add one for heads: rest"
            )
        return [rest if index < 0 else index for index in owner]  # type: ignore[misc]

    def check_lengths(self, q_len: int, kv_len: int, k_start: int = 0) -> None:
        """InputError if keys k_start .. k_start + kv_len - 1 do not lie on the grid of a grid node."""
        for path, node in self.nodes():
            if (shape := node.grid()) is None:
                continue
            cells = _product(shape)
            if kv_len and (k_start < 0 or k_start + kv_len > cells):
                keys = f"kv_len {kv_len}" + (f" from k_start {k_start}" if k_start else "")
                raise InputError(
                    f"{self.name}: {path}.{node.keyword}.shape has {cells} cells, too few for {keys}"
                )

    # ------------------------------------------------------------------ what it means
    def dense_mask(
        self,
        q_len: int,
        kv_len: int,
        *,
        device: Any = "cpu",
        rows: Any = None,
        heads: int | None = None,
        **runtime: Any,
    ) -> Any:
        """The mask as a bool tensor [heads or 1, q_len, kv_len], or [B, heads or 1, …] with a batch of run-time data.

        True is visible.  ``rows``: int64 indexes of query rows, only those are made ([…, len(rows), kv_len]; memory is
        O(rows * kv_len)).  ``heads``: number of query heads, for patterns with rules per head (default:
        ``problem.heads``, else the rules' own heads).  ``runtime``: the keywords of ``runtime_names``, and q_start,
        k_start, q_lengths, kv_starts, kv_lengths as in ``sparsegen.reference``.  Errors: TypeError for a missing or
        unknown keyword, InputError for data that does not fit.
        """
        from sparsegen.spec.dense import dense_mask

        return dense_mask(
            self, q_len, kv_len, device=device, rows=rows, heads=heads, runtime=runtime
        )


_DEFAULTS: dict[str, Any] = {
    "align": "bottom_right",
    "scale": None,
    "softcap": None,
    "alibi": False,
    "sink_logits": False,
    "null_key": False,
}


def conflicts(rules: tuple[HeadRule, ...], problem: Problem | None) -> list[tuple[int | None, str]]:
    """(rule index or None, message) of every clash between the heads of the rules, and with ``problem.heads``."""
    found: list[tuple[int | None, str]] = []
    owner: dict[int, int] = {}
    rest: int | None = None
    for index, rule in enumerate(rules):
        if rule.heads is None:
            if rest is not None:
                found.append((index, f"heads[{rest}] already has the rest of the heads"))
            rest = index if rest is None else rest
            continue
        for low, high in rule.heads:
            taken = next((h for h in range(low, high + 1) if h in owner), None)
            if taken is not None:
                found.append((index, f"head {taken} already has a mask, in heads[{owner[taken]}]"))
            if problem and high >= problem.heads:
                found.append((index, f"names head {high}, but problem.heads is {problem.heads}"))
            owner.update(dict.fromkeys(range(low, high + 1), index))
    if problem and rules and rest is None:
        missing = next((h for h in range(problem.heads) if h not in owner), None)
        if missing is not None:
            heads = f"head {missing} has no mask; problem.heads is {problem.heads}"
            found.append((None, heads + "; add a rule for heads: rest"))
    return found


def _written(heads: Ranges | None) -> Any:
    if heads is None:
        return "rest"
    return [low if low == high else f"{low}-{high}" for low, high in heads]


def _fitting(name: str) -> str:
    """A file's stem as a pattern's name."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:100]
    return name if re.fullmatch(_NAME, name) else "pattern"


def _product(shape: tuple[int, ...]) -> int:
    cells = 1
    for n in shape:
        cells *= n
    return cells
