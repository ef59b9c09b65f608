"""Interval arithmetic over score_mod graphs: the range that it finds is never too small."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_ext.attention.bounds import in_range, interval
from inductor_ext.attention.score_mod import ScoreMod, output_nodes

EXTENTS = (2, 3, 7, 11)


def traced(function):
    index = [torch.zeros((), dtype=torch.int32) for _ in range(4)]
    module = make_fx(function, tracing_mode="fake")(*index)
    return module, output_nodes(module.graph)[0], ScoreMod.of_mask(module.graph).ranges(EXTENTS)


def test_relative_position_is_proven():
    _, node, extents = traced(lambda b, h, q, k: q - k + 11)
    assert interval(node, extents) == (1, 17)
    assert in_range(node, 18, extents)
    assert not in_range(node, 17, extents)


def test_a_negative_index_is_not_in_range():
    _, node, extents = traced(lambda b, h, q, k: q - k)
    assert not in_range(node, 100, extents)


INT32 = (-(2**31), 2**31 - 1)


def test_a_float_detour_may_be_anything_that_its_dtype_holds():
    _, node, extents = traced(lambda b, h, q, k: (q.float() * 2).to(torch.int32))
    assert interval(node, extents) == INT32
    _, node, extents = traced(lambda b, h, q, k: (q.float() * 2).to(torch.uint8))
    assert interval(node, extents) == (0, 255)


def test_what_wraps_may_be_anything():
    _, node, extents = traced(lambda b, h, q, k: (k * 300_000_000) // 300_000_000)
    assert interval(node, extents) == (INT32[0] // 300_000_000, INT32[1] // 300_000_000)
    _, node, extents = traced(lambda b, h, q, k: (k * 30).to(torch.int8))
    assert interval(node, extents) == (-128, 127)
    _, node, extents = traced(lambda b, h, q, k: (k * 3).to(torch.int8))
    assert interval(node, extents) == (0, 30)


LEAVES = st.sampled_from(["b", "h", "q", "k"]) | st.integers(-5, 5)
EXPRESSIONS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["+", "-", "*", "max", "min", "where"]), inner, inner),
        st.tuples(st.sampled_from(["//", "%"]), inner, st.integers(1, 6)),
        st.tuples(st.sampled_from(["abs", "neg"]), inner),
    ),
    max_leaves=6,
)


def evaluate(expression, env):
    if isinstance(expression, str):
        return env[expression]
    if isinstance(expression, int):
        return env["q"] * 0 + expression
    op, *arguments = expression
    values = [a if op in "//%" and i else evaluate(a, env) for i, a in enumerate(arguments)]
    return {
        "+": lambda x, y: x + y,
        "-": lambda x, y: x - y,
        "*": lambda x, y: x * y,
        "//": lambda x, y: x // y,
        "%": lambda x, y: x % y,
        "max": torch.maximum,
        "min": torch.minimum,
        "where": lambda x, y: torch.where(x > y, x, y),
        "abs": torch.abs,
        "neg": lambda x: -x,
    }[op](*values)


@settings(max_examples=60, deadline=None)
@given(EXPRESSIONS)
def test_a_claimed_range_holds_everywhere(expression):
    module, node, extents = traced(lambda b, h, q, k: evaluate(expression, {"b": b, "h": h, "q": q, "k": k}))
    low, high = interval(node, extents)
    grid = torch.meshgrid(*(torch.arange(n, dtype=torch.int32) for n in EXTENTS), indexing="ij")
    values = module(*grid)
    values = values[0] if isinstance(values, (list, tuple)) else values
    assert low is None or int(values.min()) >= low
    assert high is None or int(values.max()) <= high


@pytest.mark.parametrize(("low", "high"), [(-4, 3), (None, 3), (-4, None), (2, -2), (-99, 99)])
def test_the_interval_of_a_clamp(low, high):
    _, node, extents = traced(lambda b, h, q, k: (q - k).clamp(low, high))
    values = (torch.arange(EXTENTS[2])[:, None] - torch.arange(EXTENTS[3])).clamp(low, high)
    assert interval(node, extents) == (int(values.min()), int(values.max()))
