"""Reads of captured tensors that are slices of them on the grid of a table, as ``t[h, q - k + 512]`` is for all distances.

With an index such a table takes kernels for the index, and a scatter-add in the backward. Slices and their gradients are
parts of the kernels before and behind them, and each element of the tensor gets at most one gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import sympy
import torch
from torch.fx import Node

from ..core.dynamo_graph import Inserter
from .footprints import B, Footprint, H
from .kinds import K, Q
from .kinds.diagonals import Antidiagonal, Diagonal

#: The axes of the grid: the batch, the head, and the distances or sums of a query and a key.
_BATCH, _HEAD, _ALONG = range(3)


class _Place(NamedTuple):
    """The index of one dim: ``constant + sign * x``, where x is the number along an axis of the grid."""

    axis: int
    sign: int
    constant: int


def as_slices(
    outer: Inserter,
    table: Callable[[], Node],
    sizes: Sequence[Any],
    indices: Sequence[Any],
    footprint: Footprint,
    lengths: Sequence[Any],
) -> Node | None:
    """Return a read of a table that broadcasts to the grid of a footprint, made of slices, or None if it is not possible.

    table: makes its node. sizes: those of the table. indices: for each dim an int or the polynomial of the index in b, h, q
    and k, or None if it is something else. lengths: those of b, h, q and k. No index may be out of bounds for any of these.
    """
    kind, (queries, keys) = footprint.kind, lengths[2:]
    known = all(isinstance(n, int) for n in (*sizes, queries, keys))
    if not isinstance(kind, (Diagonal, Antidiagonal)) or not known or len(indices) != len(sizes):
        return None
    values = range(kind.first(queries), kind.first(queries) + kind.elements(queries, keys))
    places = [index if isinstance(index, int) else _place(index, kind.alike(Q, K)) for index in indices]
    if not values or not all(_inside(*place, lengths, values) for place in zip(places, sizes, strict=True)):
        return None
    found = [place for place in places if isinstance(place, _Place)]
    axes = [place.axis for place in found]
    grid = [axis for axis, used in ((_BATCH, footprint.batch), (_HEAD, footprint.head), (_ALONG, True)) if used]
    # A head that cancels in what is read is an axis of the read, and not of the grid.
    if len(set(axes)) < len(axes) or _ALONG not in axes or not set(axes) <= set(grid):
        return None
    read = table()
    for dim in reversed(range(len(places))):
        if isinstance(places[dim], int):
            read = outer.method("select", read, dim, places[dim])
    read = _along(outer, read, axes.index(_ALONG), found[axes.index(_ALONG)], values)
    read = outer.method("permute", read, sorted(range(len(axes)), key=axes.__getitem__))
    for dim, axis in enumerate(grid):
        if axis not in axes:
            read = outer.method("unsqueeze", read, dim)
    return read


def _place(index: sympy.Expr | None, along: sympy.Expr) -> _Place | None:
    for axis, x in enumerate((B, H, along)):
        for sign in (1, -1):
            constant = None if index is None else sympy.expand(index - sign * x)
            if constant is not None and constant.is_Integer:
                return _Place(axis, sign, int(constant))
    return None


def _inside(place: _Place | int | None, size: int, lengths: Sequence[int], values: range) -> bool:
    """Whether an index is a constant of its dim, all of its dim, or a slice within it."""
    if not isinstance(place, _Place):
        return place is not None and -size <= place < size
    if place.axis != _ALONG:
        # A dynamic length would become a guard by the comparison.
        length = lengths[place.axis]
        return place.sign > 0 and place.constant == 0 and isinstance(length, int) and size == length
    return all(0 <= place.constant + place.sign * x < size for x in (values[0], values[-1]))


def _along(outer: Inserter, table: Node, dim: int, place: _Place, values: range) -> Node:
    """The elements for all values, those for values below 0 at the end."""
    least = place.constant + (values[0] if place.sign > 0 else -values[-1])
    read = outer.method("narrow", table, dim, least, len(values))
    if place.sign < 0:
        read = outer.function(torch.flip, read, [dim])
    return outer.function(torch.roll, read, values[0], dim) if values[0] else read
