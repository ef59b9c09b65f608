"""Whole models: attention layers with pointwise work between them, compiled at once, against float64."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from tests.support.eager_graphs import eager_graphs
from tests.support.interpreter import triton_on_cpu

from .case import relative_error

HEADS, WIDTH, LENGTH = 2, 32, 48
#: The settings are: the CPU's graphs without code generation, Triton's interpreter, and a GPU.
DEVICES = [
    "graphs",
    pytest.param("interpreter", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "interpreter":
        with triton_on_cpu():
            yield "cpu"
    elif request.param == "graphs":
        with eager_graphs():
            yield "cpu"
    else:
        yield request.param


def dense(query, key, value, score_mod):
    """Attention by the formula; score_mod gets broadcast index tensors."""
    b, h, q, k = (
        torch.arange(n, device=query.device).reshape([-1 if axis == d else 1 for d in range(4)])
        for axis, n in enumerate((*query.shape[:3], key.shape[2]))
    )
    return torch.softmax(score_mod(query @ key.mT / math.sqrt(query.shape[-1]), b, h, q, k), -1) @ value


class Layer(nn.Module):
    """The captured tensors of every layer have the same local names."""

    def __init__(self, table=None):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.bias = nn.Parameter(torch.randn(HEADS, 2 * LENGTH)) if table is None else table
        self.scale = nn.Parameter(torch.rand(HEADS) + 0.5)

    def forward(self, x, attend):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = attend(q, k, v, lambda s, b, h, i, j: s * self.scale[h] + self.bias[h, i - j + LENGTH])
        return torch.nn.functional.gelu(y.transpose(1, 2).reshape(x.shape)) + x


class Stack(nn.Module):
    def __init__(self, shared):
        super().__init__()
        table = nn.Parameter(torch.randn(HEADS, 2 * LENGTH)) if shared else None
        self.layers = nn.ModuleList(Layer(table) for _ in range(2))

    def forward(self, x, attend):
        for layer in self.layers:
            x = torch.tanh(layer(x, attend)) * 1.5
        return x


class BiasFromLinear(nn.Module):
    """pytorch#157677: the bias is produced inside the compiled region, by a Linear."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(WIDTH, HEADS * LENGTH * LENGTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, 5)

    def forward(self, x, attend):
        bias = self.project(x[:, 0]).view(-1, HEADS, LENGTH, LENGTH)
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = attend(q, k, v, lambda s, b, h, i, j: s + bias[b, h, i, j])
        return self.out(y.transpose(1, 2).reshape(x.shape))


def flex(q, k, v, score_mod):
    return flex_attention(q, k, v, score_mod=score_mod)


def check_model(model, x, **options):
    exact = copy.deepcopy(model).double()
    out = torch.compile(model, backend="gradfuse", fullgraph=True, **options)(x, flex)
    want = exact(x.double(), dense)
    grad = torch.randn_like(out)
    out.backward(grad)
    want.backward(grad.double())
    errors = {"out": relative_error(out, want)}
    for (name, parameter), reference in zip(model.named_parameters(), exact.parameters(), strict=True):
        errors[name] = relative_error(parameter.grad, reference.grad)
    assert max(errors.values()) < 2e-5, errors


@pytest.mark.breadth(0)
@pytest.mark.parametrize("device", ["cpu", *DEVICES], indirect=True)
def test_layers_whose_captures_share_their_names(device):
    check_model(Stack(shared=False).to(device), torch.randn(2, LENGTH, WIDTH, device=device))


@pytest.mark.breadth(1)
def test_layers_that_share_one_table(device):
    check_model(Stack(shared=True).to(device), torch.randn(2, LENGTH, WIDTH, device=device))


@pytest.mark.breadth(1)
def test_bias_from_a_linear(device):
    check_model(BiasFromLinear().to(device), torch.randn(2, LENGTH, WIDTH, device=device))


@pytest.mark.breadth(1)
def test_bias_made_in_the_compiled_region_from_an_argument(device):
    """pytorch#145869: the leaf is an argument, what is captured is computed from it inside the region."""
    table = torch.randn(HEADS, LENGTH, device=device, requires_grad=True)
    q = torch.randn(1, HEADS, LENGTH, 16, device=device, requires_grad=True)

    def attention(q, table, attend):
        bias = torch.cumsum(table, -1) * 0.1
        return attend(q, q, q, lambda s, b, h, i, j: s + bias[h, j] * (i - j) / LENGTH)

    out = torch.compile(attention, backend="gradfuse", fullgraph=True)(q, table, flex)
    exact = [x.detach().double().requires_grad_() for x in (q, table)]
    want = attention(*exact, dense)
    grad = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, table), grad)
    expected = torch.autograd.grad(want, exact, grad.double())
    assert max(map(relative_error, got, expected)) < 1e-5


