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
from .fx import fake_tensor, value_or_none
from .purity import changes_in_place
from .terms import CASTS, op, reads_shape
from .writes import VIEWS

#: Ops of whose operand Inductor may take the result to be, if their other operands are numbers or constants: ``x * 1``.
_MAY_BE_NOTHING = VIEWS | CASTS | {"dropout", "dropout2d", "add", "sub", "mul", "div", "pow", "cat", "concat", "stack"}
_MAY_BE_NOTHING |= {"concatenate", "hstack", "vstack", "tile", "conj", "adjoint", ".mH", ".H", "tensor_split", "where"}
_FILLS = {"zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "tensor"}
#: The numbers with which these ops change nothing.
_NEUTRAL = {"add": 0, "sub": 0, "mul": 1, "div": 1, "pow": 1}
_NAMES = """
matmul linear einsum baddbmm addmm conv1d conv2d conv3d scaled_dot_product_attention flex_attention fused_cell
softmax log_softmax layer_norm rms_norm group_norm batch_norm sum mean amax norm cross_entropy mse_loss
sin cos tanh sigmoid relu gelu silu elu leaky_relu softplus logsigmoid exp log sqrt rsqrt square neg abs erf
"""
#: Ops whose result is never the memory of an operand, whatever the other operands are.
_NEW = set(_NAMES.split())


class Outside:
    """The memory of the inputs, constants and results of a graph."""

    def __init__(self, graph: Graph) -> None:
        given = [n for n in graph.nodes if n.op in ("placeholder", "get_attr")]
        nodes = [*given, *graph.output_node().all_input_nodes]
        self._storages = {storage_of(x) for n in nodes if (x := fake_tensor(n)) is not None}

    def shares(self, node: Node) -> bool:
        """Return whether the memory of a tensor is that of an input or of a result."""
        value = fake_tensor(node)
        return value is not None and storage_of(value) in self._storages

    def has(self, node: Node) -> bool:
        """Return whether a tensor shares memory with what is outside, once Inductor has simplified the graph."""
        current: Node | None = node
        while current is not None:
            if self.shares(current):
                return True
            current = _only_operand(current) if op(current) in _MAY_BE_NOTHING else None
        return False


def _only_operand(node: Node) -> Node | None:
    """Return the operand to which an op may be equal: the only one that is no constant, if no number changes it."""
    tensors = [n for n in node.all_input_nodes if isinstance(value_or_none(n), (Tensor, tuple, list))]
    operands = [n for n in tensors if op(n) not in _FILLS]
    numbers = [x for x in node.args if isinstance(x, (int, float))] if op(node) in _NEUTRAL else []
    neutral = all(x == _NEUTRAL[op(node)] for x in numbers)
    return operands[0] if len(operands) == 1 and neutral else None


def is_returned(node: Node) -> bool:
    """Return whether the graph may return the memory of a tensor that one of its nodes computes.

    What follows it may be nothing, once Inductor has simplified it.
    """
    seen, pending = {node}, [node]
    while pending:
        current = pending.pop()
        for user in current.users:
            if user.op == "output":
                return True
            if op(user) in _NEW or reads_shape(user, current) or (op(user) in _NEUTRAL and _only_operand(user) is None):
                continue
            # A copy into other memory may become that memory.
            written = user.kwargs.get("out", user.args[0] if user.args else None) if changes_in_place(user) else None
            new = {x for x in (user, written) if isinstance(x, Node)} - seen
            seen |= new
            pending += new
    return False


@torch.library.custom_op("gradfuse::copied", mutates_args=())
def copied(x: Tensor, contiguous: bool = True) -> Tensor:
    """Return a copy of ``x``, of any shape and dtype. Inductor removes a ``clone`` from the joint graph, and not this.

    contiguous: otherwise its dims are in memory in the order in which those of ``x`` are.
    """
    return x.clone(memory_format=_format(contiguous))


@copied.register_fake
def _(x: Tensor, contiguous: bool = True) -> Tensor:
    return torch.empty_like(x, memory_format=_format(contiguous))


def _format(contiguous: bool) -> torch.memory_format:
    return torch.contiguous_format if contiguous else torch.preserve_format


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return grad, None


copied.register_autograd(_backward)
