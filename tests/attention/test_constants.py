"""What is computed from numbers alone is inserted once into a graph, and nothing else is."""

import copy
import gc
import operator
import pickle
import weakref

import pytest
import torch
from torch.fx import Graph

from inductor_ext.attention import hoisting
from inductor_ext.attention.recognition import rewrite as recognition
from inductor_ext.core.dynamo_graph import Inserter
from inductor_ext.options import Options
from inductor_ext.torch_api.graph import enter_inference_mode
from inductor_ext.torch_api.higher_order import flex_attention_hop
from tests.support.dynamo_graphs import dynamo_graph


def new_graph():
    """A graph ``(x, s)``, with ``first`` before ``second``. s is a number, as a symbolic size is."""
    made = Graph()
    for name, value in (("x", torch.ones(3)), ("s", 3)):
        made.placeholder(name).meta["example_value"] = value
    for name in ("first", "second"):
        made.create_node("call_function", torch.neg, (next(iter(made.nodes)),), name=name)
    return made


@pytest.fixture
def graph():
    return new_graph()


def inserted(graph, *makes):
    """What each function of an Inserter inserts before ``first``, ``second``, and so on."""
    users = [node for node in graph.nodes if node.target is torch.neg]
    nodes = []
    for make, user in zip(makes, users, strict=True):
        with graph.inserting_before(user):
            nodes.append(make(Inserter(graph, user)))
    graph.lint()
    return nodes


def bucket(build, scale=2, of=4):
    return build.method("clamp", build.function(operator.mul, build.function(torch.arange, of), scale), max=5)


def test_a_constant_is_inserted_once(graph):
    one, other = inserted(graph, bucket, bucket)
    assert one is other
    assert len(graph.find_nodes(op="call_function", target=torch.arange)) == 1


def test_so_is_one_of_a_size(graph):
    size = next(node for node in graph.nodes if node.name == "s")
    one, other = inserted(graph, *(lambda build: bucket(build, of=size),) * 2)
    assert one is other


@pytest.mark.parametrize("one, other", [(2, 3), (2, 2.0), (1, True), (0.0, -0.0)])
def test_other_numbers_make_another(graph, one, other):
    first, second = inserted(graph, lambda build: bucket(build, one), lambda build: bucket(build, other))
    assert first is not second
    assert first.all_input_nodes[0].all_input_nodes == second.all_input_nodes[0].all_input_nodes, "its range is the same"


def test_a_tensor_is_no_constant(graph):
    first, second = inserted(graph, *(lambda build: build.function(torch.abs, next(iter(graph.nodes))),) * 2)
    assert first is not second


def test_random_numbers_are_drawn_again(graph):
    first, second = inserted(graph, *(lambda build: build.function(torch.randint, 0, 9, (1,)),) * 2)
    assert first is not second


def test_what_comes_later_is_not_used(graph):
    one, two = (node for node in graph.nodes if node.target is torch.neg)
    with graph.inserting_before(two):
        late = bucket(Inserter(graph, two))
    with graph.inserting_before(one):
        early = bucket(Inserter(graph, one))
    graph.lint()
    assert early is not late


def test_what_is_gone_is_made_again(graph):
    def erased(build):
        node = bucket(build)
        graph.erase_node(node)
        return node

    first, second = inserted(graph, erased, bucket)
    assert first is not second
    assert second in list(graph.nodes)


def test_inference_mode_shares_nothing(graph):
    """A tensor that is made there cannot be saved for a backward."""
    with graph.inserting_before(next(iter(graph.nodes))):
        graph.call_function(enter_inference_mode, (True,))
    first, second = inserted(graph, bucket, bucket)
    assert first is not second


def test_graphs_do_not_share():
    one, two = Graph(), Graph()
    nodes = [bucket(Inserter(graph, graph.placeholder("x"))) for graph in (one, two)]
    assert [node.graph for node in nodes] == [one, two]


def test_a_graph_is_not_kept_alive():
    graph = new_graph()
    inserted(graph, bucket, bucket)
    last = weakref.ref(graph)
    del graph
    gc.collect()
    assert last() is None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_a_copy_of_a_graph_has_its_own(graph, copied):
    (one, _), other = inserted(graph, bucket, bucket), copied(graph)
    same, _ = inserted(other, bucket, bucket)
    assert one.graph is graph
    assert same.graph is other


def attentions(table, mask, *layers):
    """Layers of attention whose bias is T5's."""
    x = layers[0]
    for projection in layers[1:]:
        q = (x @ projection).unflatten(-1, (2, 16)).transpose(1, 2)
        positions = torch.arange(32)
        bias = table[(positions[:, None] - positions).clamp(-8, 8) + 8].permute(2, 0, 1)
        scores = (q @ q.mT + bias + mask[:, None, None]).softmax(-1)
        x = (scores @ q).transpose(1, 2).flatten(2)
    return x


def new_ranges(layers):
    """The number of ranges of positions that recognition and hoisting insert."""
    table, mask = torch.randn(17, 2, requires_grad=True), torch.zeros(2, 32)
    projections = (torch.randn(32, 32, requires_grad=True) for _ in range(layers))
    gm = dynamo_graph(attentions, table, mask, torch.randn(2, 32, 32), *projections)
    before = {*gm.graph.nodes}
    for fused in (recognition, hoisting):
        fused.rewrite(gm, Options())
    gm.graph.lint()
    assert len(gm.graph.find_nodes(op="call_function", target=flex_attention_hop)) == layers
    return len([node for node in gm.graph.nodes if node.target is torch.arange and node not in before])


def test_layers_share_their_positions(monkeypatch):
    monkeypatch.setattr(recognition, "FEWEST_ON_CPU", 0)
    assert 0 < new_ranges(layers=1) == new_ranges(layers=3)
