"""Which ops of a loop's steps can be computed for all times at once, and the call that does it.

If the tensors of a step have the time in front as one more dim, then an op of the steps is the same op with its other dims
moved by one: ``y[:, 0]`` becomes ``ys[:, :, 0]``, ``y.sum(1)`` becomes ``ys.sum(2)``, and ``einsum("bdn,bn->bd", y, c)``
becomes ``einsum("tbdn,tbn->tbd", ys, cs)``.
"""

from __future__ import annotations

import operator
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..core.fx import indices_of, shape_of, value_of
from ..core.purity import changes_in_place
from ..core.terms import arg, calls_torch, is_tensor, op

#: Ops that are computed element by element, of tensors and numbers.
POINTWISE = {"mul", "add", "sub", "div", "neg", "exp", "log", "sqrt", "square", "abs", "sigmoid", "tanh", "relu", "silu"}
CASTS = {"to", "type", "float", "double", "half", "bfloat16"}
#: Methods of a tensor whose second argument is a dim, or some of them.
_OF_A_DIM = {"unsqueeze", "squeeze", "select", "sum", "mean"}


@dataclass(frozen=True)
class Call:
    """An op of tensors that may have the time in front. target: a function, or the name of a method.

    The nodes among the arguments are those of one step. They stand for such tensors, and may be erased by now.
    missing: how many dims of size 1 each operand needs between the time and its other dims.
    """

    target: Callable[..., Any] | str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    missing: dict[Node, int]


def is_pointwise(node: Node) -> bool:
    """Whether an op is computed element by element, on one device, and of tensors and numbers."""
    if op(node) not in POINTWISE | CASTS or not _is_plain(node):
        return False
    if any(isinstance(x, torch.memory_format) for x in (*node.args, *node.kwargs.values())):
        return False
    return len(node.all_input_nodes) == 1 or op(node) in POINTWISE


def over_time(node: Node, has_time: Callable[[Node], bool]) -> Call | None:
    """Return the op of all times, or None if it is not known. has_time: whether an operand differs between the times."""
    if is_pointwise(node):
        return _aligned(node, node.target) if _keeps_dtype(node) else None
    if not _is_plain(node):
        return None
    if node.target is operator.getitem:
        return _indexed(node)
    if op(node) in _OF_A_DIM:
        return _of_a_dim(node)
    if op(node) == "matmul" and len(node.args) == 2 and not node.kwargs:
        ranks = {x: len(shape_of(x)) for x in node.all_input_nodes}
        # A matrix that is the same at all times is not copied for each time, but several would be.
        simple = all(rank >= 2 and (rank == 2 or has_time(x)) for x, rank in ranks.items())
        return _aligned(node, torch.matmul) if simple else None
    if op(node) == "linear" and not node.kwargs and not any(isinstance(x, Node) and has_time(x) for x in node.args[1:]):
        return Call(node.target, node.args, {}, dict.fromkeys(node.all_input_nodes, 0))
    return _einsum(node, has_time) if op(node) == "einsum" else None


def _is_plain(node: Node) -> bool:
    """Whether a node computes one tensor of tensors on its own device, and writes to none."""
    if not is_tensor(node) or not calls_torch(node) or changes_in_place(node) or not node.all_input_nodes:
        return False
    if value_of(node).is_complex():
        return False
    return all(is_tensor(x) and value_of(x).device == value_of(node).device for x in node.all_input_nodes)


def _keeps_dtype(node: Node) -> bool:
    """Whether the result of all times has the same dtype. Beside other tensors, one without dims does not decide it."""
    values = [value_of(x) for x in node.all_input_nodes]
    return len({x.dtype for x in values}) == 1 or all(x.dim() for x in values)


def _aligned(node: Node, target: Callable[..., Any] | str) -> Call:
    """The same call of operands that broadcast."""
    ranks = {x: len(shape_of(x)) for x in node.all_input_nodes}
    return Call(target, node.args, node.kwargs, {x: max(ranks.values()) - rank for x, rank in ranks.items()})


def _indexed(node: Node) -> Call | None:
    """``x[...]`` with numbers, slices and None in the brackets."""
    entries = indices_of(node)
    if len(node.all_input_nodes) != 1 or any(isinstance(e, bool) for e in entries):
        return None
    if not all(e is None or e is Ellipsis or isinstance(e, int | slice) for e in entries):
        return None
    return Call(operator.getitem, (node.args[0], (slice(None), *entries)), {}, {node.args[0]: 0})


def _of_a_dim(node: Node) -> Call | None:
    dims, kwargs = arg(node, 1, "dim"), {k: v for k, v in node.kwargs.items() if k != "dim"}
    several = isinstance(dims, list | tuple)
    plain = all(isinstance(d, int) and not isinstance(d, bool) for d in (dims if several else (dims,)))
    if not plain or dims in ([], ()) or len(node.all_input_nodes) != 1 or not node.args or not is_tensor(node.args[0]):
        return None
    if not kwargs.keys() <= {"keepdim", "dtype", "index"}:
        return None
    if not shape_of(node.args[0]) and op(node) != "unsqueeze":
        # Of a number, dim 0 and dim -1 are allowed. Of all times, dim -1 would be the time.
        return None
    moved = [d + 1 if d >= 0 else d for d in (dims if several else (dims,))]
    args = (node.args[0], moved if several else moved[0], *node.args[2:])
    return Call(op(node), args, kwargs, {node.args[0]: 0})


def _einsum(node: Node, has_time: Callable[[Node], bool]) -> Call | None:
    equation, operands = node.args[0], node.args[1:]
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        (operands,) = operands
    if node.kwargs or not isinstance(equation, str) or "." in equation or "->" not in equation:
        return None
    inputs, result = equation.replace(" ", "").split("->")
    time = next((letter for letter in string.ascii_letters if letter not in equation), None)
    if time is None or not all(map(is_tensor, operands)) or len(inputs.split(",")) != len(operands):
        return None
    own = [time * has_time(x) + part for x, part in zip(operands, inputs.split(","), strict=True)]
    return Call(torch.einsum, (f"{','.join(own)}->{time}{result}", *operands), {}, dict.fromkeys(operands, 0))
