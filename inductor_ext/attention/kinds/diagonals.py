"""Kinds that depend on the distance ``k - q`` or on the sum ``k + q`` only.

A **table** has Q + K - 1 elements. The element of the distance ``d = k - q`` has the index ``d``; negative distances are at
the end, where a negative index finds them. The element of ``q + k`` has the index ``q + k``. A tile of M queries and N keys
needs M + N - 1 neighbouring elements, which a kernel loads once and spreads over the tile.

A **strip** is the buffer to which the backward kernel adds whole tiles. It has R rows, which are skewed so that a tile of at
most R queries that starts at a multiple of its own length is one aligned block. The distance ``d`` of query ``q`` has the
index ``[q % R, d + q % R + offset]``, and the sum ``s = q + k`` has ``[q % R, s - q % R + R]``. If a strip is summed along
its own diagonals, the result is a table.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from ...core.dynamo_graph import Inserter
from ...torch_api.ir import full
from ...torch_api.lowering import lowerings
from ...torch_api.sizes import FloorDiv
from .base import K, Q, Reduction, TiledKind, arithmetic

aten = torch.ops.aten
_D = sympy.Symbol("d", integer=True)


#: The number of rows of a strip, a power of two.
STRIP_ROWS = 64
#: The length of a strip's rows is padded to a multiple of this number of elements.
ALIGNMENT = 16


def strip_shape(queries: int, keys: int) -> tuple[int, int]:
    """Return the offset of a strip (the column of key 0 of query 0) and the length of its rows, with tiles at both ends."""
    offset = _round_up(queries + STRIP_ROWS)
    return offset, offset + _round_up(keys + 3 * STRIP_ROWS)


def _round_up(n: int) -> int:
    return (n + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


class VectorKind(TiledKind):
    """The base of the kinds of which a tile of M queries and N keys needs M + N - 1 neighbouring elements."""

    as_vector = True

    def elements(self, queries: Any, keys: Any) -> Any:
        """Return the number of elements of a table for these lengths, which are ints or Inductor's expressions."""
        raise NotImplementedError

    def strip_columns(self, queries: int, keys: int) -> int:
        """Return the length of a strip's rows."""
        raise NotImplementedError

    def fold(self, strip: Any, queries: Any, keys: Any) -> Any:
        """Sum a strip [slices, STRIP_ROWS, columns] to tables [slices, elements]."""
        raise NotImplementedError

    def reduction(self, tma: bool, lengths: tuple[Any, Any]) -> Reduction:
        """TMA adds whole tiles to a strip if its shape is known; otherwise each tile is summed along its diagonals."""
        known = all(isinstance(n, (int, sympy.Integer)) for n in lengths)
        return Reduction.STRIP if tma and known else Reduction.DIAGONAL

    def buffer(self, reduction: Reduction, size: Sequence[Any], lengths: tuple[Any, Any], device: torch.device) -> Any:
        """The buffer is a strip [slices, STRIP_ROWS, columns], or the table itself."""
        if reduction is Reduction.STRIP:
            size = [sympy.prod(size[:-1]), STRIP_ROWS, self.strip_columns(*lengths)]
        return full(size, 0, torch.float32, device)

    def folded(self, buffer: Any, reduction: Reduction, size: Sequence[Any], lengths: tuple[Any, Any]) -> Any:
        """A strip is summed along its diagonals."""
        return lowerings[aten.reshape](self.fold(buffer, *lengths), size) if reduction is Reduction.STRIP else buffer

    def workspace(self, extents: Sequence[Any], device: torch.device, tilings: Sequence[dict[str, Any]]) -> Any:
        """The workspace has the shape [parts, B, H, query tiles, elements of a table].

        A tile is summed along its diagonals in parts of one tile of keys each. The same part of the next tile then has none
        of the same distances, so every element has one writer.
        """
        batch, heads, queries, keys = extents
        shortest = min(t["BLOCK_M2"] for t in tilings)
        tiles = FloorDiv(queries + shortest - 1, shortest)
        parts = max(1 + -(-t["BLOCK_M2"] // t["BLOCK_N2"]) for t in tilings)
        return full([parts, batch, heads, tiles, self.elements(queries, keys)], 0, torch.float32, device)

    def total(self, workspace: Any, axes: Sequence[bool]) -> Any:
        """Sum over parts and tiles, and over batch and heads if the table does not have them, to [b?, h?, elements]."""
        return lowerings[aten.sum](workspace, axis=[0, *(axis + 1 for axis in (0, 1) if not axes[axis]), 3])


class _Diagonal(VectorKind):
    """The base of both kinds here. A table has one element for each of Q + K - 1 distances.

    To fold a strip, its rows are read with a stride that is larger or smaller by one, so that each starts one column later
    or earlier.
    """

    def axes(self) -> list[str]:
        """There is one element for each distance."""
        return ["Q + K - 1"]

    def shape(self, outer: Inserter, queries: Any, keys: Any) -> list[Any]:
        """There is one element for each distance."""
        return [arithmetic(outer, operator.sub, arithmetic(outer, operator.add, queries, keys), 1)]

    def elements(self, queries: Any, keys: Any) -> Any:
        """There is one element for each distance."""
        return queries + keys - 1

    def first(self, queries: int) -> int:
        """Return the least of the values of ``alike``. Those below 0 are at the end of a table."""
        raise NotImplementedError

    def strip_columns(self, queries: int, keys: int) -> int:
        """Return the length of a strip's rows."""
        return strip_shape(queries, keys)[1]


def _skewed_sum(flat: Any, slices: Any, rows: Any, width: Any) -> Any:
    """Split one long vector into rows of ``width`` elements, and sum the rows."""
    return lowerings[aten.sum](lowerings[aten.reshape](flat, [slices, rows, width]), axis=[1])


class Diagonal(_Diagonal):
    """``t[b, h, k - q]``. Negative distances are at the end of a table, where a negative index finds them."""

    name = "diagonal"
    reads = "one value for each distance k - q"

    def holds(self, polynomial: sympy.Expr) -> bool:
        """Return whether the query cancels if ``k = q + d`` is substituted."""
        return Q not in sympy.expand(polynomial.subs(K, Q + _D)).free_symbols

    def alike(self, q: Any, k: Any) -> Any:
        """Return the distance."""
        return k - q

    def first(self, queries: int) -> int:
        """Return the distance of the first key and the last query."""
        return 1 - queries

    def coordinates(self, outer: Inserter, axes: Sequence[Node], queries: Any, keys: Any) -> tuple[Any, Any]:
        """Return query 0 for distances that are not negative, and key 0 for negative distances."""
        (along,) = axes
        last = arithmetic(outer, operator.sub, queries, 1)
        total = arithmetic(outer, operator.add, last, keys)
        ahead = outer.function(operator.lt, along, keys)
        distance = outer.function(torch.where, ahead, along, outer.function(operator.sub, along, total))
        negative = outer.function(operator.neg, distance)
        q, k = (outer.method("clamp", x, min=0) for x in (negative, distance))
        return q, k

    def index(self, inner: Graph, q: Node, k: Node) -> tuple[Node, ...]:
        """Return the distance."""
        return (with_meta(inner.call_function(operator.sub, (k, q)), k),)

    def fold(self, strip: Any, queries: Any, keys: Any) -> Any:
        """Sum a strip along its diagonals."""
        slices, rows, width = strip.get_size()
        offset = strip_shape(queries, keys)[0]
        flat = lowerings[aten.reshape](strip, [slices, rows * width])
        sums = _skewed_sum(lowerings[aten.constant_pad_nd](flat, [0, rows], 0.0), slices, rows, width + 1)
        ahead = lowerings[aten.slice](sums, 1, offset, offset + keys)
        behind = lowerings[aten.slice](sums, 1, offset - queries + 1, offset)
        # A cat is not used, because torch 2.13 takes it for two halves of one reduction, tries to merge them, and fails.
        padded = [(ahead, [0, queries - 1]), (behind, [keys, 0])]
        return lowerings[aten.add](*(lowerings[aten.constant_pad_nd](part, padding, 0.0) for part, padding in padded))


class Antidiagonal(_Diagonal):
    """``t[b, h, k + q]``."""

    name = "antidiagonal"
    reads = "one value for each sum k + q"

    def holds(self, polynomial: sympy.Expr) -> bool:
        """Return whether the query cancels if ``k = d - q`` is substituted."""
        return Q not in sympy.expand(polynomial.subs(K, _D - Q)).free_symbols

    def alike(self, q: Any, k: Any) -> Any:
        """Return the sum of both positions."""
        return k + q

    def first(self, queries: int) -> int:
        """Return the least sum."""
        return 0

    def coordinates(self, outer: Inserter, axes: Sequence[Node], queries: Any, keys: Any) -> tuple[Any, Any]:
        """Return the largest query that is possible, and the key that remains of the sum."""
        (along,) = axes
        q = outer.method("clamp", along, max=arithmetic(outer, operator.sub, queries, 1))
        return q, outer.function(operator.sub, along, q)

    def index(self, inner: Graph, q: Node, k: Node) -> tuple[Node, ...]:
        """Return the sum of both positions."""
        return (with_meta(inner.call_function(operator.add, (k, q)), k),)

    def fold(self, strip: Any, queries: Any, keys: Any) -> Any:
        """Sum a strip along its diagonals."""
        slices, rows, width = strip.get_size()
        flat = lowerings[aten.reshape](strip, [slices, rows * width])
        sums = _skewed_sum(lowerings[aten.slice](flat, 1, 0, rows * (width - 1)), slices, rows, width - 1)
        return lowerings[aten.slice](sums, 1, rows, rows + queries + keys - 1)


def with_meta(node: Node, like: Node) -> Node:
    """Give a node of positions the meta of another one."""
    node.meta = dict(like.meta)
    return node
