"""One form for the scatter-adds of a joint graph, whichever op they were written with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..core.integers import SAME_VALUES
from ..core.shapes import same_sizes
from ..torch_api.sizes import statically_known_true
from .permutations import same_values

aten = torch.ops.aten

_ZEROS = (aten.full.default, aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default, aten.full_like.default)
_CONVERT = torch.ops.prims.convert_element_type.default


@dataclass(frozen=True)
class ScatterAdd:
    """``base[indices] += factor * values``.

    indices: as index_put takes them, one for each leading dim, or None for a whole dim. values: broadcast to the shape of
    ``base[indices]``. keep: a mask as long as the index, and values are left out where it is false; None if no value is left
    out. factor: the number by which the values are multiplied.
    """

    node: Node
    base: Node
    indices: tuple[Node | None, ...]
    values: Node
    keep: Node | None = None
    factor: Any = 1

    @property
    def dim(self) -> int:
        """The first dim that is indexed."""
        return next(d for d, index in enumerate(self.indices) if index is not None)

    @property
    def indexed(self) -> tuple[Node, ...]:
        """The indices of the dims from ``dim`` on; empty if a whole dim lies between them, or if one of them is a mask."""
        chosen = self.indices[self.dim :]
        masks = (torch.bool, torch.uint8)
        return () if any(i is None or i.meta["val"].dtype in masks for i in chosen) else chosen


def match(node: Node) -> ScatterAdd | None:
    """The scatter-add of floating-point values along whole dims that a node computes; None for any other node."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return None
    if node.target in (aten.index_put.default, aten._unsafe_index_put.default):
        base, indices, values, *accumulate = node.args
        return ScatterAdd(node, base, tuple(indices), values) if any(accumulate) else None
    if node.target is aten._unsafe_masked_index_put_accumulate.default:
        base, mask, indices, values = node.args
        keep = row_mask(mask, indices)
        return ScatterAdd(node, base, tuple(indices), values, keep) if keep is not None else None
    if node.target is aten.index_add.default:
        base, dim, index, values = node.args
        dim %= max(value.dim(), 1)
        factor = node.kwargs.get("alpha", 1)
        if index.meta["val"].dim() != 1 or value.dim() == 0:
            return None
        return ScatterAdd(node, base, (*[None] * dim, index), values, factor=factor)
    if node.target is aten.scatter_add.default or _sums_onto_base(node):
        base, dim, index, values = node.args[:4]
        dim %= max(value.dim(), 1)
        rows = row_index(index, values, dim)
        others = [d for d in range(value.dim()) if d != dim]
        if rows is not None and all(same_sizes([value.shape[d]], [values.meta["val"].shape[d]]) for d in others):
            return ScatterAdd(node, base, (*[None] * dim, rows), values)
    return None


def is_zero(node: Any) -> bool:
    """Whether a node is a tensor of zeros."""
    if node.target not in _ZEROS:
        return False
    return node.target not in (aten.full.default, aten.full_like.default) or node.args[1] == 0


def narrow_source(values: Node) -> tuple[Node, Node | None]:
    """The half-precision tensor from which fp32 ``values`` were cast, and the mask of the rows that were set to zero.

    In the gradient of ``embedding``, the values are first cast to fp32 and the rows of the padding index are masked. Here
    the sum does both. The first result is the fp32 tensor if it was not cast, the second is None if no row was masked.
    """
    masked = None
    if values.target is aten.where.self and _is_scalar_zero(values.args[1]):
        masked, values = values.args[0], values.args[2]
    if values.target is _CONVERT and values.args[1] is torch.float32:
        source = values.args[0]
        values = source if source.meta["val"].dtype in (torch.bfloat16, torch.float16) else values
    return values, masked


def _is_scalar_zero(node: Node) -> bool:
    return isinstance(node, Node) and node.target in (aten.scalar_tensor.default, aten.full.default) and 0 in node.args[-1:]


def _sums_onto_base(node: Node) -> bool:
    if node.target is not aten.scatter_reduce.two or node.kwargs.get("include_self", True) is not True:
        return False
    return len(node.args) == 5 and node.args[4] == "sum"


def row_mask(mask: Node, indices: Any) -> Node | None:
    """``mask`` [*index, 1, ...] as a mask of the only index; None if there are more, or if it also selects within a row."""
    (index,) = indices if len(indices) == 1 else (None,)
    if index is None:
        return None
    shape = index.meta["val"].shape
    dims = mask.meta["val"].shape
    if not same_sizes(dims[: len(shape)], shape) or not all(statically_known_true(n == 1) for n in dims[len(shape) :]):
        return None
    inner = same_values(mask)
    return inner if same_sizes(inner.meta["val"].shape, shape) else None


def row_index(index: Node, values: Node, dim: int) -> Node | None:
    """The row indices [N] that ``index`` repeats along all dims of ``values`` except ``dim``; None if it does not."""
    expanded = index.meta["val"].shape
    if index.target is not aten.expand.default or not same_sizes(expanded, values.meta["val"].shape):
        return None
    rows = index.args[0]
    shape = rows.meta["val"].shape
    # ``expand`` aligns dims on the right, so it may have added dims in front. ``dim`` must not be one of them.
    at = dim - (len(expanded) - len(shape))
    if at < 0 or not statically_known_true(shape[at] == expanded[dim]):
        return None
    if not all(statically_known_true(n == 1) for d, n in enumerate(shape) if d != at):
        return None
    # Views are skipped, but casts are not: the result is used as an index.
    while rows.meta["val"].dim() != 1 and rows.target in SAME_VALUES:
        rows = rows.args[0]
    return rows if rows.meta["val"].dim() == 1 else None
