"""Ops that move values without computing any, so that a cast may be moved through them."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from ..core.fx import MOVES, SPLITS, value_or_none

aten = torch.ops.aten

#: Ops that take one operand and move its values into a tensor or a list of tensors.
_MOVES = MOVES | SPLITS
#: Moves that take a list of operands.
JOINS = {aten.cat.default, aten.stack.default}

#: Moves whose result has fewer elements than their operand.
PARTS = {aten.slice.Tensor, aten.select.int}

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def element_dtype(node: Node) -> torch.dtype | None:
    """The dtype of a node's tensor, or of its first tensor if it has several; None for a node without tensors."""
    value = value_or_none(node)
    if isinstance(value, (list, tuple)) and value:
        value = value[0]
    return value.dtype if isinstance(value, torch.Tensor) else None


def holds(wide: torch.dtype | None, narrow: torch.dtype | None) -> bool:
    """Whether ``wide`` represents every value of ``narrow``, among the four floating-point types of arithmetic."""
    if wide not in _FLOATS or narrow not in _FLOATS:
        return False
    return wide is narrow or (wide.itemsize > narrow.itemsize and wide.itemsize >= 4)


def moved(node: Node) -> list[Node]:
    """The operands whose values an op moves; empty for an op that computes."""
    if node.op != "call_function":
        return []
    if node.target in JOINS:
        return list(node.args[0])
    if node.target is operator.getitem:
        return [node.args[0]] if node.args[0].target in SPLITS else []
    return [node.args[0]] if node.target in _MOVES and isinstance(node.args[0], Node) else []
