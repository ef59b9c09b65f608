"""Which values a template computes for a whole tile, and which it reads before the matmul."""

import pytest
import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_ext.attention.score_mod import ScoreMod
from inductor_ext.attention.tile_inputs import coordinate_of, values_read_early


def traced(score_mod, *captured):
    index = [torch.zeros((), dtype=torch.int32) for _ in range(4)]
    with TransformGetItemToIndex():
        module = make_fx(score_mod, tracing_mode="fake")(torch.zeros(()), *index, *captured)
    return module.graph, ScoreMod.of(module.graph)


@pytest.mark.parametrize(
    "index, names",
    [
        (lambda q, k: k // 64, ["k_div_64"]),
        (lambda q, k: torch.div(k, 3, rounding_mode="trunc"), ["k_div_3"]),
        (lambda q, k: q % 7 + k % 8, ["q_mod_7", "k_mod_8"]),
        (lambda q, k: torch.div(k, 3), []),
        (lambda q, k: (k + 1) // 64, []),
        (lambda q, k: k // q, []),
        (lambda q, k: k // -4, []),
        (lambda q, k: k.long() // 64, []),
    ],
)
def test_coordinates(index, names):
    graph, inputs = traced(lambda s, b, h, q, k: s + index(q, k))
    found = [c.name for node in graph.nodes if (c := coordinate_of(node, inputs))]
    assert found == names


def early(score_mod, *captured, by_tile=()):
    graph, inputs = traced(score_mod, *captured)
    return values_read_early(graph, inputs, [inputs.captured[i] for i in by_tile])


def test_the_largest_values_that_do_not_depend_on_the_score_are_read_early():
    t = torch.zeros(5, 5)
    assert len(early(lambda s, b, h, q, k, t: s + (t[q, k] + t[k, q]).tanh(), t)) == 1
    assert len(early(lambda s, b, h, q, k, t: s * t[q, k] + t[k, q], t)) == 2


def test_what_is_not_read_early():
    t, indices = torch.zeros(5, 5), torch.zeros(5, 5, dtype=torch.int64)
    assert early(lambda s, b, h, q, k: s + q - k) == []
    assert early(lambda s, b, h, q, k, t: s + t[b, h], t) == []
    assert early(lambda s, b, h, q, k, t: s + t[(s > 0).long(), k], t) == []
    assert early(lambda s, b, h, q, k, t: s + t[q, k], t, by_tile=[0]) == []
    assert early(lambda s, b, h, q, k, t: torch.where(t[q, k] == 0, s, 0.0), indices) == []
    # It would be rounded to fp32 before it is used.
    assert early(lambda s, b, h, q, k, t: s * t[q, k], t.double()) == []
