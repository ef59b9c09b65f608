"""Is a combine_fn a gated recurrence?"""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from .terms import op


def gated(combine: Any) -> tuple[int, int] | None:
    """The leaves (a, x) of ``(a1 a2, x1 a2 + x2)``, in whatever order, as the operands; None for anything else."""
    if not isinstance(combine, GraphModule):
        return None
    inputs = combine.graph.find_nodes(op="placeholder")
    (results,) = combine.graph.find_nodes(op="output")[0].args
    if len(inputs) != 4 or not isinstance(results, (list, tuple)) or len(results) != 2:
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
