"""Writes to tensors of Dynamo's graph, and where they are: a lifted expression is read later than what it replaces."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node

from ..torch_api.graph import OpOverload, storage_of
from ..torch_api.higher_order import is_kernel_that_writes
from .fx import called, fake_tensor
from .purity import changes_in_place, without_gradient, written_operands
from .terms import CASTS, op


class Writes:
    """The in-place operations of a graph, by the storage that they change, and the nodes that are computed under no_grad."""

    def __init__(self, graph: Graph) -> None:
        self.without_gradient = without_gradient(graph.nodes)
        self._at: dict[Any, list[Node]] = {}
        # While a tensor exists, no other one has its storage's number.
        self._alive = [fake_tensor(node) for node in graph.nodes]
        for node in graph.nodes:
            for written in _written(node):
                value = fake_tensor(written)
                if value is not None:
                    self._at.setdefault(storage_of(value), []).append(node)

    def replaced(self, old: Node, new: Node) -> None:
        """Say that ``new`` takes the place of a node: what writes to the memory of that writes to the memory of ``new``."""
        value = fake_tensor(new)
        self._alive.append(value)
        # The list itself, so that it does not matter which of them a later write names.
        self._at[storage_of(value)] = self._at.setdefault(storage_of(fake_tensor(old)), [])

    def between(self, node: Node, reader: Node) -> bool:
        """Return whether the memory of ``node`` changes after it is computed and before ``reader`` reads it."""
        return any(node < write < reader for write in self._of(node))

    def after(self, node: Node) -> bool:
        """Return whether the memory of ``node`` changes after it is computed."""
        return any(write > node for write in self._of(node))

    def in_place_by_position(self, node: Node) -> bool:
        """Return whether a node writes to its operand although its name does not say so: ``leaky_relu(x, 0.2, True)``."""
        return not changes_in_place(node) and bool(_written(node))

    def _of(self, node: Node) -> list[Node]:
        value = fake_tensor(node)
        return [] if value is None else self._at.get(storage_of(value), [])


#: Ops that return their operand, a view of it or a copy, and have no other effect.
_NAMES = """
contiguous clone view_as reshape_as view flatten unflatten unsqueeze squeeze permute transpose t .mT .T expand expand_as
broadcast_to repeat repeat_interleave select narrow getitem detach alias pad diagonal unbind split chunk unfold real
movedim ravel view_as_real positive
"""
VIEWS = set(_NAMES.split())


def _written(node: Node) -> list[Node]:
    """Return the operands to which a node writes. Of an op that may write to any of them, all."""
    if node.op not in ("call_function", "call_method"):
        return []
    if changes_in_place(node) or called(node).startswith("_foreach_"):
        out = node.kwargs.get("out")
        lists = [x for a in node.args[:1] if isinstance(a, (list, tuple)) for x in a]
        return [x for x in (*node.args[:1], *lists, out) if isinstance(x, Node)]
    if isinstance(node.target, OpOverload):
        return written_operands(node)
    if is_kernel_that_writes(node.target):
        return list(node.all_input_nodes)
    value, first = fake_tensor(node), node.args[0] if node.args else None
    shares = value is not None and fake_tensor(first) is not None and storage_of(value) == storage_of(fake_tensor(first))
    return [first] if shares and op(node) not in VIEWS | CASTS | {"dropout"} else []
