"""Which nodes of a score_mod are sums of numbers, whose terms may be regrouped."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from ..core.fx import fake_tensor, working_dtype
from ..torch_api.graph import pytree

#: The ops that add or subtract, and the sign of their second operand.
SUMS = {operator.add: 1, operator.sub: -1, torch.add: 1, torch.sub: -1, "add": 1, "sub": -1}


def adds_numbers(node: Any) -> bool:
    """Return whether a node adds or subtracts floating-point numbers of one precision, so that terms may be regrouped.

    Integers wrap, and lose that meaning when they become floats. Booleans have other rules for sums.
    """
    if not isinstance(node, Node) or node.target not in SUMS or len(node.args) != 2 or node.kwargs:
        return False
    kinds = {_precision(x) for x in (node, *node.args)} - {"number"}
    return len(kinds) == 1 and None not in kinds


def _precision(x: Any) -> torch.dtype | str | None:
    """Return the precision in which a term is computed here (half precision: fp32); "number" for a Python number."""
    if isinstance(x, (int, float)):
        return "number"
    value = fake_tensor(x)
    if value is None or not value.is_floating_point():
        return None
    return working_dtype(value.dtype)


def is_only_operand(node: Any) -> bool:
    """Return whether a node is one operand of one other node. In ``x + x`` it is two operands."""
    if not isinstance(node, Node) or len(node.users) != 1:
        return False
    (user,) = node.users
    return sum(operand is node for operand in pytree.tree_leaves((user.args, user.kwargs))) == 1
