"""Where a cast must stay the copy that it is in eager mode: it is kept for the backward, or something reads its strides.

A program may write to an input of the graph, or to a result, between forward and backward. Eager mode has kept the copy, so
that this changes nothing. Without the copy the graph would keep the tensor itself, for which autograd raises an error, or a
view of it, such as the transpose that the gradient of a matmul reads, and autograd knows nothing of that. Where the program
itself casts a view, stock keeps such a view too, and nothing is changed here.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from ..core.fx import cast_of, name_of
from ..core.joint_graph import after_tangents
from ..core.purity import base, viewed, written

aten = torch.ops.aten

#: Ops whose result depends on the strides or on the memory of their operand, and not only on its values.
_READ_STRIDES = {
    aten.as_strided.default,
    aten.as_strided_copy.default,
    aten.as_strided_scatter.default,
    aten.view.dtype,
    aten.view_as_complex.default,
}


#: Ops that Inductor may take for their operand, depending on the others.
_MAY_BE_NOTHING = {"clone", "repeat", "cat", "constant_pad_nd", "copy", "slice_scatter", "select_scatter", "index_put"}


class Copies:
    """Answers for one joint graph. A node that is added later is not in the backward."""

    def __init__(self, graph: Graph) -> None:
        self.written = written(graph)
        self._backward = after_tangents(graph)

    def kept(self, node: Node, source: Node) -> bool:
        """Return whether ``node`` must not share memory with ``source``, because it may be kept for the backward."""
        owner = _origin(source)
        if owner in self._backward or not self._in_backward(node):
            return False
        return owner.op == "placeholder" or escapes(owner)

    def _in_backward(self, node: Node) -> bool:
        """Return whether the backward computes a node, or reads it or what can be computed from it again."""
        seen, pending = {node}, [node]
        while pending:
            current = pending.pop()
            if current in self._backward:
                return True
            new = {user for user in current.users if user.op != "output"} - seen
            if not new.isdisjoint(self._backward):
                return True
            seen |= new
            pending += filter(_is_recomputed, new)
        return False


def _origin(node: Node) -> Node:
    """Return what a node is a view of, or a copy that Inductor may remove."""
    owner = base(node)
    while name_of(owner) in _MAY_BE_NOTHING and len(owner.all_input_nodes) == 1:
        owner = base(owner.all_input_nodes[0])
    return owner


def _is_recomputed(node: Node) -> bool:
    """Return whether the backward may compute a node of the forward again, so that its operand is kept for that."""
    tags = getattr(node.target, "tags", ())
    known = viewed(node) is not None or cast_of(node) is not None or name_of(node) in _MAY_BE_NOTHING
    return known or torch.Tag.pointwise in tags


def escapes(node: Node) -> bool:
    """Return whether the graph returns a tensor, a view of it, or a copy of it, since stock may remove the copy."""
    passed_on = (u for u in node.users if viewed(u) is not None or u.target is aten.clone.default)
    return any(user.op == "output" for user in node.users) or any(map(escapes, passed_on))


def strides_are_read(node: Node) -> bool:
    """Return whether the strides of a tensor, or of a view of it, decide about values."""
    views = (user for user in node.users if viewed(user) is node)
    return any(user.target in _READ_STRIDES for user in node.users) or any(map(strides_are_read, views))
