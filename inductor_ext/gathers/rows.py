"""The values of a scatter-add as rows, one for each element of the index, and sums of rows as the base is shaped.

With an index of several tensors, ``base[:, i, j]``, the indexed dims count as one, and the tensors broadcast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ..core.fx import same_shape, same_sizes, value_of
from ..core.joint_graph import Builder
from .scatter_adds import ScatterAdd

aten = torch.ops.aten


def index_shape(found: ScatterAdd) -> tuple[Any, ...]:
    """Return the shape to which the indices broadcast."""
    first, *others = found.indexed
    if all(same_shape(first, other) for other in others):
        return tuple(value_of(first).shape)
    return tuple(torch.broadcast_shapes(*(value_of(i).shape for i in found.indexed)))


def values_shape(found: ScatterAdd) -> tuple[Any, ...]:
    """Return the shape of ``base[indices]``, to which the values broadcast."""
    base = value_of(found.base).shape
    return (*base[: found.dim], *index_shape(found), *base[found.dim + len(found.indexed) :])


def expanded(build: Builder, index: Node, found: ScatterAdd) -> Node:
    """Return one of the indices, expanded to the shape to which all of them broadcast."""
    if all(same_shape(index, other) for other in found.indexed):
        return index
    return build.call(aten.expand.default, index, _index_sizes(build, found))


def by_row(build: Builder, found: ScatterAdd, values: Node) -> Node:
    """Reshape values [*before, *index, *after] to [N, *before, *after], with one row for each element of the index."""
    shape = index_shape(found)
    dims = [*range(found.dim), *range(found.dim + len(found.indexed), value_of(found.base).dim())]
    sizes = build.sizes(found.base, dims)
    if len(shape) == 1 and found.dim == 0 and same_sizes(value_of(values).shape, values_shape(found)):
        return values
    index_sizes = _index_sizes(build, found)
    full = [*sizes[: found.dim], *index_sizes, *sizes[found.dim :]]
    values = build.call(aten.expand.default, values, full)
    index_dims = range(found.dim, found.dim + len(shape))
    others = [d for d in range(len(full)) if d not in index_dims]
    values = build.call(aten.permute.default, values, [*index_dims, *others])
    return view(build, values, [build.product(index_sizes), *sizes])


def from_rows(build: Builder, found: ScatterAdd, total: Node) -> Node:
    """Permute [*indexed dims, *before, *after] to the order of dims of the base."""
    if found.dim == 0:
        return total
    order = [*range(found.dim, found.dim + len(found.indexed)), *range(found.dim)]
    order += range(len(order), value_of(found.base).dim())
    return build.call(aten.permute.default, total, [order.index(d) for d in range(len(order))])


def flat(build: Builder, node: Node) -> Node:
    """Return a tensor with one dim."""
    if value_of(node).dim() == 1:
        return node
    return view(build, node, [build.product(build.sizes(node, range(value_of(node).dim())))])


def in_bounds(build: Builder, index: Node, size: Any) -> Node:
    """Return an index as int32, with -2 for what is not from 0 to ``size - 1``, at which kernels raise an error."""
    bad = build.full([], -2, torch.int32, value_of(index).device)
    below, above = build.call(aten.lt.Scalar, index, 0), build.call(aten.ge.Scalar, index, size)
    return build.call(
        aten.where.self, build.call(aten.bitwise_or.Tensor, below, above), bad, build.convert(index, torch.int32)
    )


def view(build: Builder, node: Node, sizes: Sequence[Any]) -> Node:
    """Return a view, of a copy if it needs one."""
    if not value_of(node).is_contiguous():
        node = build.call(aten.clone.default, node, memory_format=torch.contiguous_format)
    return build.call(aten.view.default, node, list(sizes))


def _index_sizes(build: Builder, found: ScatterAdd) -> list[Any]:
    """Return the shape to which all indices broadcast. A symbolic size is a node that reads it from an index that has it."""

    def size(dim: int, n: Any) -> Any:
        for index in () if isinstance(n, int) else found.indexed:
            at = dim - len(shape) + value_of(index).dim()
            if at >= 0 and same_sizes([value_of(index).shape[at]], [n]):
                return build.size(index, at)
        return n

    shape = index_shape(found)
    return [size(dim, n) for dim, n in enumerate(shape)]
