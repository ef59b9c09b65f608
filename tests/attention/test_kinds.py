"""The same tests for every footprint kind: how it is recognised, its position in the lattice, and the layout of its tables."""

import pytest
import sympy
import torch
from torch.fx import Graph, GraphModule, Interpreter

from inductor_ext.attention.kinds import DIAGONAL, KINDS, NONE, PAIR, K, Q, join, named, recognise
from inductor_ext.attention.kinds.images import Image, image_row
from inductor_ext.core.dynamo_graph import Inserter

#: More than two rows of an image of 64 columns, and one that ends within a row.
QUERIES, KEYS = 150, 197
IMAGE = Image.of(64)
QUERY_ROW, KEY_ROW = image_row(Q, 64), image_row(K, 64)

#: An expression of each kind and of no smaller one.
EXPRESSIONS = {
    "none": 3 + 0 * Q,
    "row": Q**2,
    "column": 2 * K,
    "diagonal": (K - Q) ** 2,
    "antidiagonal": Q + K,
    "pair": Q * K,
    "image 64": (KEY_ROW - QUERY_ROW) * (K - Q - 64 * KEY_ROW + 64 * QUERY_ROW),
}

each_kind = pytest.mark.parametrize("kind", [*KINDS, IMAGE], ids=str)


def grid(function, q=torch.arange(QUERIES)[:, None], k=torch.arange(KEYS)[None, :]):
    return torch.as_tensor(function(q, k)).expand(QUERIES, KEYS)


@each_kind
def test_an_expression_is_of_its_kind(kind):
    assert recognise(EXPRESSIONS[str(kind)]) is kind
    assert named(str(kind)) is kind


@each_kind
def test_positions_that_are_alike_have_equal_values(kind):
    alike, values = grid(kind.alike), grid(sympy.lambdify((Q, K), EXPRESSIONS[str(kind)], {"FloorDiv": lambda x, y: x // y}))
    alike, order = alike.flatten().sort()
    values = values.flatten()[order]
    same = alike[1:] == alike[:-1]
    assert (values[1:] == values[:-1])[same].all()


@each_kind
def test_kinds_are_a_lattice(kind):
    assert join(kind, kind) is kind
    assert join(NONE, kind) is kind and join(kind, NONE) is kind
    assert join(PAIR, kind) is PAIR and join(kind, PAIR) is PAIR
    for other in (*KINDS, IMAGE):
        assert join(kind, other) is join(other, kind)
        larger = IMAGE if {kind, other} <= {DIAGONAL, IMAGE} else PAIR
        assert kind in (NONE, other) or other is NONE or join(kind, other) is larger


def test_the_two_distances_of_an_image():
    """Each is a pair, of which there is no small table. Both together are the kind of the image, and no other width is."""
    rows, columns = recognise(KEY_ROW - QUERY_ROW), recognise(K - 64 * KEY_ROW - Q + 64 * QUERY_ROW)
    assert not rows.small and not columns.small and str(rows) == str(columns) == "pair"
    assert join(rows, columns) is join(columns, rows) is join(rows, DIAGONAL) is join(IMAGE, columns) is IMAGE
    assert join(rows, recognise(K)) is join(columns, PAIR) is join(PAIR, rows) is PAIR
    wider = recognise(image_row(K, 128) - image_row(Q, 128))
    assert join(rows, wider) is join(IMAGE, wider) is PAIR
    assert recognise(KEY_ROW - QUERY_ROW + image_row(K, 128) - image_row(Q, 128)) is PAIR
    assert recognise(KEY_ROW - Q) is recognise(KEY_ROW + QUERY_ROW) is recognise(KEY_ROW * QUERY_ROW) is PAIR
    assert recognise(K - 64 * KEY_ROW + Q - 64 * QUERY_ROW) is PAIR
    assert image_row(K, 96) is image_row(K, 0) is image_row(K, -64) is None


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
    assert all(((x >= 0) & (x < n)).all() for x, n in zip(map(torch.as_tensor, at), (QUERIES, KEYS), strict=True))
    table = torch.as_tensor(kind.alike(*at)).expand(lengths)

    inner = Graph()
    query, key = inner.placeholder("q"), inner.placeholder("k")
    inner.output(kind.index(inner, query, key))
    index = Interpreter(GraphModule({}, inner)).run(torch.arange(QUERIES)[:, None], torch.arange(KEYS)[None, :])
    assert torch.equal(table[tuple(index)].expand(QUERIES, KEYS), grid(kind.alike))
