"""Graphs and what is in them: operators, nested values, the order of nodes, and which tensors share memory."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._guards import detect_fake_mode
from torch._inductor.pattern_matcher import stable_topological_sort
from torch._ops import HigherOrderOperator, OpOverload
from torch._prims.rng_prims import run_with_rng_state
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.grad_mode import _enter_inference_mode as enter_inference_mode
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "HigherOrderOperator",
    "OpOverload",
    "assert_async",
    "buffer_value",
    "enter_inference_mode",
    "is_erased",
    "is_graph_argument",
    "is_torch",
    "is_wrapper",
    "pytree",
    "set_missing_values",
    "stable_topological_sort",
    "storage_of",
    "version_of",
]
_HOMES = ("_operator", "torch._C._nn", "torch._ops.aten", "torch._ops.prims")
_NAMESPACES = (torch, torch.nn.functional, torch.Tensor, torch.special)


def is_torch(function: Any) -> bool:
    """Return whether a function is an operator or one of torch, and no other function of the same name."""
    name = getattr(function, "__name__", "")
    return getattr(function, "__module__", None) in _HOMES or any(getattr(x, name, None) is function for x in _NAMESPACES)


def is_erased(node: Node) -> bool:
    """Return whether a node is no longer in its graph."""
    return node._erased


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether a tensor stands for others: a DTensor or other wrapper subclass, or one in a torch.func transform."""
    return is_traceable_wrapper_subclass(tensor) or is_functorch_wrapped_tensor(tensor)


def assert_async(condition: torch.Tensor, message: str) -> None:
    """Raise an error if a bool tensor of one element is False: at once on a CPU, by a device-side assertion on a GPU."""
    torch._assert_async(condition, message)


def is_graph_argument(node: Node) -> bool:
    """Return whether a node is an input of Dynamo's graph, and not of a graph in it, as the body of a checkpoint is."""
    return node.op == "placeholder" and node.meta.get("grapharg") is not None


def buffer_value(node: Node) -> torch.Tensor | None:
    """Return the tensor that an input of Dynamo's graph is now, if it is a buffer of a module; None for other nodes."""
    argument = node.meta.get("grapharg") if node.op == "placeholder" else None
    source = getattr(argument, "source", None)
    name = getattr(source, "name", "")
    if not re.search(r"\._buffers\['\w+'\]$", name() if callable(name) else name):
        return None
    value = argument.example
    known = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor) and not is_wrapper(value)
    return value if known else None


def set_missing_values(graph: Graph) -> None:
    """Give a value to the random numbers that a backward draws again: AOTAutograd makes their nodes without one."""
    for node in graph.find_nodes(op="call_function", target=run_with_rng_state):
        if "val" not in node.meta:
            _, function, *args = node.args
            values, kwargs = map_arg((args, node.kwargs), lambda n: n.meta["val"])
            with detect_fake_mode([n.meta.get("val") for n in graph.find_nodes(op="placeholder")]):
                node.meta["val"] = function(*values, **kwargs)


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor, or one that shares its memory, was written to; 0 if that is not counted."""
    return 0 if tensor.is_inference() else tensor._version


def storage_of(tensor: torch.Tensor) -> Any:
    """Return a value that is equal for tensors that share memory, fake tensors included."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        inner = (getattr(tensor, name) for name in names)
        return tuple(storage_of(x) for x in inner if isinstance(x, torch.Tensor))
    return tensor.untyped_storage()._cdata
