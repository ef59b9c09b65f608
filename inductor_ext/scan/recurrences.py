"""Which operands a combine_fn reads, and whether it is a gated recurrence."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from ..core.terms import op


def reads(combine: Any, first: int, count: int) -> list[bool]:
    """Whether ``combine`` reads each of its ``count`` operands from ``first`` on.

    A graph can have sizes as operands that it does not read. Of anything but a graph, all operands count as read.
    """
    if not isinstance(combine, GraphModule):
        return [True] * count
    return [bool(x.users) for x in combine.graph.find_nodes(op="placeholder")[first : first + count]]


def gated(combine: Any) -> tuple[int, int] | None:
    """The indices of the leaves (a, x) if ``combine`` is the gated recurrence ``(a1 a2, x1 a2 + x2)``; None otherwise.

    The leaves, and the operands of products and sums, may stand in any order.
    """
    if not isinstance(combine, GraphModule):
        return None
    inputs = combine.graph.find_nodes(op="placeholder")
    (results,) = combine.graph.find_nodes(op="output")[0].args
    inputs, others = inputs[:4], inputs[4:]
    if len(inputs) != 4 or any(x.users for x in others) or not isinstance(results, (list, tuple)) or len(results) != 2:
        return None
    for gate, state in ((0, 1), (1, 0)):
        a1, x1, a2, x2 = inputs[gate], inputs[state], inputs[2 + gate], inputs[2 + state]
        carried = [a for a in _operands(results[state], "add") if a is not x2]
        multiplied = set(_operands(results[gate], "mul")) == {a1, a2}
        if multiplied and len(carried) == 1 and set(_operands(carried[0], "mul")) == {x1, a2} and x2 in results[state].args:
            return gate, state
    return None


def _operands(node: Any, name: str) -> tuple[Any, ...]:
    two = isinstance(node, Node) and op(node) == name and len(node.args) == 2 and not node.kwargs
    return tuple(node.args) if two else ()
