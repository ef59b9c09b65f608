"""Ops that move values without computing any, so that a cast may be moved through them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

aten = torch.ops.aten

#: Moves that are usually views and read no memory.
VIEWS = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.expand.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.alias.default,
    aten.detach.default,
}

#: Ops that change shape or order. Every value of the first operand is in the result unchanged: once, several times or never.
MOVES = VIEWS | {
    aten.clone.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.diagonal.default,
    aten.unfold.default,
    aten.repeat.default,
    aten.flip.default,
    torch.ops.prims.rev.default,
    aten.index.Tensor,
    aten.index_select.default,
    aten.gather.default,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
}
#: Moves that return a list, from which getitem takes one tensor.
_SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int}
#: Moves that take a list of operands.
JOINS = {aten.cat.default, aten.stack.default}

#: Moves whose result has fewer elements than their operand.
PARTS = {aten.slice.Tensor, aten.select.int}

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def dtype_of(node: Node) -> torch.dtype | None:
    """The dtype of a node's tensor, or of its first tensor if it has several; None for a node without tensors."""
    value = node.meta.get("val")
    if isinstance(value, (list, tuple)) and value:
        value = value[0]
    return value.dtype if isinstance(value, torch.Tensor) else None


def holds(wide: torch.dtype | None, narrow: torch.dtype | None) -> bool:
    """Whether ``wide`` represents every value of ``narrow``, among the four floating-point types of arithmetic."""
    if wide not in _FLOATS or narrow not in _FLOATS:
        return False
    return wide is narrow or (wide.itemsize > narrow.itemsize and wide.itemsize >= 4)


def cast_of(node: Node) -> Node | None:
    """The operand of a cast; None for other nodes."""
    if node.op == "call_function" and node.target is torch.ops.prims.convert_element_type.default:
        return node.args[0]
    return None


def constant_of(node: Node) -> Any:
    """The number with which a tensor was filled; None for other nodes."""
    if node.target is aten.full.default and isinstance(node.args[1], (int, float)):
        return node.args[1]
    return None


def moved(node: Node) -> list[Node]:
    """The operands whose values an op moves; empty for an op that computes."""
    if node.op != "call_function":
        return []
    if node.target in JOINS:
        return list(node.args[0])
    if node.target is operator.getitem:
        return [node.args[0]] if node.args[0].target in _SPLITS else []
    return [node.args[0]] if node.target in MOVES and isinstance(node.args[0], Node) else []
