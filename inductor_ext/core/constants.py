"""The tensors of a Dynamo graph that passes compute from numbers alone, each of which is made once.

The position grids and buckets of a score_mod are such constants: half of its nodes, which every layer of a model has again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from ..torch_api.graph import enter_inference_mode, is_erased
from .fx import value_or_none
from .purity import is_pure


class Constants:
    """The constants that were inserted into a graph. Nothing may write to one."""

    def __init__(self) -> None:
        self._by_call: dict[str, Node] = {}
        self._nodes: set[Node] = set()

    @staticmethod
    def of(graph: Graph) -> Constants:
        """Return the constants of a graph, which keeps them: a node refers to its graph, so a table of ours would, too.

        One that is made in inference mode cannot be saved for a backward outside of it, so such a graph shares none.
        """
        if graph.find_nodes(op="call_function", target=enter_inference_mode):
            return Constants()
        return vars(graph).setdefault("_gradfuse_constants", Constants())

    def find(self, call: str, user: Node) -> Node | None:
        """Return the constant that a call computes, if there is one before ``user``."""
        node = self._by_call.get(call)
        return node if node is not None and not is_erased(node) and node < user else None

    def add(self, call: str, node: Node) -> None:
        """Keep a new node if it is a constant."""
        numbers = (int, float, torch.SymInt)
        inputs = all(isinstance(value_or_none(n), numbers) or n in self._nodes for n in node.all_input_nodes)
        if inputs and isinstance(value_or_none(node), torch.Tensor) and is_pure(node):
            self._by_call[call] = node
            self._nodes.add(node)


def call_of(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return a name for a call of a function or method. The name of a node is unique in its graph."""
    return f"{target if isinstance(target, str) else id(target)} {args} {kwargs}"
