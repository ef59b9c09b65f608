"""Lookups of Dynamo's graphs, read at one index: ``embedding``, ``index_select``, ``gather``, and tensors in brackets."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from ...core.fx import dtype_of, full_index, indices_of, shape_of
from ...core.terms import arg, is_tensor, op
from .views import Index, NotAView, broadcast

#: The dtypes of an index. A mask is none: it has as many dims as it chooses from.
_INDICES = (torch.int64, torch.int32)


def is_lookup(node: Node) -> bool:
    """Return whether a node looks something up in a tensor. Brackets without a tensor are a view."""
    return op(node) in _READS and (op(node) != "getitem" or any(isinstance(e, Node) for e in indices_of(node)))


def entries(node: Node, index: Index) -> tuple[Node, tuple[Any, ...]]:
    """Return the table of a lookup and its index for the element ``index`` of the result.

    An entry of the index is one of ``index``, or a pair of an index tensor and the index at which that is read. Raises
    NotAView for lookups that are not understood.
    """
    table, found = _READS[op(node)](node, index)
    if not is_tensor(table):
        raise NotAView
    for entry in found:
        if isinstance(entry, tuple) and dtype_of(entry[0]) not in _INDICES:
            raise NotAView
    return table, tuple(found)


def _embedding(node: Node, index: Index) -> tuple[Node, list[Any]]:
    indices, table = arg(node, 0, "input"), arg(node, 1, "weight")
    # The row of ``padding_idx`` gets no gradient, and the other arguments change the table or its gradient.
    changed = arg(node, 2, "padding_idx") is not None or arg(node, 3, "max_norm") is not None
    if changed or arg(node, 5, "scale_grad_by_freq", False) or arg(node, 6, "sparse", False):
        raise NotAView
    return table, [(indices, index[:-1]), index[-1]]


def _index_select(node: Node, index: Index) -> tuple[Node, list[Any]]:
    table, dim, indices = (arg(node, i, name) for i, name in enumerate(("input", "dim", "index")))
    dim %= len(index)
    at = () if len(shape_of(indices)) == 0 else (index[dim],)
    return table, [*index[:dim], (indices, at), *index[dim + 1 :]]


def _gather(node: Node, index: Index) -> tuple[Node, list[Any]]:
    table, dim, indices = (arg(node, i, name) for i, name in enumerate(("input", "dim", "index")))
    if arg(node, 3, "sparse_grad"):
        raise NotAView
    dim %= len(index)
    return table, [*index[:dim], (indices, index), *index[dim + 1 :]]


def _brackets(node: Node, index: Index) -> tuple[Node, list[Any]]:
    """``table[:, i, j]``: neighbouring index tensors, whose dims stand in the result where they stand in the brackets."""
    table = node.args[0]
    if not is_tensor(table):
        raise NotAView
    brackets = full_index(indices_of(node), len(shape_of(table)))
    tensors = [at for at, e in enumerate(brackets) if isinstance(e, Node)]
    known = all(isinstance(e, Node) or e == slice(None) for e in brackets)
    if (
        not known
        or not all(dtype_of(brackets[at]) in _INDICES for at in tensors)
        or tensors != list(range(tensors[0], tensors[-1] + 1))
    ):
        raise NotAView
    rank = max(len(shape_of(brackets[at])) for at in tensors)
    before, inside, after = index[: tensors[0]], index[tensors[0] : tensors[0] + rank], index[tensors[0] + rank :]
    looked_up = [(brackets[at], broadcast(inside, shape_of(brackets[at]))) for at in tensors]
    return table, [*before, *looked_up, *after]


#: Lookups by the names of their ops.
_READS = {
    "embedding": _embedding,
    "index_select": _index_select,
    "gather": _gather,
    operator.getitem.__name__: _brackets,
}
