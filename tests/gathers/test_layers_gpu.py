"""Whole MoE layers on a GPU in bf16: no worse than eager against float64, and bitwise reproducible if ``deterministic``."""

import pytest
import torch

from tests.attention.case import relative_error

from .layers import LAYERS, grouped, looped_over_experts, sorted_and_scattered

pytestmark = pytest.mark.gpu

TOKENS, WIDTH, EXPERTS, HIDDEN = 200, 64, 8, 32


def operands(seed):
    torch.manual_seed(seed)
    shapes = ((TOKENS, WIDTH), (EXPERTS, WIDTH), (EXPERTS, HIDDEN, WIDTH), (EXPERTS, WIDTH, HIDDEN))
    return [torch.randn(shape).bfloat16().cuda().requires_grad_() for shape in shapes]


def step(layer, inputs, grad):
    out = layer(*inputs)
    return [out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))]


@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=["default", "deterministic"])
@pytest.mark.parametrize("layer", [*LAYERS, grouped], ids=lambda f: f.__name__)
def test_no_worse_than_eager(layer, options):
    compiled = torch.compile(layer, backend="gradfuse", options=options)
    exact = sorted_and_scattered if layer is grouped else layer
    errors = []
    for seed in range(6):
        inputs, grad = operands(seed), torch.randn(TOKENS, WIDTH).bfloat16().cuda()
        want = step(exact, [x.detach().double().requires_grad_() for x in inputs], grad.double())
        got = step(compiled, inputs, grad)
        runs = got, step(layer, inputs, grad)
        errors.append([[relative_error(g, w) for g, w in zip(run, want, strict=True)] for run in runs])
        if options and layer is not looped_over_experts:
            assert all(map(torch.equal, got, step(compiled, inputs, grad)))
    ours, eager = torch.tensor(errors, dtype=torch.float64).square().mean(0).sqrt()
    assert (ours <= 1.2 * eager).all(), (ours, eager)
