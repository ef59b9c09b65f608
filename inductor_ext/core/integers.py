"""Computes which values an integer tensor of a joint graph can hold, and which dtypes hold them unchanged.

A cast between integer types, an addition in int32 and a float that stands for an integer are exact only within a range. So a
proof about an index needs the range of its *values*, which cannot be derived from the number of elements of the tensor.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from ..torch_api.sizes import statically_known_true
from .fx import CASTS, MOVES, fake_tensor, fill_of, shape_of, value_of

aten = torch.ops.aten
prims = torch.ops.prims

#: The least and the greatest value, ints or symbolic integers; None if there is no bound.
Range = tuple[Any, Any]

SORTS = {aten.sort.default, aten.sort.stable}


def holds_integers(dtype: torch.dtype, low: Any, high: Any) -> bool:
    """Whether ``dtype`` represents every integer from ``low`` to ``high`` (None: unbounded)."""
    if low is None or high is None or dtype.is_complex:
        return False
    least, greatest = exact_integers(dtype)
    return statically_known_true(low >= least) and statically_known_true(high <= greatest)


def exact_integers(dtype: torch.dtype) -> tuple[int, int]:
    """The range in which a dtype represents every integer: all values of an integer type, 2**24 for fp32, 2**8 for bf16.

    A complex dtype represents the integers that its real part does.
    """
    if dtype is torch.bool:
        return 0, 1
    dtype = dtype.to_real() if dtype.is_complex else dtype
    if dtype.is_floating_point:
        # eps is the distance from 1 to the next number; the dtype has every integer up to 2 / eps.
        most = int(2 / torch.finfo(dtype).eps)
        return -most, most
    info = torch.iinfo(dtype)
    return info.min, info.max


def value_range(node: Node) -> Range:
    """The range of an integer tensor's values: that of its computation if the dtype holds it, otherwise that of the dtype.

    (None, None) for other tensors.
    """
    value = fake_tensor(node)
    if value is None or value.dtype.is_floating_point or value.dtype.is_complex:
        return None, None
    low, high = _computed(node)
    return (low, high) if holds_integers(value.dtype, low, high) else exact_integers(value.dtype)


def _computed(node: Node) -> Range:
    """The range of the exact result of a node's op; (None, None) if nothing is known."""
    if node.op != "call_function":
        return None, None
    target = node.target
    if target is prims.iota.default or target is aten.arange.default:
        return _of_iota(node)
    if target is aten.randperm.default:
        return 0, shape_of(node)[0] - 1
    if target in (aten.argsort.default, aten.argsort.stable):
        return 0, _sorted_length(node) - 1
    if target is operator.getitem and node.args[1] == 1 and node.args[0].target in (*SORTS, aten.topk.default):
        return 0, _sorted_length(node.args[0]) - 1
    if isinstance(fill_of(node), int):
        return fill_of(node), fill_of(node)
    if target in CASTS and isinstance(node.args[0], Node):
        source = value_of(node.args[0]).dtype
        return value_range(node.args[0]) if not source.is_floating_point and not source.is_complex else (None, None)
    if target in MOVES and isinstance(node.args[0], Node):
        return value_range(node.args[0])
    return None, None


def _of_iota(node: Node) -> Range:
    length = shape_of(node)[0]
    if node.target is aten.arange.default:
        return (0, length - 1) if len(node.args) == 1 else (None, None)
    start, step = node.kwargs.get("start"), node.kwargs.get("step")
    if not isinstance(start, int) or not isinstance(step, int):
        return None, None
    ends = start, start + step * (length - 1)
    return ends if step > 0 else (ends[1], ends[0])


def _sorted_length(call: Node) -> Any:
    """The length of the dim along which a sort, argsort or topk runs."""
    shape = shape_of(call.args[0])
    return shape[sorted_dim(call)] if len(shape) else 1


def sorted_dim(call: Node) -> int:
    """The dim along which a sort, argsort or topk runs; it may be negative."""
    at = 2 if call.target is aten.topk.default else 1
    if call.target not in (aten.sort.stable, aten.argsort.stable) and len(call.args) > at:
        return call.args[at]
    return call.kwargs.get("dim", -1)
