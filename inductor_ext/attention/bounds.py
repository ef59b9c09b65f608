"""Keep the indices of a score_mod inside its tensors.

A score_mod may be evaluated at positions that the mask removes (``band[h, q - k]`` under a window mask), so every index is
made safe before it becomes an address. Negative values wrap, as in eager indexing. An index that is still outside is
clamped for a read and masked for a write. An index that *is* one of b, h, q, k, over a dim that is at least as long, needs
neither.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..core.fx import CASTS_AND_COPIES, fake_tensor, shape_of, value_of
from ..core.integers import exact_integers
from ..core.subgraphs import expression
from ..torch_api.sizes import statically_known_true
from .captured_grads import constant_of

aten = torch.ops.aten


#: If a tensor has more elements than this, its index arithmetic is done in 64 bits.
INT32_ELEMENTS = 2**31 - 1
#: An integer interval that includes both ends. None means that an end is unbounded.
Interval = tuple[int | None, int | None]
UNBOUNDED: Interval = (None, None)


def interval(node: Any, extents: dict[Node, Any], known: dict[Node, Interval] | None = None) -> Interval:
    """Return the range of an integer scalar of a score_mod graph, by interval arithmetic over its FX nodes.

    ``extents`` gives the lengths of the ranges of b, h, q and k. A node that is symbolic, or for which there is no rule, is
    unbounded.
    """
    known = {} if known is None else known
    constant = constant_of(node)
    if constant is not None:
        return constant, constant
    if not isinstance(node, Node):
        return UNBOUNDED
    if node not in known:
        extent = extents.get(node)
        known[node] = (0, extent - 1) if isinstance(extent, int) else _interval_of_op(node, extents, known)
    return known[node]


def _interval_of_op(node: Node, extents: dict[Node, Any], known: dict[Node, Interval]) -> Interval:
    rule = _INTERVAL_RULES.get((node.target, node.kwargs.get("rounding_mode"))) or _INTERVAL_RULES.get(node.target)
    value = fake_tensor(node)
    if value is None or value.is_floating_point() or value.is_complex():
        return UNBOUNDED
    bounds = exact_integers(value.dtype)
    if rule is None or node.kwargs.get("alpha", 1) != 1:
        return bounds
    operands = (a for a in node.args if a is None or isinstance(a, (int, Node)))
    low, high = rule(*(None if a is None else interval(a, extents, known) for a in operands))
    # A value that does not fit wraps, so the result may be any value of the dtype.
    fits = low is not None and high is not None and bounds[0] <= low and high <= bounds[1]
    return (low, high) if fits else bounds


def _add(x: Interval, y: Interval) -> Interval:
    return tuple(None if a is None or b is None else a + b for a, b in zip(x, y, strict=True))


def _neg(x: Interval) -> Interval:
    return tuple(None if a is None else -a for a in reversed(x))


def _mul(x: Interval, y: Interval) -> Interval:
    if None in (*x, *y):
        return UNBOUNDED
    products = [a * b for a in x for b in y]
    return min(products), max(products)


def _abs(x: Interval) -> Interval:
    if None in x:
        return 0, None
    return (0 if x[0] <= 0 <= x[1] else min(map(abs, x))), max(map(abs, x))


def _floor_divide(x: Interval, y: Interval, *_: Any) -> Interval:
    return (x[0] // y[0], x[1] // y[0]) if None not in x and y[0] == y[1] and (y[0] or 0) > 0 else UNBOUNDED


def _truncated_divide(x: Interval, y: Interval, *_: Any) -> Interval:
    # Both round a number that is not negative in the same way.
    return _floor_divide(x, y) if x[0] is not None and x[0] >= 0 else UNBOUNDED


def _remainder(x: Interval, y: Interval) -> Interval:
    return (0, y[0] - 1) if y[0] == y[1] and (y[0] or 0) > 0 else UNBOUNDED


def _shift_left(x: Interval, y: Interval) -> Interval:
    return _mul(x, (1 << y[0],) * 2) if y[0] == y[1] and (y[0] or -1) >= 0 else UNBOUNDED


def _shift_right(x: Interval, y: Interval) -> Interval:
    return (x[0] >> y[0], x[1] >> y[0]) if None not in x and y[0] == y[1] and (y[0] or -1) >= 0 else UNBOUNDED


def _bitwise_and(x: Interval, y: Interval) -> Interval:
    bounds = [i[1] for i in (x, y) if i[0] is not None and i[0] >= 0 and i[1] is not None]
    return (0, min(bounds)) if bounds else UNBOUNDED


def _minimum(x: Interval, y: Interval) -> Interval:
    low = None if None in (x[0], y[0]) else min(x[0], y[0])
    return low, min((a for a in (x[1], y[1]) if a is not None), default=None)


def _maximum(x: Interval, y: Interval) -> Interval:
    return _neg(_minimum(_neg(x), _neg(y)))


def _clamp(x: Interval, low: Interval | None = None, high: Interval | None = None) -> Interval:
    # None is no bound. A bound of which nothing is known may be any number.
    x = x if low is None else _maximum(x, low)
    return x if high is None else _minimum(x, high)


def _where(_: Interval, x: Interval, y: Interval) -> Interval:
    low = None if None in (x[0], y[0]) else min(x[0], y[0])
    return low, None if None in (x[1], y[1]) else max(x[1], y[1])


_INTERVAL_RULES: dict[Any, Callable[..., Interval]] = {
    aten.add.Tensor: _add,
    aten.sub.Tensor: lambda x, y: _add(x, _neg(y)),
    aten.rsub.Scalar: lambda x, y: _add(y, _neg(x)),
    aten.neg.default: _neg,
    aten.mul.Tensor: _mul,
    aten.abs.default: _abs,
    aten.floor_divide.default: _floor_divide,
    (aten.div.Tensor_mode, "floor"): _floor_divide,
    (aten.div.Tensor_mode, "trunc"): _truncated_divide,
    aten.remainder.Scalar: _remainder,
    aten.remainder.Tensor: _remainder,
    aten.bitwise_left_shift.Tensor_Scalar: _shift_left,
    aten.bitwise_right_shift.Tensor_Scalar: _shift_right,
    aten.bitwise_left_shift.Tensor: _shift_left,
    aten.bitwise_right_shift.Tensor: _shift_right,
    aten.bitwise_and.Scalar: _bitwise_and,
    aten.bitwise_and.Tensor: _bitwise_and,
    aten.minimum.default: _minimum,
    aten.maximum.default: _maximum,
    aten.clamp.default: _clamp,
    aten.clamp_min.default: _maximum,
    aten.clamp_max.default: _minimum,
    aten.where.self: _where,
    **dict.fromkeys(CASTS_AND_COPIES, lambda x, *_: x),
}


def in_range(index: Node | int, size: Any, extents: dict[Node, Any]) -> bool:
    """Return whether ``0 <= index < size`` is proven. ``extents`` gives the lengths of the ranges of b, h, q and k."""
    if index in extents:
        return statically_known_true(extents[index] <= size)
    low, high = interval(index, extents)
    return low is not None and high is not None and low >= 0 and statically_known_true(high < size)


def safe_reads(
    module: GraphModule,
    extents: dict[Node, Any],
    make_safe: Callable[[Node, Any], Node],
) -> None:
    """Replace every tensor index of a read that could be out of range by ``make_safe(index, size)``. Changes ``module``."""
    graph = module.graph

    def as_is(index: Any, size: Any) -> bool:
        # A constant goes through make_safe too: under vmap it must become a tensor of the tile, as the other indices are.
        if index is None or shape_of(index) != ():
            return True
        return constant_of(index) is None and in_range(index, size, extents)

    for node in list(graph.find_nodes(op="call_function", target=aten.index.Tensor)):
        table, indices = node.args
        with graph.inserting_before(node):
            safe = [i if as_is(i, n) else make_safe(i, n) for i, n in zip(indices, shape_of(table), strict=False)]
        node.args = (table, safe)
    module.recompile()


def call(graph: torch.fx.Graph, target: Any, *args: Any, like: Node, dtype: torch.dtype | None = None) -> Node:
    """Insert a scalar op with the metadata of ``like``, and with another dtype if one is given."""
    node = graph.call_function(target, args)
    node.meta["val"] = value_of(like).to(dtype) if dtype else value_of(like)
    return node


def wrap_negative(graph: torch.fx.Graph, index: Node, size: Any) -> Node:
    """Add ``size`` to a negative ``index``, because eager indexing counts negative indices from the end."""
    negative = call(graph, aten.lt.Scalar, index, 0, like=index, dtype=torch.bool)
    shifted = call(graph, aten.add.Tensor, index, size, like=index)
    return call(graph, aten.where.self, negative, shifted, index, like=index)


def clamp(graph: torch.fx.Graph, index: Node, size: Any, operand: Any, bounds: Interval = UNBOUNDED) -> Node:
    """Wrap and clamp ``index`` into ``[0, size)``, without the steps that the index does not need within its ``bounds``.

    ``operand`` is the size in the form that the graph's ops take: an int, or the sympy expression of a symbolic size.
    """
    low, high = bounds
    if low is None or low < 0:
        index = wrap_negative(graph, index, operand)
        if low is None or not statically_known_true(-low <= size):
            index = call(graph, aten.maximum.default, index, 0, like=index)
    if high is None or not statically_known_true(high < size):
        index = call(graph, aten.minimum.default, index, operand - 1, like=index)
    return index


def clamp_reads(module: GraphModule, extents: dict[Node, Any]) -> None:
    """Make every read of a captured tensor stay inside the tensor. Changes ``module``."""

    def inside(index: Node, size: Any) -> Node:
        return clamp(module.graph, index, size, expression(size), interval(index, extents))

    safe_reads(module, extents, inside)


def become_address(module: GraphModule, shape: Sequence[Any], extents: dict[Node, Any]) -> bool:
    """Make ``module``, which returns indices into a tensor of ``shape``, return ``(offset, in_bounds)`` instead.

    ``offset`` is the offset of the element if the tensor is contiguous. ``in_bounds`` is False if an index is outside, and
    then nothing may be written. Returns False if it is proven that ``in_bounds`` is always True.
    """
    graph = module.graph
    output = graph.find_nodes(op="output")[0]
    device = value_of(next(iter(extents))).device
    checked = False
    wide = any(isinstance(s, torch.SymInt) for s in shape) or math.prod(shape) > INT32_ELEMENTS
    dtype = torch.int64 if wide else torch.int32
    with graph.inserting_before(output):
        in_bounds = graph.call_function(aten.full.default, ([], True), {"dtype": torch.bool, "device": device})
        offset = graph.call_function(aten.full.default, ([], 0), {"dtype": dtype, "device": device})
        stride: Any = 1
        for index, size in reversed(list(zip(output.args[0], shape, strict=True))):
            proven = in_range(index, size, extents)
            size = expression(size)
            if isinstance(index, Node):
                if not proven:
                    checked = True
                    index = wrap_negative(graph, index, size)
                    for bound, compare in ((0, aten.ge.Scalar), (size, aten.lt.Scalar)):
                        inside = call(graph, compare, index, bound, like=index, dtype=torch.bool)
                        in_bounds = call(graph, aten.logical_and.default, in_bounds, inside, like=inside)
                if wide:
                    index = graph.call_function(torch.ops.prims.convert_element_type.default, (index, torch.int64))
                index = graph.call_function(aten.mul.Tensor, (index, stride))
                offset = graph.call_function(aten.add.Tensor, (offset, index))
            elif index != 0:
                # Inductor has no code for the product of 0 and a symbolic stride in a template.
                offset = graph.call_function(aten.add.Tensor, (offset, (index + size if index < 0 else index) * stride))
            stride = stride * size
        output.args = ([offset, in_bounds],)
    graph.eliminate_dead_code()
    return checked
