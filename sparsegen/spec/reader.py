"""Plain values → ``Pattern``, collecting every mistake with its path (and its place, when there was a file)."""

from __future__ import annotations

import re
from typing import Any

from sparsegen.errors import Mistake, SpecError
from sparsegen.spec.fields import allowed_words, did_you_mean, show, show_key
from sparsegen.spec.language import NODES
from sparsegen.spec.node import AnyOf, Joined, Node, NotNode
from sparsegen.spec.pattern import HeadRule, Pattern, conflicts
from sparsegen.spec.problem import Problem
from sparsegen.spec.yaml_tree import Tree, join

DEEPEST = 40  # nodes inside one another
MOST_NODES = 2000
MOST_HEADS = 65536

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_HEADS = re.compile(r"([0-9]{1,5})-([0-9]{1,5})")
_UNSET = ("scale", "softcap")  # settings that are None where a file leaves them out
_TOP = (
    "name",
    "summary",
    "mask",
    "heads",
    "align",
    "scale",
    "softcap",
    "alibi",
    "sink_logits",
    "null_key",
    "problem",
)


def read_pattern(tree: Tree, file: str, name: str) -> Pattern:
    """The pattern that ``tree.data`` describes; ``name`` is its name unless it gives one.  SpecError lists all mistakes."""
    reader = _Reader(tree, file)
    pattern = reader.pattern(name)
    if reader.mistakes or pattern is None:
        raise SpecError(reader.mistakes)
    return pattern


