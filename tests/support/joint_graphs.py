"""Get at the joint graph of a function after gradfuse's rewrites, as text that reads the same on every torch."""

import re
from unittest import mock

import torch

from inductor_ext import backend

from .eager_graphs import eager_graphs


def rewritten(function, *inputs, options=None):
    """The text of the joint graph of ``function`` once our rewrites, and not yet stock's, have run."""
    return text(rewritten_graph(function, *inputs, options=options))


def rewritten_graph(function, *inputs, options=None):
    """A copy of that graph (those of its higher-order ops come before it)."""
    graphs = []
    ours = backend._OnJointGraph.__call__

    def then_read(self, graph):
        ours(self, graph)
        copy = torch.fx.Graph()
        copy.output(copy.graph_copy(graph, {}))
        graphs.append(copy)

    torch._dynamo.reset()
    with mock.patch.object(backend._OnJointGraph, "__call__", then_read), eager_graphs():
        torch.compile(function, backend="gradfuse", fullgraph=True, options=options)(*inputs)
    return graphs[-1]


def text(graph):
    """One line a call: ``name: dtype[shape] = op(arguments)``, names numbered in order."""
    names, lines = {}, []

    def name(node):
        return names.setdefault(node, f"%{len(names)}")

    for node in graph.nodes:
        value = node.meta.get("val")
        kind = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if isinstance(value, torch.Tensor) else ""
        arguments = ", ".join([_show(a, name) for a in node.args] + [f"{k}={_show(v, name)}" for k, v in _kept(node)])
        if node.op == "placeholder":
            lines.append(f"{name(node)}: {kind} = input")
        elif node.op == "output":
            lines.append(f"return {arguments}")
        else:
            lines.append(f"{name(node)}: {kind} = {_target(node)}({arguments})")
    return "\n".join(lines) + "\n"


def _kept(node):
    return [(k, v) for k, v in sorted(node.kwargs.items()) if k not in ("layout", "device", "pin_memory", "requires_grad")]


def _show(argument, name):
    if isinstance(argument, torch.fx.Node):
        return name(argument)
    if isinstance(argument, (list, tuple)):
        return "[" + ", ".join(_show(a, name) for a in argument) + "]"
    return str(argument).removeprefix("torch.")


def _target(node):
    target = node.target
    if isinstance(target, str):
        return node.op
    return re.sub(r"\.default$", "", str(target)) if isinstance(target, torch._ops.OpOverload) else target.__name__
