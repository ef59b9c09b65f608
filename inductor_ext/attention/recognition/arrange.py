"""Views of whole tensors in which every dim is one position, so that a kernel reads them at ``[b, h, q, k]``."""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch
from torch.fx import Node

from ...core.dynamo_graph import Inserter
from ...core.fx import same_sizes, shape_of, value_of
from ...torch_api.sizes import statically_known_true
from .indices import Ranges
from .views import Index


def simplified(outer: Inserter, node: Node, index: Index, ranges: Ranges) -> tuple[Node, Index]:
    """Return a view of ``node`` and the index there that reads the same element as ``node[index]``, in simpler form.

    Dims that are read at one number are selected. A dim that counts batches and heads (``b*H + h``) is split, and dims that
    together count queries or keys (``k // W`` and ``k % W``) are joined.
    """
    for change in (_select, _join, _split, _narrow):
        node, index = change(outer, node, index, ranges)
    return node, index


def on_device(outer: Inserter, node: Node, device: torch.device) -> Node:
    """Return ``node`` on a device. A table on a GPU may have an index on the CPU, but a kernel reads both."""
    return node if value_of(node).device == device else outer.method("to", node, device)


def _select(outer: Inserter, node: Node, index: Index, ranges: Ranges) -> tuple[Node, Index]:
    for dim in reversed(range(len(index))):
        if isinstance(index[dim], sympy.Integer) and len(index) > 1:
            node = outer.method("select", node, dim, int(index[dim]))
            index = (*index[:dim], *index[dim + 1 :])
    return node, index


def _join(outer: Inserter, node: Node, index: Index, ranges: Ranges) -> tuple[Node, Index]:
    dim = 0
    while dim + 1 < len(index):
        pair, sizes = index[dim : dim + 2], shape_of(node)[dim : dim + 2]
        known = all(isinstance(i, sympy.Expr) for i in pair) and all(isinstance(n, int) for n in sizes)
        if known and not all(i.is_Symbol for i in pair) and (flat := ranges.joined(pair, sizes)).is_Symbol:
            node = outer.method("flatten", node, dim, dim + 1)
            index = (*index[:dim], flat, *index[dim + 2 :])
        else:
            dim += 1
    return node, index


def _split(outer: Inserter, node: Node, index: Index, ranges: Ranges) -> tuple[Node, Index]:
    for dim in reversed(range(len(index))):
        i = index[dim]
        positions = ranges.radix(i, shape_of(node)[dim]) if isinstance(i, sympy.Expr) else None
        if positions is not None and len(positions) > 1:
            node = outer.method("unflatten", node, dim, tuple(ranges.extents[p] for p in positions))
            index = (*index[:dim], *positions, *index[dim + 1 :])
    return node, index


def _narrow(outer: Inserter, node: Node, index: Index, ranges: Ranges) -> tuple[Node, Index]:
    for dim, i in enumerate(index):
        extent = ranges.extents.get(i) if isinstance(i, sympy.Expr) else None
        if extent is not None and not statically_known_true(shape_of(node)[dim] == extent):
            node = outer.method("narrow", node, dim, 0, extent)
    return node, index


def in_order(
    outer: Inserter, node: Node, index: Index, order: Sequence[sympy.Symbol], ranges: Ranges, expand: bool = True
) -> Node | None:
    """Return a view of ``node`` with one dim for each position in ``order``, or None if there is none.

    A position that ``index`` does not have is broadcast, or with ``expand=False`` is a dim of size 1.
    """
    if not all(isinstance(i, sympy.Expr) for i in index):
        return None
    node, index = simplified(outer, node, index, ranges)
    if len(index) == 1 and isinstance(index[0], sympy.Integer):
        node, index = outer.method("select", node, 0, int(index[0])), ()
    if len(set(index)) < len(index) or not set(index) <= set(order):
        return None
    dims = [index.index(p) for p in order if p in index]
    if dims != sorted(dims):
        node = outer.method("permute", node, dims)
    for dim, position in enumerate(order):
        if position not in index:
            node = outer.method("unsqueeze", node, dim)
    sizes = [ranges.extents.get(p, n) for p, n in zip(order, shape_of(node), strict=True)]
    return outer.method("expand", node, sizes) if expand and not same_sizes(shape_of(node), sizes) else node