@pytest.mark.breadth(1)
def test_gradient_through_the_logsumexp(device):
    q, k, v = (torch.randn(2, HEADS, LENGTH, 16, device=device, requires_grad=True) for _ in range(3))
    bias = torch.randn(HEADS, LENGTH, device=device, requires_grad=True)

    def attention(q, k, v):
        score_mod = lambda s, b, h, i, j: s + bias[h, j]  # noqa: E731
        return flex_attention(q, k, v, score_mod=score_mod, return_aux=AuxRequest(lse=True, max_scores=device != "cpu"))

    out, aux = torch.compile(attention, backend="gradfuse", fullgraph=True)(q, k, v)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v, bias)]
    scores = exact[0] @ exact[1].mT / 4 + exact[3][:, None]
    want, lse = scores.softmax(-1) @ exact[2], scores.logsumexp(-1)
    assert relative_error(aux.lse, lse) < 1e-6
    if device != "cpu":  # the front end refuses max_scores for CPU tensors
        assert relative_error(aux.max_scores, scores.amax(-1)) < 1e-6
    grad, grad_lse = torch.randn_like(out), torch.randn_like(aux.lse)
    got = torch.autograd.grad((out, aux.lse), (q, k, v, bias), (grad, grad_lse))
    expected = torch.autograd.grad((want, lse), exact, (grad.double(), grad_lse.double()))
    assert max(map(relative_error, got, expected)) < 1e-5


@pytest.mark.breadth(1)
def test_a_sink_by_the_logsumexp(device):
    """As gpt-oss spells it with flex_attention: the output times the part of the normaliser that the keys have."""
    q, k, v = (torch.randn(2, HEADS, LENGTH, 16, device=device, requires_grad=True) for _ in range(3))
    sinks = torch.randn(HEADS, device=device, requires_grad=True)
    causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, LENGTH, LENGTH, device)

    def attention(q, k, v, sinks):
        out, aux = flex_attention(q, k, v, block_mask=causal, return_aux=AuxRequest(lse=True))
        return out * torch.sigmoid(aux.lse - sinks[:, None])[..., None]

    out = torch.compile(attention, backend="gradfuse", fullgraph=True)(q, k, v, sinks)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v, sinks)]
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=device).triu(1)
    scores = (exact[0] @ exact[1].mT / 4).masked_fill(hidden, -torch.inf)
    logits = torch.cat([scores, exact[3].view(1, HEADS, 1, 1).expand(2, -1, LENGTH, 1)], -1)
    want = logits.softmax(-1)[..., :-1] @ exact[2]
    grad = torch.randn_like(out)
    got, expected = torch.autograd.grad(out, (q, k, v, sinks), grad), torch.autograd.grad(want, exact, grad.double())
    assert max(map(relative_error, (out, *got), (want, *expected))) < 1e-5


@pytest.mark.breadth(1)
def test_gradient_through_the_logsumexp_alone(device):
    q, k, v = (torch.randn(1, HEADS, LENGTH, 16, device=device, requires_grad=True) for _ in range(3))

    def attention(q, k, v):
        return flex_attention(q, k, v, return_aux=AuxRequest(lse=True))[1].lse

    lse = torch.compile(attention, backend="gradfuse", fullgraph=True)(q, k, v)
    exact = [x.detach().double().requires_grad_() for x in (q, k)]
    want = (exact[0] @ exact[1].mT / 4).logsumexp(-1)
    grad = torch.randn_like(lse)
    got = torch.autograd.grad(lse, (q, k), grad)
    assert max(map(relative_error, got, torch.autograd.grad(want, exact, grad.double()))) < 1e-5


@pytest.mark.breadth(1)
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), *DEVICES], indirect=True)
def test_dynamic_lengths(device):
    table = torch.randn(HEADS, 256, device=device, requires_grad=True)

    def attention(q, k, v, attend):
        return attend(q, k, v, lambda s, b, h, i, j: s + table[h, i - j + 128])

    compiled = torch.compile(attention, backend="gradfuse", dynamic=True, fullgraph=True)
    for length in (40, 57, 100):
        inputs = [torch.randn(2, HEADS, length, 16, device=device, requires_grad=True) for _ in range(3)]
        out = compiled(*inputs, flex)
        exact = [x.detach().double().requires_grad_() for x in inputs]
        want = dense(*exact, lambda s, b, h, i, j: s + table.double()[h, i - j + 128])
        grad = torch.randn_like(out)
        got = torch.autograd.grad(out, (*inputs, table), grad)
        expected = torch.autograd.grad(want, (*exact, table), grad.double())
        assert max(map(relative_error, got, expected)) < 1e-5, length


@pytest.mark.breadth(2)
def test_kernel_options_and_small_mask_blocks(device):
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 96, 96, device=device, BLOCK_SIZE=(32, 64))
    options = {"fwd_BLOCK_M": 16, "fwd_BLOCK_N": 32, "bwd_BLOCK_M1": 16, "bwd_BLOCK_N1": 32, "bwd_BLOCK_M2": 32}
    options |= {"bwd_BLOCK_N2": 16, "num_warps": 4, "num_stages": 1}
    q, k, v = (torch.randn(1, HEADS, 96, 16, device=device, requires_grad=True) for _ in range(3))

    def attention(q, k, v):
        return flex_attention(q, k, v, block_mask=mask, kernel_options=options)

    out = torch.compile(attention, backend="gradfuse", fullgraph=True)(q, k, v)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    want = dense(*exact, lambda s, b, h, i, j: s.masked_fill(i < j, -math.inf))
    grad = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), grad)
    assert max(map(relative_error, got, torch.autograd.grad(want, exact, grad.double()))) < 1e-5
