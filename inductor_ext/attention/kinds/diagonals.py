"""Kinds that depend on the distance ``k - q`` or on the sum ``k + q`` only.

A **table** has Q + K - 1 elements: that of ``d = k - q`` at ``d`` (negative distances at the end, where a negative index
finds them), that of ``q + k`` at ``q + k``. A tile of M queries and N keys needs M + N - 1 neighbours of it, which a
kernel loads once and spreads over the tile.

A **strip** is where the backward kernel adds whole tiles: R rows, skewed so that a tile of at most R queries that starts at
a multiple of its own length is one aligned block. Distance ``d`` of query ``q`` stands at ``[q % R, d + q % R + offset]``,
and ``s = q + k`` at ``[q % R, s - q % R + R]``. Summed along its own diagonals, a strip is a table.
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


#: Rows of a strip, a power of two.
STRIP_ROWS = 64
#: Elements that a strip's rows are padded to.
ALIGNMENT = 16


def strip_shape(queries: int, keys: int) -> tuple[int, int]:
    """The offset of a strip (the column of key 0 of query 0) and the length of its rows, tiles at the ends included."""
    offset = _round_up(queries + STRIP_ROWS)
    return offset, offset + _round_up(keys + 3 * STRIP_ROWS)


def _round_up(n: int) -> int:
    return (n + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


class _Diagonal(TiledKind):
    """What both have in common: a table has one element for each of Q + K - 1 distances."""

    as_vector = True

    def axes(self) -> list[str]:
        """One element a distance."""
        return ["Q + K - 1"]

    def shape(self, outer: Inserter, queries: Any, keys: Any) -> list[Any]:
        """One element a distance."""
        return [arithmetic(outer, operator.sub, arithmetic(outer, operator.add, queries, keys), 1)]

    def reduction(self, tma: bool, lengths: tuple[Any, Any]) -> Reduction:
        """Whole tiles into a strip by TMA where its shape is known, else sums along the diagonals of each tile."""
        known = all(isinstance(n, (int, sympy.Integer)) for n in lengths)
        return Reduction.STRIP if tma and known else Reduction.DIAGONAL

    def buffer(self, reduction: Reduction, size: Sequence[Any], lengths: tuple[Any, Any], device: torch.device) -> Any:
        """A strip [slices, STRIP_ROWS, columns], or the table itself."""
        if reduction is Reduction.STRIP:
            size = [sympy.prod(size[:-1]), STRIP_ROWS, strip_shape(*lengths)[1]]
        return full(size, 0, torch.float32, device)

    def folded(self, buffer: Any, reduction: Reduction, size: Sequence[Any], lengths: tuple[Any, Any]) -> Any:
        """A strip summed along its diagonals."""
        return lowerings[aten.reshape](self._fold(buffer, *lengths), size) if reduction is Reduction.STRIP else buffer

    def _fold(self, strip: Any, queries: Any, keys: Any) -> Any:
        """A strip as [slices, Q + K - 1].

        Rows are read with a stride of one more or less, so that each starts a column later or earlier.
        """
        raise NotImplementedError

    def workspace(self, extents: Sequence[Any], device: torch.device, tilings: Sequence[dict[str, Any]]) -> Any:
        """[parts, B, H, query tiles, Q + K - 1].

        A tile is summed along its diagonals in parts of one tile of keys each, so that the same part of the next tile
        touches none of the same distances: an element has one writer.
        """
        batch, heads, queries, keys = extents
        shortest = min(t["BLOCK_M2"] for t in tilings)
        tiles = FloorDiv(queries + shortest - 1, shortest)
        parts = max(1 + -(-t["BLOCK_M2"] // t["BLOCK_N2"]) for t in tilings)
        return full([parts, batch, heads, tiles, queries + keys - 1], 0, torch.float32, device)

    def total(self, workspace: Any, axes: Sequence[bool]) -> Any:
        """Summed over parts and tiles, and over batch and heads where the table has none: [b?, h?, Q + K - 1]."""
        return lowerings[aten.sum](workspace, axis=[0, *(axis + 1 for axis in (0, 1) if not axes[axis]), 3])


def _skewed_sum(flat: Any, slices: Any, rows: Any, width: Any) -> Any:
    """Rows of ``width`` elements from one long line, summed."""
    return lowerings[aten.sum](lowerings[aten.reshape](flat, [slices, rows, width]), axis=[1])


class Diagonal(_Diagonal):
    """``t[b, h, k - q]``. Negative distances stand at the end of a table, where a negative index finds them."""

    name = "diagonal"
    reads = "one value a distance k - q"

    def holds(self, polynomial: sympy.Expr) -> bool:
        """With ``k = q + d`` the query cancels."""
        return Q not in sympy.expand(polynomial.subs(K, Q + _D)).free_symbols

    def alike(self, q: Any, k: Any) -> Any:
        """The distance."""
        return k - q

    def coordinates(self, outer: Inserter, axes: Sequence[Node], queries: Any, keys: Any) -> tuple[Any, Any]:
        """Query 0 for distances ahead, key 0 for those behind."""
        (along,) = axes
        last = arithmetic(outer, operator.sub, queries, 1)
        total = arithmetic(outer, operator.add, last, keys)
        ahead = outer.function(operator.lt, along, keys)
        distance = outer.function(torch.where, ahead, along, outer.function(operator.sub, along, total))
        negative = outer.function(operator.neg, distance)
        q, k = (outer.method("clamp", x, min=0) for x in (negative, distance))
        return q, k

    def index(self, inner: Graph, q: Node, k: Node) -> tuple[Node, ...]:
        """The distance."""
        return (_with_meta(inner.call_function(operator.sub, (k, q)), k),)

    def _fold(self, strip: Any, queries: Any, keys: Any) -> Any:
        slices, rows, width = strip.get_size()
        offset = strip_shape(queries, keys)[0]
        flat = lowerings[aten.reshape](strip, [slices, rows * width])
        sums = _skewed_sum(lowerings[aten.constant_pad_nd](flat, [0, rows], 0.0), slices, rows, width + 1)
        ahead = lowerings[aten.slice](sums, 1, offset, offset + keys)
        behind = lowerings[aten.slice](sums, 1, offset - queries + 1, offset)
        # Not a cat, which torch 2.13 takes for two halves of one reduction to be merged, and fails at.
        padded = [(ahead, [0, queries - 1]), (behind, [keys, 0])]
        return lowerings[aten.add](*(lowerings[aten.constant_pad_nd](part, padding, 0.0) for part, padding in padded))


class Antidiagonal(_Diagonal):
    """``t[b, h, k + q]``."""

    name = "antidiagonal"
    reads = "one value a sum k + q"

    def holds(self, polynomial: sympy.Expr) -> bool:
        """With ``k = d - q`` the query cancels."""
        return Q not in sympy.expand(polynomial.subs(K, _D - Q)).free_symbols

    def alike(self, q: Any, k: Any) -> Any:
        """The sum of both positions."""
        return k + q

    def coordinates(self, outer: Inserter, axes: Sequence[Node], queries: Any, keys: Any) -> tuple[Any, Any]:
        """The last query that there is, and the key that is left of the sum."""
        (along,) = axes
        q = outer.method("clamp", along, max=arithmetic(outer, operator.sub, queries, 1))
        return q, outer.function(operator.sub, along, q)

    def index(self, inner: Graph, q: Node, k: Node) -> tuple[Node, ...]:
        """The sum of both positions."""
        return (_with_meta(inner.call_function(operator.add, (k, q)), k),)

    def _fold(self, strip: Any, queries: Any, keys: Any) -> Any:
        slices, rows, width = strip.get_size()
        flat = lowerings[aten.reshape](strip, [slices, rows * width])
        sums = _skewed_sum(lowerings[aten.slice](flat, 1, 0, rows * (width - 1)), slices, rows, width - 1)
        return lowerings[aten.slice](sums, 1, rows, rows + queries + keys - 1)


def _with_meta(node: Node, like: Node) -> Node:
    node.meta = dict(like.meta)
    return node
