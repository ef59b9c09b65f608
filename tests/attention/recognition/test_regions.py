"""Attention in the body of a checkpoint, and in layers that are compiled one by one, where a bias is an input."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from inductor_ext.core.report import collect
from tests.attention.case import relative_error
from tests.soundness.check import check_matches_eager
from tests.support.eager_graphs import eager_graphs

from .spellings import B, D, H, S, t5_bias
from .test_traps import randn, tensors


def attend(q, k, v, bias, exists):
    scores = q @ k.mT + bias
    return scores.masked_fill(~exists[:, None, None, :], torch.finfo(scores.dtype).min).softmax(-1) @ v


def flex_attentions(report):
    return [d for d in report.decisions if d.pass_name == "attention_pattern" and d.path == "flex_attention"]


EXISTS = torch.arange(S)[None, :] < torch.tensor([20, S])[:, None]


@pytest.mark.parametrize("inside", ["table", "bias"])
def test_in_the_body_of_a_checkpoint(inside):
    """The bias is computed in the body of the table, or in front of it."""

    def of_table(q, k, v, table, exists):
        return checkpoint(lambda *x: attend(*x[:3], t5_bias(x[3]), x[4]), q, k, v, table, exists, use_reentrant=False)

    def of_bias(q, k, v, table, exists):
        return checkpoint(attend, q, k, v, t5_bias(table), exists, use_reentrant=False)

    with collect() as report:
        check_matches_eager(of_table if inside == "table" else of_bias, *tensors(), randn(8, H), EXISTS, exact=True)
    assert len(flex_attentions(report)) == 1


def test_dropout_in_the_body_of_a_checkpoint():
    """The backward computes the same mask again: the output is linear in the values, and its gradient with the same mask is too."""
    torch._dynamo.reset()

    def body(q, k, v, bias):
        return F.dropout((q @ k.mT + bias).softmax(-1), 0.3, training=True) @ v

    def function(q, k, v, bias):
        return checkpoint(body, q, k, v, bias, use_reentrant=False)

    q, k, v = tensors()
    with collect() as report:
        out = torch.compile(function, backend="gradfuse", fullgraph=True)(q, k, v, randn(1, H, S, S))
        tangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
        (grad,) = torch.autograd.grad(out, v, tangent)
    assert len(flex_attentions(report)) == 1
    torch.testing.assert_close((grad * v).sum(), (tangent * out).sum(), rtol=1e-4, atol=1e-4)


class Layer(nn.Module):
    """A layer of T5, which gets its bias from the first one."""

    def __init__(self, has_table):
        super().__init__()
        self.project = nn.Linear(H * D, 3 * H * D, bias=False)
        self.table = nn.Embedding(8, H) if has_table else None

    def forward(self, x, exists, bias=None):
        bias = t5_bias(self.table.weight) if bias is None else bias
        q, k, v = self.project(x).view(B, S, 3, H, D).permute(2, 0, 3, 1, 4)
        return x + attend(q, k, v, bias, exists).transpose(1, 2).reshape(B, S, H * D), bias


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(i == 0) for i in range(3)])

    def forward(self, x, exists):
        bias = None
        for layer in self.layers:
            x, bias = layer(x, exists, bias)
        return x


def test_layers_that_are_compiled_one_by_one():
    """The first one returns the bias, so that others read it: they have it as a tensor of pairs, which is right, too."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Layers()
    exact = copy.deepcopy(model).double()
    x = torch.randn(B, S, H * D)
    want = exact(x.double(), EXISTS)
    want.square().sum().backward()
    for layer in model.layers:
        layer.compile(backend="gradfuse", fullgraph=True)
    with eager_graphs(), collect() as report:
        got = model(x, EXISTS)
        got.square().sum().backward()
    assert len(flex_attentions(report)) >= 2
    assert relative_error(got, want) < 1e-5
    for (name, mine), theirs in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert relative_error(mine.grad, theirs.grad) < 1e-5, name
