"""Joint graphs are split into contributions: these tests check the values, indices and axes."""

import pytest
import torch
from hypothesis import given, settings
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_ext.attention.captured_grads import NotUnderstood, constant_of, take_apart
from inductor_ext.attention.cpu_tiles import over_grid
from inductor_ext.attention.score_mod import returning
from tests.support import random_score_mods


def joint_graph(score_mod, *captured):
    """The joint graph of a scalar score_mod, traced as flex_attention's own autograd does."""

    def joint(score, b, h, q, k, grad, *tables):
        score = score.detach().requires_grad_()
        tables = [t.detach().requires_grad_() for t in tables]
        with torch.enable_grad(), TransformGetItemToIndex():
            out = score_mod(score, b, h, q, k, *tables)
        grads = torch.autograd.grad(out, [score, *tables], grad, allow_unused=True)
        return [grads[0], None, None, None, None, *grads[1:]]

    index = [torch.zeros((), dtype=torch.int32) for _ in range(4)]
    score = torch.zeros((), dtype=captured[0].dtype)
    return make_fx(joint, tracing_mode="fake")(score, *index, score.clone(), *captured)


def contributions(score_mod, *captured):
    joint = take_apart(joint_graph(score_mod, *captured))
    return joint, joint.captured


def test_one_index():
    _, ((only,),) = contributions(lambda s, b, h, q, k, t: s + t[h, k], torch.zeros(2, 5))
    assert len(only.indices) == 2
    assert only.axes == (False, True, False, True)


def test_indexed_twice():
    _, (both,) = contributions(lambda s, b, h, q, k, t: s + t[q] * t[k], torch.zeros(5))
    assert sorted(c.axes for c in both) == [(False, False, False, True), (False, False, True, False)]


def test_constant_index():
    _, ((only,),) = contributions(lambda s, b, h, q, k, t: s * t[h, 3], torch.zeros(2, 5))
    assert constant_of(only.indices[1]) == 3


def test_a_constant_that_does_not_fit_a_cast():
    def score_mod(s, b, h, q, k, t):
        return s * t[h, torch.full((), 300, dtype=torch.int32).to(torch.int8).to(torch.int64)]

    _, ((only,),) = contributions(score_mod, torch.zeros(2, 500))
    assert constant_of(only.indices[1]) is None


def test_an_index_cast_through_a_complex_dtype():
    def score_mod(s, b, h, q, k, t):
        return s + t[(s > 0).to(torch.complex64).to(torch.int64)]

    _, ((only,),) = contributions(score_mod, torch.zeros(2))
    assert only.on_score and constant_of(only.indices[0]) is None


def test_zero_dim():
    _, ((only,),) = contributions(lambda s, b, h, q, k, t: s * t, torch.zeros(()))
    assert only.indices == ()


def test_no_gradient_for_an_unused_table():
    _, (used, unused) = contributions(lambda s, b, h, q, k, t, u: s + t[h], torch.zeros(2), torch.zeros(3))
    assert len(used) == 1
    assert unused is None


def test_index_that_depends_on_the_score_differs_everywhere():
    _, ((only,),) = contributions(lambda s, b, h, q, k, t: s + t[(s > 0).to(torch.int32)], torch.zeros(2))
    assert only.axes == (True,) * 4


def test_a_row_is_not_understood():
    with pytest.raises(NotUnderstood):
        contributions(lambda s, b, h, q, k, t: s + (t[q] * t[k]).sum(), torch.zeros(5, 3))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(random_score_mods.score_mods)
def test_contributions_add_up_to_the_gradient(body):
    score_mod, tables, grid = random_score_mods.function(body), random_score_mods.tables(), random_score_mods.grid()
    generator = torch.Generator().manual_seed(1)
    score, grad = (torch.randn(random_score_mods.EXTENTS, generator=generator, dtype=torch.float64) for _ in range(2))
    score.requires_grad_()
    out = score_mod(score, *grid, *tables).expand(score.shape)
    want = torch.autograd.grad(out, [score, *tables], grad, allow_unused=True, materialize_grads=True)

    joint = take_apart(joint_graph(score_mod, *tables))
    frozen = [t.detach() for t in tables]
    dscore = _on_grid(joint, joint.grad_score, score.detach(), grad, grid, frozen)
    torch.testing.assert_close(dscore, want[0])
    for table, contributions, expected in zip(frozen, joint.captured, want[1:], strict=True):
        total = torch.zeros_like(table)
        for contribution in contributions or ():
            value = _on_grid(joint, contribution.value, score.detach(), grad, grid, frozen)
            indices = [_on_grid(joint, i, score.detach(), grad, grid, frozen).long() for i in contribution.indices]
            total = total.index_put(indices, value, accumulate=True) if indices else total + value.sum()
        torch.testing.assert_close(total, expected)


def _on_grid(joint, node, score, grad, grid, tables):
    """A scalar node of a joint graph for every (b, h, q, k)."""
    if not isinstance(node, torch.fx.Node):
        return torch.full_like(score, node)
    module = returning(joint.module, [node])

    def evaluate(s, g, b, h, q, k):
        return torch.zeros_like(s) + module(s, b, h, q, k, g, *tables)[0]

    return over_grid(evaluate, (score, grad), *(i.reshape(-1) for i in grid))
