"""Indices that cannot leave a tensor.

A score_mod may be evaluated at positions that the mask removes (``band[h, q - k]`` under a window mask), so an index is
made safe before it becomes an address: negative values wrap, as in eager indexing, and what is still outside is clamped
for a read and masked for a write. An index that *is* one of b, h, q, k over a dim at least as long needs neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..compat import statically_known_true
from .captured_grads import shape_of

aten = torch.ops.aten


def in_range(index: Node | int, size: Any, extents: dict[Node, Any]) -> bool:
    """Whether ``0 <= index < size`` holds for every element, ``extents`` giving the range of b, h, q and k."""
    if isinstance(index, int):
        return statically_known_true(0 <= index) and statically_known_true(index < size)
    return index in extents and statically_known_true(extents[index] <= size)


def extents_of(module: GraphModule, extents: Sequence[Any], first: int) -> dict[Node, Any]:
    """The placeholders of b, h, q, k (the first being input number ``first``) with the lengths of their ranges."""
    placeholders = module.graph.find_nodes(op="placeholder")
    return dict(zip(placeholders[first : first + 4], extents, strict=True))


def safe_reads(
    module: GraphModule,
    extents: dict[Node, Any],
    make_safe: Callable[[Node, Any], Node],
) -> None:
    """Replace, in place, every tensor index of a read that could be out of range by ``make_safe(index, size)``."""
    graph = module.graph
    for node in list(graph.find_nodes(op="call_function", target=aten.index.Tensor)):
        table, indices = node.args
        sizes = shape_of(table)
        with graph.inserting_before(node):
            node.args = (
                table,
                [
                    i if i is None or in_range(i, size, extents) or shape_of(i) != () else make_safe(i, size)
                    for i, size in zip(indices, sizes, strict=False)
                ],
            )
    module.recompile()


def call(graph: torch.fx.Graph, target: Any, *args: Any, like: Node, dtype: torch.dtype | None = None) -> Node:
    """A new scalar op with the metadata of ``like`` (and another dtype)."""
    node = graph.call_function(target, args)
    node.meta["val"] = like.meta["val"].to(dtype) if dtype else like.meta["val"]
    return node


def wrap_negative(graph: torch.fx.Graph, index: Node, size: Any) -> Node:
    """``index + size where index < 0``, as eager indexing counts from the end."""
    negative = call(graph, aten.lt.Scalar, index, 0, like=index, dtype=torch.bool)
    shifted = call(graph, aten.add.Tensor, index, size, like=index)
    return call(graph, aten.where.self, negative, shifted, index, like=index)


def clamp(graph: torch.fx.Graph, index: Node, size: Any) -> Node:
    """``index`` wrapped and clamped into ``[0, size)``."""
    wrapped = wrap_negative(graph, index, size)
    low = call(graph, aten.maximum.default, wrapped, 0, like=index)
    return call(graph, aten.minimum.default, low, size - 1, like=index)
