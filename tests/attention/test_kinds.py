"""The same tests for every footprint kind: how it is recognised, its position in the lattice, and the layout of its tables."""

import pytest
import sympy
import torch
from torch.fx import Graph, GraphModule, Interpreter

from inductor_ext.attention.kinds import KINDS, NONE, PAIR, K, Q, join, recognise
from inductor_ext.core.dynamo_graph import Inserter

QUERIES, KEYS = 5, 7

#: An expression of each kind and of no smaller one.
EXPRESSIONS = {
    "none": 3 + 0 * Q,
    "row": Q**2,
    "column": 2 * K,
    "diagonal": (K - Q) ** 2,
    "antidiagonal": Q + K,
    "pair": Q * K,
}

each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def grid(function):
    q, k = torch.arange(QUERIES)[:, None], torch.arange(KEYS)[None, :]
    return torch.as_tensor(function(q, k)).expand(QUERIES, KEYS)


@each_kind
def test_an_expression_is_of_its_kind(kind):
    assert recognise(EXPRESSIONS[kind.name]) is kind


@each_kind
def test_positions_that_are_alike_have_equal_values(kind):
    alike, values = grid(kind.alike), grid(sympy.lambdify((Q, K), EXPRESSIONS[kind.name]))
    for number in alike.unique():
        assert len(values[alike == number].unique()) == 1


@each_kind
def test_kinds_are_a_lattice(kind):
    assert join(kind, kind) is kind
    assert join(NONE, kind) is kind and join(kind, NONE) is kind
    assert join(PAIR, kind) is PAIR and join(kind, PAIR) is PAIR
    for other in KINDS:
        assert join(kind, other) is join(other, kind)
        assert kind in (NONE, other) or other is NONE or join(kind, other) is PAIR


@each_kind
def test_a_table_holds_each_value_where_it_is_read(kind):
    """A table that is made at ``coordinates`` has at ``index(q, k)`` the value of (q, k)."""
    outer = Graph()
    build = Inserter(outer, outer.placeholder("like"))
    lengths = kind.shape(build, QUERIES, KEYS)
    assert len(lengths) == len(kind.axes())
    axes = [torch.arange(n).view([-1 if i == axis else 1 for i in range(len(lengths))]) for axis, n in enumerate(lengths)]
    placeholders = [outer.placeholder(f"axis_{i}") for i in range(len(axes))]
    for node, axis in zip(placeholders, axes, strict=True):
        node.meta["example_value"] = axis
    q, k = kind.coordinates(build, placeholders, QUERIES, KEYS)
    outer.output([q, k])
    at = [0 if x is None else x for x in Interpreter(GraphModule({}, outer)).run(None, *axes)]
    table = torch.as_tensor(kind.alike(*at)).expand(lengths)

    inner = Graph()
    query, key = inner.placeholder("q"), inner.placeholder("k")
    inner.output(kind.index(inner, query, key))
    for i in range(QUERIES):
        for j in range(KEYS):
            index = Interpreter(GraphModule({}, inner)).run(i, j)
            assert table[tuple(index)] == kind.alike(i, j), (i, j)
