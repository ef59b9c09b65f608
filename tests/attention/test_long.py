"""Long sequences against float64 in chunks of queries: positions beyond 2^16, more than 2^31 scores, memory linear in length."""

import contextlib
import math

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from inductor_ext.core.report import collect
from tests.attention.case import relative_error
from tests.support.interpreter import triton_on_cpu

#: The interpreter's and the GPU's number of tokens, of documents and of queries in a chunk.
LENGTHS = [
    pytest.param("cpu", 200, 7, 64, id="interpreter"),
    pytest.param("cuda", 131072, 1000, 1024, id="cuda", marks=pytest.mark.gpu),
]
WIDTH = 32


def operands(length, device, *, tables=()):
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(1, 1, length, WIDTH)] * 3 + list(tables)
    return [torch.randn(shape, device=device, generator=generator).requires_grad_() for shape in shapes]


def step(function, inputs, device):
    """The output and all gradients under gradfuse, and the gradient of the output."""
    torch._dynamo.reset()
    run = torch.compile(function, backend="gradfuse", fullgraph=True, dynamic=False)
    with triton_on_cpu() if device == "cpu" else contextlib.nullcontext(), collect() as report:
        out = run(*inputs)
        grad = torch.randn_like(out)
        gradients = torch.autograd.grad(out, inputs, grad)
    assert "flex_backward.py.jinja" in [d.path for d in report.decisions]
    return [out, *gradients], grad


def rows_of_attention(q, k, v, bias, grad):
    """Some queries [M, D] with all keys: the output, the gradients of q, k and v, and that of the bias [M, N]."""
    probabilities = (q @ k.T / math.sqrt(WIDTH) + bias).softmax(-1)
    out = probabilities @ v
    of_scores = probabilities * (grad @ v.T - (grad * out).sum(-1, keepdim=True))
    of_products = of_scores / math.sqrt(WIDTH)
    return out, of_products @ k, of_products.T @ q, probabilities.T @ grad, of_scores


@pytest.mark.parametrize("device, length, documents, chunk", LENGTHS)
def test_distances(device, length, documents, chunk):
    inputs = operands(length, device, tables=[(2 * length - 1,)])

    def attention(q, k, v, table):
        return flex_attention(q, k, v, score_mod=lambda s, b, h, m, n: s + table[m - n + length - 1])

    got, grad = step(attention, inputs, device)
    q, k, v, table = (x.detach().double() for x in inputs)
    want = [torch.zeros_like(x) for x in (q, q, k, v, table)]
    for first in range(0, length, chunk):
        rows = slice(first, first + chunk)
        positions = torch.arange(length, device=device)
        index = positions[rows, None] - positions + length - 1
        out, dq, dk, dv, ds = rows_of_attention(q[0, 0, rows], k[0, 0], v[0, 0], table[index], grad[0, 0, rows].double())
        want[0][0, 0, rows], want[1][0, 0, rows] = out, dq
        want[2][0, 0] += dk
        want[3][0, 0] += dv
        want[4].index_add_(0, index.flatten(), ds.flatten())
    assert max(relative_error(g, w) for g, w in zip(got, want, strict=True)) < 1e-5


@pytest.mark.parametrize("device, length, documents, chunk", LENGTHS)
def test_documents(device, length, documents, chunk):
    """Each has a learned temperature and distances of its own, and sees nothing of the others."""
    cuts = torch.randperm(length - 1, generator=torch.Generator().manual_seed(0))[: documents - 1].sort().values + 1
    document = torch.zeros(length, dtype=torch.int64)
    document[cuts] = 1
    document = document.cumsum(0).to(device)
    inputs = operands(length, device, tables=[(documents,), (65,)])
    same = lambda b, h, m, n: document[m] == document[n]  # noqa: E731
    block_mask = create_block_mask(same, None, None, length, length, device, _compile=device == "cuda")

    def attention(q, k, v, temperature, distances):
        def score_mod(s, b, h, m, n):
            return s * temperature[document[n]] + distances[(m - n).clamp(-32, 32) + 32]

        return flex_attention(q, k, v, score_mod=score_mod, block_mask=block_mask)

    got, grad = step(attention, inputs, device)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    ends = [0, *cuts.tolist(), length]
    outs = []
    for number in range(documents):
        rows = slice(ends[number], ends[number + 1])
        q, k, v = (x[0, 0, rows] for x in exact[:3])
        positions = torch.arange(len(q), device=device)
        bias = exact[4][(positions[:, None] - positions).clamp(-32, 32) + 32]
        outs.append((q @ k.T / math.sqrt(WIDTH) * exact[3][number] + bias).softmax(-1) @ v)
    out = torch.cat(outs)[None, None]
    want = [out, *torch.autograd.grad(out, exact, grad.double())]
    assert max(relative_error(g, w) for g, w in zip(got, want, strict=True)) < 1e-5


@pytest.mark.gpu
def test_memory_is_linear_in_length():
    def peak(length):
        q, k, v, table = (x.detach().bfloat16().requires_grad_() for x in operands(length, "cuda", tables=[(2 * length,)]))
        torch._dynamo.reset()
        run = torch.compile(
            lambda q, k, v, t: flex_attention(q, k, v, score_mod=lambda s, b, h, m, n: s + t[m - n + length]),
            backend="gradfuse",
            dynamic=False,
        )
        for _ in range(2):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run(q, k, v, table).sum().backward()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    assert peak(131072) <= 4.2 * peak(32768)
