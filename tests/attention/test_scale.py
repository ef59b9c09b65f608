"""Scores that are multiplied, with a scale and with log2(e), around the subtraction of their maximum.

A kernel may take the maximum before it multiplies with the scale only if that is positive. And it must subtract the maximum before
it multiplies with log2(e), because LLVM makes one instruction of a product and a difference, whose product is exact.
"""

import contextlib
import re
from unittest import mock

import pytest
import torch
from torch._inductor.async_compile import AsyncCompile
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.attention.case import relative_error
from tests.support.emitted import triton_sources
from tests.support.interpreter import DEVICES, triton_on_cpu
from tests.support.offline import OFFLINE
from tests.support.targets import on_target

LENGTH = 97


def causal(b, h, q, k):
    return q >= k


@pytest.mark.breadth(3)
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


@pytest.mark.breadth(3)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("hidden", [-1e4, -1e9, -1e10, -1e12, -1e30])
def test_keys_that_are_hidden_by_a_table(hidden, dim, device):
    """The first keys are hidden for all queries, as by padding, and all keys for some queries."""
    where, length = ("cuda", 1100) if device == "cuda" else ("cpu", 130)
    torch.manual_seed(0)
    dtype = torch.float16 if device == "cuda" else torch.float32
    q, k, v = inputs = [torch.randn(2, 2, length, dim).to(where, dtype).requires_grad_() for _ in range(3)]
    keys, queries = torch.zeros(2, length, device=where), torch.zeros(2, length, device=where)
    keys[0, : length // 2], queries[1, :40] = hidden, hidden
    function = lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: s + keys[b, j] + queries[b, i])  # noqa: E731
    torch._dynamo.reset()
    with triton_on_cpu() if device == "interpreter" else contextlib.nullcontext():
        out = torch.compile(function, backend="gradfuse")(*inputs)
        grads = torch.autograd.grad(out[0].float().square().sum(), inputs)
    q, k, v = exact = [x.detach().double().requires_grad_() for x in inputs]
    scores = q.float() @ k.float().mT / dim**0.5 + keys[:, None, None] + queries[:, None, :, None]
    assert relative_error(out, scores.double().softmax(-1) @ v) < (2e-3 if device == "cuda" else 1e-5)
    wants = ((q @ k.mT / dim**0.5 + keys[:, None, None].double()).softmax(-1) @ v)[0].square().sum()
    for got, want in zip(grads, torch.autograd.grad(wants, exact), strict=True):
        assert relative_error(got[0], want[0]) < (4e-3 if device == "cuda" else 1e-5)


@OFFLINE
def test_log2e_is_not_multiplied_in_the_difference(builder):
    inputs = [torch.zeros(1, 2, 1024, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    keys = torch.zeros(2, 1024)
    run = torch.compile(lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: s + keys[h, j]), backend="gradfuse")
    torch._dynamo.reset()
    with on_target(architecture=90), mock.patch.object(AsyncCompile, "triton", lambda *_, **__: mock.MagicMock()):
        forward, _ = triton_sources(run, *inputs)
    warps, stages = (int(re.search(rf"{name}=(\d+)", forward).group(1)) for name in ("num_warps", "num_stages"))
    ptx = builder.build(forward, 90, warps, stages).ptx
    products = [line.split()[0] for line in ptx.splitlines() if "0f3FB8AA3B" in line]
    # One for each score of a thread. Those with a sum are for the logsumexp, one for each row.
    assert products.count("mul.f32") >= 32
    assert products.count("fma.rn.f32") <= 4
