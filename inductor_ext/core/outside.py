"""What a program can change between forward and backward: the inputs and results of Dynamo's graph.

A rewrite may keep something else for the backward than eager mode does: the result of an attention, or the operand of a copy
and not the copy. If the caller writes to that in place, autograd raises an error that eager mode does not raise. And if the
graph keeps a view of it, autograd notices nothing, and gradients are wrong. So what is outside is copied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..torch_api.graph import storage_of
from .fx import fake_tensor
from .terms import CASTS, op
from .writes import VIEWS

#: Ops that Inductor may take for their operand, depending on the others: ``x * 1``, ``x + zeros``, ``cat([x])``.
_MAY_BE_NOTHING = VIEWS | CASTS | {"dropout", "add", "sub", "mul", "div", "pow", "cat", "concat", "stack"}


class Outside:
    """The memory of the inputs, constants and results of a graph."""

    def __init__(self, graph: Graph) -> None:
        given = [n for n in graph.nodes if n.op in ("placeholder", "get_attr")]
        nodes = [*given, *graph.output_node().all_input_nodes]
        self._storages = {storage_of(x) for n in nodes if (x := fake_tensor(n)) is not None}

    def has(self, node: Node) -> bool:
        """Return whether the memory of a tensor can be changed outside of the graph."""
        return storage_of(fake_tensor(node)) in self._storages


def is_returned(node: Node) -> bool:
    """Return whether the graph may return the memory of a tensor that one of its nodes computes.

    What follows it may be nothing, once Inductor has simplified it.
    """
    returned = {storage_of(x) for n in node.graph.output_node().all_input_nodes if (x := fake_tensor(n)) is not None}
    if storage_of(fake_tensor(node)) in returned:
        return True
    seen, pending = {node}, [node]
    while pending:
        for user in pending.pop().users:
            if user.op == "output":
                return True
            if user not in seen and op(user) in _MAY_BE_NOTHING:
                seen.add(user)
                pending.append(user)
    return False


@torch.library.custom_op("gradfuse::copied", mutates_args=())
def copied(x: Tensor) -> Tensor:
    """Return a contiguous copy of ``x``, of any shape and dtype. Inductor removes a ``clone`` before the graph is parted."""
    return x.clone(memory_format=torch.contiguous_format)


@copied.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    return grad


copied.register_autograd(_backward)
