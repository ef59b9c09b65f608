"""Format a node of a score_mod as the expression that a user would have written, for reports."""

from __future__ import annotations

import operator
import re
from typing import Any

from torch.fx import Node

from ..core.fx import indices_of, name_of

_INFIX = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**"}
_INFIX |= {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=", "and_": "&", "or_": "|"}
#: The parts that Dynamo adds to the name of a captured tensor.
_WRAPPING = re.compile(r"^[lg]_|_cell_contents|score_mod_closure_|_parameters|_modules|_buffers|self_|_$")
LONGEST = 90


def expression(node: Any) -> str:
    """Format a node, for example as ``t[where(k - q > 0, 16, 0) + ..., h]``. A long text is cut.

    Positions have their letters, and captured tensors their names.
    """
    text = _text(node, {})
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def _text(node: Any, known: dict[Node, str]) -> str:
    """Format a node. A node that many others use is formatted once, and no more of it is kept than could be seen."""
    if not isinstance(node, Node):
        return str(node)
    if node not in known:
        known[node] = _formatted(node, known)[: LONGEST + 1]
    return known[node]


def _formatted(node: Node, known: dict[Node, str]) -> str:
    if node.op == "placeholder":
        inputs = node.graph.find_nodes(op="placeholder")
        number = inputs.index(node)
        return ("score", "b", "h", "q", "k")[number] if number < 5 else _WRAPPING.sub("", node.name) or node.name
    if node.target is operator.getitem:
        return f"{_text(node.args[0], known)}[{', '.join(_text(i, known) for i in indices_of(node))}]"
    name = name_of(node)
    if name in _INFIX and len(node.args) == 2:
        return f" {_INFIX[name]} ".join(_operand(a, known) for a in node.args)
    arguments = [*(_text(a, known) for a in node.args), *(f"{k}={_text(v, known)}" for k, v in node.kwargs.items())]
    return f"{name}({', '.join(arguments)})"


def _operand(node: Any, known: dict[Node, str]) -> str:
    infix = isinstance(node, Node) and node.op != "placeholder" and name_of(node) in _INFIX
    return f"({_text(node, known)})" if infix else _text(node, known)
