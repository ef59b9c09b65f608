"""Joint graphs taken apart: which contributions, at which indices, along which axes."""

import pytest
import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_ext.analysis.captured_grads import NotUnderstood, axes_of, constant_of, take_apart


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
    return make_fx(joint, tracing_mode="fake")(torch.zeros(()), *index, torch.zeros(()), *captured)


def contributions(score_mod, *captured):
    joint = take_apart(joint_graph(score_mod, *captured))
    return joint, joint.captured


def test_one_index():
    joint, ((only,),) = contributions(lambda s, b, h, q, k, t: s + t[h, k], torch.zeros(2, 5))
    assert len(only.indices) == 2
    assert axes_of(joint.module, only) == (False, True, False, True)


def test_indexed_twice():
    joint, (both,) = contributions(lambda s, b, h, q, k, t: s + t[q] * t[k], torch.zeros(5))
    assert sorted(axes_of(joint.module, c) for c in both) == [(False, False, False, True), (False, False, True, False)]


def test_constant_index():
    _, ((only,),) = contributions(lambda s, b, h, q, k, t: s * t[h, 3], torch.zeros(2, 5))
    assert constant_of(only.indices[1]) == 3


def test_zero_dim():
    _, ((only,),) = contributions(lambda s, b, h, q, k, t: s * t, torch.zeros(()))
    assert only.indices == ()


def test_no_gradient_for_an_unused_table():
    _, (used, unused) = contributions(lambda s, b, h, q, k, t, u: s + t[h], torch.zeros(2), torch.zeros(3))
    assert len(used) == 1
    assert unused is None


def test_index_that_depends_on_the_score_differs_everywhere():
    joint, ((only,),) = contributions(lambda s, b, h, q, k, t: s + t[(s > 0).to(torch.int32)], torch.zeros(2))
    assert axes_of(joint.module, only) == (True,) * 4


def test_a_row_is_not_understood():
    with pytest.raises(NotUnderstood):
        contributions(lambda s, b, h, q, k, t: s + (t[q] * t[k]).sum(), torch.zeros(5, 3))
