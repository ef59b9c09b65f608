"""Passes and kernels as the registry has them."""

import pytest
import torch
from torch.fx import Graph, GraphModule

from inductor_ext import lowerings, passes
from inductor_ext.core.pass_ import Pass
from inductor_ext.options import Options
from inductor_ext.registry import NAMES
from tests.support.interpreter import triton_on_cpu


def graph():
    made = Graph()
    x = made.placeholder("x")
    made.output(made.call_function(torch.sin, (x,)))
    return GraphModule({}, made)


def cosine(gm, options):
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.sin)
    node.target = torch.cos


def test_a_pass_rewrites_and_what_it_rewrote_runs():
    gm = graph()
    Pass("cosine", "dynamo", "", cosine)(gm, Options())
    assert torch.equal(gm(torch.ones(2)), torch.ones(2).cos())


def test_a_disabled_pass_is_not_run():
    gm = graph()
    Pass("cosine", "dynamo", "", cosine)(gm, Options(disable=frozenset({"cosine"})))
    assert torch.equal(gm(torch.ones(2)), torch.ones(2).sin())


def test_a_pass_that_breaks_a_graph_is_found_at_once():
    def broken(gm, options):
        (node,) = gm.graph.find_nodes(op="call_function", target=torch.sin)
        node.args = (Graph().placeholder("of another graph"),)

    with pytest.raises(RuntimeError, match="not belong to this Graph"):
        Pass("broken", "dynamo", "", broken)(graph(), Options())


def test_every_name_says_what_it_is():
    assert len({each.name for each in passes.ORDER}) == len(passes.ORDER)
    assert all(what and what[0].islower() for what in NAMES.values())


@pytest.mark.parametrize("kernel", lowerings.KERNELS, ids=lambda kernel: str(kernel.overload))
def test_every_kernel_op_is_replaced_and_can_be_disabled(kernel):
    assert lowerings.table(Options())[kernel.overload] is not None
    assert kernel.name in NAMES


def test_a_disabled_kernel_runs_the_ops_own_code():
    from inductor_ext.core.linear_scan import linear_scan

    def run(x):
        return linear_scan(None, x, list(x.shape), 1, False, torch.float32)

    x = torch.randn(2, 5, 3)
    for disabled in ([], ["linear_scan"]):
        torch._dynamo.reset()
        with triton_on_cpu():
            got = torch.compile(run, backend="gradfuse", options={"disable": disabled})(x)
        assert torch.allclose(got, x.cumsum(1), atol=1e-6)
