"""One form for the scatter-adds of a joint graph, whichever op they were written with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..core.fx import (
    DECOMPOSED_VIEWS,
    HALF,
    MASKS,
    SAME_ORDER,
    ZEROS,
    cast_of,
    cone,
    fake_tensor,
    same_shape,
    same_sizes,
    shape_of,
    value_of,
)
from ..core.joint_graph import Builder
from ..torch_api.sizes import statically_known_true
from .permutations import same_values

aten = torch.ops.aten


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
        return () if any(i is None or value_of(i).dtype in MASKS for i in chosen) else chosen


def match(node: Node) -> ScatterAdd | None:
    """The scatter-add of floating-point values along whole dims that a node computes; None for any other node."""
    value = fake_tensor(node)
    if node.op != "call_function" or value is None or not value.is_floating_point():
        return None
    if node.target in (aten.index_put.default, aten._unsafe_index_put.default):
        base, indices, values, *accumulate = node.args
        return ScatterAdd(node, base, tuple(indices), values) if any(accumulate) else None
    if node.target is aten._unsafe_masked_index_put_accumulate.default:
        base, mask, indices, values = node.args
        keep = row_mask(mask, indices, base)
        return ScatterAdd(node, base, tuple(indices), values, keep) if keep is not None else None
    if node.target is aten.index_add.default:
        base, dim, index, values = node.args
        dim %= max(value.dim(), 1)
        factor = node.kwargs.get("alpha", 1)
        if value_of(index).dim() != 1 or value.dim() == 0:
            return None
        return ScatterAdd(node, base, (*[None] * dim, index), values, factor=factor)
    if node.target is aten.scatter_add.default or _sums_onto_base(node):
        base, dim, index, values = node.args[:4]
        dim %= max(value.dim(), 1)
        rows = row_index(index, values, dim)
        others = [d for d in range(value.dim()) if d != dim]
        if rows is not None and all(same_sizes([value.shape[d]], [shape_of(values)[d]]) for d in others):
            return ScatterAdd(node, base, (*[None] * dim, rows), values)
    return None


@dataclass(frozen=True)
class Binned:
    """The gradient of a lookup in the rows of a tensor: ``base[..., r, index[r, n]] += values[..., r, n]``.

    index: [R, N], or with dims of size 1 before it.
    """

    node: Node
    base: Node
    index: Node
    values: Node


def match_binned(node: Node) -> Binned | None:
    """The scatter-add along the last dim whose index is the same in all slices of the dims before the rows, or None."""
    value = fake_tensor(node)
    if node.op != "call_function" or value is None or not value.is_floating_point() or value.dim() < 3:
        return None
    if node.target is not aten.scatter_add.default and not _sums_onto_base(node):
        return None
    base, dim, index, values = node.args[:4]
    whole = same_shape(index, values) and same_sizes(value.shape[:-1], shape_of(values)[:-1])
    if dim % value.dim() != value.dim() - 1 or not whole or index.target is not aten.expand.default:
        return None
    shape = shape_of(index.args[0])
    own = len(shape) >= 2 and same_sizes(shape[-2:], shape_of(values)[-2:])
    if not own or not all(statically_known_true(n == 1) for n in shape[:-2]):
        return None
    return Binned(node, base, index.args[0], values)


def is_zero(node: Any) -> bool:
    """Whether a node is a tensor of zeros."""
    filled = node.target in (aten.full.default, aten.full_like.default) and node.args[1] == 0
    return filled or node.target in ZEROS


def narrow_source(values: Node) -> tuple[Node, Node | None]:
    """The half-precision tensor from which fp32 ``values`` were cast, and the mask of the rows that were set to zero.

    In the gradient of ``embedding``, the values are first cast to fp32 and the rows of the padding index are masked. Here
    the sum does both. The first result is the fp32 tensor if it was not cast, the second is None if no row was masked.
    """
    masked = None
    if values.target is aten.where.self and _is_scalar_zero(values.args[1]):
        masked, values = values.args[0], values.args[2]
    source = cast_of(values)
    if source is not None and value_of(values).dtype is torch.float32 and value_of(source).dtype in HALF:
        values = source
    return values, masked


@dataclass(frozen=True)
class Scale:
    """A multiplication or division (``op``) of fp32 values by one constant: a number, or a node with one element."""

    op: Any
    factor: Any

    def of(self, build: Builder, total: Node) -> Node:
        """Return the sums, scaled."""
        factor = build.call(aten.view.default, self.factor, []) if isinstance(self.factor, Node) else self.factor
        return build.call(self.op, total, factor)


def unscaled(build: Builder, values: Node) -> tuple[Node, Scale | None]:
    """If fp32 values are scaled by a constant: the values before that, and the scale. Otherwise: the values, and None.

    The sums are scaled instead, so that no scaled copy of the values is made. Views may follow the scale. The constant is a
    finite number that is not 0, or a tensor of one element that no input of the graph changes. If that tensor is 0 or
    infinite, bins without values get NaN. Values near the largest fp32 number may overflow in a sum where scaled ones would
    not.
    """
    views, node = [], values
    while node.target in DECOMPOSED_VIEWS:
        views.append(node)
        node = node.args[0]
    if node.target not in (aten.mul.Tensor, aten.div.Tensor) or value_of(node).dtype is not torch.float32:
        return values, None
    inner, factor = node.args
    if not isinstance(inner, Node) or not _is_one_constant(factor) or not _stored_alike(inner, node):
        return values, None
    for view in reversed(views):
        inner = build.call(view.target, inner, *view.args[1:], **view.kwargs)
    return inner, Scale(node.target, factor)


def _stored_alike(x: Node, y: Node) -> bool:
    """Whether two nodes are tensors of the same dtype, shape and strides, so that the same views of both are possible."""
    a, b = fake_tensor(x), fake_tensor(y)
    same = a is not None and b is not None and a.dtype is b.dtype and same_shape(x, y)
    return same and same_sizes(a.stride(), b.stride())


def _is_one_constant(factor: Any) -> bool:
    if not isinstance(factor, Node):
        return isinstance(factor, (int, float)) and math.isfinite(factor) and factor != 0
    value = fake_tensor(factor)
    return value is not None and value.numel() == 1 and all(n.op != "placeholder" for n in cone(factor))


def _is_scalar_zero(node: Node) -> bool:
    return isinstance(node, Node) and node.target in (aten.scalar_tensor.default, aten.full.default) and 0 in node.args[-1:]


def _sums_onto_base(node: Node) -> bool:
    if node.target is not aten.scatter_reduce.two or node.kwargs.get("include_self", True) is not True:
        return False
    return len(node.args) == 5 and node.args[4] == "sum"


def row_mask(mask: Node, indices: Any, base: Node) -> Node | None:
    """``mask`` [*index, 1, ...] as a mask of the only index of ``base``, or None.

    It is None if there are more indices, or if it also selects within a row. A mask with fewer dims than the values does, as
    it is aligned on the right.
    """
    (index,) = indices if len(indices) == 1 else (None,)
    if index is None or value_of(mask).dim() != value_of(index).dim() + value_of(base).dim() - 1:
        return None
    shape, dims = shape_of(index), shape_of(mask)
    if not same_sizes(dims[: len(shape)], shape) or not all(statically_known_true(n == 1) for n in dims[len(shape) :]):
        return None
    inner = same_values(mask)
    return inner if same_sizes(shape_of(inner), shape) else None


def row_index(index: Node, values: Node, dim: int) -> Node | None:
    """The row indices [N] that ``index`` repeats along all dims of ``values`` except ``dim``; None if it does not."""
    expanded = shape_of(index)
    if index.target is not aten.expand.default or not same_shape(index, values):
        return None
    rows = index.args[0]
    shape = shape_of(rows)
    # ``expand`` aligns dims on the right, so it may have added dims in front. ``dim`` must not be one of them.
    at = dim - (len(expanded) - len(shape))
    if at < 0 or not statically_known_true(shape[at] == expanded[dim]):
        return None
    if not all(statically_known_true(n == 1) for d, n in enumerate(shape) if d != at):
        return None
    # Views are skipped, but casts are not: the result is used as an index.
    while value_of(rows).dim() != 1 and rows.target in SAME_ORDER:
        rows = rows.args[0]
    return rows if value_of(rows).dim() == 1 else None
