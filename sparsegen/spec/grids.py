"""The primitives on a grid: positions are row-major indices of an image or a video."""

from __future__ import annotations

from math import prod

from pydantic import model_validator

from sparsegen.spec.expr import Abs, And, Bool, Compare, Const, FloorDiv, Int, K, Mod, Or, Q, Sub
from sparsegen.spec.fields import LIMIT, integers, rule
from sparsegen.spec.node import Node
from sparsegen.spec.primitives import both, equal


class Grid(Node):
    """Base of patterns on a grid.  Positions are row-major grid indices; a query outside the grid sees nothing; more
    keys than the grid has cells is an error of the call.
    """

    shape: integers(1, most=16)  # type: ignore[valid-type]

    @model_validator(mode="after")
    def _not_too_large(self) -> Grid:
        if prod(self.shape) > LIMIT:
            raise rule(f"shape must have at most {LIMIT} cells, got {prod(self.shape)}")
        return self

    def grid(self) -> tuple[int, ...]:
        return self.shape

    def coordinates(self, position: Int) -> list[Int]:
        """The grid coordinates of a position, outermost first."""
        inner = prod(self.shape)
        found: list[Int] = []
        for axis, length in enumerate(self.shape):
            inner //= length
            value = position if inner == 1 else FloorDiv(position, Const(inner))
            # The outermost coordinate needs no remainder: positions on the grid are below its product.
            found.append(value if axis == 0 else Mod(value, Const(length)))
        return found

    def on_grid(self) -> list[Bool]:
        """The query lies on the grid."""
        return [Compare("<=", Const(0), Q), Compare("<", Q, Const(prod(self.shape)))]


class Axial(Grid):
    """Visible when all grid coordinates of query and key but one are equal (so the query itself too), on the grid
    ``shape`` in row-major order.  A query outside the grid sees nothing; kv_len beyond the grid is an error.
    """

    keyword = "axial"

    def expr(self) -> Bool:
        same = [equal(a, b) for a, b in zip(self.coordinates(Q), self.coordinates(K), strict=True)]
        lines = [both(same[:axis] + same[axis + 1 :]) for axis in range(len(same))]
        return And((*self.on_grid(), lines[0] if len(lines) == 1 else Or(tuple(lines))))


class Neighborhood(Grid):
    """Visible when every grid coordinate differs by at most its ``radius``, on the grid ``shape`` in row-major order.
    A query outside the grid sees nothing; kv_len beyond the grid is an error.
    """

    keyword = "neighborhood"
    radius: integers(0, most=16)  # type: ignore[valid-type]

    @model_validator(mode="after")
    def _one_radius_an_axis(self) -> Neighborhood:
        if len(self.radius) != len(self.shape):
            axes, radii = len(self.shape), len(self.radius)
            raise rule(f"needs one radius for each axis of shape, got {radii} for {axes}")
        return self

    def expr(self) -> Bool:
        axes = zip(self.coordinates(Q), self.coordinates(K), self.radius, strict=True)
        near = [Compare("<=", Abs(Sub(a, b)), Const(r)) for a, b, r in axes]
        return And((*self.on_grid(), *near))
