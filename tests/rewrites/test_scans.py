"""The rewrite of associative_scan on Dynamo's graph."""

import importlib

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import inductor_ext
from inductor_ext.compat import associative_scan_hop
from inductor_ext.ops.scan import scan
from inductor_ext.options import Options
from inductor_ext.rewrites import scans
from tests import snapshots
from tests.scan.test_compiled import pointwise_scan
from tests.scan.test_scan import COMBINES, gated, gradients, leaves, loop, total, upper_triangular

from .joint_graphs import rewritten, text

# The package shows functions under the modules' names.
associative_module = importlib.import_module("inductor_ext.ops.associative")


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


GRAPHS = {
    "gated": (gated, 1),
    "sum": (total, 0),
    "matrix": (upper_triangular, 1),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs(name):
    """The joint graph: of a gated recurrence one coefficient is scanned backwards, of a sum none."""
    combine, used = GRAPHS[name]
    xs = [torch.randn(5, 2, 3, requires_grad=True) for _ in COMBINES[combine]]
    snapshots.check(__file__, f"scans_{name}", rewritten(lambda *xs: pointwise_scan(combine, xs, 1, False)[used], *xs))


def test_graph_in_two_levels(monkeypatch):
    monkeypatch.setattr(associative_module, "CHUNK", 4)
    monkeypatch.setattr(associative_module, "FEWEST_CHUNKS", 1)
    monkeypatch.setattr(associative_module, "uses_triton_on_cpu", lambda: True)
    traced = make_fx(lambda *xs: associative_module.associative(gated, xs)[1], tracing_mode="fake")
    snapshots.check(__file__, "scans_two_levels", text(traced(torch.randn(10, 2), torch.randn(10, 2)).graph))
