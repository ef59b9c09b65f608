"""Watch one rewrite of a Dynamo graph, and stop the compilation after it."""

import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from inductor_ext.attention.calls import ForwardCall
from inductor_ext.core.report import collect
from inductor_ext.torch_api.higher_order import flex_attention_hop


class Stop(Exception):
    """Raised once the rewrite has been seen."""

    def __str__(self):
        return "Stop"


def copied(node):
    """What a test looks at: the target of a node, its arguments (nodes as copies of this kind), and its fake value."""
    arguments = [copied(a) if isinstance(a, torch.fx.Node) else a for a in node.args]
    return SimpleNamespace(target=node.target, args=arguments, value=node.meta.get("example_value"))


def after(rewrite_module, attention, query):
    """Compile ``attention(query)`` up to ``rewrite_module.rewrite``.

    Returns the flex_attention node, its score_mod as text that reads the same on every torch, the targets of the outer
    graph, and the decisions.
    """
    seen = {}
    rewrite = rewrite_module.rewrite

    def spy(gm, options):
        with collect() as report:
            rewrite(gm, options)
        (node,) = gm.graph.find_nodes(op="call_function", target=flex_attention_hop)
        text = str(getattr(gm, node.args[3].target).graph)
        text = re.sub(r"placeholder\[target=\w+\]", "placeholder", re.sub(r" : [\w.]+(?= \[)", "", text))
        seen.update(graph=text.replace(", kwargs = {}", ""), node=node, outer=[str(n.target) for n in gm.graph.nodes])
        seen["decisions"] = report.decisions
        # The graph is taken apart after the exception, so what tests look at is copied.
        seen["captured"] = [copied(n) for n in ForwardCall.of(node).captured]
        raise Stop

    compiled = torch.compile(attention, backend="gradfuse", fullgraph=True)
    with mock.patch.object(rewrite_module, "rewrite", spy), pytest.raises(Exception, match="Stop"):
        compiled(query)
    return seen


def dynamo_graph(function, *inputs):
    """The graph that Dynamo hands to a backend."""
    seen = []

    def backend(gm, example_inputs):
        seen.append(gm)
        return gm.forward

    torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(*inputs)
    return seen[0]
