"""How many kernels the backward of an attention launches."""

import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.nn.attention.flex_attention import flex_attention

from tests.attention.case import relative_error
from tests.support.interpreter import triton_on_cpu


def biased(q, k, v, t):
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + t[h, j], kernel_options={"bwd_ONE_PASS": True})


@pytest.mark.parametrize(
    ("width_of_values", "launches"),
    # The zeros of the table, delta and the zeros of dQ, the attention, and a cast of either sum.
    [pytest.param(32, 5, id="one width"), pytest.param(16, 6, id="two widths")],
)
def test_the_kernel_of_delta_makes_the_zeros_of_dq(width_of_values, launches):
    """It reads the gradient of the output anyway, which has the shape of dQ unless values have another width."""
    shapes = [(1, 2, 200, 32), (1, 2, 200, 32), (1, 2, 200, width_of_values), (2, 200)]
    leaves = [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]
    run = torch.compile(biased, backend="gradfuse", fullgraph=True)
    with triton_on_cpu(tma=True):
        got, codes = run_and_get_code(lambda: torch.autograd.grad(run(*leaves).float().square().sum(), leaves))
    assert len(re.findall(r"^ +triton_\w+\.run\(", codes[1], re.MULTILINE)) == launches
    exact = [x.detach().double().requires_grad_() for x in leaves]
    q, k, v, t = exact
    want = torch.autograd.grad((((q @ k.mT / 32**0.5) + t[:, None]).softmax(-1) @ v).square().sum(), exact)
    assert max(relative_error(x, y) for x, y in zip(got, want, strict=True)) < 0.02


def test_a_gradient_that_is_not_a_number_spoils_no_other_row():
    """The zeros do not depend on the gradient that their loop reads."""
    q, k, v = (torch.randn(1, 1, 200, 32, requires_grad=True) for _ in range(3))
    t, weight = torch.randn(1, 200, requires_grad=True), torch.ones(1, 1, 200, 32)
    weight[0, 0, 3] = torch.nan
    with triton_on_cpu(tma=True):
        out = torch.compile(biased, backend="gradfuse", fullgraph=True)(q, k, v, t)
        (grad,) = torch.autograd.grad(out, q, weight)
    assert grad[0, 0].isfinite().all(1).logical_not().nonzero().flatten().tolist() == [3]