class _Reader:
    def __init__(self, tree: Tree, file: str):
        self.tree, self.file = tree, file
        self.mistakes: list[Mistake] = list(tree.mistakes)
        self.nodes = 0

    # ------------------------------------------------------------------ mistakes
    def wrong(self, path: str, message: str, *, at_key: bool = False) -> None:
        """Note a mistake at ``path``: the nearest place that is known on the way there."""
        if path in self.tree.lost and not at_key:  # the value there is none of the file's
            return
        line, column = (self.tree.keys if at_key else self.tree.values).get(path, (0, 0))
        inner = path
        while not line and inner:
            inner = inner[: max(inner.rfind("."), inner.rfind("["), 0)]
            line, column = self.tree.values.get(inner, (0, 0))
        shown = path if len(path) <= 200 else path[:199] + "…"
        self.mistakes.append(Mistake(self.file, line, column, shown, message))

    def build(self, cls: Any, path: str, fields: dict[str, Any], hidden: str = "") -> Any:
        """``cls(**fields)``, or None with its mistakes noted under ``path``; ``hidden``: a field not in the file."""
        try:
            return cls(**fields)
        except SpecError as error:
            for mistake in error.mistakes:
                inner = "" if mistake.path == hidden else mistake.path
                joint = "." if path and inner and not inner.startswith("[") else ""
                self.wrong(path + joint + inner, mistake.message)
            return None

    def settings(self, cls: Any, path: str, data: Any, what: str) -> dict[str, Any] | None:
        """``data`` as keyword arguments of ``cls``; unknown keys are noted at the key, with the nearest known one."""
        known = list(allowed_words(cls))
        if not isinstance(data, dict):
            some = f" ({', '.join(known)})" if known else ""
            self.wrong(path, f"{what} needs a mapping of its settings{some}, got {show(data)}")
            return None
        return {key: data[key] for key in data if self.is_known(key, known, path)}

    def is_known(self, key: Any, known: Any, path: str) -> bool:
        if isinstance(key, str) and key in known:
            return True
        near = did_you_mean(key, known) if isinstance(key, str) else ""
        allowed = ", ".join(known) or "none"
        self.wrong(join(path, show_key(key)), f"unknown key{near}; allowed: {allowed}", at_key=True)
        return False

    # ------------------------------------------------------------------ the file
    def pattern(self, name: str) -> Pattern | None:
        data = self.tree.data
        if not isinstance(data, dict):
            if data is not None or not self.mistakes:
                self.wrong(
                    "", f"a pattern is a mapping with at least mask or heads, got {show(data)}"
                )
            return None
        fields: dict[str, Any] = {"name": name}
        for key, value in data.items():
            if key == "layers":
                self.wrong("layers", "is reserved and cannot be used yet", at_key=True)
            elif self.is_known(key, _TOP, "") and key not in ("mask", "heads", "problem"):
                fields[key] = value
                if (
                    value is None and key in _UNSET
                ):  # in a file it is a slip: nothing after the colon
                    self.wrong(key, f"must be {allowed_words(Pattern)[key]}, got {show(value)}")
        if "problem" in data:
            problem = self.settings(Problem, "problem", data["problem"], "problem")
            fields["problem"] = None if problem is None else self.build(Problem, "problem", problem)
        fields["rules"] = self.rules(data)
        for index, message in conflicts(fields["rules"] or (), fields.get("problem")):
            self.wrong(f"heads[{index}].heads" if index is not None else "heads", message)
        if fields["rules"] is None:  # the other fields are checked all the same, with some mask
            self.build(Pattern, "", {**fields, "rules": (HeadRule(None, NODES["full"]()),)})
            return None
        return self.build(Pattern, "", {**fields, "source": self.source()})

    def source(self) -> tuple[str, dict[str, tuple[int, int]]]:
        return self.file, self.tree.values

    def rules(self, data: dict[str, Any]) -> tuple[HeadRule, ...] | None:
        if ("mask" in data) == ("heads" in data):
            found = "both" if "mask" in data else "neither"
            self.wrong("", f"a pattern has one of: mask, heads; got {found}")
            return None
        if "mask" in data:
            mask = self.node(data["mask"], "mask", 1)
            return None if mask is None else (HeadRule(None, mask),)
        listed = data["heads"]
        if not isinstance(listed, list) or not 1 <= len(listed) <= 1024:
            self.wrong(
                "heads",
                f"must be a list of 1 to 1024 rules {{heads: …, mask: …}}, got {show(listed)}",
            )
            return None
        rules = [self.rule(entry, f"heads[{i}]") for i, entry in enumerate(listed)]
        return tuple(r for r in rules if r) if all(rules) else None

    def rule(self, data: Any, path: str) -> HeadRule | None:
        if not isinstance(data, dict):
            self.wrong(path, f"must be a mapping {{heads: …, mask: …}}, got {show(data)}")
            return None
        for key in data:
            self.is_known(key, ("heads", "mask"), path)
        missing = [key for key in ("heads", "mask") if key not in data]
        for key in missing:
            self.wrong(path, f"{key} is missing; a rule has heads and mask")
        heads = self.heads(data["heads"], path + ".heads") if "heads" in data else None
        mask = self.node(data["mask"], path + ".mask", 1) if "mask" in data else None
        if missing or mask is None or heads == ():
            return None
        return HeadRule(heads, mask)

    def heads(self, data: Any, path: str) -> tuple[tuple[int, int], ...] | None:
        """Ranges (first, last) of heads; None for ``rest``; () after a mistake."""
        if data == "rest":
            return None
        entries = data if isinstance(data, list) else [data]
        found: list[tuple[int, int]] = []
        for i, entry in enumerate(entries):
            at = join(path, i) if isinstance(data, list) else path
            match = _HEADS.fullmatch(entry) if isinstance(entry, str) else None
            low, high = (int(match[1]), int(match[2])) if match else (entry, entry)
            if type(low) is int and 0 <= low <= high < MOST_HEADS:
                found.append((low, high))
            else:
                allowed = f'a head from 0 to {MOST_HEADS - 1}, a range such as "2-3", or a list of them, or rest'
                self.wrong(at, f"must be {allowed}, got {show(entry)}")
        if not entries:
            self.wrong(path, "must name at least one head, got an empty list")
        return tuple(found) if len(found) == len(entries) else ()

    # ------------------------------------------------------------------ nodes
    def node(self, data: Any, path: str, depth: int) -> Node | None:
        self.nodes += 1
        if depth > DEEPEST or self.nodes > MOST_NODES:
            limit = (
                f"nodes nested deeper than {DEEPEST}"
                if depth > DEEPEST
                else f"more than {MOST_NODES} nodes"
            )
            if not any(limit in m.message for m in self.mistakes):
                self.wrong(path, f"a mask with {limit} is not allowed")
            return None
        if isinstance(data, str):
            return self.bare(data, path)
        if not isinstance(data, dict) or len(data) != 1:
            got = (
                "no key"
                if data == {}
                else f"{len(data)} keys"
                if isinstance(data, dict)
                else show(data)
            )
            self.wrong(path, f"a mask node is a word or a mapping with one key, got {got}")
            if isinstance(data, dict):  # look for more mistakes: each key may be a node of its own
                for key in data:
                    self.node({key: data[key]}, path, depth)
            return None
        (key, body), inner = next(iter(data.items())), ""
        if not self.is_known(key, NODES, path):
            return None
        cls, inner = NODES[key], join(path, key)
        if issubclass(cls, Joined):
            return self.joined(cls, body, inner, depth)
        if cls is NotNode:
            part = self.node(body, inner, depth + 1)
            if part is not None and part.restarts_positions:
                self.misplaced(inner)
            return None if part is None else self.build(cls, inner, {"part": part})
        if cls.shorthand:
            return self.build(cls, inner, {cls.shorthand: body}, hidden=cls.shorthand)
        if body is None and cls.bare:
            body = {}
        fields = self.settings(cls, inner, body, key)
        return None if fields is None else self.build(cls, inner, fields)

    def bare(self, word: str, path: str) -> Node | None:
        cls = NODES.get(word)
        if cls is None:
            near = did_you_mean(word, NODES)
            words = ", ".join(sorted(n for n in NODES if NODES[n].bare))
            self.wrong(path, f"unknown node {show(word)}{near}; as a plain word: {words}")
        elif not cls.bare:
            self.wrong(path, f"{word} needs its settings; write {{{word}: …}}")
        else:
            return cls()
        return None

    def joined(self, cls: type[Joined], body: Any, path: str, depth: int) -> Node | None:
        if not isinstance(body, list) or not body:
            self.wrong(path, f"must be a list of at least one mask node, got {show(body)}")
            return None
        parts = [self.node(entry, join(path, i), depth + 1) for i, entry in enumerate(body)]
        found = [p for p in parts if p is not None]
        relative = [i for i, p in enumerate(parts) if p is not None and p.restarts_positions]
        if relative and cls is AnyOf:
            self.misplaced(join(path, relative[0]))
        elif relative:
            self.scope(parts, path)
        return self.build(cls, path, {"parts": tuple(found)}) if len(found) == len(parts) else None

    def misplaced(self, path: str) -> None:
        self.wrong(
            path,
            "documents: {positions: relative} must stand in an all_of, beside the nodes that it restarts",
        )

    def scope(self, parts: list[Node | None], path: str) -> None:
        """What cannot stand inside the scope of relative positions."""
        for i, part in enumerate(parts):
            for inner, node in part.walk(join(path, i)) if part is not None else ():
                if node.restarts_positions and node is not part:
                    self.wrong(
                        inner, "positions already restart here; write positions: relative once"
                    )
                elif node.keyword == "random_blocks":
                    reason = "it draws from the blocks of the whole call"
                    self.wrong(
                        inner, f"cannot stand beside documents: {{positions: relative}}: {reason}"
                    )
