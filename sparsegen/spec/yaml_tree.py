"""YAML text → plain values, with the line and column of every value and every key.

Built on PyYAML's parser events and not on its constructors: a pattern file needs mappings, lists and plain scalars
only, and every limit below is checked while reading, so no file can take much time or memory:

    256 KiB of text · 50 levels of nesting · 20,000 values after aliases are followed · numbers of at most 19 digits

Scalars follow YAML 1.2's core schema: ``true``/``false``, decimal integers (``32_768`` allowed), floats, ``null``;
``yes`` and ``0x10`` are strings.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import yaml

from sparsegen.errors import Mistake

LONGEST = 256 * 1024  # characters
DEEPEST = 50
MOST_VALUES = 20_000

_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)")
_FLOAT = re.compile(r"[-+]?((\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)")
_WORDS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), float("-inf")),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}


class Unreadable(Exception):
    """The text cannot be read any further; the mistake is already recorded."""


@dataclass
class Tree:
    """Plain ``data``; places by path (``mask.any_of[1].window``): of values, and of the keys that lead to them."""

    data: Any = None
    values: dict[str, tuple[int, int]] = field(default_factory=dict)
    keys: dict[str, tuple[int, int]] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)
    lost: set[str] = field(
        default_factory=set
    )  # paths whose value a mistake replaced; no more is said there


def join(path: str, key: str | int) -> str:
    """The path one step further in."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    return f"{path}.{key}" if path else key


def read_tree(text: str, file: str) -> Tree:
    """Read one YAML document.  Never raises for bad text: see ``Tree.mistakes``."""
    tree = Tree()
    try:
        if len(text) > LONGEST:
            tree.mistakes.append(Mistake(file, 1, 1, "", f"is longer than {LONGEST} characters"))
            return tree
        _Builder(text, file, tree).document()
    except Unreadable:
        pass
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - text.rfind("\n", 0, error.position)
        code = error.character if isinstance(error.character, int) else ord(error.character)
        message = f"the character U+{code:04X} is not allowed in YAML"
        tree.mistakes.append(Mistake(file, line, column, "", message))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        words = ", ".join(w for w in (error.context, error.problem) if w)
        tree.mistakes.append(Mistake(file, line, column, "", f"is not YAML: {words}"))
    except ValueError as error:  # PyYAML's scanner lets int() and chr() of odd escapes escape
        tree.mistakes.append(Mistake(file, 1, 1, "", f"is not YAML: {error}"))
    return tree


@dataclass
class _Item:
    """A node before aliases are followed: a scalar's value, or a collection's items with the places of its keys."""

    value: Any
    place: tuple[int, int]


