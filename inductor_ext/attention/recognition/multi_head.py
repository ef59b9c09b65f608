"""Write out ``F.multi_head_attention_forward``, which Dynamo keeps as one node, where its mask is learned.

``nn.MultiheadAttention`` calls this function, and so does WavLM, whose ``attn_mask`` is a bias. What it computes is torch's
Python code. Here that code runs once more on the values of the graph, and each op that it calls becomes a node. So the graph
has the ops that AOTAutograd would trace in any case, and the attention among them is found as any other.
"""

from __future__ import annotations

import operator
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node
from torch.overrides import TorchFunctionMode

from ...core.dynamo_graph import Inserter, erase_unused
from ...core.fx import HALF, fake_tensor, requires_grad, value_of
from ...torch_api.graph import pytree
from .pattern import has_no_effect

#: The function without its question whether a mode or a subclass takes the whole call: the mode below takes only its ops.
_FORWARD = FunctionType(
    F.multi_head_attention_forward.__code__,
    F.multi_head_attention_forward.__globals__ | {"has_torch_function": lambda operands: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)


def write_out(graph: Graph) -> None:
    """Replace, in place, the calls whose ``attn_mask`` needs a gradient and whose probabilities nobody uses."""
    for node in graph.find_nodes(op="call_function", target=F.multi_head_attention_forward):
        _drop_unused(node)
        arguments = _arguments(node)
        if requires_grad(arguments.get("attn_mask")) and _is_simple(node, arguments):
            _write_out(graph, node, arguments)


def _drop_unused(node: Node) -> None:
    """Erase what is computed of a node for nothing: the probabilities are returned, and few callers use them."""
    for user in list(node.users):
        _drop_unused(user)
        if has_no_effect(user):
            node.graph.erase_node(user)


def _arguments(node: Node) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    names = F.multi_head_attention_forward.__code__.co_varnames
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def _is_simple(node: Node, arguments: dict[str, Any]) -> bool:
    """Return whether only the output is used, and no size is symbolic, about which the code would ask."""
    values = [fake_tensor(x) for x in arguments.values() if isinstance(x, Node)]
    known = all(x is not None and all(isinstance(n, int) for n in (*x.shape, *x.stride())) for x in values)
    return known and [(user.target, user.args[1:]) for user in node.users] == [(operator.getitem, (0,))]


def _write_out(graph: Graph, node: Node, arguments: dict[str, Any]) -> None:
    (output,) = node.users
    like, before = fake_tensor(output), node.prev
    with graph.inserting_before(node):
        recorder = _Recorder(Inserter(graph, node))
        values = pytree.tree_map_only(Node, recorder.value, arguments)
        # While this compiles, the mode of autocast may be another one than where the model runs.
        dtypes = {x.dtype for x in values.values() if isinstance(x, torch.Tensor)}
        half = like.dtype if like.dtype in HALF and torch.float32 in dtypes else None
        autocast = torch.autocast(like.device.type, half, enabled=half is not None)
        with values["query"].fake_mode, autocast, recorder:
            result, _ = _FORWARD(**values)
    if (result.shape, result.dtype, result.stride()) == (like.shape, like.dtype, like.stride()):
        Inserter(graph, node).take_place(output, recorder.node(result), lambda user: True)
        graph.erase_node(output)
    erase_unused(before, node)
    if not node.users:
        graph.erase_node(node)


class _Recorder(TorchFunctionMode):
    """Inserts a node for each op that code calls on values of a graph."""

    def __init__(self, insert: Inserter) -> None:
        super().__init__()
        self._insert = insert
        self._nodes: dict[int, Node] = {}

    def value(self, node: Node) -> Any:
        """Return the value of a node, and remember that it is the node's."""
        self._nodes[id(value_of(node))] = node
        return value_of(node)

    def node(self, value: Any) -> Node:
        """Return the node that computes a value."""
        return self._nodes[id(value)]

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if not any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(result)):
            return result
        args, kwargs = pytree.tree_map_only(torch.Tensor, self.node, (args, kwargs))
        node = self._call(function, args, kwargs)
        if isinstance(result, torch.Tensor):
            return self.value(node)
        return type(result)(self.value(self._insert.function(operator.getitem, node, i)) for i in range(len(result)))

    def _call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        name = function.__name__
        if getattr(torch.Tensor, name, None) is not function:
            return self._insert.function(function, *args, **kwargs)
        if name.startswith("__"):
            return self._insert.function(getattr(operator, name), *args, **kwargs)
        return self._insert.method(name, *args, **kwargs)
