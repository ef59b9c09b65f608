"""Which score_mods take products of queries and keys that are not scaled, because a factor has the scale."""

import pytest
import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_ext.attention.score_factors import with_scale
from tests.support.interpreter import INTERPRETED

from . import comparison

SCALE = 0.3
TAKEN = {
    "a factor of the head": lambda s, b, h, q, k, t: s * t[h],
    "on the left, of the query": lambda s, b, h, q, k, t: t[q] * s,
    "of the key, with a bias of pairs": lambda s, b, h, q, k, t: s * t[k] + t[q] * t[k],
    "computed": lambda s, b, h, q, k, t: s * (t[h].exp() * t[b]).clamp(max=3),
    "a divisor": lambda s, b, h, q, k, t: s / t[q],
    "a number": lambda s, b, h, q, k, t: s * -2,
    "a divisor that is a number": lambda s, b, h, q, k, t: 1 + s / 4,
    "before a nonlinear function": lambda s, b, h, q, k, t: torch.tanh(s * t[h]),
}
LEFT = {
    "no factor": lambda s, b, h, q, k, t: s + t[k],
    "one for each pair": lambda s, b, h, q, k, t: s * (q - k),
    "one of pairs that are added": lambda s, b, h, q, k, t: s * (t[q] + t[k]),
    "the square of the score": lambda s, b, h, q, k, t: s * s,
    "a divisor that has the score": lambda s, b, h, q, k, t: s / (1 + s.abs()),
    "the score as a divisor": lambda s, b, h, q, k, t: t[h] / s,
    "the score twice": lambda s, b, h, q, k, t: s * t[h] + s,
    "a factor behind something else": lambda s, b, h, q, k, t: (s + t[q]) * t[h],
    "rounded down": lambda s, b, h, q, k, t: torch.div(s, t[h], rounding_mode="floor"),
    "in float64": lambda s, b, h, q, k, t: s * t[h].double() / t[q].double(),
    "without the score": lambda s, b, h, q, k, t: t[q] * t[k],
}


def rewritten(score_mod, dtype):
    """The score_mod as the lowering gets it, and the one that has the scale, or None."""
    index = [torch.zeros((), dtype=torch.int32) for _ in "bhqk"]
    with TransformGetItemToIndex():
        module = make_fx(score_mod, tracing_mode="fake")(torch.zeros((), dtype=dtype), *index, torch.rand(9, dtype=dtype))
    return module, with_scale(module, SCALE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TAKEN)
def test_taken(name, dtype):
    module, with_factor = rewritten(TAKEN[name], dtype)
    generator = torch.Generator().manual_seed(0)
    table = torch.rand(9, generator=generator) + 0.1
    products = torch.randn((), generator=generator)
    for b, h, q, k in ((0, 1, 2, 3), (1, 0, 8, 7)):
        place = [torch.tensor(n, dtype=torch.int32) for n in (b, h, q, k)]
        (got,), want = with_factor(products, *place, table), module(products * SCALE, *place, table)
        assert got.dtype == want.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", LEFT)
def test_left(name):
    assert rewritten(LEFT[name], torch.float32)[1] is None


@INTERPRETED
@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", ["a factor of the head", "of the key, with a bias of pairs", "a divisor"])
def test_kernels(name):
    score_mod = lambda t: lambda s, b, h, q, k: TAKEN[name](s, b, h, q, k, t)  # noqa: E731
    comparison.assert_matches_float64(score_mod, comparison.draw(72, seed=2).abs() + 0.5, (72, 72))
