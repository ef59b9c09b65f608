"""The rewrite of associative_scan on Dynamo's graph."""

import importlib
import operator

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_ext import passes
from inductor_ext.core.report import collect
from inductor_ext.options import Options
from inductor_ext.scan import rewrite as scans
from inductor_ext.scan.scan import scan
from inductor_ext.torch_api.higher_order import associative_scan_hop
from tests.support import snapshots
from tests.support.joint_graphs import rewritten, text

from .test_compiled import channels_module, few_channels_are_enough, pointwise_scan
from .test_scan import COMBINES, gated, gradients, leaves, loop, total, upper_triangular

# In the package, the modules' names are bound to functions.
associative_module = importlib.import_module("inductor_ext.scan.associative")


def dynamo_graph(additional=(), flips=False):
    """Dynamo's graph of a gated recurrence in pointwise mode: the op, with its combine_fn as a submodule.

    flips: whether the operands are flipped, and the results flipped back, except for the last one.
    """
    root = torch.nn.Module()
    root.combine = torch.fx.symbolic_trace(gated)
    graph = torch.fx.Graph()
    xs = [graph.placeholder("a"), graph.placeholder("x")]
    extra = [graph.placeholder(name) for name in additional]
    for node in extra:
        node.meta["example_value"] = torch.ones(())
    flip = lambda x: graph.call_function(torch.flip, (x, [0]))  # noqa: E731
    operands = [flip(x) for x in xs] if flips else xs
    ys = graph.call_function(associative_scan_hop, (graph.get_attr("combine"), operands, tuple(extra)))
    if flips:
        products, state = (graph.call_function(operator.getitem, (ys, i)) for i in range(2))
        ys = (flip(products), state)
        for node in [*graph.find_nodes(op="call_function", target=torch.flip), products, state, *xs]:
            node.meta["example_value"] = torch.ones(9, requires_grad=True)
    graph.output(ys)
    return torch.fx.GraphModule(root, graph)


def test_the_op_gets_a_gradient_of_its_own():
    gm, xs = dynamo_graph(), leaves("ff", 9)
    with collect() as report:
        scans.rewrite(gm, Options())
    assert gm.graph.find_nodes(op="call_function", target=scan)
    assert [d.path for d in report.decisions] == ["scan"]
    ys, want = gm(*xs), loop(gated, xs)
    for got, exact in zip(gradients(ys, xs, (0, 1)), gradients(want, xs, (0, 1)), strict=True):
        torch.testing.assert_close(got, exact)


def test_flips_become_a_scan_from_the_end():
    """The flips of the operands and of the results disappear. A result that is used without a flip is flipped.

    What is given and returned is copied instead.
    """
    gm, xs = dynamo_graph(flips=True), leaves("ff", 9)
    want = gm(*(x.detach() for x in xs))
    scans.rewrite(gm, Options())
    (node,) = gm.graph.find_nodes(op="call_function", target=scan)
    copies = gm.graph.find_nodes(op="call_function", target=torch.ops.gradfuse.copied.default)
    assert node.kwargs == {"reverse": True} and [*node.args[1]] == copies[:2]
    assert [x.args[0].name for x in copies] == ["a", "x", "getitem"]
    (flip,) = gm.graph.find_nodes(op="call_function", target=torch.flip)
    assert flip.args[0].args[1] == 1
    for got, exact in zip(gm(*xs), want, strict=True):
        torch.testing.assert_close(got, exact)


def test_flips_of_what_changes_meanwhile_are_left():
    gm = dynamo_graph(flips=True)
    (node,) = gm.graph.find_nodes(op="call_function", target=associative_scan_hop)
    with gm.graph.inserting_before(node):
        gm.graph.call_method("add_", (node.args[1][0].args[0], 1))
    scans.rewrite(gm, Options())
    assert not node.kwargs and all(x.target is torch.flip for x in node.args[1])


