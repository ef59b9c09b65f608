"""Kinds that depend on the distance of two places of an image only: on that of their rows and that of their columns.

The positions are the places of an image whose rows have W of them: position p is in row ``p // W`` and column ``p % W``.

A **table** has ``(2 W - 1) (R_q + R_k - 1)`` elements, where R_q and R_k are the numbers of rows that the queries and the
keys fill. The element of the distances dy of the rows and dx of the columns (key minus query) has the index
``(2 W - 1) dy + dx = (k - q) + (W - 1) dy``; negative indices are at the end, where a negative index finds them. A tile of
queries in one row and keys in one row has one dy, so that it is a tile of a diagonal.

A **strip** is that of a diagonal (diagonals.py) for each dy, side by side. Each has ``2 W - STRIP_ROWS`` columns and no
padding, because no tile crosses the end of a row.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from ...core.dynamo_graph import Inserter
from ...torch_api.lowering import lowerings
from ...torch_api.sizes import FloorDiv
from .base import FootprintKind, K, Q, arithmetic
from .diagonals import STRIP_ROWS, VectorKind, with_meta
from .pair import Pair

aten = torch.ops.aten

#: The first row and column of the query, and the distances from there, in an expression.
_ROW, _COLUMN, _DY, _DX = sympy.symbols("row column dy dx", integer=True)


def image_row(position: sympy.Symbol, width: int) -> sympy.Expr | None:
    """Return the row of ``Q`` or ``K`` in an image of this width, None if there is no kind for such an image.

    A tile of 64 queries or keys lies in one row.
    """
    return FloorDiv(position, width) if width > 0 and width % STRIP_ROWS == 0 else None


def images_of(expression: sympy.Expr) -> list[FootprintKind]:
    """Return the kinds of the image whose rows are in an expression, the least first: none if there are several widths."""
    widths = {x.args[1] for x in expression.atoms(FloorDiv)}
    return [kind for width in widths if len(widths) == 1 for kind in (*_parts(int(width)), Image.of(int(width)))]


def _distances(expression: sympy.Expr, width: int) -> set[sympy.Symbol] | None:
    """Return those of ``_DY`` and ``_DX`` on which an expression depends, None if it depends on more."""
    rows = {FloorDiv(Q, width): _ROW, FloorDiv(K, width): _ROW + _DY}
    places = {Q: width * _ROW + _COLUMN, K: width * (_ROW + _DY) + _COLUMN + _DX}
    symbols = sympy.expand(expression.xreplace(rows).xreplace(places)).free_symbols
    return None if symbols & {_ROW, _COLUMN} else symbols & {_DY, _DX}


class _Part(Pair):
    """One of both distances: ``t[b, h, k // W - q // W]`` or ``t[b, h, k % W - q % W]``.

    A table of both would be larger than the tensor that is read, of which a tile needs few elements. So there is no other
    table than that of pairs. The kind is there for an index with both distances, each in a dim of its own.
    """

    def __init__(self, width: int, distance: sympy.Symbol) -> None:
        self.width, self.distance = width, distance

    def holds(self, expression: sympy.Expr) -> bool:
        """Return whether it depends on this distance only."""
        return _distances(expression, self.width) == {self.distance}

    def covers(self, other: FootprintKind) -> bool:
        """Return whether it is this kind, or a constant."""
        return FootprintKind.covers(self, other)

    def alike(self, q: Any, k: Any) -> Any:
        """Return this distance."""
        return k // self.width - q // self.width if self.distance == _DY else k % self.width - q % self.width

    def above(self) -> Sequence[FootprintKind]:
        """The kind of both distances covers this one."""
        return (Image.of(self.width),)


@functools.cache
def _parts(width: int) -> tuple[_Part, _Part]:
    return _Part(width, _DY), _Part(width, _DX)


class Image(VectorKind):
    """``t[b, h, k // W - q // W, k % W - q % W]``, for a W that is a multiple of 64."""

    name = "image"
    reads = "one value for each distance of rows and of columns"

    def __init__(self, width: int) -> None:
        self.width = width
        # A power of two, so that no tile of this length or a shorter one crosses the end of a row.
        self.longest_tile = width & -width

    @staticmethod
    @functools.cache
    def of(width: int) -> Image:
        """Return the kind for images of this width. There is one object for each."""
        return Image(width)

    @staticmethod
    def named(text: str) -> Image:
        """Return the kind with this ``str``."""
        return Image.of(int(text.removeprefix("image ")))

    def __repr__(self) -> str:
        return f"image {self.width}"

    def holds(self, expression: sympy.Expr) -> bool:
        """Return whether it depends on the two distances only."""
        return _distances(expression, self.width) is not None

    def covers(self, other: FootprintKind) -> bool:
        """A diagonal depends on ``k - q = W dy + dx``."""
        return super().covers(other) or other.name == "diagonal" or other in _parts(self.width)

    def alike(self, q: Any, k: Any) -> Any:
        """Return the index in a table."""
        return k - q + (self.width - 1) * (k // self.width - q // self.width)

    def axes(self) -> list[str]:
        """There is one element for each pair of distances."""
        return [f"{2 * self.width - 1} * (rows of queries + rows of keys - 1)"]

    def elements(self, queries: Any, keys: Any) -> Any:
        """There is one element for each pair of distances."""
        rows = [FloorDiv(n + self.width - 1, self.width) for n in (queries, keys)]
        return (2 * self.width - 1) * (sum(rows) - 1)

    def shape(self, outer: Inserter, queries: Any, keys: Any) -> list[Any]:
        """There is one element for each pair of distances."""
        rows = arithmetic(outer, operator.add, self._rows(outer, queries), self._rows(outer, keys))
        return [arithmetic(outer, operator.mul, arithmetic(outer, operator.sub, rows, 1), 2 * self.width - 1)]

    def _rows(self, outer: Inserter, length: Any) -> Any:
        whole = arithmetic(outer, operator.add, length, self.width - 1)
        return arithmetic(outer, operator.floordiv, whole, self.width)

    def coordinates(self, outer: Inserter, axes: Sequence[Node], queries: Any, keys: Any) -> tuple[Any, Any]:
        """Return the first places that have these distances. If no pair has them, the last query or key stands for it."""
        (along,) = axes
        pitch = 2 * self.width - 1
        # Key 0 is in row 0, so that indices from here on are those of negative distances.
        behind = arithmetic(outer, operator.mul, arithmetic(outer, operator.sub, self._rows(outer, keys), 1), pitch)
        ahead = outer.function(operator.lt, along, arithmetic(outer, operator.add, behind, self.width))
        total = self.shape(outer, queries, keys)[0]
        index = outer.function(torch.where, ahead, along, outer.function(operator.sub, along, total))
        dy = outer.function(operator.floordiv, outer.function(operator.add, index, self.width - 1), pitch)
        dx = outer.function(operator.sub, index, outer.function(operator.mul, dy, pitch))
        places = []
        for sign, length in ((-1, queries), (1, keys)):
            row, column = (outer.method("clamp", outer.function(operator.mul, d, sign), min=0) for d in (dy, dx))
            place = outer.function(operator.add, outer.function(operator.mul, row, self.width), column)
            places.append(outer.method("clamp", place, max=arithmetic(outer, operator.sub, length, 1)))
        return places[0], places[1]

    def index(self, inner: Graph, q: Node, k: Node) -> tuple[Node, ...]:
        """Return the index of the distances."""

        def op(target: Any, x: Any, y: Any) -> Node:
            return with_meta(inner.call_function(target, (x, y)), k)

        rows = [op(operator.floordiv, x, self.width) for x in (k, q)]
        shift = op(operator.mul, op(operator.sub, *rows), self.width - 1)
        return (op(operator.add, op(operator.sub, k, q), shift),)

    def strip_columns(self, queries: int, keys: int) -> int:
        """Return the length of a strip's rows: the columns of all distances of rows."""
        return self.elements(queries, keys) // (2 * self.width - 1) * (2 * self.width - STRIP_ROWS)

    def fold(self, strip: Any, queries: Any, keys: Any) -> Any:
        """Sum the strip of each dy along its diagonals: row r, column c has ``dx = c - r + STRIP_ROWS - W``."""
        width, pitch = self.width, 2 * self.width - 1
        total = self.elements(queries, keys)
        slices, distances = strip.get_size()[0], total // pitch
        parts = lowerings[aten.reshape](strip, [slices, STRIP_ROWS, distances, 2 * width - STRIP_ROWS])
        parts = lowerings[aten.permute](parts, [0, 2, 1, 3])
        # In rows that are longer by one, each row starts one column earlier than the row before it.
        flat = lowerings[aten.constant_pad_nd](parts, [0, STRIP_ROWS], 0.0)
        flat = lowerings[aten.reshape](flat, [slices, distances, STRIP_ROWS * 2 * width])
        flat = lowerings[aten.constant_pad_nd](flat, [STRIP_ROWS - 1, 1], 0.0)
        sums = lowerings[aten.sum](lowerings[aten.reshape](flat, [slices, distances, STRIP_ROWS, 2 * width + 1]), axis=[2])
        sums = lowerings[aten.reshape](lowerings[aten.slice](sums, 2, 0, pitch), [slices, total])
        # The elements of negative indices come first here, and last in a table.
        negative = (FloorDiv(queries + width - 1, width) - 1) * pitch + width - 1
        ahead, behind = (lowerings[aten.slice](sums, 1, *ends) for ends in ((negative, total), (0, negative)))
        padded = [(ahead, [0, negative]), (behind, [total - negative, 0])]
        return lowerings[aten.add](*(lowerings[aten.constant_pad_nd](part, padding, 0.0) for part, padding in padded))
