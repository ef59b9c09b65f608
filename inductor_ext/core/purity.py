"""Side effects of ops: they write to memory, draw random numbers, or change the gradient mode.

A rewrite may compute a value elsewhere, once instead of often, or not at all, only if its op has none of these effects.
"""

from __future__ import annotations

import functools
import inspect
import operator
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, Node

from ..torch_api.graph import OpOverload
from .fx import called

_OPERATORS = "add sub mul truediv floordiv matmul mod pow and or xor lshift rshift"
_IN_PLACE_OPERATORS = {"setitem", *(f"i{name}" for name in _OPERATORS.split())}
_IN_PLACE_METHODS = {f"__{name}__" for name in _IN_PLACE_OPERATORS}
_DRAWS = "rand|randn|randint|randperm|bernoulli|multinomial|normal|poisson|dropout|rrelu|exponential"
_RANDOM = re.compile(rf"(^|_)({_DRAWS})(_|$|\d)")


def changes_in_place(node: Node) -> bool:
    """Whether a node of Dynamo's graph writes to one of its operands, judged by its name and arguments."""
    name = called(node)
    # Names in ``operator`` such as ``and_`` end in "_" only because ``and`` is a keyword of Python.
    keyword = getattr(node.target, "__module__", "") == "_operator"
    written_to = (name.endswith("_") and not name.endswith("__") and not keyword) or name in _IN_PLACE_METHODS
    named = node.kwargs.get("inplace") is True or node.kwargs.get("out") is not None
    at = place_of_inplace(node.target)
    by_position = at is not None and len(node.args) > at and node.args[at] is True
    return written_to or name in _IN_PLACE_OPERATORS or named or by_position


@functools.cache
def place_of_inplace(function: Any) -> int | None:
    """Return which argument of a function is ``inplace``, as of ``relu(x, True)``; None if there is none."""
    if isinstance(function, str) or getattr(function, "__module__", "") != "torch.nn.functional":
        return None
    names = list(inspect.signature(function).parameters)
    return names.index("inplace") if "inplace" in names else None


def is_random(node: Node) -> bool:
    """Whether a node draws random numbers, so that a second computation gives another result."""
    if isinstance(node.target, OpOverload):
        return torch.Tag.nondeterministic_seeded in node.target.tags
    return bool(_RANDOM.search(called(node)))


_GRADIENT_MODE = ("_set_grad_enabled", "set_grad_enabled")
#: The functions that begin and end a region of ``torch.inference_mode``.
INFERENCE_MODE = ("_enter_inference_mode", "_exit_inference_mode")


def sets_gradient_mode(node: Node) -> bool:
    """Whether a node begins or ends a region without gradients (``torch.no_grad``)."""
    return called(node) in (*_GRADIENT_MODE, *INFERENCE_MODE)


#: The functions that begin and end a region in which autocast is on or off.
_AUTOCAST = ("_enter_autocast", "_exit_autocast")


def sets_autocast(node: Node) -> bool:
    """Whether a node begins or ends a region of ``torch.autocast``."""
    return called(node) in _AUTOCAST


def without_gradient(nodes: Iterable[Node]) -> dict[Node, None]:
    """The nodes of Dynamo's graph, in order, that are computed in regions without gradients."""
    found: dict[Node, None] = {}
    gradients, before = True, []
    for node in nodes:
        if called(node) in _GRADIENT_MODE:
            gradients = bool(node.args[0]) if node.args else True
        elif called(node) == INFERENCE_MODE[0]:
            before.append(gradients)
            gradients = not node.args[0]
        elif called(node) == INFERENCE_MODE[1]:
            gradients = before.pop()
        elif not gradients and node.op not in ("placeholder", "output"):
            found[node] = None
    return found


def under_autocast(nodes: Iterable[Node]) -> dict[Node, None]:
    """The nodes of Dynamo's graph, in order, that are computed where the graph itself has changed the mode of autocast."""
    found: dict[Node, None] = {}
    depth = 0
    for node in nodes:
        if called(node) == _AUTOCAST[0]:
            depth += 1
        elif called(node) == _AUTOCAST[1]:
            depth -= 1
        elif depth and node.op not in ("placeholder", "output"):
            found[node] = None
    return found


def is_pure(node: Node) -> bool:
    """Whether a node of Dynamo's graph only computes its result, and computes the same result each time."""
    return not (changes_in_place(node) or is_random(node) or sets_gradient_mode(node))


def viewed(node: Node) -> Node | None:
    """The tensor (or list of tensors) of which a node of an ATen graph is a view; None if the node has its own memory."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        return node.args[0] if viewed(node.args[0]) is not None else None
    returns = node.target._schema.returns if isinstance(node.target, OpOverload) else ()
    aliases = bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write
    # The schema of ``_unsafe_view`` has no alias, but its result shares memory after Inductor has lowered it.
    return node.args[0] if aliases or node.target is torch.ops.aten._unsafe_view.default else None


def base(node: Node) -> Node:
    """The node that owns the memory of ``node``."""
    while (inner := viewed(node)) is not None:
        node = inner
    return node


def written(graph: Graph) -> set[Node]:
    """The nodes of an ATen graph that own memory to which some op writes."""
    return {base(operand) for node in graph.nodes for operand in written_operands(node)}


def written_operands(node: Node) -> list[Node]:
    """The operands to which an ATen op writes."""
    if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return []
    found: list[Any] = []
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            found += value if isinstance(value, (list, tuple)) else [value]
    return [x for x in found if isinstance(x, Node)]