class _Builder:
    def __init__(self, text: str, file: str, tree: Tree):
        self.events, self.file, self.tree = yaml.parse(text, Loader=yaml.SafeLoader), file, tree
        self.anchors: dict[str, _Item | None] = {}
        self.count = 0

    def document(self) -> None:
        next(self.events)  # the stream starts
        if isinstance(next(self.events), yaml.StreamEndEvent):
            raise self.stop((1, 1), "", "is empty; a pattern file needs at least mask or heads")
        root = self.node(next(self.events), "", 1)
        next(self.events)  # the document ends
        after = next(self.events)
        if not isinstance(after, yaml.StreamEndEvent):
            self.wrong(
                _place(after), "", "a pattern file holds one document, here a second one starts"
            )
        self.tree.data = self.plain(root, "", 1)

    def node(self, event: Any, path: str, depth: int) -> _Item:
        """The node that starts with ``event``; reads all its events."""
        place = _place(event)
        if isinstance(event, yaml.AliasEvent):
            name = str(event.anchor)
            known = self.anchors.get(name)
            if known is None:
                inside = name in self.anchors
                reason = "stands inside its own anchor" if inside else "has no anchor"
                self.wrong(place, path, f"the alias *{name[:40]} {reason}")
                self.tree.lost.add(path)
            return known or _Item(None, place)
        self.enough(depth, place, path)
        if event.tag is not None and event.tag != "!":
            self.wrong(place, path, f"tags are not allowed, got {event.tag[:60]}")
            self.tree.lost.add(path)
        if event.anchor:
            self.anchors[event.anchor] = None
        item = _Item(self.content(event, path, depth), place)
        if event.anchor:
            self.anchors[event.anchor] = item
        return item

    def content(self, event: Any, path: str, depth: int) -> Any:
        if isinstance(event, yaml.ScalarEvent):
            return self.scalar(event, path)
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[_Item] = []
            while not isinstance(inner := next(self.events), yaml.SequenceEndEvent):
                items.append(self.node(inner, join(path, len(items)), depth + 1))
            return items
        return self.mapping(path, depth)

    def mapping(self, path: str, depth: int) -> dict[str, tuple[_Item, tuple[int, int]]]:
        entries: dict[str, tuple[_Item, tuple[int, int]]] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            place = _place(event)
            key = self.node(event, path, depth + 1).value
            is_word = isinstance(key, str) and key.isprintable() and 0 < len(key) <= 200
            name = key if is_word else "?"
            value = self.node(next(self.events), join(path, name), depth + 1)
            if not is_word:
                self.wrong(place, path, "a key must be a word" + _found(key))
            elif name in entries:
                line = entries[name][1][0]
                self.wrong(place, join(path, name), f"is given twice, first in line {line}")
            else:
                entries[name] = (value, place)
        return entries

    def scalar(self, event: Any, path: str) -> Any:
        text = event.value
        if not event.implicit[0]:  # quoted
            return text
        if text in _WORDS:
            return _WORDS[text]
        if _INTEGER.fullmatch(text):
            if len(text.replace("_", "")) > 20:
                self.wrong(_place(event), path, "a number has at most 19 digits, got " + _cut(text))
                self.tree.lost.add(path)
                return 0
            return int(text)
        return float(text) if len(text) <= 60 and _FLOAT.fullmatch(text) else text

    # ------------------------------------------------------------------ aliases followed
    def plain(self, item: _Item, path: str, depth: int) -> Any:
        self.enough(depth, item.place, path)
        self.tree.values[path] = item.place
        if isinstance(item.value, list):
            return [self.plain(v, join(path, i), depth + 1) for i, v in enumerate(item.value)]
        if isinstance(item.value, dict):
            data = {}
            for key, (value, place) in item.value.items():
                self.tree.keys[join(path, key)] = place
                data[key] = self.plain(value, join(path, key), depth + 1)
            return data
        return item.value

    def enough(self, depth: int, place: tuple[int, int], path: str) -> None:
        self.count += 1
        if depth > DEEPEST:
            raise self.stop(place, path, f"is nested deeper than {DEEPEST} levels")
        # Each value counts twice: while reading, and while aliases are followed.
        if self.count > 2 * MOST_VALUES:
            raise self.stop(place, path, f"holds more than {MOST_VALUES} values, aliases followed")

    def wrong(self, place: tuple[int, int], path: str, message: str) -> None:
        self.tree.mistakes.append(Mistake(self.file, *place, _cut_path(path), message))

    def stop(self, place: tuple[int, int], path: str, message: str) -> Unreadable:
        self.wrong(place, path, message)
        return Unreadable()


def _place(event: Any) -> tuple[int, int]:
    return event.start_mark.line + 1, event.start_mark.column + 1


def _found(key: Any) -> str:
    if isinstance(key, (list, dict)):
        return ", got a " + ("list" if isinstance(key, list) else "mapping")
    return ", got " + _cut(repr(key))


def _cut(words: str) -> str:
    return words if len(words) <= 60 else words[:59] + "…"


def _cut_path(path: str) -> str:
    return path if len(path) <= 200 else path[:199] + "…"


def tree_of(data: Any, file: str) -> Tree:
    """Plain Python values as a ``Tree`` without places, under the same limits; tuples count as lists."""
    tree = Tree()
    count = 0

    def plain(value: Any, path: str, depth: int) -> Any:
        nonlocal count
        count += 1
        if depth > DEEPEST or count > MOST_VALUES:
            limit = (
                f"is nested deeper than {DEEPEST} levels"
                if depth > DEEPEST
                else f"holds more than {MOST_VALUES} values"
            )
            tree.mistakes.append(Mistake(file, 0, 0, _cut_path(path), limit))
            raise Unreadable
        if isinstance(value, dict):
            return {
                k: plain(v, join(path, k if isinstance(k, str) else repr(k)), depth + 1)
                for k, v in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [plain(v, join(path, i), depth + 1) for i, v in enumerate(value)]
        return value

    with suppress(Unreadable):
        tree.data = plain(data, "", 1)
    return tree
