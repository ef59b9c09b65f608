"""Weight gradients on a GPU: the matmul writes its fp32 accumulator, without a cast kernel."""

import pytest
import torch

from tests.attention.case import relative_error

pytestmark = pytest.mark.gpu


def linear(x, weight):
    with torch.autocast("cuda", torch.bfloat16):
        return torch.nn.functional.linear(x, weight)


def experts(x, weight):
    return torch.bmm(x, weight.to(x.dtype))


def step(function, x, weight, grad, **options):
    torch._dynamo.reset()
    out = torch.compile(function, backend="gradfuse", fullgraph=True, options=options)(x, weight)
    return torch.autograd.grad(out, weight, grad.to(out.dtype))[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["linear", "experts"])
def test_the_gradient_of_a_master_weight_is_not_rounded(name, dtype):
    if name == "linear":
        x, weight, grad = torch.randn(300, 72), torch.randn(40, 72), torch.randn(300, 40).bfloat16()
        narrow = x.bfloat16()
        exact = grad.double().T @ narrow.double()
        function, x = linear, x
    else:
        x, weight, grad = torch.randn(3, 200, 72).to(dtype), torch.randn(3, 72, 40), torch.randn(3, 200, 40).to(dtype)
        exact = x.double().mT @ grad.double()
        function = experts
    x, weight, grad = x.cuda(), weight.cuda().requires_grad_(), grad.cuda()
    assert relative_error(step(function, x, weight, grad), exact) < 1e-5
    rounded = step(function, x, weight, grad, disable=["out_dtype"])
    assert relative_error(rounded, exact) > 1e-4
    assert torch.equal(rounded, step(function, x, weight, grad, emulate_precision_casts=True))


def test_half_precision_does_not_overflow_on_the_way():
    """An fp16 weight gradient above 65504 is infinite in eager mode, and finite here."""
    x, grad = torch.full((4096, 16), 8.0), torch.full((4096, 16), 8.0)
    weight = torch.zeros(1, 16, 16)
    got = step(experts, x.half()[None].cuda(), weight.cuda().requires_grad_(), grad.half()[None].cuda())
    assert torch.equal(got.cpu(), torch.full((1, 16, 16), 4096 * 64.0))