def test_a_flip_that_changes_meanwhile_is_left():
    gm = dynamo_graph(flips=True)
    (node,) = gm.graph.find_nodes(op="call_function", target=associative_scan_hop)
    with gm.graph.inserting_before(node):
        gm.graph.call_function(operator.setitem, (node.args[1][1], 0, 0.0))
    scans.rewrite(gm, Options())
    assert not node.kwargs and all(x.target is torch.flip for x in node.args[1])


def test_flips_of_results_that_change_are_left():
    """Stock can differentiate this, because the op writes to the copy."""
    gm = dynamo_graph(flips=True)
    (node,) = gm.graph.find_nodes(op="call_function", target=associative_scan_hop)
    (output,) = gm.graph.find_nodes(op="output")
    with gm.graph.inserting_before(output):
        view = gm.graph.call_method("movedim", (output.args[0][0], 0, 1))
        gm.graph.call_method("add_", (view, 1))
    scans.rewrite(gm, Options())
    assert not node.kwargs


def test_captured_tensors_go_along():
    gm = dynamo_graph(additional=["scale"])
    scans.rewrite(gm, Options())
    (node,) = gm.graph.find_nodes(op="call_function", target=scan)
    assert [x.name for x in node.args[2]] == ["scale"]


def test_can_be_disabled():
    gm = dynamo_graph()
    (each,) = (p for p in passes.ORDER if p.name == "scans")
    each(gm, Options(disable=frozenset(["scans"])))
    assert gm.graph.find_nodes(op="call_function", target=associative_scan_hop)


GRAPHS = {
    "gated": (gated, 1),
    "sum": (total, 0),
    "matrix": (upper_triangular, 1),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs(name):
    """The joint graph. Of a gated recurrence one coefficient is scanned backwards, and of a sum none."""
    combine, used = GRAPHS[name]
    xs = [torch.randn(5, 2, 3, requires_grad=True) for _ in COMBINES[combine]]
    snapshots.check(__file__, f"scans_{name}", rewritten(lambda *xs: pointwise_scan(combine, xs, 1, False)[used], *xs))


def test_graph_in_two_levels(monkeypatch):
    monkeypatch.setattr(associative_module, "CHUNK", 4)
    monkeypatch.setattr(associative_module, "FEWEST_CHUNKS", 1)
    monkeypatch.setattr(associative_module, "uses_triton_on_cpu", lambda: True)
    traced = make_fx(lambda *xs: associative_module.associative(gated, xs, True)[1], tracing_mode="fake")
    snapshots.check(__file__, "scans_two_levels", text(traced(torch.randn(10, 2), torch.randn(10, 2)).graph))


FORMS = {
    "gated": (gated, 1, "a linear recurrence in one kernel", "a linear recurrence in one kernel"),
    "sum": (total, 0, "a kernel over channels", "a linear recurrence in one kernel"),
    "matrix": (upper_triangular, 1, "a kernel over channels", "carried back in time"),
}


@pytest.mark.breadth(3)
@pytest.mark.parametrize("enough", [False, True], ids=["few_channels", "many_channels"])
@pytest.mark.parametrize("name", FORMS)
def test_the_report_shows_the_forms(name, enough, monkeypatch):
    """Each direction once, although AOTAutograd traces the forward more than once, and at the user's line."""
    combine, used, forward, backward = FORMS[name]
    if enough:
        few_channels_are_enough(monkeypatch)
        monkeypatch.setattr(channels_module, "uses_triton_on_cpu", lambda: True)
    xs = [torch.randn(5, 2, 3, requires_grad=True) for _ in COMBINES[combine]]
    with collect() as report:
        rewritten(lambda *xs: pointwise_scan(combine, xs, 0, False)[used], *xs)
    found = [d for d in report.decisions if d.pass_name == "scans"]
    one = "a scan in one level"
    want = [forward, backward] if enough else [one, one]
    assert [(d.op, d.path) for d in found[1:]] == list(
        zip(("associative_scan", "associative_scan_backward"), want, strict=True)
    )
    assert all("test_compiled.py" in d.where for d in found)
