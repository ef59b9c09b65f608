"""Remove in-place operations and gradient modes from a score_mod. Values and gradients stay the same.

Later passes read a score_mod as an expression: they copy, merge and drop nodes. So ``x.mul_(2)`` becomes a new value that
replaces ``x`` from there on, and a value that is computed under ``torch.no_grad`` is detached where it leaves the region.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from ..core.fx import called, dtype_of, fake_tensor, indices_of, value_of
from ..core.purity import INFERENCE_MODE, changes_in_place, is_pure, place_of_inplace, sets_gradient_mode, without_gradient
from ..core.terms import CASTS, arg

_OPERATORS = {
    getattr(operator, f"i{name}"): getattr(operator, name)
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "xor")
} | {operator.iand: operator.and_, operator.ior: operator.or_}
#: The same as methods: ``x.__iadd__(y)``.
_METHODS = {f"__{inplace.__name__}__": f"__{plain.__name__.rstrip('_')}__" for inplace, plain in _OPERATORS.items()}
#: Ops that return a view of their operand.
_VIEWS = {"view", "view_as", "reshape", "detach", "expand", "expand_as", "squeeze", "unsqueeze", "alias", "T", "mT", "t"}
_VIEWS |= {"flatten", "ravel", "transpose", "permute", "select", "narrow"}
#: Ops that return the operand itself if it already has the dtype and the layout, or if there is nothing to do.
_SAME = CASTS | {"contiguous", "positive", "pos", "__pos__", "real", "dropout", "conj", "resolve_conj"}


class Impure(Exception):
    """A score_mod cannot be read as an expression. The message says why."""


def functionalise(graph: Graph) -> list[str]:
    """Make a score_mod's graph functional and return notes about it. Raises Impure, before any change, if it cannot."""
    nodes = list(graph.nodes)
    _check(nodes)
    done = []
    for node in nodes:
        if changes_in_place(node):
            _replace(graph, node)
            done.append("in-place operations are now functional")
    if any(map(sets_gradient_mode, nodes)):
        _detach_regions(graph)
        done.append("values of no_grad regions are now detached")
    return list(dict.fromkeys(done))


def impurity(graph: Graph) -> str | None:
    """Return why a graph is not an expression, or None if it is one."""
    for node in graph.nodes:
        if not is_pure(node):
            return f"{called(node)} does more than compute a value"
    return None


def _check(nodes: list[Node]) -> None:
    frozen = without_gradient(nodes)
    for node in nodes:
        if called(node) in INFERENCE_MODE:
            raise Impure("it enters inference mode")
        if changes_in_place(node):
            if node in frozen:
                raise Impure("it changes a value in place under no_grad")
            _check_in_place(node)


def _check_in_place(node: Node) -> None:
    changed = node.args[0] if node.args else None
    if not isinstance(changed, Node) or out_of_place(node) is None:
        raise Impure(f"{called(node)} works only in place")
    captured = changed.op == "placeholder" and changed not in changed.graph.find_nodes(op="placeholder")[:1]
    if captured or _is_view(changed):
        raise Impure(f"{called(node)} changes a captured tensor or a view in place")
    if any(_is_view(user) and user.args[0] is changed for user in changed.users):
        raise Impure(f"{called(node)} changes a value in place that also has a view")


def _is_view(node: Node) -> bool:
    """Return whether a node is its operand, or a view of it, and does not write to it."""
    if changes_in_place(node):
        return False
    if node.target is operator.getitem:
        return not any(isinstance(i, Node) for i in indices_of(node))
    if called(node) in _SAME and isinstance(node.args[0], Node):
        return dtype_of(node) is dtype_of(node.args[0])
    return called(node) in _VIEWS


def out_of_place(node: Node) -> tuple[str, Any] | None:
    """Return the op and the target of the same computation out of place, or None if there is none.

    For fill_, zero_ and copy_, which do not compute with the old value, the target is the name "fill", "zero" or "copy".
    """
    if node.kwargs.get("out") is not None:
        return None
    if node.kwargs.get("inplace") is True or (place_of_inplace(node.target) is not None and changes_in_place(node)):
        return node.op, node.target
    if node.target in _OPERATORS:
        return node.op, _OPERATORS[node.target]
    if node.target in _METHODS:
        return node.op, _METHODS[node.target]
    if not called(node).endswith("_"):
        return None
    name = called(node)[:-1]
    if name in ("fill", "zero", "copy"):
        return node.op, name
    if node.op == "call_method" and hasattr(torch.Tensor, name):
        return node.op, name
    return (node.op, getattr(torch, name)) if node.op == "call_function" and hasattr(torch, name) else None


def operands_out_of_place(node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a node without ``inplace``."""
    at = place_of_inplace(node.target)
    args = tuple(False if i == at else x for i, x in enumerate(node.args))
    return args, {name: x for name, x in node.kwargs.items() if name != "inplace"}


def _replace(graph: Graph, node: Node) -> None:
    changed, value = node.args[0], value_of(node.args[0])
    op, target = out_of_place(node)
    with graph.inserting_before(node):
        if target in ("fill", "zero"):
            fill = arg(node, 1, "value") if target == "fill" else 0
            if isinstance(fill, Node):
                new = graph.call_method("to", (fill, value.dtype))
            else:
                new = graph.call_function(torch.full_like, (changed, fill))
        elif target == "copy":
            new = graph.call_method("to", (node.args[1], value.dtype))
        else:
            new = graph.create_node(op, target, *operands_out_of_place(node))
        new.meta = dict(node.meta)
        if any(dtype_of(n) is not value.dtype for n in node.all_input_nodes):
            # The result of an in-place op has the dtype of the value that it changes, whatever the other operands are.
            new = graph.call_method("to", (new, value.dtype))
            new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    for user in [u for u in changed.users if u > node]:
        user.replace_input_with(changed, new)
    graph.erase_node(node)


def _detach_regions(graph: Graph) -> None:
    without = without_gradient(graph.nodes)
    for node in list(filter(sets_gradient_mode, graph.nodes)):
        graph.erase_node(node)
    for node in without:
        outside = [user for user in node.users if user not in without]
        if outside and fake_tensor(node) is not None:
            with graph.inserting_after(node):
                detached = graph.call_method("detach", (node,))
            detached.meta = dict(node.meta)
            for user in outside:
                user.replace_input_with(node, detached)
