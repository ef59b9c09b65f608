"""Sizes and numbers that are symbolic: of a batch, of lengths, and of modules with ``dynamic=True``."""

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Node

from inductor_ext.attention.recognition import rewrite as rewrite_module
from inductor_ext.core.dynamo_graph import Inserter
from inductor_ext.core.fx import value_of
from inductor_ext.core.report import collect
from inductor_ext.torch_api.sizes import statically_known_true
from tests.attention.case import relative_error
from tests.support.interpreter import DEVICES, triton_on_cpu

from .spellings import D, H, S
from .test_traps import decisions, randn, tensors


class Folded(torch.nn.Module):
    """Heads are a part of the batch, as in timm's BottleneckAttn, and a dropout of 0 is a number of a module."""

    def __init__(self):
        super().__init__()
        self.table, self.dropout = torch.nn.Parameter(torch.randn(2 * S - 1)), torch.nn.Dropout(0.0)

    def forward(self, x):
        q, k, v = (y.reshape(-1, S, D) for y in x.view(-1, S, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0))
        i = torch.arange(S, device=x.device)
        y = self.dropout((q @ k.mT + self.table[i[:, None] - i + S - 1]).softmax(-1)) @ v
        return y.view(-1, H, S, D).transpose(1, 2).flatten(2)


@pytest.mark.breadth(0)
@pytest.mark.parametrize("device", ["cpu", *DEVICES])
@pytest.mark.parametrize("dynamic", [True, None])
def test_heads_in_a_batch_of_any_size(dynamic, device):
    """A size of the result is three times a size of an input. Loops on a CPU cannot have it, but kernels can."""
    torch._dynamo.reset()
    module = Folded().to("cuda" if device == "cuda" else "cpu")
    run = torch.compile(module, backend="gradfuse", dynamic=dynamic)
    with triton_on_cpu() if device == "interpreter" else contextlib.nullcontext(), collect() as report:
        for batch in (2, 3, 5):
            x = torch.randn(batch, S, 3 * H * D, device=module.table.device, requires_grad=True)
            leaves = (x, module.table)
            got, want = ((y, *torch.autograd.grad(y.square().sum(), leaves)) for y in (run(x), module(x)))
            assert all(relative_error(g, w) < 1e-5 for g, w in zip(got, want, strict=True))
    found = {d.path for d in report.decisions if d.pass_name == "attention_pattern"}
    static = set() if dynamic else {"flex_attention"}
    assert found == static | {"stock" if device == "cpu" else "flex_attention"}


class Numbers(torch.nn.Module):
    """Numbers of a module, which are symbolic with ``dynamic=True``."""

    def __init__(self):
        super().__init__()
        self.bias, self.scale, self.dropout = torch.nn.Parameter(randn(H, S, S, grad=False)), 0.3, torch.nn.Dropout(0.0)

    def forward(self, q, k, v):
        mask = self.bias.expand(q.shape[0], -1, -1, -1)
        dropout = self.dropout.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=self.scale)
        return y + self.dropout((q * self.scale @ k.mT + self.bias).softmax(-1)) @ v


@pytest.mark.breadth(0)
def test_numbers_of_a_module():
    torch._dynamo.reset()
    module, inputs = Numbers(), tensors()
    with collect() as report:
        got = torch.compile(module, backend="gradfuse", dynamic=True)(*inputs)
        grads = torch.autograd.grad(got.square().sum(), (*inputs, module.bias))
    want = module(*inputs)
    exact = torch.autograd.grad(want.square().sum(), (*inputs, module.bias))
    assert all(relative_error(g, w) < 1e-5 for g, w in zip((got, *grads), (want, *exact), strict=True))
    assert {d.path for d in report.decisions if d.pass_name == "attention_pattern"} == {"flex_attention"}


SIZES = {
    "three quarters": lambda n: int(n * 0.75),
    "half, rounded up": lambda n: math.ceil(n / 2),
    "half": lambda n: n // 2,
    "one less": lambda n: n - 1,
    "a multiple": lambda n: (n + 7) // 8 * 8 - 8,
}


@pytest.mark.breadth(1)
@pytest.mark.parametrize("name", SIZES)
def test_lengths_that_are_computed(name, monkeypatch):
    """A part of the tokens attend, as in a masked autoencoder. The graph of a GPU is taken, on which no loop needs sizes."""
    monkeypatch.setattr(rewrite_module, "uses_triton_on_cpu", lambda: True)

    def function(x, b):
        n = SIZES[name](x.shape[1])
        q = k = v = x[:, :n].view(x.shape[0], n, 2, 16).transpose(1, 2)
        return (q @ k.mT + b[:, :n, :n]).softmax(-1) @ v

    x, b = randn(2, 40, 32), randn(2, 64, 64)
    torch._dynamo.mark_dynamic(x, (0, 1))
    (decision,) = decisions(function, x, b)
    assert decision.path == "flex_attention"


def test_a_size_that_no_tensor_has_is_computed():
    """AOTAutograd knows a symbolic size only if a node has it."""
    found = []

    def backend(gm, _inputs):
        like = gm.graph.find_nodes(op="call_method")[0]
        size = 4 * value_of(like).shape[0] + 1
        with gm.graph.inserting_before(like):
            zeros = Inserter(gm.graph, like).function(torch.zeros, size)
        computed = zeros.args[0]
        found.append(isinstance(computed, Node) and statically_known_true(value_of(computed) == size))
        return gm.forward

    torch._dynamo.reset()
    x = torch.randn(6)
    torch._dynamo.mark_dynamic(x, 0)
    assert torch.equal(torch.compile(lambda x: x.sin(), backend=backend)(x), x.sin()) and found == [True]
