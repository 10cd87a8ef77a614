"""What every node of a mask is, the register of all of them, and the three that join others.

A new primitive is one subclass of ``Node`` (in ``primitives`` or ``run_time``) with a ``keyword``; the reader, the
JSON Schema and the tests find it in ``NODES``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from sparsegen.errors import SpecError
from sparsegen.spec import expr
from sparsegen.spec.fields import allowed_words, as_mistakes, wrong

NODES: dict[str, type[Node]] = {}


class Node(BaseModel):
    """One node of a mask.  Frozen, hashable, equal when its settings are equal."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    keyword: ClassVar[str] = ""
    bare: ClassVar[bool] = (
        False  # may be written as a plain word, with all settings at their default
    )
    shorthand: ClassVar[str | None] = (
        None  # the field that is written instead of a mapping of settings
    )
    runtime: ClassVar[
        tuple[tuple[str, ...], ...]
    ] = ()  # keywords of a call: one of each group is needed

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        if cls.keyword:
            NODES[cls.keyword] = cls

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            words = allowed_words(type(self))
            raise SpecError(as_mistakes(error, words, f"<{self.keyword}>")) from None

    def expr(self) -> expr.Bool:
        """When a cell is visible: the node's meaning."""
        raise NotImplementedError

    def needs(self) -> tuple[tuple[str, ...], ...]:
        """Run-time keywords of this node with these settings, as groups of alternatives."""
        return self.runtime

    @property
    def decided_by_data(self) -> bool:
        """True when visibility depends on data of the call and not on positions alone."""
        return bool(self.needs())

    @property
    def restarts_positions(self) -> bool:
        """True for the node that makes its siblings in an ``all_of`` count from their document's start."""
        return False

    def grid(self) -> tuple[int, ...] | None:
        """Shape of the grid that positions are laid on, for grid nodes."""
        return None

    def children(self) -> tuple[tuple[str, Node], ...]:
        """(path inside this node, node) of the nodes that this one joins."""
        return ()

    def walk(self, path: str = "mask") -> Iterator[tuple[str, Node]]:
        """(path, node) of this node and of all below it, outside in."""
        yield path, self
        for step, child in self.children():
            yield from child.walk(path + step)

    def visible(self, call: Any) -> Any:
        """Dense visibility of this node's ``Term`` in a call: bool tensor that broadcasts to [B, H, rows, keys]."""
        raise NotImplementedError(f"{self.keyword} is arithmetic and has no Term")

    def to_data(self) -> Any:
        """The node as it is written in a file; settings at their default are left out."""
        body = self.body()
        return self.keyword if self.bare and not body else {self.keyword: body}

    def body(self) -> Any:
        """What stands under the keyword."""
        written = {n: _plain(v) for n, v in self if v != type(self).model_fields[n].default}
        return written[self.shorthand] if self.shorthand else written


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _is_node(value: Any) -> Node:
    if not isinstance(value, Node):
        raise wrong("a mask node")
    return value


Part = Annotated[Any, BeforeValidator(_is_node)]
Parts = Annotated[
    tuple[Part, ...], Field(min_length=1, description="A list of at least one mask node.")
]


class Joined(Node):
    """A node made of a list of nodes."""

    shorthand = "parts"
    parts: Parts

    def children(self) -> tuple[tuple[str, Node], ...]:
        return tuple((f".{self.keyword}[{i}]", part) for i, part in enumerate(self.parts))

    def body(self) -> Any:
        return [part.to_data() for part in self.parts]


class AllOf(Joined):
    """Visible when every one of the listed nodes is visible (intersection)."""

    keyword = "all_of"

    def expr(self) -> expr.Bool:
        """The parts joined; beside ``documents: {positions: relative}`` they count from the document's start."""
        if any(part.restarts_positions for part in self.parts):
            shifted = (
                p.expr() if p.restarts_positions else expr.in_document(p.expr()) for p in self.parts
            )
            return expr.And(tuple(shifted))
        return expr.And(tuple(part.expr() for part in self.parts))


class AnyOf(Joined):
    """Visible when at least one of the listed nodes is visible (union)."""

    keyword = "any_of"

    def expr(self) -> expr.Bool:
        return expr.Or(tuple(part.expr() for part in self.parts))


class NotNode(Node):
    """Visible when the node is not (complement)."""

    keyword = "not"
    shorthand = "part"
    part: Part = Field(description="A mask node.")

    def children(self) -> tuple[tuple[str, Node], ...]:
        return ((".not", self.part),)

    def body(self) -> Any:
        return self.part.to_data()

    def expr(self) -> expr.Bool:
        return expr.Not(self.part.expr())
