"""Attention as models spell it, by the kernels it becomes: T5's bias on a GPU, and rows without keys in Triton's interpreter."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from inductor_ext.core.report import collect
from tests.attention.case import relative_error
from tests.support.interpreter import INTERPRETED, triton_on_cpu
from tests.support.targets import on_target

from .spellings import SPELLINGS

HEADS, WIDTH, BUCKETS = 12, 64, 32


def t5_buckets(length):
    """As transformers computes them, for distances up to 128 in both directions."""
    position = torch.arange(length, device="cuda")
    relative = position[None, :] - position[:, None]
    distance = relative.abs()
    far = 8 + (torch.log(distance.float() / 8) / math.log(128 / 8) * 8).to(torch.long)
    far = torch.min(far, torch.full_like(far, 15))
    return (relative > 0).to(torch.long) * 16 + torch.where(distance < 8, distance, far)


def layers(q, k, v, table, spelt):
    """Two layers with one bias."""
    bias = F.embedding(t5_buckets(q.shape[2]), table).permute(2, 0, 1).unsqueeze(0)
    for _ in range(2):
        if spelt:
            q = F.softmax((q @ k.mT + bias).float(), -1).type_as(q) @ v
        else:
            q = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype), scale=1.0)
    return q


def operands(length, dtype, batch=1):
    generator = torch.Generator("cuda").manual_seed(0)
    made = [torch.randn(batch, HEADS, length, WIDTH, device="cuda", generator=generator) / 4 for _ in range(3)]
    table = torch.randn(BUCKETS, HEADS, device="cuda", generator=generator)
    return [x.to(dtype).requires_grad_() for x in (*made, table)]


def results(function, inputs, spelt):
    """The output, the gradients, and what the pass decided."""
    torch._dynamo.reset()
    with collect() as report:
        out = function(*inputs, spelt)
        grad = torch.randn(out.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        leaves = [x for x in inputs if x.requires_grad]
        grads = torch.autograd.grad(out, leaves, grad.to(out.dtype))
    return [out, *grads], [d.path for d in report.decisions if d.pass_name == "attention_pattern"]


def exactly(inputs, spelt):
    return results(layers, [x.detach().double().requires_grad_(x.requires_grad) for x in inputs], spelt)[0]


def compiled(inputs, spelt):
    return results(torch.compile(layers, backend="gradfuse", fullgraph=True), inputs, spelt)


@pytest.mark.gpu
@pytest.mark.parametrize("spelt", [True, False], ids=["spelt", "sdpa"])
def test_every_distance_has_eagers_bucket(spelt):
    """Distances up to 2047, where a logarithm that is rounded otherwise would choose the next bucket."""
    inputs = operands(2048, torch.float32)
    got, paths = compiled(inputs, spelt)
    assert paths == ["flex_attention"] * 2
    for mine, exact in zip(got, exactly(inputs, spelt), strict=True):
        assert relative_error(mine, exact) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("spelt", [True, False], ids=["spelt", "sdpa"])
def test_a_frozen_bias_is_computed_in_the_kernel(spelt):
    inputs = operands(512, torch.bfloat16)
    inputs[3].requires_grad_(False)
    got, paths = compiled(inputs, spelt)
    assert paths == ["flex_attention"] * 2
    eager, _ = results(layers, copy.deepcopy(inputs), spelt)
    for mine, theirs, exact in zip(got, eager, exactly(inputs, spelt), strict=True):
        assert relative_error(mine, exact) <= 1.2 * relative_error(theirs, exact)


@pytest.mark.gpu
@pytest.mark.parametrize("spelt", [True, False], ids=["spelt", "sdpa"])
def test_nothing_has_a_number_for_each_pair(spelt):
    """Neither the bias that two layers share, nor its gradient."""
    length = 2048
    inputs = operands(length, torch.bfloat16)
    function = torch.compile(layers, backend="gradfuse", fullgraph=True)
    results(function, inputs, spelt)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(function(*inputs, spelt).sum(), inputs)
    assert torch.cuda.max_memory_allocated() - before < 2 * HEADS * length**2


@INTERPRETED
@pytest.mark.parametrize("name", ["t5_eager_with_an_empty_sequence", "t5_sdpa_with_an_empty_sequence"])
def test_a_row_without_keys_is_uniform_in_the_kernel(name):
    """Its keys are hidden by finfo.min, whose product with log2(e) is -inf."""
    spelling = SPELLINGS[name]
    inputs = spelling.inputs()
    exact = [x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs]
    torch._dynamo.reset()
    with triton_on_cpu(tma=True), on_target(architecture=90, multiprocessors=1, gluon=False), collect() as report:
        out = torch.compile(spelling.function, backend="gradfuse", fullgraph=True)(*inputs)
        got = [out, *torch.autograd.grad(out.square().sum(), inputs[:4])]
    assert any(d.path.endswith(".jinja") for d in report.decisions if d.pass_name == "flex_attention")
    want = spelling.function(*exact)
    want = [want, *torch.autograd.grad(want.square().sum(), exact[:4])]
    assert all(relative_error(mine, exactly) < 1e-5 for mine, exactly in zip(got, want, strict=True))
