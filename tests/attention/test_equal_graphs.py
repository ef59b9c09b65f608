"""Which score_mods of a graph become one, and that the graph computes the same."""

import pytest
import torch
from torch.fx import GraphModule
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from inductor_ext.core import equal_graphs
from inductor_ext.options import Options
from tests.support.dynamo_graphs import dynamo_graph
from tests.support.eager_graphs import eager_graphs

QUERY = torch.randn(1, 2, 16, 16)


def shared(*score_mods):
    """The number of graphs of score_mods after the pass, for one attention with each of these score_mods."""

    def attentions(q):
        for score_mod in score_mods:
            q = flex_attention(q, q, q, score_mod=score_mod)
        return q

    gm = dynamo_graph(attentions, QUERY)
    inputs = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
    assert len(inputs) <= 1 + len(score_mods)
    equal_graphs.rewrite(gm, Options())
    gm.graph.lint()
    gm.recompile()
    return len([name for name, module in gm.named_children() if isinstance(module, GraphModule) and "score" in name])


def of_table(table):
    return lambda s, b, h, q, k: s + table[h, q - k + 15]


def scaled(factor):
    return lambda s, b, h, q, k: s * factor


def test_equal_score_mods_become_one():
    """Captured tensors are operands, so another tensor of the same kind makes no other graph."""
    assert shared(*(of_table(torch.randn(2, 31)) for _ in range(3))) == 1


@pytest.mark.breadth(4)
@pytest.mark.parametrize(
    "one, other",
    [
        (scaled(2.0), scaled(3.0)),
        (scaled(2.0), scaled(2)),
        (scaled(0.0), scaled(-0.0)),
        (of_table(torch.randn(2, 31)), of_table(torch.randn(2, 31).half())),
        (of_table(torch.randn(2, 31)), of_table(torch.randn(2, 31).requires_grad_())),
        (of_table(torch.randn(2, 31)), of_table(torch.randn(2, 40))),
        (of_table(torch.randn(2, 31)), of_table(torch.randn(31, 2).T)),
        (lambda s, b, h, q, k: s + q - k, lambda s, b, h, q, k: s + k - q),
    ],
    ids=["constant", "int and float", "sign of zero", "dtype", "gradient", "shape", "strides", "operands"],
)
def test_others_stay(one, other):
    assert shared(one, other) == 2


def formula(q, *tables):
    """What ``test_a_model_computes_the_same`` computes, without flex_attention."""
    i = torch.arange(16)
    for table, power in zip(tables, (1, 1, 2), strict=True):
        bias = table[:, i[:, None] - i + 15] ** power
        q = ((q @ q.mT / 4 + bias).masked_fill(i[:, None] < i, -torch.inf)).softmax(-1) @ q
    return q


@pytest.mark.breadth(0)
def test_a_model_computes_the_same():
    """Masks and score_mods of three layers, two of them equal, and graphs that passes have rewritten."""
    tables = [torch.randn(2, 31, requires_grad=True) for _ in range(3)]
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 16, 16, device="cpu")

    def model(q, *tables):
        for table, power in zip(tables, (1, 1, 2), strict=True):
            q = flex_attention(
                q, q, q, score_mod=lambda s, b, h, i, k, t=table, p=power: s + t[h, i - k + 15] ** p, block_mask=mask
            )
        return q

    graphs = []
    stock = equal_graphs.rewrite

    def spy(gm, options):
        before = len(list(gm.children()))
        stock(gm, options)
        graphs.append((before, len(list(gm.children()))))

    with eager_graphs(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(equal_graphs, "rewrite", spy)
        got = torch.compile(model, backend="gradfuse", fullgraph=True)(QUERY, *tables)
    want = formula(QUERY, *tables)
    assert torch.allclose(got, want, atol=1e-5)
    gradients = (torch.autograd.grad(y.square().sum(), tables) for y in (got, want))
    assert all(torch.allclose(x, y, atol=1e-4) for x, y in zip(*gradients, strict=True))
    ((before, after),) = graphs
    assert before > 6 and after == 3, "two score_mods and a mask_mod"


def test_the_body_of_a_checkpoint_stays():
    """Only functions of numbers become one. A body may have effects."""

    def body(x):
        return x.sin() + 1

    def twice(x):
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False)
        return x

    gm = dynamo_graph(twice, torch.randn(3, requires_grad=True))
    before = len(list(gm.children()))
    equal_graphs.rewrite(gm, Options())
    assert len(list(gm.children())) == before


def test_what_other_nodes_read_stays():
    """An unused graph is kept if a call, or a graph in it, still needs it. Hand-made: Dynamo traces no such graph today."""
    gm = GraphModule({}, torch.fx.Graph())
    x = gm.graph.placeholder("x")
    for name in ("a", "b", "c"):
        gm.add_module(name, torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Identity())))
        gm.graph.get_attr(name)
    gm.graph.output((gm.graph.call_module("a", (x,)), gm.graph.get_attr("b.0")))
    equal_graphs.rewrite(gm, Options())
    gm.graph.lint()
    assert {name for name, _ in gm.named_children()} == {"a", "b"}
