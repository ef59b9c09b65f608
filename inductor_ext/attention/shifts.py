"""Relative shifts that TMA cannot read where they are: ``x[b, h, q, q - k + K - 1]`` of Conformer and Transformer-XL.

Row q of ``x`` holds a number for each distance, and its scores are a slice of it that starts one element further in each
row. In memory that is a matrix whose rows are one element longer than those of ``x``. A kernel that reads single elements of
it is several times as slow as one that reads blocks by TMA (docs/notes/attention.md), which needs aligned rows and a whole
number of tiles (blocks.py). Elsewhere the matrix is made outside of the kernel, by views and one copy. It is smaller than
``x``. Its gradient is the reverse, in which each element has one writer, so that nothing is added or rounded twice.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from ..core.dynamo_graph import Inserter
from ..core.fx import fake_tensor, indices_of
from ..core.kernels import LARGEST_TILE
from ..core.target import TMA_ALIGNMENT, Target
from .footprints import Footprint
from .kinds import K, Q
from .row_lookups import lookups_in_rows


@dataclass(frozen=True)
class Shift:
    """``x[b, h, row, row_factor * row + column_factor * column + constant]``, where column_factor is 1 or -1.

    by_key: whether the rows are those of the key and not of the query. width: the length of a row of ``x``. columns: their
    number.
    """

    by_key: bool
    row_factor: int
    column_factor: int
    constant: int
    width: int
    columns: int

    @property
    def first(self) -> int:
        """The place of the least element of the first row."""
        return self.constant + min(0, self.column_factor * (self.columns - 1))

    @property
    def stride(self) -> int:
        """The number of elements from a row to the next."""
        return self.width + self.row_factor

    def in_place(self, tensor: torch.Tensor) -> bool:
        """Return whether TMA can read it where it is (blocks.py), if it is stored contiguously."""
        offsets = (self.first, self.stride, tensor.shape[2] * self.width)
        aligned = all(n * tensor.dtype.itemsize % TMA_ALIGNMENT == 0 for n in offsets)
        return not self.by_key and self.column_factor < 0 and self.columns % LARGEST_TILE == 0 and aligned

    def inside(self, rows: int) -> bool:
        """Return whether every place is in its row, so that no index wraps, and rows do not overlap."""
        last = self.row_factor * (rows - 1)
        lowest, highest = self.first + min(0, last), self.first + self.columns - 1 + max(0, last)
        return lowest >= 0 and highest < self.width and self.columns <= self.stride


def relative_shifts(
    graph: Graph, footprints: dict[Node, Footprint], sums: dict[Node, sympy.Expr], extents: Sequence[Any]
) -> dict[Node, Shift]:
    """Return the relative shifts among the nodes of a score_mod's graph of which a table should be made.

    sums: the nodes that are polynomials in b, h, q and k. extents: the numbers of values of these.
    """
    if not all(isinstance(n, int) for n in extents):
        return {}
    lookups = lookups_in_rows(graph, footprints, extents)
    found = {node: _shift(node, by_key, sums, extents) for node, by_key in lookups.items()}
    # The keys of a tile are in ascending order for every other table.
    alone = sum(node.target is operator.getitem for node in graph.nodes) == 1
    return {
        node: shift
        for node, shift in found.items()
        if shift is not None and not (alone and shift.in_place(fake_tensor(node.args[0])))
    }


def _shift(node: Node, by_key: bool, sums: dict[Node, sympy.Expr], extents: Sequence[int]) -> Shift | None:
    place, table = indices_of(node)[-1], fake_tensor(node.args[0])
    if place not in sums or not Target.of(table.device).tma or not isinstance(table.shape[3], int):
        return None
    row, column = (K, Q) if by_key else (Q, K)
    rows, columns = (extents[3], extents[2]) if by_key else (extents[2], extents[3])
    polynomial = sympy.Poly(sums[place], row, column)
    factors = [int(polynomial.coeff_monomial(x)) for x in (row, column, 1)]
    if polynomial.total_degree() != 1 or abs(factors[1]) != 1:
        return None
    shift = Shift(by_key, *factors, table.shape[3], columns)
    return shift if shift.inside(rows) else None


def shifted(outer: Inserter, tensor: Any, shift: Shift, shape: Sequence[int], padded: int) -> Node:
    """Insert the matrices [B, H, Q, padded] of a shift of ``tensor``, whose columns after the last key are zero.

    shape: that of ``tensor``.
    """
    call, method = outer.function, outer.method
    batch, heads, rows, _ = shape
    elements = method("reshape", tensor, [batch, heads, rows * shift.width])
    after = shift.first + rows * shift.stride - rows * shift.width
    elements = call(F.pad, elements, (-shift.first, after))
    matrix = method("narrow", method("reshape", elements, [batch, heads, rows, shift.stride]), 3, 0, shift.columns)
    if shift.column_factor < 0:
        matrix = call(torch.flip, matrix, (3,))
    if shift.by_key:
        matrix = call(torch.transpose, matrix, 2, 3)
    keys = rows if shift.by_key else shift.columns
    return matrix if keys == padded else call(F.pad, matrix, (0, padded - keys))
