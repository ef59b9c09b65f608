"""Replaces one node of a graph after AOTAutograd by the ATen ops of a traced function."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ..torch_api.graph import pytree
from ..torch_api.sizes import size_hint
from ..torch_api.tracing import detect_fake_mode, trace
from .fx import value_of

aten = torch.ops.aten


def replace_node(gm: GraphModule, node: Node, operands: list[Any], function: Callable[..., Any]) -> None:
    """Replace ``node``, in place, by the trace of ``function(*operands)``, whose nested outputs must match the node's."""
    values = [value_of(o) for o in operands]
    fake_mode = detect_fake_mode(values)

    # This is done before tracing, because the trace would contain a comparison of symbolic strides.
    orders = [_memory_order(x) for x in pytree.tree_leaves(value_of(node), is_leaf=lambda x: x is None)]

    def laid_out(*arguments: Any) -> Any:
        leaves, structure = pytree.tree_flatten(function(*arguments), is_leaf=lambda x: x is None)
        return structure.unflatten(_in_order(x, order) for x, order in zip(leaves, orders, strict=True))

    with fake_mode:
        traced = trace(laid_out, values)
    _copy_if_needed(traced)
    inserted: dict[Node, Any] = {}
    inputs = iter(operands)
    with gm.graph.inserting_before(node):
        for inner in traced.graph.nodes:
            if inner.op == "placeholder":
                inserted[inner] = next(inputs)
            elif inner.op == "get_attr":
                inserted[inner] = gm.graph.get_attr(_adopt(gm, inner.target, getattr(traced, inner.target)))
                inserted[inner].meta = dict(inner.meta)
            elif inner.op == "output":
                results = torch.fx.map_arg(inner.args[0], lambda n: inserted[n])
            else:
                inserted[inner] = gm.graph.node_copy(inner, lambda n: inserted[n])
                inserted[inner].meta.setdefault("stack_trace", node.meta.get("stack_trace"))
    _redirect(gm, node, results)


def _copy_if_needed(traced: GraphModule) -> None:
    """Make every view a ``reshape``, also in loops: Inductor may give an operand other strides than were traced.

    It does so with the gradient of a convolution that it computes in another memory format.
    """
    for module in traced.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.find_nodes(op="call_function", target=aten.view.default):
                node.target = aten.reshape.default
            module.recompile()


def _memory_order(promised: Tensor | None) -> list[int]:
    """The dims of a result in memory order, outermost first, as the op's fake implementation promised."""
    if promised is None:
        return []
    strides = [size_hint(s) for s in promised.stride()]
    return sorted(range(promised.dim()), key=lambda d: strides[d], reverse=True)


def _in_order(result: Tensor | None, order: list[int]) -> Tensor | None:
    """``result`` with the given memory order of its dims."""
    if result is None:
        return None
    return result.permute(order).contiguous().permute([order.index(d) for d in range(result.dim())])


def _adopt(gm: GraphModule, name: str, value: Any) -> str:
    fresh, i = f"gradfuse_{name}", 0
    while hasattr(gm, fresh):
        i += 1
        fresh = f"gradfuse_{name}_{i}"
    setattr(gm, fresh, value)
    return fresh


def _redirect(gm: GraphModule, node: Node, results: Any) -> None:
    """Replace the users of ``node`` (getitems, possibly nested) by the corresponding results."""
    for user in list(node.users):
        assert user.target is operator.getitem, user
        result = results[user.args[1]]
        if isinstance(result, (list, tuple)):
            _redirect(gm, user, result)
        elif result is None:
            for consumer in list(user.users):
                consumer.args = torch.fx.map_arg(consumer.args, lambda n, gone=user: None if n is gone else n)
            gm.graph.erase_node(user)
        else:
            user.replace_all_uses_with(result)
            gm.graph.erase_node(user)
    if not node.users:
        gm.graph.erase_node(node)
