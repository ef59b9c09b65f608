"""The rewrite of associative_scan on Dynamo's graph."""

import torch

import inductor_ext
from inductor_ext.compat import associative_scan_hop
from inductor_ext.ops.scan import scan
from inductor_ext.options import Options
from inductor_ext.rewrites import scans
from tests.scan.test_scan import gated, gradients, leaves, loop


def dynamo_graph(additional=()):
    """What Dynamo hands over for a gated recurrence in pointwise mode: the op, and its combine_fn as a submodule."""
    root = torch.nn.Module()
    root.combine = torch.fx.symbolic_trace(gated)
    graph = torch.fx.Graph()
    xs = [graph.placeholder("a"), graph.placeholder("x")]
    extra = [graph.placeholder(name) for name in additional]
    for node in extra:
        node.meta["example_value"] = torch.ones(())
    ys = graph.call_function(associative_scan_hop, (graph.get_attr("combine"), xs, tuple(extra)))
    graph.output(ys)
    return torch.fx.GraphModule(root, graph)


def test_the_op_gets_a_gradient_of_its_own():
    gm, xs = dynamo_graph(), leaves("ff", 9)
    with inductor_ext.report.collect() as report:
        scans.rewrite(gm, Options())
    assert gm.graph.find_nodes(op="call_function", target=scan)
    assert [d.path for d in report.decisions] == ["scan"]
    ys, want = gm(*xs), loop(gated, xs)
    for got, exact in zip(gradients(ys, xs, (0, 1)), gradients(want, xs, (0, 1)), strict=True):
        torch.testing.assert_close(got, exact)


def test_captured_tensors_go_along():
    gm = dynamo_graph(additional=["scale"])
    scans.rewrite(gm, Options())
    (node,) = gm.graph.find_nodes(op="call_function", target=scan)
    assert [x.name for x in node.args[2]] == ["scale"]


def test_can_be_disabled():
    gm = dynamo_graph()
    scans.rewrite(gm, Options(disable=frozenset(["scans"])))
    assert gm.graph.find_nodes(op="call_function", target=associative_scan_hop)
