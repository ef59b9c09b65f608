"""The factor of the scores. A kernel may take the maximum before it multiplies with it only if the factor is positive."""

import contextlib

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.attention.case import relative_error
from tests.support.interpreter import DEVICES, triton_on_cpu

LENGTH = 97


def causal(b, h, q, k):
    return q >= k


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("scale", [-3.0, 0.0, 3.0])
def test_scale(scale, masked, device):
    where = "cuda" if device == "cuda" else "cpu"
    torch.manual_seed(0)
    inputs = [torch.randn(1, 2, LENGTH, 32).to(where).requires_grad_() for _ in range(3)]
    mask = create_block_mask(causal, None, None, LENGTH, LENGTH, where, BLOCK_SIZE=32) if masked else None
    torch._dynamo.reset()
    run = torch.compile(lambda q, k, v: flex_attention(q, k, v, block_mask=mask, scale=scale), backend="gradfuse")
    with triton_on_cpu() if device == "interpreter" else contextlib.nullcontext():
        out = run(*inputs)
        got = [out, *torch.autograd.grad(out.square().sum(), inputs)]
    q, k, v = exact = [x.detach().double().requires_grad_() for x in inputs]
    scores = q @ k.mT * scale
    scores = scores.masked_fill(torch.ones(LENGTH, LENGTH, device=where).triu(1).bool(), float("-inf")) if masked else scores
    want = scores.softmax(-1) @ v
    want = [want, *torch.autograd.grad(want.square().sum(), exact)]
    for x, y in zip(got, want, strict=True):
        error = (x - y).norm() / max(y.norm(), 1e-3) if scale == 0 else relative_error(x, y)
        assert error < 1e-5
