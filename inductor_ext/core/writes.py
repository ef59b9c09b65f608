"""Writes to tensors of Dynamo's graph, and where they are: a lifted expression is read later than what it replaces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.fx import Graph, Node

from ..torch_api.graph import OpOverload, storage_of, version_of
from ..torch_api.higher_order import is_kernel_that_writes
from .fx import called, fake_tensor, requires_grad
from .purity import changes_in_place, under_autocast, without_gradient, written_operands
from .terms import CASTS, op


class Writes:
    """The in-place operations of a graph, by the storage that they change, and the nodes that are computed under no_grad.

    Neither the name nor the schema of a call shows every write: not those in the body of a checkpoint, nor those through a
    view as a NumPy array. But Dynamo has run every op on fake tensors, and these count the writes to their memory. If they
    have counted more than are found, the others may be anywhere.
    """

    def __init__(self, graph: Graph) -> None:
        self.without_gradient = without_gradient(graph.nodes)
        #: The nodes that give other results, or other gradients, if they are computed elsewhere in the graph.
        self.in_other_modes = self.without_gradient | under_autocast(graph.nodes)
        self._at: dict[Any, list[Node]] = {}
        # While a tensor exists, no other one has its storage's number.
        self._alive = [fake_tensor(node) for node in graph.nodes]
        for node in graph.nodes:
            for written in _written(node):
                value = fake_tensor(written)
                if value is not None:
                    self._at.setdefault(storage_of(value), []).append(node)
        known = {id(value): value for value in self._alive if value is not None}.values()
        self._anywhere = {storage_of(x) for x in known if version_of(x) > len(self._at.get(storage_of(x), ()))}

    def replaced(self, old: Node, new: Node) -> None:
        """Say that ``new`` takes the place of a node: what writes to the memory of that writes to the memory of ``new``."""
        value = fake_tensor(new)
        self._alive.append(value)
        # The list itself, so that it does not matter which of them a later write names.
        self._at[storage_of(value)] = self._at.setdefault(storage_of(fake_tensor(old)), [])

    def between(self, node: Node, reader: Node) -> bool:
        """Return whether the memory of ``node`` may change after it is computed and before ``reader`` reads it."""
        return self.during([node], node, reader)

    def during(self, nodes: Iterable[Node], begin: Node, end: Node) -> bool:
        """Return whether the memory of a tensor may change between two nodes of the graph."""
        return any(self.unknown(x) or any(begin < write < end for write in self.to(x)) for x in nodes)

    def after(self, node: Node) -> bool:
        """Return whether the memory of ``node`` may change after it is computed."""
        return self.unknown(node) or any(write > node for write in self.to(node))

    def to(self, node: Node) -> list[Node]:
        """Return the nodes that are known to write to the memory of a node."""
        value = fake_tensor(node)
        return [] if value is None else self._at.get(storage_of(value), [])

    def unknown(self, node: Node) -> bool:
        """Return whether something that is not known writes to the memory of a node."""
        value = fake_tensor(node)
        return value is not None and storage_of(value) in self._anywhere

    def in_place_by_position(self, node: Node) -> bool:
        """Return whether a node writes to its operand although its name does not say so: ``leaky_relu(x, 0.2, True)``."""
        return not changes_in_place(node) and bool(_written(node))


#: Ops that return their operand, a view of it or a copy, and have no other effect.
_NAMES = """
contiguous clone view_as reshape_as view flatten unflatten unsqueeze squeeze permute transpose t .mT .T expand expand_as
broadcast_to repeat repeat_interleave select narrow getitem detach alias pad diagonal unbind split chunk unfold real
movedim ravel view_as_real positive
"""
VIEWS = set(_NAMES.split())
#: Layers that change their running statistics, which are operands without a gradient. No version counts that.
_KEEP_STATISTICS = {"batch_norm", "instance_norm"}


def _written(node: Node) -> list[Node]:
    """Return the operands to which a node writes. Of an op that may write to any of them, all."""
    if node.op not in ("call_function", "call_method"):
        return []
    if changes_in_place(node) or called(node).startswith("_foreach_"):
        # With ``out=``, the first operand is only read.
        out = node.kwargs.get("out")
        written = node.args[0] if out is None and node.args else out
        return [x for x in (written if isinstance(written, (list, tuple)) else [written]) if isinstance(x, Node)]
    if isinstance(node.target, OpOverload):
        return written_operands(node)
    if is_kernel_that_writes(node.target):
        return list(node.all_input_nodes)
    if called(node) in _KEEP_STATISTICS:
        return [x for x in node.all_input_nodes if not requires_grad(x)]
    value, first = fake_tensor(node), node.args[0] if node.args else None
    shares = value is not None and fake_tensor(first) is not None and storage_of(value) == storage_of(fake_tensor(first))
    return [first] if shares and op(node) not in VIEWS | CASTS | {"dropout"} else []
