"""Functions of numbers (score_mods, mask_mods, combine_fns) in a Dynamo graph: equal ones become one, unused ones go.

The layers of a model have equal ones, and a pass that rewrites a score_mod leaves the old one in the module. Inductor's
passes before autograd rewrite, print and compile each graph three times, and AOTAutograd's cache hashes them all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..options import Options
from .dynamo_graph import attribute, is_function_of_numbers
from .fx import value_or_none

NAME = "equal_graphs"


def rewrite(gm: GraphModule, options: Options) -> None:
    """Let every use of equal functions of numbers take the first of them, and delete the graphs that nothing uses."""
    kept: dict[Any, str] = {}
    # What is deeper in the module may belong to the user's.
    graphs = [node for node in gm.graph.find_nodes(op="get_attr") if isinstance(getattr(gm, node.target, None), GraphModule)]
    names = {node.target for node in graphs}
    for node in graphs:
        if not node.users:
            gm.graph.erase_node(node)
        elif is_function_of_numbers(node):
            node.target = kept.setdefault(contents(getattr(gm, node.target).graph), node.target)
    used = {node.target.partition(".")[0] for node in gm.graph.nodes if node.op in ("get_attr", "call_module")}
    for name in names - used:
        gm.delete_submodule(name)


def contents(graph: Graph) -> tuple[Any, ...]:
    """Return all that a graph computes, and what is known of its values. Equal graphs have equal contents."""
    numbers = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
    return tuple((node.op, _target(node), _arguments(node, numbers), _facts(node)) for node in graph.nodes)


def _target(node: Node) -> Any:
    """The name of an input has no meaning. Attributes are compared by identity."""
    if node.op == "placeholder":
        return None
    return id(attribute(node.graph.owning_module, node.target)) if node.op in ("get_attr", "call_module") else node.target


def _arguments(node: Node, numbers: dict[Node, str]) -> str:
    return repr(torch.fx.node.map_arg((node.args, node.kwargs), numbers.__getitem__))


def _facts(node: Node) -> Any:
    value = value_or_none(node)
    if isinstance(value, torch.Tensor):
        return value.dtype, str(value.shape), str(value.stride()), value.device, value.requires_grad
    return type(value), str(value)
