"""The JSON Schema of pattern files, made from the models, for editors.

``json_schema()`` is what ``patterns/pattern.schema.json`` holds; a test keeps the two equal, and running this module
(``python -m sparsegen.spec.schema``) writes the file anew.  The schema catches names, types and ranges; rules between
fields (width at most stride, a divisor that can be 0) are checked when the file is read.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from sparsegen.spec.language import NODES
from sparsegen.spec.node import Joined, Node, NotNode
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem

_NODE = {"$ref": "#/$defs/node"}


def json_schema() -> dict[str, Any]:
    """The schema of a pattern file as plain values (JSON Schema, draft 2020-12)."""
    fields = _fields(Pattern)
    whole = {name: fields[name] for name in ("name", "summary")}
    whole["mask"] = {**_NODE, "description": "One mask for all heads."}
    whole["heads"] = {
        "type": "array",
        "minItems": 1,
        "items": {"$ref": "#/$defs/head_rule"},
        "description": "A mask for each group of query heads; instead of mask.",
    }
    rest = ("align", "scale", "softcap", "alibi", "sink_logits", "null_key")
    whole.update({name: fields[name] for name in rest})
    whole["problem"] = {"$ref": "#/$defs/problem"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "sparsegen pattern",
        "type": "object",
        "additionalProperties": False,
        "properties": whole,
        "oneOf": [{"required": ["mask"]}, {"required": ["heads"]}],
        "$defs": {
            "node": {"anyOf": [_words(), *map(_node, sorted(NODES))]},
            "head_rule": _head_rule(),
            "problem": {
                "type": "object",
                "additionalProperties": False,
                "properties": _fields(Problem),
                "description": _text(Problem),
            },
        },
    }


def _words() -> dict[str, Any]:
    words = sorted(name for name, cls in NODES.items() if cls.bare)
    return {"enum": words, "description": "A node without settings."}


def _node(keyword: str) -> dict[str, Any]:
    cls = NODES[keyword]
    return {
        "type": "object",
        "additionalProperties": False,
        "required": [keyword],
        "properties": {keyword: {**_body(cls), "description": _text(cls)}},
    }


def _body(cls: type[Node]) -> dict[str, Any]:
    if issubclass(cls, Joined):
        return {"type": "array", "minItems": 1, "items": _NODE}
    if cls is NotNode:
        return dict(_NODE)
    if cls.shorthand:
        return {k: v for k, v in _fields(cls)[cls.shorthand].items() if k != "description"}
    kind: Any = ["object", "null"] if cls.bare else "object"  # ``causal:`` with nothing behind it
    body = {"type": kind, "additionalProperties": False, "properties": _fields(cls)}
    required = [name for name, field in cls.model_fields.items() if field.is_required()]
    return {**body, "required": required} if required else body


def _fields(cls: Any) -> dict[str, Any]:
    """Schema of each field of a model, without pydantic's titles and ``null`` defaults."""
    properties = TypeAdapter(cls).json_schema(ref_template="#/$defs/{model}")["properties"]
    return {
        name: {
            k: v for k, v in schema.items() if k != "title" and not (k == "default" and v is None)
        }
        for name, schema in properties.items()
        if name not in ("rules", "problem", "source")
    }


def _head_rule() -> dict[str, Any]:
    one = {
        "anyOf": [
            {"type": "integer", "minimum": 0},
            {"type": "string", "pattern": "^[0-9]+-[0-9]+$"},
        ]
    }
    heads = {
        "anyOf": [{"const": "rest"}, one, {"type": "array", "minItems": 1, "items": one}],
        "description": "Query heads: a number, a range such as 2-3, a list of them, or rest.",
    }
    return {
        "type": "object",
        "additionalProperties": False,
        "required": ["heads", "mask"],
        "properties": {"heads": heads, "mask": _NODE},
    }


def _text(cls: Any) -> str:
    return " ".join(inspect.cleandoc(cls.__doc__ or "").split())


def schema_text() -> str:
    """The schema as the text of the shipped file."""
    import json

    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    from sparsegen.paths import data_dir

    Path(data_dir("patterns") / "pattern.schema.json").write_text(schema_text(), encoding="utf-8")
