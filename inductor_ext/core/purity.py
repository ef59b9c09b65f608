"""What an op does besides computing its result: writing to memory, drawing random numbers, changing how gradients flow.

A value may be computed elsewhere, once instead of often, or not at all only where the op that computes it does none of this.
"""

from __future__ import annotations

import operator
import re
from typing import Any

import torch
from torch.fx import Graph, Node

from ..torch_api.graph import OpOverload

_OPERATORS = "add sub mul truediv floordiv matmul mod pow and or xor lshift rshift"
_IN_PLACE_OPERATORS = {"setitem", *(f"i{name}" for name in _OPERATORS.split())}
_DRAWS = "rand|randn|randint|randperm|bernoulli|multinomial|normal|poisson|dropout|rrelu|exponential"
_RANDOM = re.compile(rf"(^|_)({_DRAWS})(_|$|\d)")


def changes_in_place(node: Node) -> bool:
    """Whether a node of Dynamo's graph writes to one of its operands, as far as its name tells."""
    name = called(node)
    # ``operator`` has names like ``and_``, which only keep clear of Python's keywords.
    keyword = getattr(node.target, "__module__", "") == "_operator"
    written_to = name.endswith("_") and not name.endswith("__") and not keyword
    named = node.kwargs.get("inplace") is True or node.kwargs.get("out") is not None
    return written_to or name in _IN_PLACE_OPERATORS or named


def called(node: Node) -> str:
    """The name of the function or method that a node calls; "" for a node that calls none."""
    if node.op not in ("call_function", "call_method"):
        return ""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def is_random(node: Node) -> bool:
    """Whether a node draws random numbers, so that computing it once more gives something else."""
    if isinstance(node.target, OpOverload):
        return torch.Tag.nondeterministic_seeded in node.target.tags
    return bool(_RANDOM.search(called(node)))


def sets_gradient_mode(node: Node) -> bool:
    """Whether a node begins or ends a region without gradients (``torch.no_grad``)."""
    return called(node) in ("_set_grad_enabled", "set_grad_enabled", "_enter_inference_mode", "_exit_inference_mode")


def is_pure(node: Node) -> bool:
    """Whether a node of Dynamo's graph does nothing but compute its result, the same whenever it is asked."""
    return not (changes_in_place(node) or is_random(node) or sets_gradient_mode(node))


def viewed(node: Node) -> Node | None:
    """The tensor (or list of tensors) whose memory a node of a graph of ATen ops is a view of; None where it has its own."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        return node.args[0] if viewed(node.args[0]) is not None else None
    returns = node.target._schema.returns if isinstance(node.target, OpOverload) else ()
    aliases = bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write
    # ``_unsafe_view`` claims none, but shares memory once Inductor has lowered it.
    return node.args[0] if aliases or node.target is torch.ops.aten._unsafe_view.default else None


def base(node: Node) -> Node:
    """The node that owns the memory of ``node``."""
    while (inner := viewed(node)) is not None:
        node = inner
    return node


def written(graph: Graph) -> set[Node]:
    """The nodes of a graph of ATen ops that own memory which some op writes to."""
    return {base(operand) for node in graph.nodes for operand in _written_operands(node)}


def _written_operands(node: Node) -> list[Node]:
    if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return []
    found: list[Any] = []
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            found += value if isinstance(value, (list, tuple)) else [value]
    return [x for x in found if isinstance(x, Node)]
